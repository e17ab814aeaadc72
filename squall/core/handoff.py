"""A replica's part in hand-offs: requests whose KV waits to leave, those whose KV is to come, those that are to go elsewhere.

As a source it holds a request after its prefill, or while the replica is emptied, with its blocks, until their content has been
sent to whoever wants it (`handoff_source`). As a target it takes blocks first, then asks for the KV, and lets the request decode
when all of it is there (`handoff_target`). Blocks change hands only between two runs, so that a run of k steps stays k single
steps. Knows no policy, no route and no link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from squall.core.actions import Abandon, AnyAction, Forget, Hold, Send
from squall.core.blocks import BlockPool
from squall.core.decodes import DecodeGroup, Work
from squall.core.events import (
    AnyEvent,
    Disowned,
    Dropped,
    Held,
    KeepWanted,
    KvArrived,
    KvFailed,
    KvSent,
    KvWanted,
    MoveWanted,
    Offered,
    ReplicaDown,
    ReturnWanted,
    RoleChanged,
    Surrendered,
)
from squall.core.handoff_source import HandoffSource, NextBoundary
from squall.core.handoff_target import HandoffTarget
from squall.core.types import FOREVER, ROUTER, ReplicaId, RequestId, Role


class Owner(Protocol):
    """The replica, at a boundary."""

    @property
    def decodes(self) -> DecodeGroup:
        """Whom a request joins, and leaves."""
        ...

    @property
    def works_in_pair(self) -> bool:
        """Live scaling has a say in whose its prompts are."""
        ...

    def give_up(self, request: RequestId) -> bool:
        """Out of the queue or the prefill; False where it is not there, or a run works on it."""
        ...


class Boundary:
    """What has changed between two runs.

    Attributes:
        actions: for the engine and for other replicas, before the next run.
        held: for the router; `gone`: cancelled requests that have left.
    """

    __slots__ = ("actions", "gone", "held")

    def __init__(self, actions: list[AnyAction], held: tuple[Held, ...], gone: tuple[RequestId, ...]) -> None:
        self.actions = actions
        self.held = held
        self.gone = gone


class Handoffs:
    """See the module.

    Args:
        id: the replica.
        pool, running: the replica's own: its blocks, and the requests that it works on.
        block_size: tokens of a block.
        seats: the most requests that it works on at once.

    Attributes:
        role: PREFILL holds what it has computed; others decode it.
    """

    __slots__ = ("_id", "_moving", "_next", "_pool", "_returning", "_running", "_source", "_target", "role")

    def __init__(self, id: ReplicaId, pool: BlockPool, running: dict[RequestId, Work], block_size: int, seats: int) -> None:
        self.role = Role.BOTH
        self._id = id
        self._pool = pool
        self._running = running
        self._next = NextBoundary()
        self._source = HandoffSource(id, self._next)
        self._target = HandoffTarget(id, pool, running, block_size, seats, self._next)
        self._moving: dict[RequestId, None] = {}  # in the order of asking
        self._returning: dict[RequestId, None] = {}  # likewise

    @property
    def stirred(self) -> bool:
        """Something waits for the next boundary that could change it."""
        return self._next.awaited

    @property
    def num_held(self) -> int:
        """Requests whose KV waits to leave, or is on its way."""
        return self._source.num_held

    @property
    def num_expected(self) -> int:
        """Requests that were offered and do not decode yet."""
        return self._target.num_expected

    @property
    def holds(self) -> bool:
        """What ends its prefill does not decode here."""
        return self.role is Role.PREFILL

    def awaits(self, request: RequestId) -> bool:
        """It was offered and has no blocks yet."""
        return self._target.awaits(request)

    # -- events

    def handle(self, event: AnyEvent) -> list[AnyAction] | None:
        """None where the event is about something else."""
        if type(event) is Offered:
            self._target.offer(event)
            return []
        if type(event) is KvWanted:
            return self._source.want(event)
        if type(event) is KvSent:
            return self._source.sent(event)
        if type(event) is KvArrived:
            return self._target.arrive(event)
        if type(event) is KvFailed:
            if event.to != self._id:
                return self._seated(self._source.fail(event))
            return self._target.lack(event.request, (event.first_layer, event.last_layer))
        return self._handle_rarer(event)

    def _handle_rarer(self, event: AnyEvent) -> list[AnyAction] | None:
        match event:
            case Dropped(request, by):
                if not self._source.drop(request, by):
                    return self._target.drop(event)
            case RoleChanged():
                self.role = event.role
                return [] if self.holds else self._seated(self._source.keep_all())
            case Disowned(requests):
                for request in requests:
                    self._source.disown(request)
                    self._target.disown(request)
            case MoveWanted(requests):
                self._moving.update(dict.fromkeys(requests))
                self._next.awaited = True
            case ReturnWanted(requests):
                self._returning.update(dict.fromkeys(requests))
                self._next.awaited = True
            case KeepWanted(requests):
                return self._seated(self._source.keep(requests))
            case ReplicaDown(replica, lost):
                if lost:
                    self._target.lose(replica)
            case _:
                return None
        return []

    def cancel(self, request: RequestId) -> None:
        """Nobody wants it any more. Where it is only expected, its source tells the router when it is gone."""
        held = self._source.held.get(request)
        if held is not None:
            self._source.cancel(held)
        else:
            self._target.cancel(request)

    def _seated(self, actions: list[AnyAction]) -> list[AnyAction]:
        """Whoever the source's part lets go of decodes here."""
        for work in self._source.staying:
            self._target.seat(work)
        self._source.staying.clear()
        return actions

    # -- as a source

    def hold(self, work: Work, head: ReplicaId | None = None, num_layers: int = 0) -> None:
        """A prefill has ended: the request leaves the batch and keeps its blocks; the router hears of it at the boundary.

        The KV of its first `num_layers` layers may be at another replica, `head`.
        """
        self._running.pop(work.request.id, None)
        self._source.hold(work, head, num_layers)

    def hold_part(self, work: Work) -> None:
        """The KV of its first layers is here, and the replica that has the others tells the router."""
        self._source.hold_part(work)

    def begin_anew(self, request: RequestId) -> None:
        """It comes to be computed here. What is left of it from earlier gives its blocks back, and no more than that: the engine,
        which knows requests by their ids alone, has forgotten it for the new one."""
        self._source.begin_anew(request)
        self._target.begin_anew(request)

    # -- between two runs

    @property
    def is_quiet(self) -> bool:
        """A boundary changes nothing here."""
        if self._next.awaited or self._source.just_held:
            return False
        target = self._target
        return not (target.arrived or target.offers or self._moving or self._returning)

    def at_boundary(self, owner: Owner, has_preempted: bool, cancelled: Sequence[RequestId]) -> Boundary:
        """Let go, give back, join, take: in this order.

        Args:
            owner: whose boundary it is.
            has_preempted: somebody who lost its KV here waits for blocks; it comes before what is offered.
            cancelled: have just left the batch.
        """
        source, target = self._source, self._target
        actions: list[AnyAction] = []
        held: tuple[Held, ...] = ()
        gone: tuple[RequestId, ...] = ()
        returned = self._let_go(owner) if self._moving or self._returning else ()
        self._next.awaited = False
        if source.just_held:
            held = tuple(sorted(source.just_held, key=_request) if len(source.just_held) > 1 else source.just_held)
            actions.append(Hold(tuple([one.request for one in held])))
            source.just_held.clear()
        if returned:
            actions += [Abandon(returned), Send(ROUTER, Surrendered(self._id, returned))]
        if source.leaving or target.unwanted or target.forsaken or cancelled:
            gone = self._give_back(actions, cancelled)
        if target.arrived:
            target.join(owner.decodes, actions)
        if target.offers and not has_preempted:
            target.take(owner.decodes, actions)
        return Boundary(actions, held, gone)

    def _let_go(self, owner: Owner) -> tuple[RequestId, ...]:
        """Who is to go elsewhere and decodes is held, and who does not decode is given back. Returns the latter."""
        returned: list[RequestId] = []
        for request in list(self._moving):
            work = self._running.get(request)
            if work is not None and work.group is owner.decodes:
                work.target = work.group.leave(work)
                self.hold(work)
            elif owner.give_up(request):
                returned.append(request)
            elif work is not None:
                continue  # a run works on it, or live scaling does
            del self._moving[request]
        for request in [] if owner.works_in_pair else list(self._returning):
            work = self._running.get(request)
            if owner.give_up(request):
                returned.append(request)
            elif work is not None and work.group is None:
                continue
            del self._returning[request]
        return tuple(sorted(returned))

    def _give_back(self, actions: list[AnyAction], cancelled: Iterable[RequestId]) -> tuple[RequestId, ...]:
        """Blocks of who has left, or does not come. Returns whoever of these the router is to hear of."""
        source, target = self._source, self._target
        gone: list[RequestId] = []
        silent: list[RequestId] = []
        for held in source.leaving:
            self._pool.release(held.work.blocks, held.work.shared)
            if held.gone and not held.silent:
                gone.append(held.work.request.id)
            elif not held.anew:
                silent.append(held.work.request.id)
        for coming in target.unwanted:
            self._pool.release(coming.work.blocks, ())
            if not coming.anew:
                silent.append(coming.work.request.id)
        for coming in target.take_forsaken() if target.forsaken else ():
            self._pool.release(coming.work.blocks, coming.work.shared)
            gone.append(coming.work.request.id)
        source.leaving.clear()
        target.unwanted.clear()
        if gone or cancelled:
            actions.append(Forget((*cancelled, *gone)))
        if silent:
            actions.append(Abandon(tuple(silent)))
        return tuple(gone)


def _request(held: Held) -> RequestId:
    return held.request


def seats_of(policy: object) -> int:
    """The most requests that a batching policy lets a replica work on."""
    seats: int = getattr(policy, "max_num_seqs", FOREVER)
    return seats
