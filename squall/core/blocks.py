"""A replica's KV blocks, by count, and the prefix cache over them.

Knows how many blocks are free, which hashes are held and which of those nobody uses. Does not know requests, and does not
know block ids: the engine owns the physical blocks and follows the same rules.

A block is in one of three states: free; private to one request; or cached under a hash, used by as many requests as its count
says. A cached block that nobody uses is idle: it counts as available, and the one idle for longest is evicted first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from squall.core.types import BlockHash

EVICTED_AT_ONCE: Final = 64
"""A run is bounded so that it evicts no more blocks than this (or one step's), since it must name them beforehand."""


class BlockPool:
    """Counts of blocks.

    Args:
        num_blocks: blocks in all.

    Attributes:
        num_blocks: as given.
        num_available: blocks that may be taken: the free and the idle ones.
        idle: the cached blocks that nobody uses, in the order of eviction.
    """

    __slots__ = ("_uses", "idle", "num_available", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        self._uses: dict[BlockHash, int] = {}
        self.idle: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.num_available - len(self.idle)

    def take(self, count: int) -> None:
        """Make `count` blocks private: free ones first, then evicted ones. There must be as many available."""
        self.num_available -= count
        while self.idle and len(self.idle) > self.num_available:
            evicted, _ = self.idle.popitem(last=False)
            del self._uses[evicted]

    def oldest(self, count: int) -> tuple[BlockHash, ...]:
        """The `count` idle blocks that would be evicted first, in this order."""
        return tuple(islice(self.idle, count))

    def match(self, hashes: Sequence[BlockHash], limit: int) -> tuple[int, int]:
        """How many of the first `limit` hashes are held without a gap, and how many of those are in use already."""
        uses = self._uses
        held = in_use = 0
        for block in islice(hashes, limit):
            count = uses.get(block)
            if count is None:
                break
            held += 1
            if count:
                in_use += 1
        return held, in_use

    def use(self, hashes: Iterable[BlockHash]) -> None:
        """One more user for each of these held blocks."""
        uses = self._uses
        for block in hashes:
            count = uses[block]
            if not count:
                del self.idle[block]
                self.num_available -= 1
            uses[block] = count + 1

    def share(self, hashes: Iterable[BlockHash]) -> tuple[BlockHash, ...]:
        """Turn private blocks into cached ones with one user, and return them; one whose hash is held already stays private."""
        shared = {block: 1 for block in hashes if block not in self._uses}
        self._uses.update(shared)
        return tuple(shared)

    def release(self, num_blocks: int, shared: Sequence[BlockHash]) -> None:
        """One user gives back its `num_blocks` blocks, of which those in `shared` are cached.

        The tail of a chain is useless without its head, so it becomes idle (and is evicted) first.
        """
        self.num_available += num_blocks
        if not shared:
            return
        self.num_available -= len(shared)
        uses = self._uses
        for block in reversed(shared):
            count = uses[block] - 1
            uses[block] = count
            if not count:
                self.idle[block] = None
                self.num_available += 1
