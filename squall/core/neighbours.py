"""The GPUs of a cluster that several fleets share, as the controller of one of them knows it: which are whose.

What others have, it hears as events, so that the log of one controller tells all that it knew. Knows no node's state, no
replica's life, and of other fleets only their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from squall.core.actions import AnyAction, TellNeighbours
from squall.core.events import GpusHeld
from squall.core.fleet_plan import Slots
from squall.core.types import ReplicaId


class Neighbours:
    """
    Args:
        slots: of the fleet, with its place on the cluster (`slots.shared`).

    Attributes:
        ours: slots of which the fleet has the GPUs: it has a process there, or one that has not ended yet.
    """

    def __init__(self, slots: Slots) -> None:
        assert slots.shared is not None
        self.ours: set[ReplicaId] = set()
        self._slots = slots
        self._share = slots.shared
        self._held: dict[int, int] = {}  # how many each other fleet has
        self._theirs: dict[int, int] = {}  # a GPU, and the fleet that has it
        self._slot_of = {gpu: replica for replica in range(slots.num) for gpu in slots.gpus(replica)}
        self._closed: set[ReplicaId] = set()  # slots that they have GPUs of
        self._copies: dict[int, tuple[frozenset[int], int]] = {}  # of each other fleet: nodes that have one, and its bytes
        self._told: tuple[Sequence[int], Sequence[int]] = (), ()

    def hear(self, event: GpusHeld) -> bool:
        """Whether GPUs have come free."""
        had = {gpu for gpu, fleet in self._theirs.items() if fleet == event.fleet}
        self._theirs = {gpu: fleet for gpu, fleet in self._theirs.items() if fleet != event.fleet}
        self._theirs.update(dict.fromkeys(event.gpus, event.fleet))
        self._closed = {self._slot_of[gpu] for gpu in self._theirs if gpu in self._slot_of}
        self._held[event.fleet] = len(event.gpus)
        self._copies[event.fleet] = frozenset(event.copies), event.copy_bytes
        return not had.issubset(event.gpus)

    def has(self, replica: ReplicaId) -> bool:
        """Another fleet has GPUs of the slot."""
        return replica in self._closed

    def room(self, is_gone: Callable[[int], bool]) -> int:
        """Replicas that there are GPUs for, beside what every other fleet lacks of its minimum; `is_gone` tells of nodes."""
        share = self._share
        taken = {*self._theirs, *self._gpus()}
        free = sum(gpu not in taken and not is_gone(gpu // share.gpus_per_node) for gpu in range(share.num_gpus))
        others = (fleet for fleet in range(len(share.minima)) if fleet != share.fleet)
        kept = sum(max(0, share.minima[fleet] - self._held.get(fleet, 0)) for fleet in others)
        return max(0, free - kept) // share.gpus_per_slot

    def copy_bytes(self, node: int) -> int:
        """Of the node's memory, what the weights of other fleets take."""
        return sum(size for nodes, size in self._copies.values() if node in nodes)

    def took(self, replica: ReplicaId) -> None:
        self.ours.add(replica)

    def gave(self, replica: ReplicaId) -> None:
        self.ours.discard(replica)

    def news(self, copies: Sequence[int], copy_bytes: int) -> list[AnyAction]:
        """What the others are to hear, where that has changed; the nodes `copies` have our weights in their memory."""
        held = tuple(self._gpus()), tuple(copies)
        if held == self._told:
            return []
        self._told = held
        return [TellNeighbours(GpusHeld(self._share.fleet, *held, copy_bytes))]

    def _gpus(self) -> list[int]:
        return [gpu for replica in sorted(self.ours) for gpu in self._slots.gpus(replica)]
