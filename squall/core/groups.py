"""The groups in which a replica's decodes advance.

Knows who decodes with whom, and what an engine has to be told about it. Knows no blocks, no policy and no order of events.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from squall.core.actions import Regrouped
from squall.core.decodes import DecodeGroup, Work, arrival
from squall.core.types import RequestId


class Groups:
    """Splits a replica's decodes and brings them together again, so that whoever is fewer moves.

    Args:
        block_size: tokens of a KV block.
        running: all that a replica has admitted.

    Attributes:
        moved: what an engine has to be told with the next run.
    """

    __slots__ = ("_block_size", "_empty", "_num_groups", "_running", "moved")

    def __init__(self, block_size: int, running: dict[RequestId, Work]) -> None:
        self.moved: list[Regrouped] = []
        self._block_size = block_size
        self._running = running
        self._num_groups = 0
        self._empty: list[DecodeGroup] = []

    def members(self, group: DecodeGroup) -> Iterable[Work]:
        """Who is in it. Costs as much as all that run, as does every question but `empty`."""
        return (work for work in self._running.values() if work.group is group)

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
            self._move(nsmallest(count, self.members(group), key=arrival), group, other)
            return group, other
        kept = {work.request.id for work in nsmallest(count, self.members(group), key=arrival)}
        self._move([work for work in self.members(group) if work.request.id not in kept], group, other)
        return other, group

    def unite(self, one: DecodeGroup, other: DecodeGroup) -> DecodeGroup:
        """Bring two groups together: the smaller one becomes empty."""
        if other.size > one.size:
            one, other = other, one
        if other.size:
            self._move(list(self.members(other)), other, one)
        self._empty.append(other)
        return one

    def _move(self, works: list[Work], old: DecodeGroup, new: DecodeGroup) -> None:
        if works:
            for work in works:
                old.give(work, new)
            self.moved.append(Regrouped(new.id, tuple(sorted(work.request.id for work in works))))

    def told(self) -> tuple[Regrouped, ...]:
        """What has changed since this was asked last."""
        if not self.moved:
            return ()
        moved = tuple(self.moved)
        self.moved.clear()
        return moved
