"""Nodes that go and come back, and what that means for the slots on them. Knows no reason and no replica's work."""

from __future__ import annotations

from squall.core.fleet import Fleet
from squall.core.types import Nanos, ReplicaId


class Nodes:
    """The nodes of a fleet.

    Attributes:
        num_usable: slots that no node which goes, or is gone, has a part in.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.num_usable = fleet.slots.num
        self._fleet = fleet
        self._leaving: dict[int, Nanos] = {}  # nodes that go, or are gone: when

    def goes(self, node: int, at: Nanos, now: Nanos) -> None:
        """At `at`, which may be now. Replicas there may serve for half of that time."""
        self._leaving[node] = at
        self._mark(node, now)

    def comes(self, node: int) -> None:
        """It may be used again."""
        self._leaving.pop(node, None)
        self._mark(node, None)

    def is_down(self, replica: ReplicaId) -> bool:
        """The slot is not to be used."""
        return bool(self._leaving) and any(node in self._leaving for node in self._fleet.slots.nodes(replica))

    def _mark(self, node: int, now: Nanos | None) -> None:
        slots = self._fleet.slots
        for member in self._fleet.members.values():
            nodes = slots.nodes(member.replica)
            if node in nodes:
                leaves_at = min((self._leaving[other] for other in nodes if other in self._leaving), default=None)
                if now is not None and leaves_at is not None:
                    member.withdraw_at = now + (leaves_at - now) // 2
                member.leaves_at = leaves_at
                self._fleet.file(member)
        self.num_usable = sum(not self.is_down(replica) for replica in range(slots.num))
