"""A replica's KV blocks, by count, and the prefix cache over them.

Knows how many blocks are free, which hashes are held and which of those nobody uses. Does not know requests, and does not
know block ids: the engine owns the physical blocks and follows the same rules.

A block is in one of three states: free; private to one request; or cached under a hash, used by as many requests as its count
says. A cached block that nobody uses is idle: it counts as available, and the one idle for longest is evicted first.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import filterfalse, islice, repeat, takewhile
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


class BlockPool:
    """Counts of blocks.

    A prompt may have hundreds of them: whatever is done with a chain of hashes is done with all at once where none of them is
    an exception. What became idle together stays together until it is evicted, or some of it is used again.

    Args:
        num_blocks: blocks in all.

    Attributes:
        num_blocks: as given.
        num_available: blocks that may be taken: the free and the idle ones.
        idle: the cached blocks that nobody uses; of each, the number of its chain.
    """

    __slots__ = ("_chains", "_held", "_latest", "_more", "_next", "idle", "num_available", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        self._held: set[BlockHash] = set()  # all that are cached
        self._more: dict[BlockHash, int] = {}  # users of a block beyond the first
        self.idle: dict[BlockHash, int] = {}
        self._next: list[BlockHash] = []  # of these the first to be evicted: runs name them, and evict them at their end
        self._chains: OrderedDict[int, Sequence[BlockHash]] = OrderedDict()  # those after them
        self._latest = 0  # the number of the last one

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.num_available - len(self.idle)

    def take(self, count: int) -> None:
        """Make `count` blocks private: free ones first, then evicted ones. There must be as many available."""
        self.num_available -= count
        excess = len(self.idle) - self.num_available
        if excess > 0:
            evicted = self.oldest(excess)
            del self._next[:excess]
            self._held.difference_update(evicted)
            list(map(self.idle.pop, evicted))

    def oldest(self, most: int) -> tuple[BlockHash, ...]:
        """The idle blocks that would be evicted first, in this order: `most` of them, or all."""
        found = self._next
        while len(found) < most and self._chains:
            found += self._chains.popitem(last=False)[1]
        return tuple(found[:most])

    def match(self, hashes: Sequence[BlockHash], limit: int) -> tuple[int, int]:
        """How many of the first `limit` hashes are held without a gap, and how many of those are in use already."""
        held = tuple(takewhile(self._held.__contains__, islice(hashes, limit)))
        return len(held), len(held) - sum(map(self.idle.__contains__, held))

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """One more user for each of these held blocks."""
        idle = self.idle
        more = self._more
        for block in filterfalse(idle.__contains__, hashes):
            more[block] = more.get(block, 0) + 1
        numbers = list(map(idle.pop, filter(idle.__contains__, hashes)))
        if numbers:
            self.num_available -= len(numbers)
            self._unchain(set(hashes), set(numbers))

    def _unchain(self, used: set[BlockHash], numbers: set[int]) -> None:
        """These of the chains are idle no more."""
        chains = self._chains
        for number in numbers:
            if number not in chains:
                self._next[:] = filterfalse(used.__contains__, self._next)
            elif rest := tuple(filterfalse(used.__contains__, chains[number])):
                chains[number] = rest
            else:
                del chains[number]

    def share(self, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Turn private blocks into cached ones with one user, and return them; one whose hash is held already stays private."""
        held = self._held
        before = len(held)
        new = tuple(hashes if held.isdisjoint(hashes) else filterfalse(held.__contains__, hashes))
        held.update(new)
        return new if len(held) == before + len(new) else tuple(dict.fromkeys(new))

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
            self._chains[number] = shared[::-1]
            self.idle.update(zip(shared, repeat(number)))

    def _leave(self, used: Collection[BlockHash]) -> None:
        """One user less for blocks that others use, too."""
        more = self._more
        self.num_available -= len(used)
        for block in used:
            others = more.pop(block)
            if others > 1:
                more[block] = others - 1
