"""How long a step takes: the interface that the simulator and the emulated engine price steps with.

Knows no requests and no clock. Sources (roofline, profile, ...) implement `LatencyModel`; exact integer arithmetic makes a
run of k steps cost, to the nanosecond, what k single steps cost.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import isqrt
from typing import Protocol

from msgspec import Struct

from squall.core.actions import Chunk
from squall.core.types import Nanos

UNITS_PER_NANO = 16
"""Prices progress in sixteenths of a nanosecond, fine enough for one context token's share of a fast GPU."""


class BatchShape(Protocol):
    """What a latency model may read of a step: `core.actions.RunSteps` satisfies it."""

    @property
    def num_decodes(self) -> int: ...
    @property
    def decode_context(self) -> int: ...
    @property
    def chunks(self) -> Sequence[Chunk]: ...


class Progression(Struct, frozen=True, gc=False):
    """`count` steps; step j (0-based) lasts `(first + j * increment) // 16` nanoseconds, at least 1.

    `first >= 16` and `increment >= 0`, in sixteenths of a nanosecond.
    """

    count: int
    first: int
    increment: int


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
    if not increment:
        return count * (first >> 4)
    lost = _LOST[first & 15][increment & 15]
    exact = count * first + increment * (count * (count - 1) >> 1) - lost[count & 15]
    return (exact if count < UNITS_PER_NANO else exact - (count >> 4) * lost[UNITS_PER_NANO]) >> 4


def steps_until(progression: Progression, elapsed: Nanos) -> int:
    """The first step, counted from 1, that ends strictly after `elapsed`; at most `count`."""
    # Without rounding, j steps last (increment * j^2 + (2 * first - increment) * j) / 32; rounding takes less than 1 ns a step.
    high = progression.count
    first = progression.first
    increment = progression.increment
    if increment:
        b = 2 * first - increment
        low = (isqrt(b * b + 128 * increment * elapsed) - b) // (2 * increment)
    else:
        low = elapsed // (first >> 4)
    if low >= high:
        low = high - 1
    while low and total(progression, low) > elapsed:
        low -= 1
    if low + 1 == high or total(progression, low + 1) > elapsed:
        return low + 1
    while high - low > 1:
        middle = (low + high) // 2
        if total(progression, middle) > elapsed:
            high = middle
        else:
            low = middle
    return high


class LatencyModel(Protocol):
    """Prices steps.

    Attributes:
        source: where the prices come from, for reports.
    """

    @property
    def source(self) -> str: ...

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """Prices of `steps` consecutive steps that start at `shape`, as progressions that count `steps` together.

        Over the run the decode context grows by `num_decodes` a step, and the one chunk's offset (there is at most one when
        steps > 1) by its `num_tokens`. `run(shape, k)` equals k calls with one step each, to the unit.
        """
        ...
