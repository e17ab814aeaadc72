"""What one session's live scaling is in the middle of: batches whose activations go to another replica, or come from one.

Whoever sends says how that ended, exactly once, whatever becomes of the receiver. A receiver has one batch in hand at a time, as
its machine asks for no more. Knows no machine, and not how activations move.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from msgspec import Struct

from squall.core.actions import RunLayers, SendActivations
from squall.core.events import ActivationsArrived, ActivationsFailed, ActivationsSent, AnyEvent
from squall.core.types import MachineId, ReplicaId
from squall.live.activations import ActivationsOffer, ActivationsWay
from squall.live.engine.interface import Activations
from squall.live.transport.kv import Stop

_log = logging.getLogger(__name__)


class Desk(Protocol):
    """The session, as its layers see it. On its loop, except `on_loop`; see `handoffs.Desk`."""

    def on_loop(self, call: Callable[[Any], None], argument: Any) -> None: ...
    def tell(self, to: MachineId, event: AnyEvent) -> None: ...
    def ended(self, event: AnyEvent) -> None: ...
    def offer_activations(self, offer: ActivationsOffer) -> None: ...


class _Sending(Struct):
    batch: int
    to: ReplicaId


class _Coming:
    """A batch that is fetched; `is_here`: the machine was told that it has come."""

    def __init__(self, offer: ActivationsOffer, stop: Stop, ended: Future[Activations]) -> None:
        self.offer = offer
        self.stop = stop
        self.ended = ended
        self.is_here = False


class Layers:
    """See the module; also the `Sender` of its batches.

    Args:
        replica: whose.
        way: how its activations move.
        desk: its session.
    """

    def __init__(self, replica: ReplicaId, way: ActivationsWay, desk: Desk) -> None:
        self._replica = replica
        self._way = way
        self._desk = desk
        self._sendings: dict[int, _Sending] = {}  # by number
        self._coming: _Coming | None = None

    # -- as a target: batches leave

    def send(self, action: SendActivations) -> None:
        number = secrets.randbits(63)
        self._sendings[number] = _Sending(action.batch, action.to)
        self._way.send(action, number, self)

    def offered(self, offer: ActivationsOffer) -> None:
        self._desk.on_loop(self._offer, offer)

    def sent(self, number: int) -> None:
        self._desk.on_loop(self._sent, number)

    def failed(self, number: int) -> None:
        self._desk.on_loop(self._fail, number)

    def _offer(self, offer: ActivationsOffer) -> None:
        if offer.number in self._sendings:
            self._desk.offer_activations(offer)

    def _sent(self, number: int) -> None:
        if (sending := self._sendings.pop(number, None)) is not None:
            self._desk.ended(ActivationsSent(sending.batch))

    def _fail(self, number: int) -> None:
        if (sending := self._sendings.pop(number, None)) is not None:
            self._way.withdraw(number)
            self._desk.ended(ActivationsFailed(sending.batch))

    def lets_pass(self, event: AnyEvent) -> bool:
        """Asked before the machine is given `event`. A receiver's word that it has not got a batch is for us."""
        if isinstance(event, ActivationsArrived) and self._coming is not None and self._coming.offer.batch == event.batch:
            self._coming.is_here = True
        if not isinstance(event, ActivationsFailed):
            return True
        numbers = [number for number, sending in self._sendings.items() if sending.batch == event.batch]
        for number in numbers:
            self._fail(number)
        return not numbers

    def lose(self, partner: ReplicaId) -> None:
        """The other one of a pair is gone. What has come from it stays: the machine may already have asked for it to run."""
        for number in [number for number, sending in self._sendings.items() if sending.to == partner]:
            self._fail(number)
        if self._coming is not None and self._coming.offer.source == partner and not self._coming.is_here:
            self._drop()

    # -- as a source: they come

    def take(self, offer: ActivationsOffer) -> None:
        """A batch can be had. What was coming before is not wanted any more, or nobody would have asked for another one."""
        self._drop()
        stop = Stop()
        coming = self._coming = _Coming(offer, stop, self._way.take(offer, stop))
        coming.ended.add_done_callback(lambda _: self._desk.on_loop(self._ended, coming))

    def _ended(self, coming: _Coming) -> None:
        if coming is not self._coming or coming.ended.cancelled() or (error := coming.ended.exception()) is None:
            return
        _log.warning("a batch did not come: %s", error)
        self._coming = None
        self._desk.tell(coming.offer.source, ActivationsFailed(coming.offer.batch))

    def given(self, action: RunLayers) -> Future[Activations] | None:
        """What has come of a batch that is to run; None where it is the engine's own.

        The machine may hear that a batch is here a moment before we do: the sender was told first, by whoever fetched it.
        """
        coming = self._coming
        if not action.first_layer or coming is None or coming.offer.batch != action.batch:
            return None
        self._coming = None
        return coming.ended

    def _drop(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.ended.cancel()
            coming.stop.stop()

    def close(self) -> None:
        """The session is over."""
        for number in self._sendings:
            self._way.withdraw(number)
        self._sendings.clear()
        self._drop()
