"""A latency model that is off by a factor: what if all steps took so much longer? Knows nothing of the model it stretches."""

from __future__ import annotations

from msgspec import Struct

from squall.core.types import Nanos
from squall.perf.latency import UNITS_PER_NANO, BatchShape, LatencyModel, Progression, only_stage

_PARTS = 1000


class Scaled(Struct, frozen=True):
    """`latency` with all prices multiplied by `factor`, to a thousandth."""

    latency: LatencyModel
    factor: float

    @property
    def source(self) -> str:
        return f"{self.latency.source} x {self.factor:g}"

    @property
    def num_stages(self) -> int:
        return self.latency.num_stages

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`; increments are rounded on their own, so unlike in a source of prices a run of k steps may
        differ from k single ones, by up to a sixteenth of a nanosecond a step."""
        return [
            Progression(part.count, max(UNITS_PER_NANO, self._times(part.first)), self._times(part.increment))
            for part in self.latency.run(shape, steps)
        ]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        if self.num_stages == 1:
            return only_stage(self.run(shape, 1))
        return tuple(max(1, self._times(nanos)) for nanos in self.latency.stages(shape))

    def _times(self, units: int) -> int:
        return units * round(self.factor * _PARTS) // _PARTS
