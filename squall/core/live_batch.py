"""What passes from a live target to its source, and the bounds on how much of it there may be.

Knows no replica and no order of events: `live_scaling` and `live_source` do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence
from typing import TYPE_CHECKING, Final, NamedTuple

from squall.core.actions import Chunk, RunLayers
from squall.core.blocks import blocks_of
from squall.core.types import MILLISECOND, Nanos, RequestId

if TYPE_CHECKING:
    from squall.core.decodes import Work


class LiveLimits(NamedTuple):
    """How much a target takes on at once.

    Attributes:
        most_pending, least_pending, every: batches that it has begun to form: at first the most, one fewer after each `every`,
            but not fewer than the least (BlitzScale's flow control: 4, 2 and 200 ms).
        slots: batches whose activations it can keep, those on their way to the source counted.
    """

    most_pending: int = 4
    least_pending: int = 2
    every: Nanos = 200 * MILLISECOND
    slots: int = 16

    def pending(self, elapsed: Nanos) -> int:
        return max(self.least_pending, self.most_pending - elapsed // self.every)


LIMITS: Final = LiveLimits()
BATCH_TOKENS: Final = 2048
"""Prompt tokens of a batch under a policy that has no bound of its own."""


class Batch:
    """Some whole prompts that pass the layers together.

    Attributes:
        works: whose they are, in the order of the queue.
        done: layers that have run.
    """

    __slots__ = ("_chunks", "done", "id", "works")

    def __init__(self, id: int, works: list[Work]) -> None:
        self.id = id
        self.works = works
        self.done = 0
        self._chunks: tuple[Chunk, ...] = ()  # of `works`, which only ever get fewer

    @property
    def num_tokens(self) -> int:
        return sum(work.target for work in self.works)

    @property
    def requests(self) -> tuple[RequestId, ...]:
        return tuple(work.request.id for work in self.works)

    def run(self, to: int) -> RunLayers:
        """Its next layers, up to (not including) `to`."""
        if len(self._chunks) != len(self.works):
            self._chunks = tuple(Chunk(work.request.id, 0, work.target, 0, last=True) for work in self.works)
        return RunLayers(self.id, self.done, to, self._chunks)


def first_of(queue: deque[Work], most_tokens: int, blocks: int, block_size: int) -> list[Work]:
    """Out of the queue, its first prompts that fit a batch of so many tokens (a longer one is alone) and so many blocks."""
    works: list[Work] = []
    tokens = 0
    while queue:
        work = queue[0]
        blocks -= blocks_of(work.target, block_size)
        tokens += work.target
        if blocks < 0 or (works and tokens > most_tokens):
            break
        work.hashes = ()  # KV that comes in halves is not shared
        works.append(queue.popleft())
    return works


def without(queues: Iterable[MutableSequence[Work]], request: RequestId) -> Work | None:
    """Out of whichever of the queues it is in; None where it is in none."""
    for queue in queues:
        for work in queue:
            if work.request.id == request:
                queue.remove(work)
                return work
    return None
