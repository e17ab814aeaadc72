"""A grid of step shapes, and how to make an engine run them: prompts that arrive one by one and then decode together.

Knows how to ask an engine for a step of a shape and how to time it. Does not know what makes a step long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from msgspec import Struct

from squall.core.actions import Chunk, RunSteps
from squall.core.types import SECOND, RequestId
from squall.live.engine.interface import Engine, Job, Sampling
from squall.perf.profile import Point

DECODE_STEPS = 9
"""Steps timed for each decode shape: enough for a median, few enough for a slow machine."""

NO_CHUNK = Chunk(0, 0, 0, 0, False)


class Stage(Struct, frozen=True):
    """One part of the sweep: prompts of one length come one after the other and then decode together.

    Attributes:
        prompt: tokens of each prompt.
        chunk: in pieces of so many tokens, beside the decodes of the prompts that came before.
        batches: how many decode when decode steps are timed.
    """

    prompt: int
    chunk: int
    batches: tuple[int, ...] = ()

    def num_points(self) -> int:
        return max(self.batches, default=1) * -(-self.prompt // self.chunk) + len(self.batches)

    def fits(self, engine: Engine) -> bool:
        """No context gets too long for the engine, and all of them fit into its KV pool."""
        longest = self.prompt + self.num_points() + len(self.batches) * DECODE_STEPS
        blocks = max(self.batches, default=1) * (longest // engine.block_size + 1)
        return longest < engine.max_model_len and blocks <= engine.num_blocks


SWEEP = (
    Stage(prompt=64, chunk=64, batches=(1,)),
    Stage(prompt=256, chunk=256),
    Stage(prompt=16, chunk=16),
    Stage(prompt=128, chunk=128),
    Stage(prompt=32, chunk=32),
    Stage(prompt=64, chunk=64, batches=(1, 2, 3, 4, 6, 8, 11, 14, 16)),
    Stage(prompt=512, chunk=128),
    Stage(prompt=512, chunk=512),
    Stage(prompt=256, chunk=128, batches=(1, 2, 4, 8, 12, 16)),
    Stage(prompt=1024, chunk=256, batches=(1, 2, 4)),
    Stage(prompt=8, chunk=8, batches=(1, 4, 23, 32)),
    Stage(prompt=256, chunk=32),
    Stage(prompt=190, chunk=190),
    Stage(prompt=45, chunk=45),
    Stage(prompt=4096, chunk=1024, batches=(1, 4, 16)),
    Stage(prompt=2048, chunk=2048, batches=(1, 32)),
    Stage(prompt=128, chunk=128, batches=(64, 100, 128, 190, 256)),
)
"""The commonest shapes first: a sweep that runs out of time has measured what matters most. The last ones are for GPUs.

Powers of two are what kernels are best at; what is served is seldom one.
"""


def sweep(
    engine: Engine, stages: Sequence[Stage] = SWEEP, clock: Callable[[], int] = lambda: time.perf_counter_ns()
) -> Iterator[Point]:
    """Measure shape by shape, by a clock of nanoseconds; stages that do not fit into the engine are left out. May be closed at
    any point."""
    hands = _Hands(engine, clock)
    for stage in stages:
        if stage.fits(engine):
            try:
                yield from hands.measure(stage)
            finally:
                hands.forget()


class _Hands:
    """What moves an engine: counts runs and requests, and remembers how long the context of each request is."""

    def __init__(self, engine: Engine, clock: Callable[[], int]) -> None:
        self._engine = engine
        self._clock = clock
        self._run = 0
        self._request: RequestId = 0
        self._contexts: dict[RequestId, int] = {}

    def measure(self, stage: Stage) -> Iterator[Point]:
        for count in range(1, max(stage.batches, default=1) + 1):
            yield from self._prefill(stage)
            if count in stage.batches:
                yield self._timed(DECODE_STEPS, NO_CHUNK)

    def forget(self) -> None:
        """Free what the engine holds of us."""
        self._engine.forget(range(1, self._request + 1))
        self._contexts.clear()

    def _prefill(self, stage: Stage) -> Iterator[Point]:
        """One more prompt, piece by piece, beside those that decode already."""
        self._request += 1
        # token ids that every vocabulary has, different in each prompt
        prompt = tuple(100 + (self._request * 7919 + i * 31) % 97 for i in range(stage.prompt))
        self._engine.add(Job(self._request, prompt, Sampling(max_tokens=1 << 20, temperature=0, ignore_eos=True)))
        for offset in range(0, stage.prompt, stage.chunk):
            size = min(stage.chunk, stage.prompt - offset)
            yield self._timed(1, Chunk(self._request, offset, size, num_cached=0, last=offset + size == stage.prompt))
        self._contexts[self._request] = stage.prompt

    def _timed(self, steps: int, chunk: Chunk) -> Point:
        """Run `steps` steps; the median of their times, at the context of the middle one."""
        self._run += 1
        decodes = len(self._contexts)
        context = sum(self._contexts.values()) + decodes
        chunks = (chunk,) if chunk.num_tokens else ()
        ends = [self._clock()]
        self._engine.run(RunSteps(self._run, steps, decodes, context, chunks), lambda _: ends.append(self._clock()))
        if steps == 1:  # a piece of a prompt yields no token, so nothing was emitted
            ends[1:] = [self._clock()]
        for request in self._contexts:
            self._contexts[request] += steps
        took = median(after - before for before, after in pairwise(ends)) / SECOND
        return Point(decodes, context + decodes * (steps // 2), chunk.num_tokens, chunk.offset, chunk.last, took)
