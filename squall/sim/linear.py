"""The simplest latency model: a step costs so much, and so much a token. For theory, tests and thought experiments.

Knows no hardware; `perf.roofline` and measured profiles do.
"""

from msgspec import Struct

from squall.core.types import Nanos
from squall.perf.latency import UNITS_PER_NANO, BatchShape, Progression


class Linear(Struct, frozen=True):
    """Coefficients in sixteenths of a nanosecond, so that prices are exact.

    Attributes:
        fixed: of every step; at least 16.
        token: of every token that a step computes.
        context: of every token that a decode attends to.
        work: of every pair of a chunk's token and a token before it, counted twice.
        shares: how a step's price is shared between pipeline stages, each of which takes at least a nanosecond.
    """

    fixed: int
    token: int = 0
    context: int = 0
    work: int = 0
    shares: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.fixed < UNITS_PER_NANO:
            raise ValueError(f"fixed must be at least {UNITS_PER_NANO} (one nanosecond), not {self.fixed}")

    @property
    def source(self) -> str:
        return "linear"

    @property
    def num_stages(self) -> int:
        return len(self.shares)

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        tokens = shape.num_decodes
        work = growth = 0
        for chunk in shape.chunks:
            tokens += chunk.num_tokens
            work += chunk.num_tokens * (2 * chunk.offset + chunk.num_tokens)
            growth += 2 * chunk.num_tokens * chunk.num_tokens
        first = self.fixed + self.token * tokens + self.context * shape.decode_context + self.work * work
        return [Progression(steps, first, self.context * shape.num_decodes + self.work * growth)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        price = self.run(shape, 1)[0].first // UNITS_PER_NANO
        parts = sum(self.shares)
        return tuple(max(1, price * share // parts) for share in self.shares)
