"""The router of a disaggregated fleet: prompts go to prefill replicas, and from there to decode replicas.

All about prompts is as in `Router`. Knows where every request's KV is and who is promised it; does not know how KV travels, nor
when: replicas settle that among themselves, and say `Adopted` when it is done.

The two ends of a hand-off may die at any time. Whoever is left is asked (`Dropped`): it has the KV, whole, and all is well, or
says `NotHeld`, and the request begins again with the tokens that its client has.
"""

from __future__ import annotations

from squall.core.actions import AnyAction, Send
from squall.core.demand import Demand
from squall.core.entries import Entry
from squall.core.events import (
    Adopted,
    AnyEvent,
    Cancelled,
    Disowned,
    Dropped,
    HandoffFailed,
    Kept,
    NotHeld,
    Progressed,
    Rejection,
    ReplicaDown,
    ReplicaUp,
    RoleChanged,
)
from squall.core.finish_rate import MIN_WAIT_S, UNKNOWN_WAIT_S
from squall.core.fleet_view import RoutePolicy
from squall.core.handoff_queue import HandoffQueue, dropped, offer, sources_of
from squall.core.lifecycle import REQUEST, RequestHappening, RequestPhase
from squall.core.replica_index import Backend, Chosen, Ranked
from squall.core.router import Router, reply
from squall.core.types import Nanos, ReplicaId, RequestId, Role
from squall.errors import IllegalTransition


class DisaggregatedRouter(Router):
    """See `Router`.

    For the scale policy a request counts for the prefill replicas until its first token, and for the decode replicas from then
    on: as queued until it is promised to one of them, as waiting while its KV moves, and as running there.

    Args:
        decode_policy, max_share, max_ratio: how decode replicas are chosen; see `HandoffQueue`.
    """

    __slots__ = ("_handoffs", "_owed", "decode_policy", "max_ratio", "max_share")

    def __init__(
        self,
        policy: RoutePolicy,
        max_queued_requests: int,
        max_queued_tokens: int,
        max_retries: int,
        elastic: bool,
        decode_policy: RoutePolicy,
        max_share: float = 1.0,
        max_ratio: float = 2.0,
    ) -> None:
        super().__init__(policy, max_queued_requests, max_queued_tokens, max_retries, elastic)
        self.decode_policy = decode_policy
        self.max_share = max_share
        self.max_ratio = max_ratio
        self._handoffs = HandoffQueue(decode_policy, max_share, max_ratio)
        self._owed: dict[ReplicaId, set[ReplicaId]] = {}  # who may wait for a word of whom about KV that is of no use any more

    @property
    def num_open(self) -> int:
        return len(self._index.replicas) + len(self._handoffs.index.replicas)

    def demand(self, role: Role) -> Demand:
        return self._handoffs.demand if role is Role.DECODE else self._demand

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        match event:
            case Progressed():
                return self._progressed(event, now)
            case Adopted(replica, request):
                return self._adopted(replica, request)
            case HandoffFailed():
                return self._handoff_failed(event, now)
            case NotHeld(replica, request):
                return self._not_held(replica, request, now)
            case Kept(replica, requests):
                return self._kept(replica, requests)
            case RoleChanged(replica, role):
                backend = self._backends.get(replica)
                return [] if backend is None else [*self._change_role(backend, role), *self._fleet_changed()]
            case ReplicaUp():
                backend = self._backends.get(event.replica)
                changed = [] if backend is None else self._change_role(backend, event.role)
                return changed + self._replica_up(event)
        return super().handle(event, now)

    # -- requests come and go

    def _progressed(self, event: Progressed, now: Nanos) -> list[AnyAction]:
        actions: list[AnyAction] = []
        for request in event.finished:
            entry = self._entries.get(request)
            if entry is not None and entry.held is not None:  # it ends where it is held
                actions += self._take_back(entry)
        actions += super()._progressed(event, now)
        if event.held:
            backend = self._backends[event.replica]
            for held in event.held:
                entry = self._step(held.request, backend, "held")
                self._handoffs.hold(entry, held, now)
                if entry.phase is RequestPhase.CANCELLING:
                    self._handoffs.withdraw(entry)
        return actions + self._settle_handoffs()

    def _cancelled(self, request: RequestId) -> list[AnyAction]:
        entry = self._entries.get(request)
        if entry is None or entry.held is None or entry.phase is RequestPhase.CANCELLING:
            return super()._cancelled(request)
        return self._call_off(entry) + self._settle_handoffs()

    def _call_off(self, entry: Entry) -> list[AnyAction]:
        """Nobody wants it. Whoever is its last holder says that it is finished."""
        request, holder, head = entry.request.id, entry.backend, None if entry.held is None else entry.held.head
        assert holder is not None
        self._handoffs.withdraw(entry)
        self._step(request, holder, "cancelled")
        actions: list[AnyAction] = [Send(holder.replica, Cancelled(request))]
        if head is not None:
            actions.append(Send(head, Disowned((request,))))
        if entry.to is not None and entry.to is not holder:
            actions.append(Send(entry.to.replica, Cancelled(request)))
        return actions

    # -- hand-offs

    def _settle_handoffs(self) -> list[AnyAction]:
        """Offer what can be offered."""
        actions: list[AnyAction] = []
        queue = self._handoffs.queue
        while queue:
            for entry in self._handoffs.settle():
                entry.phase = REQUEST[entry.phase]["offered"]
                actions.append(offer(entry))
            largest = self._handoffs.largest
            if not queue or not largest or next(iter(queue.values())).num_tokens <= largest:
                break
            message = f"its KV does not fit into the {largest} tokens of a decode replica"
            actions += self._refuse(next(iter(queue.values())), Rejection.TOO_LARGE, message, 0.0)
        return actions + self._settle_draining() if self._draining else actions

    def _refuse(self, entry: Entry, rejection: Rejection, message: str, retry_after_s: float) -> list[AnyAction]:
        """It was prefilled in vain."""
        told: list[AnyAction] = [reply(entry.request, rejection, message, retry_after_s)]
        return told + self._call_off(entry)

    def _adopted(self, replica: ReplicaId, request: RequestId) -> list[AnyAction]:
        entry = self._promised(replica, request, "adopted")
        source = self._handoffs.adopt(entry)
        actions: list[AnyAction] = []
        if source.open:
            source.index.changed(source)
            actions += self._settle()
        elif source is not entry.backend:
            actions += self._emptied(source)
        if entry.phase is RequestPhase.CANCELLING:  # it may have come there before anybody could say so
            actions.append(Send(replica, Cancelled(request)))
        return actions + self._settle_draining() if self._draining else actions

    def _promised(self, replica: ReplicaId, request: RequestId, happening: RequestHappening) -> Entry:
        """Follow the table for a request that was promised to the replica."""
        entry = self._entries.get(request)
        if entry is None or entry.to is None or entry.to.replica != replica:
            where = "is unknown" if entry is None else f"is {entry.phase}, and not promised to it"
            raise IllegalTransition(f"replica {replica} says {happening!r} of request {request}, which {where}")
        entry.phase = REQUEST[entry.phase][happening]
        return entry

    def _handoff_failed(self, event: HandoffFailed, now: Nanos) -> list[AnyAction]:
        entry = self._entries.get(event.request)
        if entry is None or entry.held is None or entry.to is None or entry.to.replica != event.to:
            return []  # that one is gone, and the request was promised to another one since
        if entry.held.head is not None or entry.to is entry.backend:
            # the other half may have left already, and this one is of no use then
            return [Send(event.replica, Disowned((event.request,))), *self._begin_again(entry, event.replica, now)]
        entry.num_failed += 1
        actions = self._return_to_queue(entry)
        if entry.num_failed > self.max_retries:
            message = f"its KV could not be sent to a decode replica, {entry.num_failed} times"
            actions += self._refuse(entry, Rejection.LOST, message, MIN_WAIT_S)
        return actions + self._settle_handoffs()

    def _return_to_queue(self, entry: Entry) -> list[AnyAction]:
        """Whoever was to have it will not."""
        target = entry.to
        self._unpromise(entry)
        return self._let_go(target)

    def _unpromise(self, entry: Entry) -> None:
        entry.phase = REQUEST[entry.phase]["taken back"]
        self._handoffs.return_to_queue(entry)
        if entry.phase is RequestPhase.CANCELLING:
            self._handoffs.withdraw(entry)

    def _let_go(self, target: Backend | None) -> list[AnyAction]:
        """A promise to it was broken; it may have waited for nothing else."""
        if target is None or target.open or self._backends.get(target.replica) is not target:
            return []
        return self._emptied(target)

    def _take_back(self, entry: Entry) -> list[AnyAction]:
        """Count it as running where it is held, as if there were no hand-offs."""
        target = entry.to
        self._handoffs.keep(entry)
        return [] if target is entry.backend else self._let_go(target)

    def _not_held(self, replica: ReplicaId, request: RequestId, now: Nanos) -> list[AnyAction]:
        entry = self._entries.get(request)
        if entry is None or entry.held is None:
            return []
        is_target = entry.to is not None and entry.to.replica == replica
        orphaned = entry.to is entry.backend or entry.held.head is not None
        if (is_target and orphaned) or (not is_target and replica in sources_of(entry)):
            return self._begin_again(entry, replica, now)
        return []

    def _begin_again(self, entry: Entry, by: ReplicaId, now: Nanos) -> list[AnyAction]:
        """Some of its KV is lost with, or by, that replica: the request goes on from the tokens that its client has."""
        request, holder, target = entry.request.id, entry.backend, entry.to
        assert holder is not None
        others = [source for source in sources_of(entry) if source != by]
        if target is not None:
            for source in sources_of(entry):
                self._owed.setdefault(source, set()).add(target.replica)
        if target is not None and target is not holder and target.replica != by:
            others.append(target.replica)
        actions: list[AnyAction] = [Send(other, Disowned((request,))) for other in others]
        actions += self._take_back(entry)
        actions += self._requeue(entry, holder, now)
        if target is not holder:
            holder.num_running -= 1
            holder.num_tokens -= entry.request.num_prompt_tokens
        holder.num_promised -= entry.num_tokens
        if holder.open:
            holder.index.changed(holder)
        else:
            actions += self._let_go(holder)
        return actions + self._settle()

    def _kept(self, replica: ReplicaId, requests: tuple[RequestId, ...]) -> list[AnyAction]:
        actions: list[AnyAction] = []
        for request in requests:
            entry = self._entries.get(request)
            if entry is None or entry.held is None or entry.backend is None or entry.backend.replica != replica:
                continue  # it was given up meanwhile; the replica hears, or has heard, of that
            entry.phase = REQUEST[entry.phase]["kept"]
            target = entry.to
            actions += self._handoffs.keep(entry)
            actions += self._let_go(target)
        return actions + self._settle_handoffs()

    # -- replicas come and go

    def _place(self, role: Role) -> tuple[Demand, Ranked | Chosen]:
        return (self._handoffs.demand, self._handoffs.index) if role is Role.DECODE else (self._demand, self._index)

    def _change_role(self, backend: Backend, role: Role) -> list[AnyAction]:
        """What it has goes with it."""
        if backend.role is role:
            return []
        if backend.open:
            backend.index.remove(backend)
        before = backend.demand
        backend.role = role
        backend.demand, backend.index = after, _ = self._place(role)
        if backend.open:
            backend.index.add(backend)
        for entry in self._entries.values():
            if entry.backend is backend and entry.held is None:
                tokens = entry.request.num_prompt_tokens
                for demand, sign in ((before, -1), (after, 1)):
                    demand.num_promised_tokens += sign * entry.num_tokens
                    demand.num_running += sign * entry.started
                    demand.num_waiting += sign * (not entry.started)
                    demand.num_waiting_tokens += sign * (0 if entry.started else tokens)
        return []

    def _replica_down(self, event: ReplicaDown, now: Nanos) -> list[AnyAction]:
        backend = self._backends.get(event.replica)
        if backend is not None and not event.lost and self._draining and backend.role is Role.DECODE and self._needs_decodes():
            self._closing.add(event.replica)
            return []
        return super()._replica_down(event, now)

    def _needs_decodes(self) -> bool:
        """Somebody may yet have to be handed off."""
        return bool(self._queue) or any(b.role is Role.PREFILL and b.num_outstanding for b in self._backends.values())

    def _lose(self, backend: Backend, now: Nanos) -> list[AnyAction]:
        concerned = [entry for entry in self._entries.values() if entry.held is not None]
        actions: list[AnyAction] = []
        for entry in sorted(concerned, key=_id):
            actions += self._lose_end(entry, backend, now)
        lost = ReplicaDown(backend.replica, lost=True)
        actions += [Send(target, lost) for target in sorted(self._owed.pop(backend.replica, ())) if target in self._backends]
        actions += super()._lose(backend, now)
        return actions + self._settle_handoffs()

    def _lose_end(self, entry: Entry, backend: Backend, now: Nanos) -> list[AnyAction]:
        """An end of a hand-off is lost; whatever is not settled here is left to `Router`."""
        request, target = entry.request.id, entry.to
        assert entry.held is not None
        if entry.backend is backend:
            if target is not None and target is not backend:  # has it all already?
                entry.backend = target
                entry.lost_by += backend.blame
                return [dropped(request, target, backend)]
            head = entry.held.head
            self._take_back(entry)
            return [] if head is None else [Send(head, Disowned((request,)))]
        if target is backend:
            self._unpromise(entry)
            return [Send(source, Dropped(request, backend.replica)) for source in sources_of(entry)]
        if entry.held.head == backend.replica:
            return self._begin_again(entry, backend.replica, now) if target is None else [dropped(request, target, backend)]
        return []

    def _fleet_changed(self) -> list[AnyAction]:
        actions = super()._fleet_changed()
        return actions + self._settle_handoffs()

    def _settle_draining(self) -> list[AnyAction]:
        actions: list[AnyAction] = []
        decodes = self._handoffs.index.replicas
        if not decodes:
            message = "the service is shutting down and no decode replica is left"
            for entry in list(self._handoffs.queue.values()):
                actions += self._refuse(entry, Rejection.DRAINING, message, UNKNOWN_WAIT_S)
        kept = set() if not self._needs_decodes() else {backend.replica for backend in decodes}
        waiting, self._closing = self._closing & kept, self._closing - kept
        actions += super()._settle_draining()
        self._closing |= waiting
        return actions


def _id(entry: Entry) -> RequestId:
    return entry.request.id
