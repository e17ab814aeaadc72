"""The measured rows of one operator, ready to be asked: for each kind a grid of points, its trend and its spreads.

Knows no file. What is asked of a kind that was not measured (another head size, window or cache type) is read off the nearest
kind, in proportion to what the law of the operator says of both, and called extrapolated.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from squall.perf.operators import Estimate, Provenance
from squall.perf.tables.grid import Grid
from squall.perf.tables.operations import Array, Operation, Sizes
from squall.perf.tables.spread import NOISE, Spreads, best_tile, learn, sampled
from squall.perf.tables.trend import Trend, fit_trend

Kind = tuple[Any, ...]

_TILES = (0, 16, 32, 64, 128, 256)
"""Rows of a block of a matrix product, as kernels for GPUs choose them."""


class Curve:
    """Rows of one kind.

    Args:
        operation: which operator.
        kind: the values that all rows share.
        rows: with the columns of its sizes, and `seconds`.
    """

    def __init__(self, operation: Operation, kind: Kind, rows: pl.DataFrame) -> None:
        self.operation = operation
        self.kind = kind
        self._rows = rows

    @cached_property
    def trend(self) -> Trend:
        sizes: Sizes = {name: self._rows[name].to_numpy().astype(float) for name in self.operation.sizes}
        return fit_trend(self.operation, self._named() | sizes, self._rows["seconds"].to_numpy())

    @cached_property
    def grid(self) -> Grid:
        sizes, seconds = self._arrays
        grid = Grid.of(sizes, seconds, self.trend.along(self._named()))
        return best_tile(grid, _TILES, self._some) if self.operation.tiled else grid

    @cached_property
    def spreads(self) -> Spreads:
        return learn(self.grid, self._some)

    @cached_property
    def points(self) -> list[tuple[tuple[float, ...], float]]:
        sizes, seconds = self._arrays
        return list(zip(map(tuple, sizes.tolist()), seconds.tolist(), strict=True))

    @cached_property
    def _arrays(self) -> tuple[Array, Array]:
        """Sizes [points, sizes] and seconds [points]."""
        columns = [self._rows[name].to_numpy().astype(float) for name in self.operation.sizes]
        return np.stack(columns, axis=1), self._rows["seconds"].to_numpy()

    @cached_property
    def _some(self) -> list[tuple[tuple[float, ...], float]]:
        """The points that tiles and spreads are learned from."""
        sizes, seconds = self._arrays
        at = sampled(len(seconds))
        return list(zip(map(tuple, sizes[at].tolist()), seconds[at].tolist(), strict=True))

    def most(self, column: str) -> float:
        """The largest value of a size that was measured."""
        return float(np.max(self._rows[column].to_numpy()))

    def at(self, sizes: Sequence[float]) -> Sizes:
        """A row's kinds and sizes, by name."""
        return self._named() | dict(zip(self.operation.sizes, sizes, strict=True))

    def estimate(self, sizes: Sequence[float]) -> Estimate:
        """The time at these sizes, in the order of the operation."""
        reading = self.grid.read(sizes)
        if reading.beyond:
            provenance = Provenance.EXTRAPOLATED
        else:
            provenance = Provenance.INTERPOLATED if reading.between else Provenance.MEASURED
        if provenance is Provenance.MEASURED:
            return Estimate(reading.seconds, provenance, NOISE)
        return Estimate(reading.seconds, provenance, lambda: self.spreads.of(reading))

    def _named(self) -> Sizes:
        return dict(zip(self.operation.kinds, self.kind, strict=True))


class OperatorTable:
    """All kinds of one operator.

    Args:
        operation: which.
        rows: with the operation's columns and `seconds`; checked (see `checks`).
        curve: what is made of the rows of a kind.
    """

    def __init__(self, operation: Operation, rows: pl.DataFrame, curve: type[Curve] = Curve) -> None:
        self.operation = operation
        parts = rows.partition_by(operation.kinds, as_dict=True) if operation.kinds else {(): rows}
        self.curves: dict[Kind, Curve] = {kind: curve(operation, kind, part) for kind, part in parts.items()}

    def estimate(self, kind: Kind, sizes: Sequence[float]) -> Estimate | None:
        """The time of an operator of exactly this kind; None where none was measured."""
        curve = self.curves.get(kind)
        return None if curve is None else curve.estimate(sizes)

    def near(self, kind: Kind, loose: Sequence[str]) -> Curve | None:
        """The curve of this kind, or of the nearest that differs in the `loose` columns only."""
        exact = self.curves.get(kind)
        if exact is not None:
            return exact
        held = [i for i, name in enumerate(self.operation.kinds) if name not in loose]
        candidates = [curve for other, curve in self.curves.items() if all(other[i] == kind[i] for i in held)]
        return min(candidates, key=lambda curve: _distance(curve.kind, kind), default=None)

    def like(self, curve: Curve, kind: Kind, sizes: Sequence[float]) -> Estimate:
        """The time of `kind` from a curve of another one."""
        estimate = curve.estimate(sizes)
        if curve.kind == kind:
            return estimate
        asked = dict(zip(self.operation.kinds, kind, strict=True)) | dict(zip(self.operation.sizes, sizes, strict=True))
        share = curve.trend.seconds(asked) / curve.trend.seconds(curve.at(sizes))
        return Estimate(estimate.seconds * share, Provenance.EXTRAPOLATED, lambda: estimate.spread + _ANOTHER_KIND)


_ANOTHER_KIND = 0.15
"""Added to the spread of a time that was read off another kind: what windows and head sizes of the public tables differ by."""


def _distance(kind: Kind, other: Kind) -> float:
    """How unlike two kinds are: numbers by their ratio (no window, 0, is far from any), words by being another."""
    distance = 0.0
    for a, b in zip(kind, other, strict=True):
        if a != b:
            numbers = isinstance(a, int | float) and isinstance(b, int | float)
            distance += abs(float(np.log((a or 1 << 20) / (b or 1 << 20)))) if numbers else 5.0
    return distance
