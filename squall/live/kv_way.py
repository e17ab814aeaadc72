"""How the KV of a request comes from one replica's engine to another's; where engines pretend, it takes as long as it would take.

Knows no request's life: who is to get what, and who gives up, is said from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from squall.config import Config
from squall.core.actions import SendKv
from squall.core.types import ReplicaId, RequestId
from squall.live.engine.interface import KvEngine
from squall.live.predicted_way import Prices
from squall.live.transport.kv import KvOffer
from squall.perf.spec import ModelSpec


class Sender(Protocol):
    """Whose KV is on its way. From any thread; each `SendKv` ends in one of `sent` and `failed`, or is withdrawn."""

    def offered(self, offer: KvOffer) -> None:
        """It may be fetched; tell whoever is to have it."""
        ...

    def sent(self, request: RequestId, number: int, num_bytes: int) -> None:
        """It is there: its receiver has said so."""
        ...

    def failed(self, request: RequestId, number: int) -> None: ...


class Taking(Protocol):
    """KV that is being fetched."""

    @property
    def ended(self) -> Future[int]:
        """With the bytes that came, or raises SquallError. Blocks are nobody else's before, or before `settle` has returned."""
        ...

    def stop(self) -> None:
        """It is not wanted any more: let it end soon."""
        ...

    def settle(self) -> None:
        """After `stop`: return once nothing is written to the blocks any more, though it may still be reaching for its sender."""
        ...


class KvWay(Protocol):
    """One replica's part in all hand-offs. Called on the loop.

    Attributes:
        engine: whose KV it is.
    """

    engine: KvEngine

    def send(self, action: SendKv, number: int, sender: Sender) -> None:
        """Begin. The blocks stay until it ends; `number` is unlike that of any other hand-off."""
        ...

    def withdraw(self, number: int) -> None:
        """Nobody is to have it: nothing is said of it any more. Harmless where it has ended."""
        ...

    def take(self, offer: KvOffer, blocks: Sequence[int]) -> Taking:
        """Fetch what is offered into these blocks."""
        ...

    def close(self) -> None:
        """No more hand-offs."""
        ...


class PricedKv:
    """KV that does not move, and takes as long as alone on the links between both replicas. See `KvWay`.

    Args:
        replica: whose.
        engine: pretends, too.
        prices: of the links.
        config: its [handoff] may say how long each takes; bytes are those of its replica.
        spec: the model's.
    """

    def __init__(self, replica: ReplicaId, engine: KvEngine, prices: Prices, config: Config, spec: ModelSpec) -> None:
        shape = config.replica
        dtype = shape.dtype if shape.kv_dtype == "auto" else shape.kv_dtype
        self.engine = engine
        self._replica = replica
        self._prices = prices
        self._delay_s = config.handoff.delay_s
        self._time_dilation = config.serve.time_dilation
        self._num_layers = spec.num_layers
        self._token_bytes = spec.kv_bytes_per_token(spec.dtypes(dtype)[0], shape.tp, pp=shape.pp)  # of one GPU
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def send(self, action: SendKv, number: int, sender: Sender) -> None:
        last = action.last_layer or self._num_layers
        num_bytes = max(1, self._token_bytes * action.num_tokens * (last - action.first_layer) // self._num_layers)
        seconds = self._prices.kv_seconds(self._replica, action.to, num_bytes) if self._delay_s is None else self._delay_s

        def end() -> None:
            del self._timers[number]
            sender.sent(action.request, number, num_bytes * self._prices.gpus)

        self._timers[number] = asyncio.get_running_loop().call_later(seconds * self._time_dilation, end)

    def withdraw(self, number: int) -> None:
        if timer := self._timers.pop(number, None):
            timer.cancel()

    def take(self, offer: KvOffer, _blocks: Sequence[int]) -> Taking:
        raise ValueError(f"KV of request {offer.request} is offered, but an engine that pretends has nowhere to put it")

    def close(self) -> None:
        """Timers end with the loop."""
