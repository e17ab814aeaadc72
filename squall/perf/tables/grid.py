"""Times between measured points. Knows no operator: sizes are numbers, and a trend says how time goes from one to the next.

A grid is a tree, one level a size: sorted values, and below each the points that share it. It need not be full. Between two
neighbours time runs along the trend, scaled to meet both: never below the lower nor above the higher of them, hence monotone
where the points are. Beyond the last point the trend goes on from it, in proportion: there, nothing is negative and nothing is
flat. Kernels compute whole tiles, so that times may rise in steps; with a tile, a size that shares its last tile with a measured
neighbour takes as long as that one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from math import log2

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Array = NDArray[np.float64]

Trend = Callable[[Sequence[float]], float]
"""Seconds at a point; above 0."""


class Reading(Struct, frozen=True, gc=False):
    """A time read off a grid.

    Attributes:
        seconds: the time.
        between: depths of the sizes that lie between two measured values.
        beyond: doublings of the trend outside the measured values, all sizes together; 0 inside.
    """

    seconds: float
    between: tuple[int, ...]
    beyond: float


class Grid:
    """Measured points, every one with as many sizes.

    Args:
        points: (sizes, seconds), no two with the same sizes.
        trend: as above.
        tile: of the last size; 0 for none.
    """

    def __init__(self, points: Iterable[tuple[Sequence[float], float]], trend: Trend, tile: int = 0) -> None:
        several = list(points)
        sizes = np.array([at for at, _ in several], dtype=float)
        self._hold(sizes, np.array([seconds for _, seconds in several], dtype=float), trend, tile)

    @classmethod
    def of(cls, sizes: Array, seconds: Array, trend: Trend, tile: int = 0) -> "Grid":
        """The same of arrays [points, sizes] and [points]."""
        grid = cls.__new__(cls)
        grid._hold(sizes, seconds, trend, tile)
        return grid

    def _hold(self, sizes: Array, seconds: Array, trend: Trend, tile: int) -> None:
        order = np.lexsort(sizes.T[::-1])
        self._trend = trend
        self._tile = tile
        self._root = _Node(sizes[order], seconds[order], 0)

    def tiled(self, tile: int) -> "Grid":
        """The same points with another tile."""
        grid = Grid.__new__(Grid)
        grid._trend, grid._tile, grid._root = self._trend, tile, self._root
        return grid

    def around(self, at: Sequence[float]) -> "Gap | None":
        """The gap in which a measured point would lie along the last size if it had not been measured; None at an end."""
        node, last = self._root, len(at) - 1
        for size in at[:-1]:
            node = node.child(bisect_left(node.values, size))  # type: ignore[assignment]
        place = bisect_left(node.values, at[last])
        if not 0 < place < len(node.values) - 1:
            return None
        low, high = node.values[place - 1], node.values[place + 1]
        from_, here, to = (self._trend((*at[:-1], size)) for size in (low, at[last], high))
        share = min(1.0, max(0.0, (here - from_) / (to - from_))) if to != from_ else 0.5
        return Gap(low, at[last], high, float(node.child(place - 1)), float(node.child(place + 1)), share)  # type: ignore[arg-type]

    def read(self, at: Sequence[float], *, without: Sequence[float] | None = None, depth: int = -1) -> Reading:
        """The time at some sizes. `without` and `depth` leave out the measured value at that level of that point: what would be
        read if it had not been measured."""
        hidden = None if without is None else (tuple(without), depth % len(without))
        return self._read(self._root, list(at), 0, hidden)

    def _read(self, node: "_Node", at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None) -> Reading:
        values = node.values
        place = bisect_left(values, at[depth])
        exact = place < len(values) and values[place] == at[depth]
        low = high = place
        if hidden is not None and exact and hidden[1] == depth and len(values) > 1:
            low, high = place - 1, place + 1
        elif not exact:
            low = place - 1
        if low == high:
            return self._below(node.child(low), at, depth, hidden)
        if low < 0 or high >= len(values):
            return self._outside(node, high if low < 0 else low, at, depth, hidden)
        return self._between(node, low, high, at, depth, hidden)

    def _below(
        self, child: "_Node | float", at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None
    ) -> Reading:
        return self._read(child, at, depth + 1, hidden) if isinstance(child, _Node) else Reading(child, (), 0.0)

    def _at(
        self, node: "_Node", place: int, at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None
    ) -> tuple[Reading, float]:
        """The reading at a measured value of this level, and the trend there."""
        moved = at.copy()
        moved[depth] = node.values[place]
        return self._below(node.child(place), moved, depth, hidden), self._trend(moved)

    def _between(
        self, node: "_Node", low: int, high: int, at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None
    ) -> Reading:
        first, from_ = self._at(node, low, at, depth, hidden)
        last, to = self._at(node, high, at, depth, hidden)
        here = self._trend(at)
        share = (here - from_) / (to - from_) if to != from_ else 0.5
        share = min(1.0, max(0.0, share))
        if self._tile and depth == len(at) - 1:
            share = stepped(self._tile, share, node.values[low], at[depth], node.values[high])
        seconds = first.seconds + share * (last.seconds - first.seconds)
        return Reading(seconds, (depth, *sorted({*first.between, *last.between})), max(first.beyond, last.beyond))

    def _outside(
        self, node: "_Node", place: int, at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None
    ) -> Reading:
        edge, there = self._at(node, place, at, depth, hidden)
        growth = self._trend(at) / there
        return Reading(edge.seconds * growth, edge.between, edge.beyond + abs(log2(growth)))


class Gap(Struct, frozen=True):
    """Two neighbours, a size between them, and how far along the trend it lies."""

    low: float
    here: float
    high: float
    first: float
    last: float
    share: float

    def seconds(self, tile: int) -> float:
        """The time read across the gap."""
        share = stepped(tile, self.share, self.low, self.here, self.high) if tile else self.share
        return self.first + share * (self.last - self.first)


def stepped(tile: int, share: float, low: float, here: float, high: float) -> float:
    """The share of the way where time rises at the ends of tiles only."""
    first, place, last = -(-low // tile), -(-here // tile), -(-high // tile)
    if first == last:
        return share
    return 0.0 if place == first else 1.0 if place == last else share


class _Node:
    """The values of one size, and what lies below each, which is looked at when it is first asked for.

    Args:
        sizes, seconds: of the points in order, all alike in the sizes above `depth`.
    """

    __slots__ = ("_bounds", "_children", "_depth", "_seconds", "_sizes", "values")

    def __init__(self, sizes: Array, seconds: Array, depth: int) -> None:
        column = sizes[:, depth]
        starts = np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1])))
        self.values: list[float] = column[starts].tolist()
        self._depth = depth
        self._sizes, self._seconds = sizes, seconds
        is_last = depth == sizes.shape[1] - 1
        self._bounds: list[int] = [] if is_last else [*starts.tolist(), len(column)]
        self._children: list[_Node | float | None] = [*seconds[starts].tolist()] if is_last else [None] * len(starts)

    def child(self, place: int) -> "_Node | float":
        """What is below the value at a place: a time at the last size."""
        child = self._children[place]
        if child is None:
            rows = slice(self._bounds[place], self._bounds[place + 1])
            child = self._children[place] = _Node(self._sizes[rows], self._seconds[rows], self._depth + 1)
        return child
