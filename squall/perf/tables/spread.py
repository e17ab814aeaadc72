"""How far readings of a grid are off, learned from the grid itself. Knows no operator.

Points are taken out, one value of one size at a time, and read from what is left. Nine tenths of such errors are smaller than
the spread that is kept: one for each size that may lie between two values, and one for each doubling beyond the last of them.
Taking a point out makes the gap that is read across twice as wide as the gaps that readings are for; that is not corrected, so
intervals are rather too wide than too narrow where points are evenly spread.
"""

from collections.abc import Sequence
from math import log

import numpy as np
from msgspec import Struct

from squall.perf.tables.grid import Grid, Reading

CONFIDENCE = 0.9
NOISE = 0.01
"""The least spread: what repeated measurements of one point differ by on a GPU whose clock is not fixed."""

_SAMPLE = 400
_UNKNOWN = 0.3
"""The spread where too few points were measured to tell."""
_FEW = 5


class Spreads(Struct, frozen=True):
    """Relative half-widths of intervals that hold nine times in ten.

    Attributes:
        between: for each size, by depth, when it lies between two measured values.
        beyond: for each doubling outside them.
    """

    between: tuple[float, ...]
    beyond: float

    def of(self, reading: Reading) -> float:
        """Of one reading: errors of several sizes add up like independent ones."""
        squares = NOISE**2 + sum(self.between[depth] ** 2 for depth in reading.between)
        if reading.beyond:
            squares += (self.beyond * max(1.0, reading.beyond)) ** 2
        return float(squares**0.5)


def learn(grid: Grid, points: Sequence[tuple[tuple[float, ...], float]]) -> Spreads:
    """The spreads of a grid of these points."""
    depths = len(points[0][0])
    some = sample(points)
    between: list[float] = []
    beyond: list[float] = []
    for depth in range(depths):
        errors: list[float] = []
        for sizes, seconds in some:
            reading = grid.read(sizes, without=sizes, depth=depth)
            error = abs(log(reading.seconds / seconds))
            if reading.beyond:
                beyond.append(error / max(1.0, reading.beyond))
            elif reading.between:
                errors.append(error)
        between.append(_quantile(errors))
    return Spreads(tuple(between), _quantile(beyond))


def best_tile(grid: Grid, tiles: Sequence[int], points: Sequence[tuple[tuple[float, ...], float]]) -> Grid:
    """The grid with the one of some tiles with which it reads those points best that are taken out."""
    gaps = [(gap, seconds) for at, seconds in sample(points) if (gap := grid.around(at)) is not None]
    return grid.tiled(min(tiles, key=lambda tile: sum(abs(log(gap.seconds(tile) / seconds)) for gap, seconds in gaps)))


def sample(points: Sequence[tuple[tuple[float, ...], float]]) -> list[tuple[tuple[float, ...], float]]:
    """Some hundred of the points, evenly spread."""
    return [points[i] for i in sampled(len(points))]


def sampled(count: int) -> list[int]:
    """Which of so many points are looked at."""
    return [int(place) for place in np.linspace(0, count - 1, min(count, _SAMPLE))]


def _quantile(errors: Sequence[float]) -> float:
    return float(np.expm1(np.quantile(errors, CONFIDENCE))) if len(errors) >= _FEW else _UNKNOWN
