"""The target's part in hand-offs: requests whose KV is to come to a replica.

Blocks first: an offer waits until there are some, then the KV is asked for, and the request decodes when all of it is there. As
long as anybody may write to blocks they are nobody else's, also where the request is of no use any more. Of one request only one
offer has blocks at a time, so that every answer to a `KvWanted` can only mean that one. Knows no route and no link.
"""

from __future__ import annotations

from collections import deque

from squall.core.actions import AnyAction, Join, Reserve, Send
from squall.core.blocks import BlockPool
from squall.core.decodes import DecodeGroup, Work
from squall.core.events import Adopted, Dropped, KvArrived, KvWanted, NotHeld, Offered
from squall.core.handoff_source import NextBoundary
from squall.core.types import ROUTER, ReplicaId, RequestId


class ComingWork:
    """A request whose KV is to come.

    Attributes:
        missing: the layers that have not come, as first and last; all of them are asked for once there are blocks.
        reserved: it has its blocks.
        gone: its client went away; `failed`: some of it will never come. Blocks are kept as long as anybody writes to them.
        anew: the request has begun here once more, for which the engine forgot what came.
    """

    __slots__ = ("anew", "failed", "gone", "missing", "offer", "reserved", "work")

    def __init__(self, offer: Offered, work: Work) -> None:
        self.offer = offer
        self.work = work
        self.missing = {(part.first_layer, part.last_layer) for part in offer.parts}
        self.reserved = False
        self.gone = False
        self.failed = False
        self.anew = False


class HandoffTarget:
    """See the module.

    Args:
        id: the replica.
        pool, running: the replica's own: its blocks, and the requests that it works on.
        block_size: tokens of a block.
        seats: the most requests that it works on at once.
        next_boundary: its own.

    Attributes:
        offers: those without blocks.
        arrived: complete; they join the decodes at the next boundary with a seat for them, but for those that nobody wants any
            more, of whom there are some where it is `forsaken`.
        unwanted: whose blocks become free at the next boundary.
    """

    __slots__ = (
        "_block_size", "_expected", "_id", "_lapsed", "_next", "_pool", "_running", "_seats", "arrived", "forsaken",
        "offers", "unwanted",
    )  # fmt: skip

    def __init__(
        self, id: ReplicaId, pool: BlockPool, running: dict[RequestId, Work], block_size: int, seats: int,
        next_boundary: NextBoundary,
    ) -> None:  # fmt: skip
        self.offers: deque[ComingWork] = deque()
        self.arrived: list[ComingWork] = []
        self.forsaken = False
        self.unwanted: list[ComingWork] = []
        self._next = next_boundary
        self._id = id
        self._pool = pool
        self._running = running
        self._block_size = block_size
        self._seats = seats
        self._expected: dict[RequestId, ComingWork] = {}
        self._lapsed: dict[RequestId, ComingWork] = {}  # failed, still written to, and offered anew since

    @property
    def num_expected(self) -> int:
        return len(self._expected) + len(self.arrived) + len(self._lapsed)

    def awaits(self, request: RequestId) -> bool:
        """It was offered and has no blocks yet."""
        coming = self._expected.get(request)
        return coming is not None and not coming.reserved

    # -- events

    def offer(self, event: Offered) -> None:
        request, num_tokens = event.request, event.num_tokens
        blocks = -(-num_tokens // self._block_size)
        generated = num_tokens - request.num_prompt_tokens + 1
        coming = ComingWork(event, Work(request, (), num_tokens, generated, num_tokens, blocks))
        before = self._expected.get(request.id)
        self._expected[request.id] = coming
        if before is not None and before.reserved:
            self._lapsed[request.id] = before
        if request.id not in self._lapsed:
            self._queue(coming)

    def _queue(self, coming: ComingWork) -> None:
        self.offers.append(coming)
        if len(self.offers) == 1:
            self._next.awaited = True  # behind another one that waits for blocks it can change nothing

    def seat(self, work: Work) -> None:
        """Its KV is here already, and it decodes here from now on."""
        self.arrived.append(ComingWork(Offered(work.request, work.target, ()), work))
        self._next.awaited = True

    def arrive(self, event: KvArrived) -> list[AnyAction]:
        layers = event.first_layer, event.last_layer
        if event.request in self._lapsed:
            self._answered(event.request, layers)
            return []
        coming = self._expected.get(event.request)
        if coming is None:
            return []
        coming.missing.discard(layers)
        if coming.missing:
            return []
        if coming.failed:
            return self._lapse(coming)
        del self._expected[event.request]
        self._next.awaited = True
        self.arrived.append(coming)
        if coming.gone:
            self.forsaken = True
        return [Send(ROUTER, Adopted(self._id, event.request))]

    def _lapse(self, coming: ComingWork) -> list[AnyAction]:
        """Nobody writes to its blocks any more, and some of it has not come. Where its client went away, whoever held the rest
        may have let go of that before it could know: the router will ask."""
        request = coming.work.request.id
        del self._expected[request]
        self.unwanted.append(coming)
        self._next.awaited = True
        return [Send(ROUTER, NotHeld(self._id, request))] if coming.gone and len(coming.offer.parts) > 1 else []

    def begin_anew(self, request: RequestId) -> None:
        """It comes to be computed here."""
        if self.unwanted or self._lapsed:
            for coming in (*self.unwanted, *self._lapsed.values()):
                coming.anew |= coming.work.request.id == request
        if (coming_still := self._expected.get(request)) is not None:
            coming_still.anew = True

    def lack(self, request: RequestId, layers: tuple[int, int]) -> list[AnyAction]:
        """These layers will not come."""
        if request in self._lapsed:
            self._answered(request, layers)
            return []
        coming = self._expected.get(request)
        return [] if coming is None else self._lack(coming, layers)

    def _lack(self, coming: ComingWork, layers: tuple[int, int]) -> list[AnyAction]:
        coming.failed = True
        if not coming.reserved:
            self._forget(coming)
            return []
        coming.missing.discard(layers)
        return [] if coming.missing else self._lapse(coming)

    def _answered(self, request: RequestId, layers: tuple[int, int]) -> None:
        """Nobody writes these layers of a lapsed one any more. After its last ones the request may have blocks again."""
        lapsed = self._lapsed[request]
        lapsed.missing.discard(layers)
        if lapsed.missing:
            return
        del self._lapsed[request]
        self.unwanted.append(lapsed)
        self._next.awaited = True
        if (anew := self._expected.get(request)) is not None:
            self._queue(anew)

    def cancel(self, request: RequestId) -> None:
        """Nobody wants it any more. Where it is only expected, its source tells the router when it is gone."""
        for coming in self.arrived:
            if coming.work.request.id == request:
                coming.gone = self.forsaken = True
                self._next.awaited = True
                return
        expected = self._expected.get(request)
        if expected is None:
            return
        if expected.reserved:
            expected.gone = True
        else:
            self._forget(expected)

    def disown(self, request: RequestId) -> None:
        """It begins again elsewhere. Who was asked for some of it will answer."""
        coming = self._expected.get(request)
        if coming is None:
            return
        coming.failed = True
        if not coming.reserved:
            self._forget(coming)

    def drop(self, event: Dropped) -> list[AnyAction]:
        """A source is gone: who has the request whole keeps it, who has not says so."""
        request = event.request
        coming = self._expected.get(request)
        if coming is not None:
            for part in coming.offer.parts:
                if part.source == event.by:
                    self._lack(coming, (part.first_layer, part.last_layer))
        elif request in self._running or any(here.work.request.id == request for here in self.arrived):
            return []  # `Adopted`, or `Kept`, is on its way
        return [Send(ROUTER, NotHeld(self._id, request))]

    def lose(self, source: ReplicaId) -> None:
        """A replica is gone: it writes nothing more to those that are of no use any more."""
        for coming in [*self._lapsed.values(), *(coming for coming in self._expected.values() if coming.failed)]:
            for part in coming.offer.parts:
                if part.source == source:
                    self.lack(coming.work.request.id, (part.first_layer, part.last_layer))

    def _forget(self, coming: ComingWork) -> None:
        request = coming.work.request.id
        if request not in self._lapsed:
            self.offers.remove(coming)
        del self._expected[request]
        self._next.awaited = True  # whoever comes next may need fewer blocks

    # -- between two runs

    def take_forsaken(self) -> list[ComingWork]:
        """Out of the arrived."""
        forsaken = [coming for coming in self.arrived if coming.gone]
        self.arrived = [coming for coming in self.arrived if not coming.gone]
        self.forsaken = False
        return forsaken

    def join(self, decodes: DecodeGroup, actions: list[AnyAction]) -> None:
        """As many as there are seats for; the others keep their blocks."""
        seats = max(0, self._seats - len(self._running))
        joining, self.arrived = self.arrived[:seats], self.arrived[seats:]
        joined: list[RequestId] = []
        for coming in joining:
            work = coming.work
            joined.append(work.request.id)
            self._running[work.request.id] = work
            decodes.join(work)
        if joined:
            actions.append(Join(tuple(joined), decodes.id))

    def take(self, decodes: DecodeGroup, actions: list[AnyAction]) -> None:
        """Blocks for the offers, in order, as far as they go."""
        while self.offers and self._take(self.offers[0], decodes, actions):
            self.offers.popleft()

    def _take(self, coming: ComingWork, decodes: DecodeGroup, actions: list[AnyAction]) -> bool:
        """Blocks for it, and for its first step and everybody's next; then its KV may come."""
        pool, num_tokens = self._pool, coming.offer.num_tokens
        free = pool.num_available - decodes.next_blocks()
        if num_tokens // self._block_size + 1 > free:
            return False
        if len(self._running) + len(self.arrived) + self._num_reserved() >= self._seats:
            return False
        blocks = coming.work.blocks
        evicted = pool.oldest(max(0, blocks - pool.num_free)) if pool.idle else ()
        pool.take(blocks)
        coming.reserved = True
        request = coming.work.request.id
        actions.append(Reserve(request, num_tokens, evicted))
        actions += [Send(p.source, KvWanted(request, self._id, p.first_layer, p.last_layer)) for p in coming.offer.parts]
        return True

    def _num_reserved(self) -> int:
        waiting = len(self._expected.keys() & self._lapsed.keys()) if self._lapsed else 0
        return len(self._expected) - len(self.offers) - waiting
