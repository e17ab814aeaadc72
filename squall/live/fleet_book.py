"""What the head remembers of its fleet for people and metrics: decisions, loads, where replicas can be reached.

Knows no process and decides nothing. Who may read weights from whom is known here only as addresses.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection

from squall.core import metrics
from squall.core.actions import Decided, LoadWeights
from squall.core.controller import Controller
from squall.core.fleet import HOLDS_WEIGHTS, Member
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.live.frontend import Decision, FleetStatus, GpuStats, LoadStats, ReplicaStatus, RoleStatus, ScaleStats
from squall.live.rpc.convert import Peer, WeightsMoved
from squall.live.transfers import needed

NUM_DECISIONS = 50
"""So many of the latest are told."""

NUM_KEPT = 100_000
"""So many of the latest decisions and loads are left in the run directory: a head may run for months."""


class FleetBook:
    """See the module.

    Args:
        controller: whose replicas they are.

    Attributes:
        decisions, weights: for the run directory; instants count from when the book was opened.
    """

    def __init__(self, controller: Controller) -> None:
        self.num_failed_loads = 0
        self.decisions: deque[metrics.Decision] = deque(maxlen=NUM_KEPT)
        self.weights: deque[metrics.Delivery] = deque(maxlen=NUM_KEPT)
        self._opened_at: Nanos = time.monotonic_ns()
        self._controller = controller
        self._decisions: deque[Decision] = deque(maxlen=NUM_DECISIONS)
        self._ups: Counter[str] = Counter()
        self._downs: Counter[str] = Counter()
        self._loads: dict[str, LoadStats] = {}
        self._addresses: dict[ReplicaId, tuple[str, ...]] = {}
        self._held: dict[ReplicaId, LoadWeights] = {}

    # -- who is where

    def reachable(self, peer: Peer) -> None:
        self._addresses[peer.replica] = peer.addresses

    def gone(self, replica: ReplicaId) -> None:
        """It is reached no more, and what it was to load is void."""
        self._addresses.pop(replica, None)
        self._held.pop(replica, None)

    def hold(self, action: LoadWeights) -> None:
        """An order to be given once those that the replica reads from can be reached; the latest counts."""
        self._held[action.replica] = action

    def released(self, here: Collection[ReplicaId]) -> list[tuple[LoadWeights, list[Peer]]]:
        """The orders that can be given now, and the peers that they name.

        Args:
            here: replicas whose processes run or come up; those that do not are not waited for, as another order will come.
        """
        slots = self._controller.plan.slots
        found = []
        for replica, action in list(self._held.items()):
            waits = needed(action.transfer, replica, slots) - self._addresses.keys() - {replica}
            if waits.isdisjoint(here):
                del self._held[replica]
                found.append((action, self._peers(action)))
        return found

    def _peers(self, action: LoadWeights) -> list[Peer]:
        transfer = action.transfer
        places = (transfer.source, *transfer.more_sources)
        named = dict.fromkeys([*(place.id for place in places if place.kind == "gpu"), *transfer.path])
        return [Peer(id, self._addresses[id]) for id in named if id in self._addresses and id != action.replica]

    # -- what happened

    def decided(self, action: Decided) -> None:
        role = action.role.value
        self.decisions.append(metrics.Decision(self._now(), role, action.before, action.after, action.why))
        self._decisions.append(Decision(round(time.time(), 3), role, action.before, action.after, action.why))
        (self._ups if action.after > action.before else self._downs)[role] += 1

    def _now(self) -> Nanos:
        return time.monotonic_ns() - self._opened_at

    def moved(self, replica: ReplicaId, moved: WeightsMoved) -> None:
        took, transfer = round(moved.seconds * SECOND), self._controller.fleet[replica].source
        if moved.num_bytes and transfer is not None:  # else they were there
            self.weights.append(metrics.weights_delivered(replica, transfer, moved.num_bytes, self._now() - took, took))
        before = self._loads.get(moved.kind) or LoadStats(moved.kind, 0, 0.0, 0, 0)
        self._loads[moved.kind] = LoadStats(
            moved.kind, before.count + 1, before.seconds + moved.seconds, before.num_bytes + moved.num_bytes,
            before.num_repaired + moved.num_repaired,
        )  # fmt: skip

    # -- to be looked at

    def loads(self) -> tuple[LoadStats, ...]:
        return tuple(self._loads[kind] for kind in sorted(self._loads))

    def scales(self) -> tuple[ScaleStats, ...]:
        return tuple(
            ScaleStats(role.value, state.target, self._ups[role.value], self._downs[role.value])
            for role, state in self._controller.states.items()
        )

    def num_layers(self, member: Member) -> int:
        """Layers of the member that can be computed with."""
        return self._controller.plan.weights.num_layers if member.phase in HOLDS_WEIGHTS else member.layers_ready

    def status(self) -> FleetStatus:
        states, members = self._controller.states, self._controller.fleet
        roles = (
            RoleStatus(
                role.value, state.minimum, state.maximum, state.target, state.manual, state.num_ready, state.num_coming,
                state.num_draining, state.num_idle,
            )
            for role, state in states.items()
        )  # fmt: skip
        replicas = tuple(self._replica(members[id]) for id in sorted(members))
        return FleetStatus(tuple(roles), replicas, tuple(self._decisions), self.gpus())

    def gpus(self) -> GpuStats | None:
        return None if self._controller.plan.slots.shared is None else GpuStats(*self._controller.gpus)

    def _replica(self, member: Member) -> ReplicaStatus:
        transfer = member.source
        return ReplicaStatus(
            member.replica, member.role.value, member.phase.value, self.num_layers(member),
            None if transfer is None else transfer.kind,
            None if transfer is None else transfer.named_sources,
            member.num_outstanding,
        )  # fmt: skip
