"""From the prices of kinds of work to exact prices of steps: the one place where seconds become integers.

Knows no model and no hardware; `roofline` and `profile` say what work costs. Why a run of k steps is one arithmetic
progression, to the unit: over a run the decodes' context grows by the number of decodes a step and the chunk's offset by the
chunk's length, nothing else changes; and both enter the price multiplied by a whole number of units (sixteenths of a
nanosecond). Rounding those two factors costs at most 1/32 ns a context token.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

from squall.core.types import Nanos
from squall.perf.latency import UNITS_PER_NANO, BatchShape, Progression, only_stage

UNITS_PER_SECOND = UNITS_PER_NANO * 1_000_000_000


class Work(Protocol):
    """What each kind of work in a step costs, in seconds. No price falls when there is more work."""

    def step_s(self) -> float:
        """Whatever is in the step, once."""
        ...

    def tokens_s(self, tokens: int) -> float:
        """What every computed token passes: matrices, norms, communication. `tokens` is at least 1."""
        ...

    def logits_s(self, rows: int) -> float:
        """Head and sampling for `rows` tokens; 0 for none."""
        ...

    def context_s(self) -> float:
        """One decode's attention to one token of its context."""
        ...

    def chunk_s(self, tokens: int) -> tuple[float, float]:
        """A prefill chunk's attention: to itself, and to each token before it."""
        ...


def _units(seconds: float) -> int:
    return int(seconds * UNITS_PER_SECOND + 0.5)


class StepPrices:
    """A `LatencyModel` made of prices of work; each price is computed once."""

    def __init__(self, source: str, work: Work) -> None:
        self.source = source
        self.num_stages = 1
        self._context = _units(work.context_s())
        step = work.step_s()
        self._tokens: Callable[[int], int] = cache(lambda tokens: max(UNITS_PER_NANO, _units(step + work.tokens_s(tokens))))
        self._logits: Callable[[int], int] = cache(lambda rows: _units(work.logits_s(rows)) if rows else 0)
        self._decodes: Callable[[int], int] = cache(lambda decodes: self._tokens(decodes) + self._logits(decodes))
        self._chunk: Callable[[int], tuple[int, int]] = cache(lambda tokens: _pair(work.chunk_s(tokens)))

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`. Always a single progression."""
        decodes = shape.num_decodes
        chunks = shape.chunks
        growth = self._context * decodes
        if not chunks:
            return [Progression(steps, self._decodes(decodes) + self._context * shape.decode_context, growth)]
        tokens = rows = decodes
        price = self._context * shape.decode_context
        for chunk in chunks:
            own, each_before = self._chunk(chunk.num_tokens)
            price += own + each_before * chunk.offset
            tokens += chunk.num_tokens
            rows += chunk.last
        if steps > 1:  # one chunk, whose offset advances by its length
            growth += each_before * chunk.num_tokens
        return [Progression(steps, price + self._tokens(tokens) + self._logits(rows), growth)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        return only_stage(self.run(shape, 1))


def _pair(seconds: tuple[float, float]) -> tuple[int, int]:
    own, each_before = seconds
    return _units(own), _units(each_before)
