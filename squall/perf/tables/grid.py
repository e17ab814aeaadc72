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

from msgspec import Struct

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
        self._trend = trend
        self._tile = tile
        self._root = _tree(sorted((tuple(sizes), seconds) for sizes, seconds in points), 0)

    def tiled(self, tile: int) -> "Grid":
        """The same points with another tile."""
        grid = Grid.__new__(Grid)
        grid._trend, grid._tile, grid._root = self._trend, tile, self._root
        return grid

    def read(self, at: Sequence[float], *, without: Sequence[float] | None = None, depth: int = -1) -> Reading:
        """The time at some sizes. `without` and `depth` leave out the measured value at that level of that point: what would be
        read if it had not been measured."""
        hidden = None if without is None else (tuple(without), depth % len(without))
        return self._read(self._root, list(at), 0, hidden)

    def _read(self, node: "_Node", at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None) -> Reading:
        values, below = node.values, node.below
        place = bisect_left(values, at[depth])
        exact = place < len(values) and values[place] == at[depth]
        low = high = place
        if hidden is not None and exact and hidden[1] == depth and len(values) > 1:
            low, high = place - 1, place + 1
        elif not exact:
            low = place - 1
        if low == high:
            return self._below(below[low], at, depth, hidden)
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
        return self._below(node.below[place], moved, depth, hidden), self._trend(moved)

    def _between(
        self, node: "_Node", low: int, high: int, at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None
    ) -> Reading:
        first, from_ = self._at(node, low, at, depth, hidden)
        last, to = self._at(node, high, at, depth, hidden)
        here = self._trend(at)
        share = (here - from_) / (to - from_) if to != from_ else 0.5
        share = min(1.0, max(0.0, share))
        if self._tile and depth == len(at) - 1:
            share = self._stepped(share, node.values[low], at[depth], node.values[high])
        seconds = first.seconds + share * (last.seconds - first.seconds)
        return Reading(seconds, (depth, *sorted({*first.between, *last.between})), max(first.beyond, last.beyond))

    def _stepped(self, share: float, low: float, here: float, high: float) -> float:
        """The share of the way where time rises at the ends of tiles only."""
        tile = self._tile
        first, place, last = -(-low // tile), -(-here // tile), -(-high // tile)
        if first == last:
            return share
        return 0.0 if place == first else 1.0 if place == last else share

    def _outside(
        self, node: "_Node", place: int, at: list[float], depth: int, hidden: tuple[tuple[float, ...], int] | None
    ) -> Reading:
        edge, there = self._at(node, place, at, depth, hidden)
        growth = self._trend(at) / there
        return Reading(edge.seconds * growth, edge.between, edge.beyond + abs(log2(growth)))


class _Node(Struct, frozen=True):
    values: list[float]
    below: "list[_Node] | list[float]"


def _tree(points: list[tuple[tuple[float, ...], float]], depth: int) -> _Node:
    """Of points sorted by their sizes, all alike above `depth`."""
    if depth == len(points[0][0]) - 1:
        return _Node([sizes[depth] for sizes, _ in points], [seconds for _, seconds in points])
    values: list[float] = []
    below: list[_Node] = []
    start = 0
    for end in range(1, len(points) + 1):
        if end == len(points) or points[end][0][depth] != points[start][0][depth]:
            values.append(points[start][0][depth])
            below.append(_tree(points[start:end], depth + 1))
            start = end
    return _Node(values, below)
