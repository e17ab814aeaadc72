"""The router's hand-off queue: requests whose KV is held, first come first served, and the replicas that are to decode them.

The replica is chosen late: a request waits where its KV is until one has room for all that it may come to need; one that decodes
on a replica that is to be empty goes on with it until then. A replica that was promised far more than the others is held back
until it falls below. Counts what decode replicas are asked for. Knows no link, no layer and nothing of a request before its first
token.
"""

from __future__ import annotations

from collections import OrderedDict

from squall.core.actions import AnyAction, Send
from squall.core.demand import Demand
from squall.core.entries import Entry
from squall.core.events import Dropped, Held, Offered, Part
from squall.core.replica_index import Backend, Chosen, Ranked
from squall.core.types import Nanos, ReplicaId, RequestId


class HandoffQueue:
    """See the module.

    Args:
        index: the replicas that take hand-offs; its policy chooses among those with room.
        max_share: so much of its KV pool may be promised: 1 promises nothing that it does not have, more counts on short outputs.
        max_ratio: one that was promised more than so many times the mean of all, and half of its pool, gets nothing more.
        demand: what is asked of the replicas in `index`; one of its own when None.

    Attributes:
        index: as given.
        queue: requests that are promised to nobody yet, in the order of their first tokens.
        movers: those that are held, promised or not, though they have decoded: their holder can go on with them.
        heads: of how many requests a replica has the KV of the first layers, and nothing else.
        demand: as given: queued here, waiting while their KV moves, running.
    """

    __slots__ = ("_max_ratio", "_max_share", "demand", "heads", "index", "movers", "queue")

    def __init__(self, index: Ranked | Chosen, max_share: float, max_ratio: float, demand: Demand | None = None) -> None:
        self._max_share = max_share
        self._max_ratio = max_ratio
        self.index = index
        self.queue: OrderedDict[RequestId, Entry] = OrderedDict()
        self.movers: dict[RequestId, Entry] = {}
        self.heads: dict[ReplicaId, int] = {}
        self.demand = Demand(self._oldest_queued_at) if demand is None else demand

    def _oldest_queued_at(self) -> Nanos | None:
        return next(iter(self.queue.values())).queued_at if self.queue else None

    @property
    def largest(self) -> int:
        """The largest KV pool that takes hand-offs, in tokens; 0 without any."""
        return max((backend.capacity for backend in self.index.replicas), default=0)

    # -- requests come and go

    def hold(self, entry: Entry, held: Held, now: Nanos) -> None:
        """Its prefill is done, or it was to leave; from now on it counts for the decode replicas."""
        backend = entry.backend
        assert backend is not None
        entry.held = held
        if held.head is not None:
            self.heads[held.head] = self.heads.get(held.head, 0) + 1
        entry.queued_at = now
        backend.num_promised -= entry.num_tokens
        backend.num_held += 1
        demand = self.demand
        demand.num_unplaced_tokens += entry.num_tokens
        if backend.demand is demand:
            self.movers[entry.request.id] = entry
        else:
            demand.num_arrived += 1
            demand.num_arrived_tokens += held.num_tokens
        if entry.to is None:
            self._enqueue(entry)
        else:
            demand.num_places -= 1
            entry.to.num_waiting_tokens += entry.request.num_prompt_tokens

    def _enqueue(self, entry: Entry) -> None:
        assert entry.held is not None
        self.queue[entry.request.id] = entry
        self.demand.num_queued += 1
        self.demand.num_queued_tokens += entry.held.num_tokens

    def _dequeue(self, entry: Entry) -> None:
        assert entry.held is not None
        del self.queue[entry.request.id]
        self.demand.num_queued -= 1
        self.demand.num_queued_tokens -= entry.held.num_tokens

    def return_to_queue(self, entry: Entry) -> None:
        """The replica that it was promised to will not have it; its place in the queue is the old one."""
        self._break_promise(entry)
        self._enqueue(entry)
        if len(self.queue) > 1:
            ordered = sorted(self.queue.values(), key=_age)
            self.queue.clear()
            self.queue.update((other.request.id, other) for other in ordered)

    def forget(self, entry: Entry) -> None:
        """It is no hand-off any more: it ended, or is to begin again, or stays where it is."""
        if entry.request.id in self.queue:
            self._dequeue(entry)
        elif entry.to is not None:
            self._break_promise(entry)
        self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        """Nobody holds it for anybody."""
        held, entry.held = entry.held, None
        self.movers.pop(entry.request.id, None)
        self.demand.num_unplaced_tokens -= entry.num_tokens
        if held is not None and held.head is not None:
            self.heads[held.head] -= 1

    def withdraw(self, entry: Entry) -> None:
        """Nobody wants it: it is offered to nobody any more."""
        if entry.request.id in self.queue:
            self._dequeue(entry)

    def _break_promise(self, entry: Entry) -> None:
        if entry.to is not None:
            entry.to.num_waiting_tokens -= entry.request.num_prompt_tokens
            self._displace(entry, entry.to)

    # -- places for those that still decode

    def place(self, entry: Entry) -> bool:
        """Promise it a place at another replica, while it decodes where it is; False where nobody has one."""
        target = self._pick(entry)
        if target is not None:
            self._place(entry, target)
            self.demand.num_places += 1
        return target is not None

    def _place(self, entry: Entry, target: Backend) -> None:
        entry.to = target
        target.num_promised += entry.num_tokens
        self.demand.num_unplaced_tokens -= entry.num_tokens
        target.num_tokens += entry.request.num_prompt_tokens
        target.num_waiting += 1
        self.index.changed(target)
        if isinstance(self.index, Chosen):
            self.index.sent(entry.request, target)

    def displace(self, entry: Entry) -> Backend:
        """It does not leave where it decodes. Returns who had a place for it."""
        target = entry.to
        assert target is not None
        self._displace(entry, target)
        self.demand.num_places -= 1
        return target

    def _displace(self, entry: Entry, target: Backend) -> None:
        entry.to = None
        target.num_promised -= entry.num_tokens
        self.demand.num_unplaced_tokens += entry.num_tokens
        target.num_tokens -= entry.request.num_prompt_tokens
        target.num_waiting -= 1
        if target.open:
            target.index.changed(target)

    # -- offers

    def settle(self) -> list[Entry]:
        """Promise what can be promised, in order; returns whom `offer` is to tell of."""
        promised: list[Entry] = []
        while self.queue:
            entry = next(iter(self.queue.values()))
            target = self._pick(entry)
            if target is None:
                break
            self._promise(entry, target)
            promised.append(entry)
        return promised

    def _promise(self, entry: Entry, target: Backend) -> None:
        self._dequeue(entry)
        self._place(entry, target)
        target.num_waiting_tokens += entry.request.num_prompt_tokens

    def _pick(self, entry: Entry) -> Backend | None:
        """Whom the policy chooses, of those that have room and are not held back."""
        if not self.index.replicas:
            return None
        first = self.index.pick(entry.request)
        if first is None or self._takes(first, entry):
            return first
        return self.index.pick_among(entry.request, [other for other in self.index.replicas if self._takes(other, entry)])

    def _takes(self, backend: Backend, entry: Entry) -> bool:
        if backend is entry.backend:
            return False
        if backend.num_promised and backend.num_promised + entry.num_tokens > self._max_share * backend.capacity:
            return False
        return entry.num_tokens <= backend.capacity and not self.is_held_back(backend)

    def is_held_back(self, backend: Backend) -> bool:
        """It was promised far more than the others: it gets nothing until it falls below."""
        if 2 * backend.num_promised <= backend.capacity:
            return False
        replicas = self.index.replicas
        promised = sum(other.num_promised for other in replicas)
        return backend.num_promised * len(replicas) > self._max_ratio * promised

    # -- how it ends

    def adopt(self, entry: Entry) -> Backend:
        """The KV is there: it is that replica's from now on. Returns the replica that held it."""
        source, target = entry.backend, entry.to
        assert source is not None
        assert target is not None
        tokens = entry.request.num_prompt_tokens
        if source is not target:  # otherwise the one that held it is gone
            source.num_running -= 1
            source.num_held -= 1
            source.num_tokens -= tokens
        target.num_waiting -= 1
        target.num_waiting_tokens -= tokens
        target.num_running += 1
        self.demand.num_unplaced_tokens += entry.num_tokens
        entry.backend, entry.to = target, None
        self._let_go(entry)
        if target.open:
            target.index.changed(target)
        return source

    def keep(self, entry: Entry) -> list[AnyAction]:
        """Its holder decodes it itself. Whoever it was promised to is told."""
        backend = entry.backend
        assert backend is not None
        told: list[AnyAction] = [dropped(entry.request.id, entry.to, backend)] if entry.to is not None else []
        if entry.to is not backend:  # otherwise the one that held it is gone
            backend.num_held -= 1
        self.forget(entry)
        backend.num_promised += entry.num_tokens
        return told


def offer(entry: Entry) -> Send:
    """Tell the replica that `entry` is promised to, and where its KV is."""
    assert entry.held is not None
    assert entry.to is not None
    assert entry.backend is not None
    held = entry.held
    parts: tuple[Part, ...] = (Part(entry.backend.replica, held.num_layers, 0),)
    if held.head is not None:
        parts = Part(held.head, 0, held.num_layers), *parts
    return Send(entry.to.replica, Offered(entry.request, held.num_tokens, parts))


def dropped(request: RequestId, told: Backend, by: Backend) -> Send:
    """One end of a hand-off hears that the other one is gone."""
    return Send(told.replica, Dropped(request, by.replica))


def sources_of(entry: Entry) -> tuple[ReplicaId, ...]:
    """The replicas that have parts of its KV."""
    assert entry.held is not None
    assert entry.backend is not None
    return (entry.backend.replica,) if entry.held.head is None else (entry.backend.replica, entry.held.head)


def _age(entry: Entry) -> tuple[Nanos, RequestId]:
    return entry.queued_at, entry.request.id
