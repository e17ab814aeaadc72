"""The router of a disaggregated fleet: prompts go to prefill replicas, and from there to decode replicas.

Who serves what is here: where replicas of a role are found and counted, what becomes of one that changes it, and which role has
to wait for the other one at the end. How requests are handed on is in `HandoffRouter`.
"""

from __future__ import annotations

from squall.core.actions import AnyAction
from squall.core.demand import Demand
from squall.core.events import AnyEvent, Rejection, ReplicaDown, ReplicaUp, RoleChanged
from squall.core.finish_rate import UNKNOWN_WAIT_S
from squall.core.fleet_view import RoutePolicy
from squall.core.handoff_queue import HandoffQueue
from squall.core.handoff_router import HandoffRouter
from squall.core.replica_index import Backend, Chosen, Ranked, index_of
from squall.core.types import Nanos, Role


class DisaggregatedRouter(HandoffRouter):
    """See `HandoffRouter`.

    For the scale policy a request counts for the prefill replicas until its first token, and for the decode replicas from then
    on: as queued until it is promised to one of them, as waiting while its KV moves, and as running there.

    Args:
        decode_policy: chooses among decode replicas.
    """

    __slots__ = ("decode_policy",)

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
        moves: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(  # one by one: compiled, a starred argument arrives as one
            policy, max_queued_requests, max_queued_tokens, max_retries, elastic, max_share, max_ratio, moves, max_model_len
        )
        self.decode_policy = decode_policy
        self._handoffs = HandoffQueue(index_of(decode_policy), max_share, max_ratio)

    @property
    def num_open(self) -> int:
        return len(self._index.replicas) + len(self._handoffs.index.replicas)

    def demand(self, role: Role) -> Demand:
        demand = self._handoffs.demand if role is Role.DECODE else self._demand
        return demand.sum_up(self._backends.values())

    def _handle_rarer(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        if type(event) is RoleChanged:
            backend = self._backends.get(event.replica)
            return [] if backend is None else [*self._change_role(backend, event.role), *self._fleet_changed()]
        return super()._handle_rarer(event, now)

    # -- replicas come and go

    def _replica_up(self, event: ReplicaUp) -> list[AnyAction]:
        backend = self._backends.get(event.replica)
        changed = [] if backend is None else self._change_role(backend, event.role)
        return changed + super()._replica_up(event)

    def _place(self, role: Role) -> tuple[Demand, Ranked | Chosen]:
        return (self._handoffs.demand, self._handoffs.index) if role is Role.DECODE else (self._demand, self._index)

    def _change_role(self, backend: Backend, role: Role) -> list[AnyAction]:
        """What it has goes with it."""
        if backend.role is role:
            return []
        if backend.open:
            backend.index.remove(backend)
        backend.role = role
        backend.demand, backend.index = self._place(role)
        if backend.open:
            backend.index.add(backend)
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
