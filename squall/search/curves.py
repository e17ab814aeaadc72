"""What a finished simulation says of every metric, at all quantiles: enough to ask about other limits without running again.

A quantile here is the smallest value that at least such a share keeps (nearest rank), the same sense in which limits are
checked. Requests that never got there count as infinitely late. Knows no limits.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.core.metrics import UNSET, RunRecord
from squall.report.sample import sample_of_gaps
from squall.report.summary import Lives

FRACTIONS = (*(i / 100 for i in range(1, 100)), 0.995, 0.999, 1.0)
"""Where curves are kept."""

NEVER = -1.0
"""Stands for infinitely late, which JSON cannot say."""

Curve = tuple[float, ...]
"""Seconds at each of `FRACTIONS`, rounded up to six digits; empty where there is nothing to measure."""


class Curves(Struct, frozen=True):
    """One curve a metric."""

    ttft: Curve
    tbt: Curve
    tpot: Curve
    e2e: Curve
    queue: Curve

    def at(self, metric: str, quantile: float) -> float | None:
        """An upper bound of a quantile in seconds, the exact value where it is one of `FRACTIONS`; infinite where requests
        never got there, None where there is nothing to measure."""
        curve: Curve = getattr(self, metric)
        if not curve:
            return None
        value = curve[next(place for place, fraction in enumerate(FRACTIONS) if fraction >= quantile - 1e-9)]
        return math.inf if value == NEVER else value


def curves(record: RunRecord, warm_up: int, num_gaps: int) -> Curves:
    """The curves of a run, of the requests after the first `warm_up`, and of all gaps, of which there should be `num_gaps`."""
    rows = record.requests[warm_up:]
    lives = Lives.of(rows)
    never = np.iinfo(np.int64).max

    def since_arrival(at: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(at == UNSET, never, at - lives.arrived_at)

    finished = np.where(lives.completed, lives.finished_at, UNSET)
    several = ~lives.completed | (lives.num_output_tokens > 1)
    each = np.where(
        lives.completed, (lives.finished_at - lives.first_token_at) / np.maximum(lives.num_output_tokens - 1, 1), float(never)
    )
    gaps = sample_of_gaps(record.gaps)
    return Curves(
        ttft=_curve(since_arrival(np.where(lives.completed, lives.first_token_at, UNSET))),
        tbt=_of_gaps(gaps.values, gaps.weights, num_gaps),
        tpot=_curve(np.ceil(each[several])),
        e2e=_curve(since_arrival(finished)),
        queue=_curve(since_arrival(np.where(lives.completed, lives.scheduled_at, UNSET))),
    )


def _curve(values: NDArray[np.int64] | NDArray[np.float64]) -> Curve:
    if not len(values):
        return ()
    ordered = np.sort(values)
    return tuple(_seconds(float(ordered[max(0, math.ceil(fraction * len(ordered) - 1e-9) - 1)])) for fraction in FRACTIONS)


def _of_gaps(values: NDArray[np.int64], weights: NDArray[np.int64], total: int) -> Curve:
    """Gaps that should be there and are not come last."""
    if not total:
        return ()
    ends = np.cumsum(weights)
    places = [int(np.searchsorted(ends, math.ceil(fraction * total - 1e-9))) for fraction in FRACTIONS]
    return tuple(_seconds(float(values[place])) if place < len(values) else NEVER for place in places)


def _seconds(nanos: float) -> float:
    """Rounded up, so that what is kept is never rosier than what was."""
    if nanos >= np.iinfo(np.int64).max:
        return NEVER
    return math.ceil(nanos / 1000) / 1e6
