"""How what lies between two layers of a batch comes from one replica's engine to another's; where they pretend, it takes a while.

Bytes are read out of the sender's memory by their receiver, checked, and freed on its word. Knows no request's life and no layer:
who is to get what, and who gives up, is said from outside.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec
import xxhash
from msgspec import Struct

from squall.config import Config
from squall.core.actions import SendActivations
from squall.core.types import ReplicaId, RequestId
from squall.errors import PeerLost, TransferFailed
from squall.live.engine.interface import Activations, LiveEngine
from squall.live.predicted_way import Prices
from squall.live.transport.interface import Link, Transport
from squall.live.transport.kv import Stop, dial
from squall.live.transport.region import Region
from squall.perf.dtypes import DTYPE_BYTES
from squall.perf.spec import ModelSpec

ATTEMPTS = 3
"""How often a sender is dialled, and how often the bytes may come wrong."""


class ActivationsOffer(Struct, frozen=True):
    """A sender's word, carried by the control plane to the receiver: what lies between two layers of `batch` may be read.

    Attributes:
        requests, num_tokens: whose, and how many tokens each has.
        num_bytes, sum: of all, and their checksum (XXH3, 64 bits).
        addresses: of the sender; `source`, `to`: the replicas.
        number: unlike that of any other offer.
    """

    batch: int
    requests: tuple[RequestId, ...]
    num_tokens: tuple[int, ...]
    num_bytes: int
    sum: int
    addresses: tuple[str, ...]
    source: ReplicaId
    to: ReplicaId
    number: int

    @property
    def region(self) -> str:
        return f"activations {self.number}"


class ActivationsTaken(Struct, frozen=True, tag=True):
    """The receiver's word to the sender: offer `number` is here and right."""

    number: int


class Sender(Protocol):
    """Whose activations are on their way. From any thread; each batch ends in one of `sent` and `failed`, or is withdrawn."""

    def offered(self, offer: ActivationsOffer) -> None: ...
    def sent(self, number: int) -> None: ...
    def failed(self, number: int) -> None: ...


class ActivationsWay(Protocol):
    """One replica's part in all batches that change hands. Called on the loop.

    Attributes:
        engine: whose batches they are.
    """

    engine: LiveEngine

    def send(self, action: SendActivations, number: int, sender: Sender) -> None:
        """Begin; the engine keeps nothing of the batch any more."""
        ...

    def withdraw(self, number: int) -> None:
        """Nobody is to have it: nothing is said of it any more. Harmless where it has ended."""
        ...

    def take(self, offer: ActivationsOffer, stop: Stop) -> Future[Activations]:
        """Fetch what is offered; raises SquallError where it cannot be had."""
        ...

    def close(self) -> None: ...


class PricedActivations:
    """Activations that do not move, and take as long as alone on the links between both replicas. See `ActivationsWay`."""

    def __init__(self, replica: ReplicaId, engine: LiveEngine, prices: Prices, config: Config, spec: ModelSpec) -> None:
        self.engine = engine
        self._replica = replica
        self._prices = prices
        self._time_dilation = config.serve.time_dilation
        self._delay_s = config.handoff.delay_s
        self._token_bytes = round(spec.hidden_size * DTYPE_BYTES[spec.dtypes(config.replica.dtype)[0]])
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def send(self, action: SendActivations, number: int, sender: Sender) -> None:
        self.engine.activations(action.batch)
        num_bytes = max(1, self._token_bytes * action.num_tokens)
        seconds = self._prices.kv_seconds(self._replica, action.to, num_bytes) if self._delay_s is None else self._delay_s

        def end() -> None:
            del self._timers[number]
            sender.sent(number)

        self._timers[number] = asyncio.get_running_loop().call_later(seconds * self._time_dilation, end)

    def withdraw(self, number: int) -> None:
        if timer := self._timers.pop(number, None):
            timer.cancel()

    def take(self, offer: ActivationsOffer, _stop: Stop) -> Future[Activations]:
        raise ValueError(f"activations of batch {offer.batch} are offered, but an engine that pretends has no use for them")

    def close(self) -> None:
        """Timers end with the loop."""


class PulledActivations:
    """See `ActivationsWay`. What is sent stays where the engine left it, and is registered for as long as it is offered.

    Attributes:
        endpoint: the replica's end of its links, which hands `on_notify` what peers say; to be set before the first batch.
    """

    endpoint: Transport

    def __init__(self, replica: ReplicaId, engine: LiveEngine) -> None:
        self.engine = engine
        self._replica = replica
        self._sending: dict[int, tuple[Sender, str]] = {}
        self._threads = ThreadPoolExecutor(2, f"activations-{replica}")

    # -- as a sender

    def send(self, action: SendActivations, number: int, sender: Sender) -> None:
        kept = self.engine.activations(action.batch)
        ends = self.endpoint.addresses, self._replica, action.to
        offer = ActivationsOffer(action.batch, kept.requests, kept.num_tokens, len(kept.data), 0, *ends, number)
        self._sending[number] = sender, offer.region
        self._threads.submit(self._offer, offer, kept.data)

    def _offer(self, offer: ActivationsOffer, data: memoryview) -> None:
        """In a thread: a checksum takes a while."""
        if (sending := self._sending.get(offer.number)) is None:
            return
        made = msgspec.structs.replace(offer, sum=xxhash.xxh3_64_intdigest(data))
        self.endpoint.register(Region(offer.region, data))
        sending[0].offered(made)
        if offer.number not in self._sending:
            self.endpoint.unregister(offer.region)

    def on_notify(self, _node: str, payload: bytes) -> None:
        """For `Transport`: a receiver has spoken. What makes no sense, or comes twice, is passed over."""
        try:
            taken = msgspec.msgpack.decode(payload, type=ActivationsTaken)
        except msgspec.DecodeError:
            return
        if (sender := self._end(taken.number)) is not None:
            sender.sent(taken.number)

    def withdraw(self, number: int) -> None:
        self._end(number)

    def _end(self, number: int) -> Sender | None:
        sender, region = self._sending.pop(number, (None, ""))
        if sender is not None:
            self.endpoint.unregister(region)
        return sender

    # -- as a receiver

    def take(self, offer: ActivationsOffer, stop: Stop) -> Future[Activations]:
        return self._threads.submit(self._pull, offer, stop)

    def _pull(self, offer: ActivationsOffer, stop: Stop) -> Activations:
        data = memoryview(bytearray(offer.num_bytes))
        copy = Region(offer.region, data)
        reason, here = "it is not wanted any more", False
        for _ in range(ATTEMPTS):
            if stop.wanted:
                break
            link: Link | None = None
            try:
                link = dial(self.endpoint, offer.addresses, None if here else offer.region)  # told once, a sender has it no more
                stop.watch(link)
                if not here:
                    link.read(offer.region, [(0, offer.num_bytes)], copy)
                    here = xxhash.xxh3_64_intdigest(data) == offer.sum
                if here:
                    link.notify(msgspec.msgpack.encode(ActivationsTaken(offer.number)))
                    return Activations(offer.requests, offer.num_tokens, data)
                reason = "they came with a wrong checksum"
            except PeerLost as error:
                reason = str(error)
            finally:
                stop.watch(None)
                if link is not None:
                    link.close()
        raise TransferFailed(f"activations of batch {offer.batch} of replica {offer.source}: {reason}")

    def close(self) -> None:
        for number in list(self._sending):
            self._end(number)
        self._threads.shutdown(wait=False, cancel_futures=True)
