"""A replica's KV blocks, by count, and the prefix cache over them.

Knows how many blocks are free, which hashes are held and which of those nobody uses. Does not know requests, and does not
know block ids: the engine owns the physical blocks and follows the same rules.

A block is in one of three states: free; private to one request; or cached under a hash, used by as many requests as its count
says. A cached block that nobody uses is idle: it counts as available, and the one idle for longest is evicted first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import filterfalse, islice, takewhile
from typing import Final

from squall.core.types import BlockHash, Request

EVICTED_AT_ONCE: Final = 64
"""A run of decodes alone is bounded so that it evicts no more blocks than this (or one step's): it must name them beforehand, and
most end long before. With a prompt's chunks it has a length of its own."""


def blocks_of(tokens: int, block_size: int) -> int:
    """KV blocks that hold so many tokens."""
    return -(-tokens // block_size)


def most_blocks(request: Request, block_size: int) -> int:
    """KV blocks that a request may come to hold: the last token's KV is never needed."""
    return blocks_of(request.num_prompt_tokens + request.max_output_tokens - 1, block_size)


IN_USE: Final = 0
"""The chain of blocks that somebody uses; those of idle ones are numbered from 1."""


class BlockPool:
    """Counts of blocks.

    A prompt may have hundreds of them: whatever is done with a chain of hashes is done with all at once where none of them is
    an exception. What became idle together stays together until it is evicted, or some of it is used again.

    Args:
        num_blocks: blocks in all.

    Attributes:
        num_blocks: as given.
        num_available: blocks that may be taken: the free and the idle ones.
        num_idle: the cached blocks that nobody uses.
    """

    __slots__ = ("_cached", "_chains", "_latest", "_more", "_next", "num_available", "num_blocks", "num_idle")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        self.num_idle = 0
        self._cached: dict[BlockHash, int] = {}  # of each, its chain
        self._more: dict[BlockHash, int] = {}  # users of a block beyond the first
        self._next: list[BlockHash] = []  # idle ones in the order of eviction: runs name them, and evict them at their end
        self._chains: OrderedDict[int, Sequence[BlockHash]] = OrderedDict()  # those after them
        self._latest = IN_USE  # the number of the last one

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.num_available - self.num_idle

    def take(self, count: int) -> None:
        """Make `count` blocks private: free ones first, then evicted ones. There must be as many available."""
        self.num_available -= count
        excess = self.num_idle - self.num_available
        if excess > 0:
            evicted = self.oldest(excess)
            del self._next[:excess]
            self.num_idle -= excess
            list(map(self._cached.pop, evicted))

    def oldest(self, most: int) -> tuple[BlockHash, ...]:
        """The idle blocks that would be evicted first, in this order: `most` of them, or all."""
        found = self._next
        while len(found) < most and self._chains:
            found += self._chains.popitem(last=False)[1]
        return tuple(found[:most])

    def match(self, hashes: Sequence[BlockHash], limit: int) -> tuple[int, int]:
        """How many of the first `limit` hashes are held without a gap, and how many of those are in use already."""
        cached = self._cached
        held = tuple(takewhile(cached.__contains__, islice(hashes, limit)))
        return len(held), list(map(cached.__getitem__, held)).count(IN_USE)

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """One more user for each of these held blocks."""
        cached = self._cached
        found = list(map(cached.__getitem__, hashes))
        num_idle = len(found) - found.count(IN_USE)
        if num_idle < len(found):
            more = self._more
            for block, number in zip(hashes, found, strict=True):
                if number == IN_USE:
                    more[block] = more.get(block, 0) + 1
        if num_idle:
            self.num_available -= num_idle
            self.num_idle -= num_idle
            self._leave_idle(set(hashes), set(found))
            cached.update(dict.fromkeys(hashes, IN_USE))

    def _leave_idle(self, used: set[BlockHash], numbers: set[int]) -> None:
        """These of the chains are idle no more."""
        chains = self._chains
        for number in numbers:
            if number in chains:
                rest = tuple(filterfalse(used.__contains__, chains[number]))
                if rest:
                    chains[number] = rest
                else:
                    del chains[number]
            elif number != IN_USE:
                self._next[:] = filterfalse(used.__contains__, self._next)

    def share(self, hashes: Iterable[BlockHash]) -> tuple[BlockHash, ...]:
        """Turn private blocks into cached ones with one user, and return them; one whose hash is held already stays private."""
        new = dict.fromkeys(filterfalse(self._cached.__contains__, hashes), IN_USE)
        self._cached.update(new)
        return tuple(new)

    def release(self, num_blocks: int, shared: Sequence[BlockHash]) -> None:
        """One user gives back its `num_blocks` blocks, of which those in `shared` are cached.

        The tail of a chain is useless without its head, so it becomes idle (and is evicted) first.
        """
        self.num_available += num_blocks
        if self._more and (used := self._more.keys() & shared):
            self._leave(used)
            shared = tuple(filterfalse(used.__contains__, shared))
        if shared:
            self._latest = number = self._latest + 1
            self._cached.update(dict.fromkeys(shared, number))
            self._chains[number] = shared[::-1]
            self.num_idle += len(shared)

    def _leave(self, used: Iterable[BlockHash]) -> None:
        """One user less for blocks that others use, too."""
        more = self._more
        for block in used:
            others = more.pop(block)
            if others > 1:
                more[block] = others - 1
            self.num_available -= 1
