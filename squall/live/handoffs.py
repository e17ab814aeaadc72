"""What one session's hand-offs are in the middle of: the performer of Hold, Reserve, Join, SendKv and Abandon.

As a source it sends KV, and says how that ended: exactly once, whatever becomes of the receiver. As a target it keeps what
machines never see of a request until there are blocks for it, and lets nobody else have these while they are written to. Knows no
machine, and not how KV moves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from squall.core.actions import Hold, Join, Reserve, SendKv
from squall.core.events import AnyEvent, Cancelled, Disowned, Dropped, KvFailed, KvSent
from squall.core.types import MachineId, Nanos, ReplicaId, RequestId
from squall.live.engine.interface import Job
from squall.live.kv_way import KvWay, Taking
from squall.live.transport.kv import KvOffer

_log = logging.getLogger(__name__)


class Desk(Protocol):
    """The session, as its hand-offs see it. On its loop, except `on_loop`."""

    def in_engine(self, call: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        """Make `call` in the engine's thread, then `done` with its result on the loop."""
        ...

    def on_loop(self, call: Callable[[Any], None], argument: Any) -> None: ...

    def tell(self, to: MachineId, event: AnyEvent) -> None:
        """Another machine."""
        ...

    def ended(self, event: AnyEvent) -> None:
        """The machine's long action has ended so."""
        ...

    def offer(self, offer: KvOffer) -> None:
        """Send it to its receiver."""
        ...

    def awaits(self, request: RequestId) -> bool:
        """The machine has an offer of it and no blocks for it yet."""
        ...


class _Sending(Struct):
    action: SendKv
    number: int
    began_at: Nanos


class Handoffs:
    """See the module; also the `Sender` of its KV.

    Args:
        replica: whose.
        way: how its KV moves.
        desk: its session.
    """

    def __init__(self, replica: ReplicaId, way: KvWay, desk: Desk) -> None:
        self._replica = replica
        self._way = way
        self._engine = way.engine
        self._desk = desk
        self._jobs: dict[tuple[RequestId, int], Job] = {}  # offered, and without blocks: by request and its tokens
        self._blocks: dict[RequestId, tuple[int, ...]] = {}  # of those whose KV is to come
        self._reserving: dict[RequestId, list[KvOffer]] = {}  # that the engine has not given blocks yet
        self._takings: dict[RequestId, list[tuple[KvOffer, Taking]]] = {}
        self._sendings: dict[tuple[RequestId, ReplicaId], _Sending] = {}  # a request may be on its way in vain, and once more

    # -- actions

    def perform(self, action: Hold | Reserve | Join | SendKv) -> None:
        match action:
            case Hold(requests):
                self._desk.in_engine(lambda: [self._engine.pause(request) for request in requests])
            case Reserve():
                self._reserve(action)
            case Join(requests, group):
                for request in requests:
                    self._blocks.pop(request, None)
                self._desk.in_engine(lambda: self._resume(requests, group))
            case SendKv():
                sending = _Sending(action, secrets.randbits(63), time.monotonic_ns())
                self._sendings[action.request, action.to] = sending
                self._way.send(action, sending.number, self)

    def _resume(self, requests: Sequence[RequestId], group: int) -> None:
        for request in requests:
            self._engine.resume(request, group)

    def let_go(self, requests: Sequence[RequestId]) -> Callable[[], None]:
        """Their blocks are to be free, and their senders hear of it. Returns what waits until nobody writes to them."""
        stopped, refused = self._stop(requests)
        for offer in refused:
            self._refuse(offer)
        return lambda: _settle(stopped)

    def job_of(self, action: Reserve) -> Job:
        """What came with the offer that blocks are taken for."""
        return self._jobs[action.request, action.num_tokens]

    def _reserve(self, action: Reserve) -> None:
        request = action.request
        job = self._jobs.pop((request, action.num_tokens))
        self._reserving[request] = []
        self._desk.in_engine(
            lambda: self._engine.adopt(job, action.num_tokens, action.evictable), lambda blocks: self._reserved(request, blocks)
        )

    def _reserved(self, request: RequestId, blocks: tuple[int, ...]) -> None:
        offers = self._reserving.pop(request, None)
        if offers is None:
            return  # given up meanwhile
        self._blocks[request] = blocks
        for offer in offers:
            self._take(offer)

    # -- as a target

    def expect(self, request: RequestId, num_tokens: int, job: Job) -> None:
        """What came with an offer to this replica, before its machine reserves blocks for so many tokens."""
        self._jobs[request, num_tokens] = job

    def take(self, offer: KvOffer) -> None:
        """KV that this replica has asked for can be had."""
        if offer.request in self._reserving:
            self._reserving[offer.request].append(offer)
        elif offer.request in self._blocks:
            self._take(offer)
        else:
            self._refuse(offer)

    def _take(self, offer: KvOffer) -> None:
        taking = self._way.take(offer, self._blocks[offer.request])
        self._takings.setdefault(offer.request, []).append((offer, taking))
        taking.ended.add_done_callback(lambda _: self._desk.on_loop(lambda of: self._ended(of, taking), offer))

    def _ended(self, offer: KvOffer, taking: Taking) -> None:
        """Where it has come, its sender knows, and tells the machine."""
        takings = self._takings.get(offer.request, [])
        if (offer, taking) not in takings:
            return
        takings.remove((offer, taking))
        if not takings:
            del self._takings[offer.request]
        if not taking.ended.cancelled() and (error := taking.ended.exception()) is not None:
            _log.warning("a hand-off failed: %s", error)
            self._refuse(offer)

    def _refuse(self, offer: KvOffer) -> None:
        self._desk.tell(offer.source, KvFailed(offer.request, self._replica, offer.first, offer.last))

    def _stop(self, requests: Iterable[RequestId]) -> tuple[list[Taking], list[KvOffer]]:
        """What was being fetched, and all that was offered and is not taken."""
        takings: list[tuple[KvOffer, Taking]] = []
        refused: list[KvOffer] = []
        for request in requests:
            self._blocks.pop(request, None)
            refused += self._reserving.pop(request, ())
            takings += self._takings.pop(request, ())
        for _, taking in takings:
            taking.stop()
        return [taking for _, taking in takings], [*refused, *(offer for offer, _ in takings)]

    # -- what is heard of both ends

    def lets_pass(self, event: AnyEvent) -> bool:
        """Asked before the machine is given `event`. A receiver's word that it has not got something is for us."""
        if not isinstance(event, KvFailed) or event.to == self._replica:
            return True
        self._end(event.request, event.to, KvFailed(event.request, event.to))
        return False

    def heard(self, event: AnyEvent) -> None:
        """Called once the machine was given `event`."""
        if isinstance(event, Dropped):
            self._end(event.request, event.by, KvFailed(event.request, event.by))

    def about_to_be_heard(self, event: AnyEvent) -> None:
        """Called just before the machine takes `event` in."""
        if not isinstance(event, (Cancelled, Disowned, Dropped, KvFailed)):
            return
        # The machine forgets an offer without blocks when its client, or an end of it, is gone, and nobody is told.
        about = event.requests if isinstance(event, Disowned) else (event.request,)
        forgotten = [(key, job) for key, job in self._jobs.items() if key[0] in about]
        if forgotten:
            asyncio.get_running_loop().call_soon(self._drop_jobs, forgotten)  # behind the machine

    def _drop_jobs(self, forgotten: Sequence[tuple[tuple[RequestId, int], Job]]) -> None:
        for key, job in forgotten:
            if self._jobs.get(key) is job and not self._desk.awaits(key[0]):
                del self._jobs[key]

    # -- as a source

    def offered(self, offer: KvOffer) -> None:
        self._desk.on_loop(self._offer, offer)

    def sent(self, request: RequestId, number: int, num_bytes: int) -> None:
        self._desk.on_loop(self._sent, (request, number, num_bytes))

    def failed(self, request: RequestId, number: int) -> None:
        self._desk.on_loop(self._failed, (request, number))

    def _offer(self, offer: KvOffer) -> None:
        if self._current(offer.request, offer.number):
            self._desk.offer(offer)

    def _sent(self, what: tuple[RequestId, int, int]) -> None:
        request, number, num_bytes = what
        if sending := self._current(request, number):
            to, took = sending.action.to, time.monotonic_ns() - sending.began_at
            self._end(request, to, KvSent(request, to, num_bytes, took))

    def _failed(self, what: tuple[RequestId, int]) -> None:
        if sending := self._current(*what):
            self._end(what[0], sending.action.to, KvFailed(what[0], sending.action.to))

    def _current(self, request: RequestId, number: int) -> _Sending | None:
        sendings = self._sendings.items()
        return next((sending for key, sending in sendings if key[0] == request and sending.number == number), None)

    def _end(self, request: RequestId, to: ReplicaId, event: KvSent | KvFailed) -> None:
        """What is being sent to that replica ends so; nothing where it has ended before."""
        sending = self._sendings.pop((request, to), None)
        if sending is not None:
            self._way.withdraw(sending.number)
            self._desk.ended(event)

    def lose(self, partner: ReplicaId) -> None:
        """Of a pair, the other one is gone: what is being sent to it has failed."""
        for request, to in list(self._sendings):
            if to == partner:
                self._end(request, to, KvFailed(request, to))

    def close(self) -> Callable[[], None]:
        """The session is over. Returns what waits until nobody writes to this replica's blocks."""
        for sending in self._sendings.values():
            self._way.withdraw(sending.number)
        self._sendings.clear()
        self._jobs.clear()
        stopped, _ = self._stop([*self._takings])
        return lambda: _settle(stopped)


def _settle(takings: Sequence[Taking]) -> None:
    for taking in takings:
        taking.settle()
