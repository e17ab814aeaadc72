"""Sums over a `Progression`: how long its first steps last together, and which step is on at an instant. Exact, in closed form.

Knows no model, no batch and no clock.
"""

from itertools import accumulate
from math import isqrt

from squall.core.types import Nanos
from squall.perf.latency import UNITS_PER_NANO, Progression

_LOST = tuple(
    tuple(
        (0, *accumulate((first + j * increment) % UNITS_PER_NANO for j in range(UNITS_PER_NANO)))
        for increment in range(UNITS_PER_NANO)
    )
    for first in range(UNITS_PER_NANO)
)
"""What rounding down takes from the first 0 to 16 steps, by first and increment modulo 16; it repeats every 16 steps."""


def total(progression: Progression, count: int) -> Nanos:
    """How long the first `count` steps last together: exactly the sum of the single, rounded steps."""
    first = progression.first
    increment = progression.increment
    exact = count * first + increment * (count * (count - 1) >> 1)
    lost = _LOST[first & 15][increment & 15]
    if count <= UNITS_PER_NANO:
        return (exact - lost[count]) >> 4
    return (exact - lost[count & 15] - (count >> 4) * lost[UNITS_PER_NANO]) >> 4


def steps_until(progression: Progression, elapsed: Nanos) -> tuple[int, Nanos]:
    """The first step, counted from 1, that ends strictly after `elapsed`, at most `count`; and how long it and those before it
    last together."""
    # Without rounding, j steps last (increment * j^2 + (2 * first - increment) * j) / 32. Rounding takes less than 1 ns a step:
    # it is the next step, or where steps are many and short one soon after it.
    high = progression.count
    first = progression.first
    increment = progression.increment
    if increment:
        b = 2 * first - increment
        low = (isqrt(b * b + 128 * increment * elapsed) - b) // (2 * increment)
    else:
        low = elapsed // (first >> 4)
    if low + 1 < high:
        low += 1
        lasting = total(progression, low)
        if lasting > elapsed:
            return low, lasting
        while high - low > 1:
            middle = (low + high) // 2
            if total(progression, middle) > elapsed:
                high = middle
            else:
                low = middle
    return high, total(progression, high)
