"""Nodes that go and come back, and what that means for the slots on them; processes that go before they are asked to.

Knows no reason and no replica's work.
"""

from __future__ import annotations

from squall.core.fleet import Fleet, Member
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
        self._ending: dict[ReplicaId, Nanos] = {}  # replicas whose process ends: when

    def goes(self, node: int, at: Nanos, now: Nanos) -> None:
        """At `at`, which may be now. Replicas there may serve for half of that time."""
        self._leaving[node] = at
        self._mark(node, now)

    def comes(self, node: int) -> None:
        """It may be used again."""
        self._leaving.pop(node, None)
        self._mark(node, None)

    def ends(self, replica: ReplicaId, at: Nanos, now: Nanos) -> None:
        """Its process ends at `at`; its slot may be used again when it has."""
        self._ending[replica] = at
        self._mark_one(self._fleet.members[replica], now)

    def ended(self, replica: ReplicaId) -> None:
        """Its process has ended."""
        if self._ending.pop(replica, None) is not None:
            self._mark_one(self._fleet.members[replica], None)

    def is_down(self, replica: ReplicaId) -> bool:
        """The slot is not to be used."""
        return bool(self._leaving) and any(node in self._leaving for node in self._fleet.slots.nodes(replica))

    def _mark(self, node: int, now: Nanos | None) -> None:
        slots = self._fleet.slots
        for member in self._fleet.members.values():
            if node in slots.nodes(member.replica):
                self._mark_one(member, now)
        self.num_usable = sum(not self.is_down(replica) for replica in range(slots.num))

    def _mark_one(self, member: Member, now: Nanos | None) -> None:
        times = [self._leaving[node] for node in self._fleet.slots.nodes(member.replica) if node in self._leaving]
        times += [self._ending[member.replica]] if member.replica in self._ending else []
        leaves_at = min(times, default=None)
        if now is not None and leaves_at is not None:
            member.withdraw_at = now + (leaves_at - now) // 2
        member.leaves_at = leaves_at
        self._fleet.file(member)
