"""How long a step takes: the interface that the simulator and the emulated engine price steps with.

Knows no requests and no clock; `progressions` adds up. Sources (roofline, profile, ...) implement `LatencyModel`; exact
integer arithmetic makes a run of k steps cost, to the nanosecond, what k single steps cost.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from squall.core.actions import Chunk
from squall.core.types import Nanos

UNITS_PER_NANO: Final = 16
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


class LatencyModel(Protocol):
    """Prices steps.

    Attributes:
        source: where the prices come from, for reports.
        num_stages: pipeline stages that a step passes, one after the other; 1 without a pipeline.
    """

    @property
    def source(self) -> str: ...

    @property
    def num_stages(self) -> int: ...

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """Prices of `steps` consecutive steps that start at `shape`, as progressions that count `steps` together.

        Over the run the decode context grows by `num_decodes` a step, and the one chunk's offset (there is at most one when
        steps > 1) by its `num_tokens`. `run(shape, k)` equals k calls with one step each, to the unit.
        """
        ...

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """How long one step keeps each stage busy, the first stage first; each at least 1.

        A stage but the last includes handing its result on. With one stage this is what `run(shape, 1)` says.
        """
        ...


def only_stage(progressions: Sequence[Progression]) -> tuple[Nanos, ...]:
    """`LatencyModel.stages` of a model with one stage, from what its `run(shape, 1)` says."""
    return (progressions[0].first // UNITS_PER_NANO,)
