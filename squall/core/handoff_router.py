"""A router that hands requests on: from the replica that has their KV to another one, which decodes them.

All about prompts is as in `Router`. Knows where every request's KV is and who is promised it; does not know how KV travels, nor
when: replicas settle that among themselves, and say `Adopted` when it is done.

A replica that is withdrawn may be emptied instead of waited for: what has no token yet goes back into the queue; what it decodes
goes elsewhere, one by one, as there is room for it, and decodes until then.

The two ends of a hand-off may die at any time. Whoever is left is asked (`Dropped`): it has the KV, whole, and all is well, or
says `NotHeld`, and the request begins again with the tokens that its client has.
"""

from __future__ import annotations

from collections.abc import Sequence

from squall.core.actions import AnyAction, Send
from squall.core.entries import Entry
from squall.core.events import (
    Adopted,
    AnyEvent,
    Arrived,
    Cancelled,
    Disowned,
    Dropped,
    HandoffFailed,
    KeepWanted,
    Kept,
    MoveWanted,
    NotHeld,
    Progressed,
    Rejection,
    ReplicaDown,
    ReplicaUp,
    ReturnWanted,
    Surrendered,
)
from squall.core.finish_rate import MIN_WAIT_S
from squall.core.fleet_view import RoutePolicy
from squall.core.handoff_queue import HandoffQueue, dropped, offer, sources_of
from squall.core.lifecycle import REQUEST, RequestHappening, RequestPhase
from squall.core.moves import Moves, by_holder
from squall.core.replica_index import Backend
from squall.core.router import Router, reply
from squall.core.types import Nanos, ReplicaId, RequestId
from squall.errors import IllegalTransition


class HandoffRouter(Router):
    """See `Router`. As it is, for colocated fleets; the route policy chooses who takes a request over, too.

    Args:
        max_share, max_ratio: who may take one over; see `HandoffQueue`.
        moves: replicas that are withdrawn are emptied.
    """

    __slots__ = ("_handoffs", "_lost", "_moves", "_owed", "max_ratio", "max_share", "moves")

    def __init__(
        self,
        policy: RoutePolicy,
        max_queued_requests: int,
        max_queued_tokens: int,
        max_retries: int,
        elastic: bool,
        max_share: float = 1.0,
        max_ratio: float = 2.0,
        moves: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(policy, max_queued_requests, max_queued_tokens, max_retries, elastic, max_model_len)
        self.max_share = max_share
        self.max_ratio = max_ratio
        self.moves = moves
        self._handoffs = HandoffQueue(self._index, max_share, max_ratio, self._demand)
        self._moves = Moves()
        self._lost: Backend | None = None  # while what it leaves behind is settled
        self._owed: dict[ReplicaId, set[ReplicaId]] = {}  # who may wait for a word of whom about KV that is of no use any more

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        if type(event) is Progressed:  # nearly all events are of these three
            return self._progressed(event, now)
        if type(event) is Arrived:
            return self._arrived(event.request, now)
        if type(event) is Adopted:
            return self._adopted(event.replica, event.request)
        return self._handle_rarer(event, now)

    def _handle_rarer(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        match event:
            case HandoffFailed():
                return self._handoff_failed(event, now)
            case NotHeld(replica, request):
                return self._not_held(replica, request, now)
            case Kept(replica, requests):
                return self._kept(replica, requests)
            case Surrendered(replica, requests) if self._moves.asked or self._moves.waiting:
                backend = self._backends.get(replica)
                entries = [entry for id in requests if (entry := self._entries.get(id)) is not None and entry.backend is backend]
                return self._stop_moving(entries) + super()._handle_rarer(event, now) + self._settle_handoffs()
            case ReplicaUp(replica):
                self._moves.stop(replica)
        return super()._handle_rarer(event, now)

    # -- requests come and go

    def _progressed(self, event: Progressed, now: Nanos) -> list[AnyAction]:
        actions: list[AnyAction] = []
        moving = bool(self._moves.waiting or self._moves.asked)  # when this began: those dictionaries change below
        for request in event.finished:
            entry = self._entries.get(request)
            if entry is not None and entry.held is not None:  # it ends where it is held
                actions += self._take_back(entry)
            elif entry is not None and moving:
                actions += self._stop_moving((entry,))
        backend = self._backends.get(event.replica)
        actions += super().handle(event, now)
        if event.held and backend is not None:
            for held in event.held:
                entry = self._step(held.request, backend, "held")
                if moving:
                    self._moves.leave(entry)
                self._handoffs.hold(entry, held, now)
                if entry.phase is RequestPhase.CANCELLING:
                    self._handoffs.withdraw(entry)
                elif held.head is not None and held.head not in self._backends:  # it died before who held the rest could know
                    actions += self._begin_again(entry, held.head, now)
                elif entry.to is not None:
                    actions.append(self._offer(entry))
        if event.replica in self._moves.emptying:
            actions += self._go_on_emptying(event)
        return actions + self._settle_handoffs()

    def _cancelled(self, request: RequestId) -> list[AnyAction]:
        entry = self._entries.get(request)
        if entry is None or entry.phase is RequestPhase.CANCELLING:
            return super()._cancelled(request)
        if entry.held is None:
            return self._stop_moving((entry,)) + super()._cancelled(request)
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
        """Offer what can be offered, and let those go on decoding that nobody else takes."""
        actions: list[AnyAction] = []
        queue, movers = self._handoffs.queue, self._handoffs.movers
        while queue:
            actions += [self._offer(entry) for entry in self._handoffs.settle()]
            if movers:
                actions += self._keep([entry for id, entry in movers.items() if id in queue])
            if not queue:
                break
            largest = self._handoffs.largest
            if not largest or next(iter(queue.values())).num_tokens <= largest:
                break
            message = f"its KV does not fit into the {largest} tokens of a decode replica"
            actions += self._refuse(next(iter(queue.values())), Rejection.TOO_LARGE, message, 0.0)
        if self._draining:
            return actions + self._settle_draining()
        return actions + self._ask_movers() if self._moves.waiting else actions

    def _offer(self, entry: Entry) -> Send:
        entry.phase = REQUEST[entry.phase]["offered"]
        return offer(entry)

    def _refuse(self, entry: Entry, rejection: Rejection, message: str, retry_after_s: float) -> list[AnyAction]:
        """It was prefilled in vain."""
        return [reply(entry.request, rejection, message, retry_after_s), *self._call_off(entry)]

    def _adopted(self, replica: ReplicaId, request: RequestId) -> list[AnyAction]:
        entry = self._promised(replica, request, "adopted")
        head = None if entry.held is None else entry.held.head
        source = self._handoffs.adopt(entry)
        actions: list[AnyAction] = []
        if source.open:
            source.index.changed(source)
            actions += self._settle()
        elif source is not entry.backend:
            actions += self._emptied(source)
        actions += self._release_head(head)
        if entry.phase is RequestPhase.CANCELLING:  # it may have come there before anybody could say so
            actions.append(Send(replica, Cancelled(request)))
        elif replica in self._moves.emptying:
            self._moves.add(entry)
            actions += self._settle_handoffs()
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
            if entry.phase is RequestPhase.CANCELLING:
                return [Send(event.replica, Disowned((event.request,))), *self._ask_holder(entry, event.replica)]
            # the other half may have left already, and this one is of no use then
            disowned = Send(event.replica, Disowned((event.request,)))
            return [disowned, *self._begin_again(entry, event.replica, now), *self._settle_handoffs()]
        entry.num_failed += 1
        actions = self._return_to_queue(entry)
        if entry.num_failed > self.max_retries:
            if event.request in self._handoffs.movers:
                actions += self._keep([entry])
            else:
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

    def _emptied(self, backend: Backend) -> list[AnyAction]:
        if backend is self._lost or self._handoffs.heads.get(backend.replica):
            return []  # the latter has a part of what others hold
        actions = super()._emptied(backend)
        if actions:
            self._moves.stop(backend.replica)
        return actions

    def _release_head(self, head: ReplicaId | None) -> list[AnyAction]:
        """Nobody needs the part any more that it had."""
        return [] if head is None else self._let_go(self._backends.get(head))

    def _take_back(self, entry: Entry) -> list[AnyAction]:
        """Count it as running where it is held, as if there were no hand-offs."""
        target, head = entry.to, None if entry.held is None else entry.held.head
        self._handoffs.keep(entry)
        return (self._let_go(target) if target is not entry.backend else []) + self._release_head(head)

    def _not_held(self, replica: ReplicaId, request: RequestId, now: Nanos) -> list[AnyAction]:
        entry = self._entries.get(request)
        if entry is None or entry.held is None:
            return []
        is_target = entry.to is not None and entry.to.replica == replica
        if entry.phase is RequestPhase.CANCELLING and entry.backend is not None and entry.backend.replica != replica:
            return self._ask_holder(entry, replica) if is_target and entry.held.head is not None else []
        orphaned = entry.to is entry.backend or entry.held.head is not None
        if (is_target and orphaned) or (not is_target and replica in sources_of(entry)):
            return self._begin_again(entry, replica, now) + self._settle_handoffs()
        return []

    @staticmethod
    def _ask_holder(entry: Entry, by: ReplicaId) -> list[AnyAction]:
        """Nobody wants it, and some of it is lost with, or by, that replica: who holds the rest says when it is gone, or that it
        has let go of it before it was told."""
        assert entry.backend is not None
        return [Send(entry.backend.replica, Dropped(entry.request.id, by))]

    def _begin_again(self, entry: Entry, by: ReplicaId, now: Nanos) -> list[AnyAction]:
        """Some of its KV is lost with, or by, that replica: the request goes on from the tokens that its client has.

        What was promised for it is free: who calls this settles that.
        """
        request, holder, target = entry.request.id, entry.backend, entry.to
        assert holder is not None
        others = [source for source in sources_of(entry) if source != by]
        if target is not None:
            for source in sources_of(entry):
                if source != target.replica:  # who took over from a dead holder counts as one
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
            if replica in self._moves.emptying and entry.num_failed <= self.max_retries:
                self._moves.add(entry)
        return actions + self._settle_handoffs()

    # -- replicas that are emptied

    def _empty(self, backend: Backend) -> list[AnyAction]:
        """Nothing new comes to it; what it has is to go elsewhere."""
        self._moves.emptying.add(backend.replica)
        actions = self._displace_from(backend)
        prompts: list[RequestId] = []
        for request, entry in self._entries.items():
            if entry.backend is not backend or entry.held is not None:
                continue
            if entry.started:
                self._moves.add(entry)
            elif entry.phase is not RequestPhase.CANCELLING:
                prompts.append(request)
        return actions + self._ask_back(backend.replica, prompts) + self._settle_handoffs()

    def _go_on_emptying(self, event: Progressed) -> list[AnyAction]:
        """Who has its first token there has to go, too; who lost its KV has nothing to take along."""
        for request in event.first:
            entry = self._entries.get(request)
            if entry is not None and entry.held is None and entry.backend is not None and entry.backend.replica == event.replica:
                self._moves.add(entry)
        return self._ask_back(event.replica, event.preempted)

    def _ask_back(self, replica: ReplicaId, requests: Sequence[RequestId]) -> list[AnyAction]:
        """Where somebody else takes prompts now; otherwise they are best served where they are."""
        return [Send(replica, ReturnWanted(tuple(requests)))] if requests and self._index.replicas else []

    def _ask_movers(self) -> list[AnyAction]:
        """Whoever has a place elsewhere is to be held. They go in order, but for those that fit nowhere."""
        leaving: list[Entry] = []
        for entry in list(self._moves.waiting.values()):
            if self._handoffs.place(entry):
                self._moves.ask(entry)
                leaving.append(entry)
            elif entry.num_tokens <= self._handoffs.largest:
                break
        return [Send(replica, MoveWanted(requests)) for replica, requests in by_holder(leaving)]

    def _keep(self, entries: Sequence[Entry]) -> list[AnyAction]:
        """Whoever held them goes on with them, and says so."""
        for entry in entries:
            self._handoffs.withdraw(entry)
        return [Send(replica, KeepWanted(requests)) for replica, requests in by_holder(entries)]

    def _stop_moving(self, entries: Sequence[Entry]) -> list[AnyAction]:
        """They are not to leave any more; their places are free."""
        actions: list[AnyAction] = []
        for entry in entries:
            if self._moves.leave(entry):
                actions += self._let_go(self._handoffs.displace(entry))
        return actions

    def _displace_from(self, target: Backend) -> list[AnyAction]:
        """It takes nobody in; whoever was to come looks for another place."""
        actions = self._stop_moving(entries := self._moves.meant_for(target))
        for entry in entries:
            self._moves.add(entry)
        return actions

    # -- replicas come and go

    def _replica_down(self, event: ReplicaDown, now: Nanos) -> list[AnyAction]:
        backend = self._backends.get(event.replica)
        if backend is None and event.lost:
            return self._excuse(event.replica)
        actions = super()._replica_down(event, now)
        if backend is None or event.lost or backend.open or not self.moves or self._draining:
            return actions
        return actions + self._empty(backend) if self._backends.get(event.replica) is backend else actions

    def _lose(self, backend: Backend, now: Nanos) -> list[AnyAction]:
        self._lost = backend
        if backend.open:  # nobody of those who begin again is to begin there
            backend.open = False
            backend.index.remove(backend)
        self._moves.stop(backend.replica)
        actions = self._displace_from(backend) + self._stop_moving(self._moves.of(backend))
        for request in sorted(request for request, entry in self._entries.items() if entry.held is not None):
            actions += self._lose_end(self._entries[request], backend, now)
        actions += self._excuse(backend.replica)
        actions += super()._lose(backend, now)
        self._lost = None
        return actions + self._settle_handoffs()

    def _excuse(self, source: ReplicaId) -> list[AnyAction]:
        """It answers nobody any more, and writes nothing."""
        lost = ReplicaDown(source, lost=True)
        return [Send(target, lost) for target in sorted(self._owed.pop(source, ()))]

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
            if target is not None:
                return [dropped(request, target, backend)]
            if entry.phase is RequestPhase.CANCELLING:
                return self._ask_holder(entry, backend.replica)
            return self._begin_again(entry, backend.replica, now)
        return []

    def _fleet_changed(self, came: Backend | None = None) -> list[AnyAction]:
        return super()._fleet_changed(came) + self._settle_handoffs()
