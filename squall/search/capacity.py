"""The highest rate that passes, on a grid of rates that is the same for everything: by doubling steps, then by halving them.

The grid makes the answer independent of where the search began: the last rate that passes before one that does not. Rates are
whole numbers here, places on the grid. Knows no simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SLOWEST_RPS = 1e-4
"""Place 0 of the grid."""

FIRST_STEP = 8


def rate_at(place: int, tolerance: float) -> float:
    """Requests a second."""
    return SLOWEST_RPS * (1 + tolerance) ** place


def place_below(rate_rps: float, tolerance: float) -> int:
    """The last place whose rate is not above this one; -1 where there is none."""
    if rate_rps < SLOWEST_RPS:
        return -1
    return math.floor(math.log(rate_rps / SLOWEST_RPS) / math.log1p(tolerance) + 1e-9)


def highest(passes: Callable[[int], bool], start: int, low: int, high: int) -> int | None:
    """The highest place in [low, high] at which `passes`, which holds up to somewhere and not beyond; None where `low` fails.

    Args:
        start: where to begin, the likelier the better.
    """
    if low > high:
        return None
    start = min(max(start, low), high)
    step = FIRST_STEP
    if passes(start):
        good, bad = start, high + 1
        while good < high:
            ahead = min(good + step, high)
            if not passes(ahead):
                bad = ahead
                break
            good, step = ahead, 2 * step
    else:
        good, bad = low - 1, start
        while bad > low:
            behind = max(bad - step, low)
            if passes(behind):
                good = behind
                break
            bad, step = behind, 2 * step
        if good < low:
            return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return good
