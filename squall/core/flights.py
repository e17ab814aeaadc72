"""The runs that a replica has in progress, and the groups in which its decodes advance.

Knows who decodes with whom, and what an engine has to be told about it. Knows no blocks, no policy and no order of events.
"""

from __future__ import annotations

from squall.core.actions import Regrouped
from squall.core.decodes import DecodeGroup, Work


class Flight:
    """A run in progress.

    Attributes:
        group: whom its chunks join when they complete their prefill.
        decoding: whether the group advances.
        batch: whose prefill it works on, and how many tokens a step.
    """

    __slots__ = ("batch", "decoding", "group")

    def __init__(self, group: DecodeGroup, decoding: bool) -> None:
        self.group = group
        self.decoding = decoding
        self.batch: list[tuple[Work, int]] = []

    def depart(self, prefilling: list[Work]) -> None:
        """No other run may work on the same from now on."""
        self.group.flying = True
        for work, _ in self.batch:
            work.flying = True
            prefilling.remove(work)

    def land(self, prefilling: list[Work]) -> None:
        """The opposite; `prefilling` keeps the order in which runs took from it."""
        self.group.flying = False
        for work, _ in self.batch:
            work.flying = False
            prefilling.append(work)


def is_flying(work: Work) -> bool:
    """Whether a run works on it; told of only where there may be several."""
    return work.flying or (work.group is not None and work.group.flying)


class Groups:
    """Splits a replica's decodes and brings them together again, so that whoever is fewer moves.

    Args:
        block_size: tokens of a KV block.
    """

    __slots__ = ("_block_size", "_empty", "_flights", "_moved", "_num_groups")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_groups = 0
        self._empty: list[DecodeGroup] = []
        self._flights: list[Flight] = []
        self._moved: list[Regrouped] = []

    def flight(self, group: DecodeGroup, decoding: bool) -> Flight:
        """A run of `group`; one that is over is used again."""
        if not self._flights:
            return Flight(group, decoding)
        flight = self._flights.pop()
        flight.group = group
        flight.decoding = decoding
        return flight

    def spare(self, flight: Flight) -> None:
        """The run is over and its consequences are drawn."""
        flight.batch.clear()
        self._flights.append(flight)

    def empty(self) -> DecodeGroup:
        """A group without members."""
        if self._empty:
            return self._empty.pop()
        self._num_groups += 1
        return DecodeGroup(self._block_size, self._num_groups - 1)

    def part(self, group: DecodeGroup, count: int) -> tuple[DecodeGroup, DecodeGroup]:
        """Take the `count` earliest arrivals out of `group`. Returns those that stay behind, and those taken."""
        other = self.empty()
        if count == group.size:
            return other, group
        if not count:
            return group, other
        if 2 * count <= group.size:
            self._move(group.earliest(count), group, other)
            return group, other
        kept = {work.request.id for work in group.earliest(count)}
        self._move([work for id, work in group.members.items() if id not in kept], group, other)
        return other, group

    def unite(self, one: DecodeGroup, other: DecodeGroup) -> DecodeGroup:
        """Bring two groups together: the smaller one becomes empty."""
        if other.size > one.size:
            one, other = other, one
        self._move(list(other.members.values()), other, one)
        self._empty.append(other)
        return one

    def _move(self, works: list[Work], old: DecodeGroup, new: DecodeGroup) -> None:
        if works:
            for work in works:
                old.give(work, new)
            self._moved.append(Regrouped(new.id, tuple(sorted(work.request.id for work in works))))

    def told(self) -> tuple[Regrouped, ...]:
        """What has changed since this was asked last; to be told with the next run."""
        if not self._moved:
            return ()
        moved = tuple(self._moved)
        self._moved.clear()
        return moved
