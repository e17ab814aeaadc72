"""How many steps a run may have: as many as its plan asks for, but no more than there are blocks for, and than the plan holds.

Knows what a run's decodes and chunks take, step by step. Knows no policy and no queue. `group` is the decodes that take part,
None where they pause; `batch` the run's chunks.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from squall.core.blocks import EVICTED_AT_ONCE, BlockPool
from squall.core.decodes import DecodeGroup, Work
from squall.core.types import BlockHash
from squall.core.views import WorkView

Piece = tuple[Work, int, int]
"""Of a prompt: whose, its tokens in each step of a run, and the blocks that the request holds after the first."""


def need(group: DecodeGroup | None, batch: Sequence[Piece], block_size: int, steps: int) -> int:
    """Blocks that the run takes in `steps` steps."""
    blocks = 0 if group is None else group.blocks(steps)
    for work, tokens, _ in batch:
        blocks += work.new_blocks(tokens * steps, block_size)
    return blocks


def within(group: DecodeGroup | None, batch: Sequence[Piece], block_size: int, steps: int, blocks: int) -> tuple[int, int]:
    """The most steps, at least 1 and at most `steps`, that take no more than `blocks`; and how many they take."""
    if not batch:
        if group is None:
            return steps, 0
        steps = group.steps_within(blocks, steps) or 1
        return steps, group.blocks(steps)
    taken = need(group, batch, block_size, steps)
    if taken <= blocks:
        return steps, taken
    low, high = 1, max(1, steps)
    while high - low > 1:
        middle = (low + high) // 2
        if need(group, batch, block_size, middle) <= blocks:
            low = middle
        else:
            high = middle
    return low, need(group, batch, block_size, low)


def within_cache(
    pool: BlockPool,
    group: DecodeGroup | None,
    batch: Sequence[Piece],
    block_size: int,
    steps: int,
    keep: int,
    looked_at: Mapping[WorkView, int],
) -> tuple[int, tuple[BlockHash, ...]]:
    """As `within`, for several steps and where blocks may be evicted, but no further than the plan surely holds; and what may be
    evicted.

    Args:
        keep: idle blocks that the plan wants to stay.
        looked_at: who waits and was asked for, and how many blocks of its prompt are cached: the plan rests on these.
    """
    idle = len(pool.idle)
    free = pool.num_available - idle
    most = idle - keep
    if most > EVICTED_AT_ONCE and not batch:
        most = EVICTED_AT_ONCE
    steps, taken = within(group, batch, block_size, steps, free + most)
    if taken <= free:
        return steps, ()
    evicted = pool.oldest(taken - free)
    if steps > 1 and (batch or looked_at):
        # Who waits would have these blocks, and who computes one that is cached keeps it private: so until the first is evicted.
        watched: set[BlockHash] = set()
        is_idle = pool.idle.__contains__
        for waiting, held in looked_at.items():
            watched.update(filter(is_idle, islice(waiting.hashes, held)))
        for work, _, _ in batch:
            watched.update(filter(is_idle, islice(work.hashes, work.computed // block_size, None)))
        if not watched.isdisjoint(evicted):
            first = next(i for i, block in enumerate(evicted) if block in watched)
            steps, taken = within(group, batch, block_size, steps, free + first)
            return steps, pool.oldest(max(0, taken - free))
    return steps, evicted
