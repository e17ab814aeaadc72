"""The highest rate that passes, on a grid of rates that is the same for everything: by doubling steps, then by halving them.

Rates are whole numbers here, places on the grid. The answer is a rate that passes, of which the next one fails. Between two
rates, the one at the multiple of the highest power of two is looked at first, wherever the search began: where by chance a higher
rate passes and a lower one fails, searches from different places still look at the same rates and say the same. Knows no
simulation.
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
    start = min(max(start - start % FIRST_STEP, low), high)
    step = FIRST_STEP
    if passes(start):
        good, bad = start, high + 1
        while good < high:
            ahead = min(good - good % FIRST_STEP + step, high)
            if not passes(ahead):
                bad = ahead
                break
            good, step = ahead, 2 * step
    else:
        good, bad = low - 1, start
        while bad > low:
            behind = max(bad - bad % FIRST_STEP - step, low)
            if passes(behind):
                good = behind
                break
            bad, step = behind, 2 * step
        if good < low:
            return None
    while bad - good > 1:
        middle = between(good, bad)
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return good


def between(low: int, high: int) -> int:
    """The place above `low` and below `high` that the highest power of two divides; there is one where they are two apart."""
    power = (low ^ (high - 1)).bit_length() - 1
    return (high - 1) >> power << power
