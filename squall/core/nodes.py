"""Slots that can be used: nodes that go and come back, GPUs that other fleets have, processes that go before they are asked to.

Knows no reason and no replica's work.
"""

from __future__ import annotations

from collections.abc import Collection

from squall.core.events import GpusHeld
from squall.core.fleet import Fleet, Member
from squall.core.neighbours import Neighbours
from squall.core.types import Nanos, ReplicaId


class Nodes:
    """The nodes of a fleet.

    Attributes:
        num_up: slots that no node which goes, or is gone, has a part in.
        neighbours: who else has GPUs there; None where the fleet is alone.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.num_up = fleet.slots.num
        self.neighbours = None if fleet.slots.shared is None else Neighbours(fleet.slots)
        self._fleet = fleet
        self._usable: int | None = None  # as far as it is known
        self._room: int | None = None
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

    def began(self, replica: ReplicaId) -> None:
        """It gets a process."""
        if self.neighbours is not None:
            self.neighbours.took(replica)
            self._changed()

    def ended(self, replica: ReplicaId) -> None:
        """Its process has ended."""
        if self.neighbours is not None:
            self.neighbours.gave(replica)
            self._changed()
        if self._ending.pop(replica, None) is not None:
            self._mark_one(self._fleet.members[replica], None)

    @property
    def num_usable(self) -> int:
        """Slots where there is a replica, or could be one."""
        if self._usable is None:
            self._usable = self.num_up if self.neighbours is None else self._count(self.neighbours.ours)
        return self._usable

    def _count(self, ours: Collection[ReplicaId]) -> int:
        free = sum(replica not in ours and not self.is_closed(replica) for replica in range(self._fleet.slots.num))
        return sum(not self._is_down(replica) for replica in ours) + min(free, self.room)

    @property
    def room(self) -> int:
        """Replicas that there are GPUs for, if there are slots."""
        if self._room is None:
            self._room = self.num_up if self.neighbours is None else self.neighbours.room(self._leaving.__contains__)
        return self._room

    def _changed(self) -> None:
        self._usable = self._room = None

    def hear(self, event: GpusHeld) -> bool:
        """What another fleet has; whether GPUs have come free."""
        self._changed()
        return self.neighbours is not None and self.neighbours.hear(event)

    def is_closed(self, replica: ReplicaId) -> bool:
        """The slot is not to be used."""
        return self._is_down(replica) or (self.neighbours is not None and self.neighbours.has(replica))

    def _is_down(self, replica: ReplicaId) -> bool:
        return bool(self._leaving) and any(node in self._leaving for node in self._fleet.slots.nodes(replica))

    def _mark(self, node: int, now: Nanos | None) -> None:
        slots = self._fleet.slots
        for member in self._fleet.members.values():
            if node in slots.nodes(member.replica):
                self._mark_one(member, now)
        self._changed()
        self.num_up = sum(not self._is_down(replica) for replica in range(slots.num))

    def _mark_one(self, member: Member, now: Nanos | None) -> None:
        times = [self._leaving[node] for node in self._fleet.slots.nodes(member.replica) if node in self._leaving]
        times += [self._ending[member.replica]] if member.replica in self._ending else []
        leaves_at = min(times, default=None)
        if now is not None and leaves_at is not None:
            member.withdraw_at = now + (leaves_at - now) // 2
        member.leaves_at = leaves_at
        self._fleet.file(member)
