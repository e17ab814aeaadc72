"""A replica's part in hand-offs: requests whose KV waits to leave, and those whose KV is to come.

As a source it holds a request after its prefill, with its blocks, until their content has been sent to whoever wants it. As a
target it takes blocks first, then asks for the KV, and lets the request decode when all of it is there. Blocks change hands only
between two runs, so that a run of k steps stays k single steps. Knows no policy, no route and no link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from squall.core.actions import Abandon, AnyAction, Forget, Hold, Join, Reserve, Send, SendKv
from squall.core.blocks import BlockPool
from squall.core.decodes import DecodeGroup, Work
from squall.core.events import (
    Adopted,
    AnyEvent,
    Disowned,
    Dropped,
    HandoffFailed,
    Held,
    Kept,
    KvArrived,
    KvFailed,
    KvSent,
    KvWanted,
    NotHeld,
    Offered,
    RoleChanged,
)
from squall.core.types import FOREVER, ROUTER, ReplicaId, RequestId, Role


class Source:
    """A request held here.

    Attributes:
        sending: what is being sent of it; only one at a time.
        wanted: what comes after that, or at once.
        gone: its client went away; `silent`: and nobody is to be told, since another part of its KV is lost.
        whole: all layers are here.
    """

    __slots__ = ("gone", "sending", "silent", "wanted", "whole", "work")

    def __init__(self, work: Work, whole: bool) -> None:
        self.work = work
        self.whole = whole
        self.sending: KvWanted | None = None
        self.wanted: KvWanted | None = None
        self.gone = False
        self.silent = False


class Target:
    """A request whose KV is to come.

    Attributes:
        missing: the layers that have not come, as first and last; all of them are asked for once there are blocks.
        reserved: it has its blocks.
        gone: its client went away; `failed`: some of it will never come. Blocks are kept as long as anybody writes to them.
    """

    __slots__ = ("failed", "gone", "missing", "offer", "reserved", "work")

    def __init__(self, offer: Offered, work: Work) -> None:
        self.offer = offer
        self.work = work
        self.missing = {(part.first_layer, part.last_layer) for part in offer.parts}
        self.reserved = False
        self.gone = False
        self.failed = False


class Boundary:
    """What has changed between two runs.

    Attributes:
        actions: for the engine and for other replicas, before the next run.
        held: for the router; `gone`: cancelled requests that have left.
    """

    __slots__ = ("actions", "gone", "held")

    def __init__(self) -> None:
        self.actions: list[AnyAction] = []
        self.held: tuple[Held, ...] = ()
        self.gone: tuple[RequestId, ...] = ()


class Handoffs:
    """See the module.

    Args:
        id: the replica.
        pool, running: the replica's own: its blocks, and the requests that it works on.
        block_size: tokens of a block.
        seats: the most requests that it works on at once.

    Attributes:
        role: PREFILL holds what it has computed; others decode it.
        stirred: something waits for the next boundary that could change it.
    """

    __slots__ = (
        "_arrived", "_block_size", "_disowned", "_expected", "_held", "_id", "_just_held", "_leaving", "_offers", "_pool",
        "_running", "_seats", "_unwanted", "role", "stirred",
    )  # fmt: skip

    def __init__(self, id: ReplicaId, pool: BlockPool, running: dict[RequestId, Work], block_size: int, seats: int) -> None:
        self.role = Role.BOTH
        self.stirred = False
        self._id = id
        self._pool = pool
        self._running = running
        self._block_size = block_size
        self._seats = seats
        self._held: dict[RequestId, Source] = {}
        self._just_held: list[Held] = []
        self._disowned: list[Source] = []  # of no use, but still read from
        self._expected: dict[RequestId, Target] = {}
        self._offers: deque[Target] = deque()  # those without blocks
        self._arrived: list[Target] = []  # complete; they join the decodes at the next boundary with a seat for them
        self._leaving: list[Source] = []  # whose blocks become free at the next boundary
        self._unwanted: list[Target] = []  # likewise

    @property
    def num_held(self) -> int:
        """Requests whose KV waits to leave, or is on its way."""
        return len(self._held) + len(self._disowned)

    @property
    def num_expected(self) -> int:
        """Requests that were offered and do not decode yet."""
        return len(self._expected) + len(self._arrived)

    @property
    def holds(self) -> bool:
        """What ends its prefill does not decode here."""
        return self.role is Role.PREFILL

    # -- events

    def handle(self, event: AnyEvent) -> list[AnyAction] | None:
        """None where the event is about something else."""
        if type(event) is Offered:
            self._offer(event)
            return []
        if type(event) is KvWanted:
            return self._want(event)
        if type(event) is KvSent:
            return self._sent(event)
        if type(event) is KvArrived:
            return self._arrive(event)
        if type(event) is KvFailed:
            return self._fail(event)
        if type(event) is Dropped:
            return self._drop(event)
        if type(event) is RoleChanged:
            return self._change_role(event.role)
        if type(event) is Disowned:
            for request in event.requests:
                self._disown(request)
            return []
        return None

    def cancel(self, request: RequestId) -> None:
        """Nobody wants it any more. Where it is only expected, its source tells the router when it is gone."""
        source = self._held.get(request)
        if source is not None:
            source.gone = True
            if source.sending is None:
                self._leave(source)
            return
        for target in self._arrived:
            if target.work.request.id == request:
                target.gone = True
                self.stirred = True
                return
        expected = self._expected.get(request)
        if expected is not None:
            if expected.reserved:
                expected.gone = True
            else:
                self._forget_offer(expected)

    # -- as a source

    def hold(self, work: Work, head: ReplicaId | None = None, num_layers: int = 0) -> None:
        """A prefill has ended: the request leaves the batch and keeps its blocks; the router hears of it at the boundary.

        The KV of its first `num_layers` layers may be at another replica, `head`.
        """
        request = work.request.id
        self._running.pop(request, None)
        self._held[request] = Source(work, head is None)
        self._just_held.append(Held(request, work.target, head, num_layers))

    def hold_part(self, work: Work) -> None:
        """The KV of its first layers is here, and the replica that has the others tells the router."""
        self._held[work.request.id] = Source(work, whole=False)

    def _want(self, event: KvWanted) -> list[AnyAction]:
        source = self._held.get(event.request)
        if source is None or source.gone:
            return [_failed(event)]
        source.wanted = event
        return [] if source.sending is not None else self._start(source)

    def _start(self, source: Source) -> list[AnyAction]:
        wanted, source.wanted = source.wanted, None
        source.sending = wanted
        if wanted is None:
            return []
        return [SendKv(wanted.request, wanted.to, wanted.first_layer, wanted.last_layer, source.work.target)]

    def _sent(self, event: KvSent) -> list[AnyAction]:
        if self._disowned and (actions := self._end_disowned(event.request, event.to)) is not None:
            return actions
        source = self._held.get(event.request)
        if source is None or source.sending is None or source.sending.to != event.to:
            return []  # of a process before this one
        sent, source.sending = source.sending, None
        self._leave(source)
        if source.gone:
            return [_failed(sent)]
        return [Send(sent.to, KvArrived(sent.request, sent.first_layer, sent.last_layer))]

    def _fail(self, event: KvFailed) -> list[AnyAction]:
        if event.to == self._id:
            self._lack(event.request, event.first_layer, event.last_layer)
            return []
        if self._disowned and (ended := self._end_disowned(event.request, event.to)) is not None:
            return ended
        source = self._held.get(event.request)
        if source is None or source.sending is None or source.sending.to != event.to:
            return []
        failed, source.sending = source.sending, None
        actions: list[AnyAction] = [_failed(failed)]
        if source.gone:
            self._leave(source)
            return actions
        return [*actions, Send(ROUTER, HandoffFailed(self._id, failed.request, failed.to)), *self._start(source)]

    def _leave(self, source: Source) -> None:
        """Its blocks become free when the run ends."""
        del self._held[source.work.request.id]
        self._leaving.append(source)
        self.stirred = True

    def _disown(self, request: RequestId) -> None:
        """The rest of its KV is lost: what is here is of no use."""
        source = self._held.get(request)
        if source is not None:
            source.gone = source.silent = True
            if source.sending is None:
                self._leave(source)
            else:  # it may be held once more before that has ended
                del self._held[request]
                self._disowned.append(source)

    def _end_disowned(self, request: RequestId, to: ReplicaId) -> list[AnyAction] | None:
        """Nothing is read from its blocks any more; None where nobody who was disowned was on the way there."""
        for source in self._disowned:
            sent = source.sending
            if sent is not None and sent.request == request and sent.to == to:
                self._disowned.remove(source)
                self._leaving.append(source)
                self.stirred = True
                anew = self._held.get(request)
                comes = anew is not None and any(part is not None and part.to == to for part in (anew.sending, anew.wanted))
                return [] if comes else [_failed(sent)]
        return None

    def _change_role(self, role: Role) -> list[AnyAction]:
        """Whoever is held and not asked for decodes here, without a copy, if this replica decodes from now on."""
        self.role = role
        if role is Role.PREFILL:
            return []
        kept: list[RequestId] = []
        for request, source in list(self._held.items()):
            if source.whole and source.sending is None and source.wanted is None and not source.gone:
                del self._held[request]
                kept.append(request)
                self._arrived.append(Target(Offered(source.work.request, source.work.target, ()), source.work))
        if not kept:
            return []
        self.stirred = True
        return [Send(ROUTER, Kept(self._id, tuple(kept)))]

    # -- as a target

    def _offer(self, event: Offered) -> None:
        request, num_tokens = event.request, event.num_tokens
        blocks = -(-num_tokens // self._block_size)
        generated = num_tokens - request.num_prompt_tokens + 1
        target = Target(event, Work(request, (), num_tokens, generated, num_tokens, blocks))
        self._expected[request.id] = target
        self._offers.append(target)
        if len(self._offers) == 1:
            self.stirred = True  # behind another one that waits for blocks it can change nothing

    def _arrive(self, event: KvArrived) -> list[AnyAction]:
        target = self._expected.get(event.request)
        if target is None:
            return []
        target.missing.discard((event.first_layer, event.last_layer))
        if target.missing:
            return []
        del self._expected[event.request]
        self.stirred = True
        if target.failed:
            self._unwanted.append(target)
            return []
        self._arrived.append(target)
        return [Send(ROUTER, Adopted(self._id, event.request))]

    def _lack(self, request: RequestId, first_layer: int, last_layer: int) -> None:
        """These layers will not come."""
        target = self._expected.get(request)
        if target is None:
            return
        target.failed = True
        if not target.reserved:
            self._forget_offer(target)
            return
        target.missing.discard((first_layer, last_layer))
        if not target.missing:
            del self._expected[request]
            self._unwanted.append(target)
            self.stirred = True

    def _drop(self, event: Dropped) -> list[AnyAction]:
        request = event.request
        source = self._held.get(request)
        if source is not None:
            if source.wanted is not None and source.wanted.to == event.by:
                source.wanted = None
            return []
        target = self._expected.get(request)
        if target is not None:
            for part in target.offer.parts:
                if part.source == event.by:
                    self._lack(request, part.first_layer, part.last_layer)
        elif request in self._running or any(here.work.request.id == request for here in self._arrived):
            return []  # `Adopted`, or `Kept`, is on its way
        return [Send(ROUTER, NotHeld(self._id, request))]

    def _forget_offer(self, target: Target) -> None:
        self._offers.remove(target)
        del self._expected[target.work.request.id]
        self.stirred = True  # whoever comes next may need fewer blocks

    # -- between two runs

    @property
    def is_quiet(self) -> bool:
        """A boundary changes nothing here."""
        return not (self.stirred or self._just_held or self._arrived or self._offers)

    def at_boundary(self, decodes: DecodeGroup, has_preempted: bool, cancelled: Sequence[RequestId]) -> Boundary:
        """Give back, join, take: in this order.

        Args:
            decodes: whom a request joins.
            has_preempted: somebody who lost its KV here waits for blocks; it comes before what is offered.
            cancelled: have just left the batch.
        """
        self.stirred = False
        found = Boundary()
        actions = found.actions
        if self._just_held:
            found.held = tuple(sorted(self._just_held, key=_request))
            actions.append(Hold(tuple(held.request for held in found.held)))
            self._just_held.clear()
        if self._leaving or self._unwanted or self._arrived or cancelled:
            self._give_back(found, cancelled)
            if self._arrived:
                self._join(decodes, actions)
        while self._offers and not has_preempted and self._take(self._offers[0], decodes, actions):
            self._offers.popleft()
        return found

    def _give_back(self, found: Boundary, cancelled: Sequence[RequestId]) -> None:
        gone: list[RequestId] = []
        silent: list[RequestId] = []
        for source in self._leaving:
            self._pool.release(source.work.blocks, source.work.shared)
            told = source.gone and not source.silent
            (gone if told else silent).append(source.work.request.id)
        for target in self._unwanted:
            self._pool.release(target.work.blocks, ())
            silent.append(target.work.request.id)
        if self._arrived:
            for target in [target for target in self._arrived if target.gone]:
                self._arrived.remove(target)
                self._pool.release(target.work.blocks, target.work.shared)
                gone.append(target.work.request.id)
        self._leaving.clear()
        self._unwanted.clear()
        if gone or cancelled:
            found.gone = tuple(gone)
            found.actions.append(Forget((*cancelled, *gone)))
        if silent:
            found.actions.append(Abandon(tuple(silent)))

    def _join(self, decodes: DecodeGroup, actions: list[AnyAction]) -> None:
        """As many as there are seats for; the others keep their blocks."""
        seats = max(0, self._seats - len(self._running))
        joining, self._arrived = self._arrived[:seats], self._arrived[seats:]
        for target in joining:
            self._running[target.work.request.id] = target.work
            decodes.join(target.work)
        if joining:
            actions.append(Join(tuple(target.work.request.id for target in joining), decodes.id))

    def _take(self, target: Target, decodes: DecodeGroup, actions: list[AnyAction]) -> bool:
        """Blocks for it, and for its first step and everybody's next; then its KV may come."""
        pool, num_tokens = self._pool, target.offer.num_tokens
        free = pool.num_available - decodes.next_blocks()
        if num_tokens // self._block_size + 1 > free:
            return False
        if len(self._running) + len(self._arrived) + self._num_reserved() >= self._seats:
            return False
        blocks = target.work.blocks
        evicted = pool.oldest(max(0, blocks - pool.num_free)) if pool.idle else ()
        pool.take(blocks)
        target.reserved = True
        request = target.work.request.id
        actions.append(Reserve(request, num_tokens, evicted))
        actions += [Send(p.source, KvWanted(request, self._id, p.first_layer, p.last_layer)) for p in target.offer.parts]
        return True

    def _num_reserved(self) -> int:
        return len(self._expected) - len(self._offers)


def _failed(wanted: KvWanted) -> Send:
    return Send(wanted.to, KvFailed(wanted.request, wanted.to, wanted.first_layer, wanted.last_layer))


def _request(held: Held) -> RequestId:
    return held.request


def seats_of(policy: object) -> int:
    """The most requests that a batching policy lets a replica work on."""
    seats: int = getattr(policy, "max_num_seqs", FOREVER)
    return seats
