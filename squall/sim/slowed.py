"""A replica that is slower than its hardware: a straggler. The same prices, so many times."""

from squall.core.types import Nanos
from squall.perf.latency import BatchShape, LatencyModel, Progression


class Slowed:
    """Satisfies `LatencyModel`: every step takes `times` as long, a whole number, so that runs still equal their single steps."""

    def __init__(self, latency: LatencyModel, times: int) -> None:
        self._latency = latency
        self._times = times

    @property
    def source(self) -> str:
        return self._latency.source

    @property
    def num_stages(self) -> int:
        return self._latency.num_stages

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        times = self._times
        return [Progression(p.count, p.first * times, p.increment * times) for p in self._latency.run(shape, steps)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        return tuple(busy * self._times for busy in self._latency.stages(shape))
