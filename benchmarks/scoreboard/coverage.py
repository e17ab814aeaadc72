"""How often a whole step, as it was measured, lies inside the interval that is told for it.

Two ways to add up the operators' intervals: as if all erred in the same direction, which is what `squall latency` tells, and
as if each erred by itself (the root of the sum of squares).
"""

from collections.abc import Sequence
from math import log, log1p

import numpy as np

from benchmarks.scoreboard.rows import Row
from squall.perf.composed import Composed, interval_of
from squall.perf.latency import BatchShape

Inside = tuple[bool, bool]
"""Whether a measurement lies inside: all in the same direction, each by itself."""


def inside(model: Composed, shape: BatchShape, share: float) -> Inside:
    """Of a step that was told to take `share` times as long as it was measured to."""
    lines = model.explain(shape)
    middle, low, high = interval_of(lines)
    alone = sum((line.seconds / middle * log1p(line.spread)) ** 2 for line in lines) ** 0.5
    return middle / high <= share <= middle / low, abs(log(share)) <= alone


def rows(key: str, metric: str, setup: str, found: Sequence[Inside]) -> list[Row]:
    """The lines: both ways."""
    together, alone = (100 * float(np.mean([each[index] for each in found])) for index in (0, 1))
    return [
        Row(f"{key}.coverage", metric, f"{setup}; errors in the same direction", len(found), together, 88.0, "% inside"),
        Row(f"{key}.coverage.alone", metric, f"{setup}; errors by themselves", len(found), alone, None, "% inside"),
    ]
