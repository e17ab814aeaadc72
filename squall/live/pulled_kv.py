"""KV out of one engine's pool into another's: offered by its sender, read by its receiver, and freed on the receiver's word.

Knows blocks, offers and threads; nothing of what a request is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

from msgspec import Struct

from squall.core.actions import SendKv
from squall.core.types import ReplicaId, RequestId
from squall.errors import ModelError, SquallError, TransferFailed
from squall.live.engine.interface import KvEngine
from squall.live.engine.torch_engine import TorchEngine
from squall.live.engine.window import Window
from squall.live.kv_way import Sender, Taking
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.interface import OnNotify
from squall.live.transport.kv import KvOffer, KvTaken, Ledger, Stop, offer, pull
from squall.live.transport.region import Region

_log = logging.getLogger(__name__)


class _Offered(Struct):
    """What was promised to whom, and who wants to know how it ends."""

    request: RequestId
    sender: Sender
    num_bytes: int


class PulledKv:
    """See `KvWay`.

    Args:
        replica: whose.
        engine: has a pool that peers can read, once it is built.
        connect: makes the replica's end of its links, which tells us what receivers say.
        max_transfers: hand-offs that it works on at once, on either side; the others wait in order.

    Attributes:
        endpoint: the one that was made; not ours to close.
    """

    def __init__(
        self, replica: ReplicaId, engine: TorchEngine, connect: Callable[[OnNotify], Endpoint], max_transfers: int = 4
    ) -> None:
        self.engine: KvEngine = engine
        self._torch = engine
        self._replica = replica
        self._ledger = Ledger(self._taken)
        self._offers: dict[int, _Offered] = {}
        self._threads = ThreadPoolExecutor(max_transfers, f"kv-{replica}")
        self.endpoint = connect(self._ledger.on_notify)

    # -- as a sender

    def send(self, action: SendKv, number: int, sender: Sender) -> None:
        self._offers[number] = _Offered(action.request, sender, 0)
        if (window := self._window) is not None:
            window.begin()
        self._threads.submit(self._offer, action, number)

    def _offer(self, action: SendKv, number: int) -> None:
        """In a thread: checksums take a while."""
        if (offered := self._offers.get(number)) is None:
            return
        try:
            region, pool = self._region(), self._torch.kv_pool
            blocks = self._torch.blocks(action.request)[: -(-action.num_tokens // self._torch.block_size)]
            first, last = action.first_layer, action.last_layer or pool.num_layers
            ends = self._replica, action.to
            made = offer(
                region, pool, self.endpoint.addresses, action.request, action.num_tokens, blocks, (first, last), ends, number
            )
        except Exception:
            _log.exception("KV of request %s cannot be offered", action.request)
            if self._end(number) is not None:
                offered.sender.failed(action.request, number)
            return
        offered.num_bytes = pool.num_bytes(last - first, len(blocks))
        self._ledger.offered(action.request, first, last, number)
        if number in self._offers:
            offered.sender.offered(made)
        else:
            self._ledger.withdraw(action.request, number)

    def _taken(self, taken: KvTaken) -> None:
        if (offered := self._end(taken.number)) is not None:
            offered.sender.sent(taken.request, taken.number, offered.num_bytes)

    def withdraw(self, number: int) -> None:
        if (offered := self._end(number)) is not None:
            self._ledger.withdraw(offered.request, number)

    def _end(self, number: int) -> _Offered | None:
        """Whoever asks first has the last word on it."""
        offered = self._offers.pop(number, None)
        if offered is not None and (window := self._window) is not None:
            window.end()
        return offered

    # -- as a receiver

    def take(self, offer: KvOffer, blocks: Sequence[int]) -> Taking:
        stop = Stop()
        return PulledTaking(stop, self._threads.submit(self._pull, offer, blocks, stop))

    def _pull(self, offered: KvOffer, blocks: Sequence[int], stop: Stop) -> int:
        try:
            with nullcontext() if (window := self._window) is None else window.used():
                return pull(self.endpoint, offered, self._region(), self._torch.kv_pool, blocks, stop)
        except SquallError:
            raise
        except Exception as error:  # whatever it is, nothing is lost but this hand-off
            _log.exception("KV of request %s cannot be fetched", offered.request)
            raise TransferFailed(f"{type(error).__name__}: {error}") from None

    def _region(self) -> Region:
        if (region := self._torch.kv_region) is None:
            raise ModelError(
                "the KV pool is on GPUs that cannot lend memory to each other's processes, from where it cannot move"
            )
        return region

    @property
    def _window(self) -> Window | None:
        return self._torch.cache.window

    def close(self) -> None:
        for number in list(self._offers):
            self._end(number)
        self._threads.shutdown(wait=False, cancel_futures=True)


class PulledTaking:
    """See `Taking`."""

    def __init__(self, stop: Stop, ended: Future[int]) -> None:
        self.ended = ended
        self._stop = stop

    def stop(self) -> None:
        self.ended.cancel()  # where no thread has begun with it
        self._stop.stop()

    def settle(self) -> None:
        self._stop.settle()
