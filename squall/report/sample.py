"""Numbers about many numbers: exact percentiles of durations, also of weighted and of run-length coded ones.

Knows no request, no file and no unit other than that nanoseconds go in and seconds come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.core.metrics import Gaps
from squall.core.types import SECOND

Int64s = NDArray[np.int64]

PERCENTILES = (50, 90, 95, 99)


class Distribution(Struct, frozen=True):
    """What a report says of a sample, of durations in seconds. Percentiles interpolate linearly between the two nearest ranks."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Sample(Struct, frozen=True):
    """Durations in ascending order, the i-th seen `weights[i]` times (at least once). Nanoseconds."""

    values: Int64s
    weights: Int64s

    @classmethod
    def of(cls, values: Int64s, weights: Int64s | None = None) -> Sample:
        """The sample of these durations, in any order; each counts once unless `weights` says otherwise."""
        if weights is None:
            return cls(np.sort(values), np.ones(len(values), dtype=np.int64))
        seen = weights > 0
        order = np.argsort(values[seen])
        return cls(values[seen][order], weights[seen][order])

    def at(self, fractions: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """The quantiles at `fractions` (0 to 1), in nanoseconds: those of the sample written out in full. Not of an empty one."""
        ends = np.cumsum(self.weights)
        rank = (ends[-1] - 1) * np.asarray(fractions, dtype=np.float64)
        below = np.floor(rank).astype(np.int64)
        low = self.values[np.searchsorted(ends, below, side="right")]
        high = self.values[np.searchsorted(ends, np.minimum(below + 1, ends[-1] - 1), side="right")]
        quantiles: NDArray[np.float64] = low + (high - low) * (rank - below)
        return quantiles

    def nth(self, n: int) -> int | None:
        """The n-th smallest, counted from 1, in nanoseconds; None where there are not so many."""
        ends = np.cumsum(self.weights)
        return int(self.values[np.searchsorted(ends, n)]) if len(ends) and n <= ends[-1] else None

    def distribution(self, unit: int = SECOND) -> Distribution | None:
        """Mean, percentiles and maximum in seconds (`unit` 1: of counts, as they are); None of nothing."""
        if not len(self.values):
            return None
        mean = float(np.average(self.values, weights=self.weights))
        numbers = (mean, *self.at([p / 100 for p in PERCENTILES]), self.values[-1])
        return Distribution(*(round(float(n) / unit, 12) for n in numbers))


def sample_of_gaps(gaps: Gaps) -> Sample:
    """All gaps of all requests, pooled."""
    columns = (gaps.weight, gaps.count, gaps.first, gaps.increment)
    return sample_of_progressions(*(np.array(column, dtype=np.int64) for column in columns))


def sample_of_progressions(weight: Int64s, count: Int64s, first: Int64s, increment: Int64s) -> Sample:
    """`count[i]` durations of `first[i] + j * increment[i]` sixteenths of a nanosecond, each seen `weight[i]` times.

    A run whose durations are all alike stays one entry; the others are written out, eight bytes each, without a loop.
    """
    alike = increment == 0
    growing = ~alike
    lengths = count[growing]
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    values = (np.repeat(first[growing], lengths) + position * np.repeat(increment[growing], lengths)) >> 4
    return Sample.of(
        np.concatenate((first[alike] >> 4, values)),
        np.concatenate((weight[alike] * count[alike], np.repeat(weight[growing], lengths))),
    )
