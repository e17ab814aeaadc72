"""Which physical KV block holds what. Knows no tensors, and decides nothing: how many blocks there are for whom, and which cached
ones go, the replica's machine says; this follows the rules that `RunSteps` states.

A block is free, or in some sequences' tables, or kept under the hash of the prompt that filled it (also while in tables).
"""

from collections.abc import Iterator, Sequence

from squall.core.types import BlockHash, RequestId


class BlockTables:
    """Blocks 0 to `num_blocks` - 1 of `block_size` tokens each.

    Attributes:
        tables: the blocks of every sequence that has any, in order of its tokens.
        may_take: so many free blocks, before something is evicted instead; -1: all.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tables: dict[RequestId, list[int]] = {}
        self.may_take = -1
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._num_filed: dict[RequestId, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks kept under a hash."""
        return len(self._held)

    def attach(self, request: RequestId, hashes: Sequence[BlockHash]) -> None:
        """Begin the table of `request` with the cached blocks of `hashes`, all of which are held."""
        if request in self.tables:
            raise RuntimeError(f"request {request} starts its prefill again, but its KV was never freed")
        unknown = [name for name in hashes if name not in self._held]
        if unknown:
            raise RuntimeError(f"request {request} counts on cached block {unknown[0]:x}, which is not held")
        self.tables[request] = [self._held[name] for name in hashes]
        self._num_filed[request] = len(hashes)

    def extend(self, request: RequestId, num_tokens: int, evictable: Iterator[BlockHash]) -> list[int]:
        """Grow the table until it holds `num_tokens` tokens, from free blocks and then from `evictable`. Returns the table."""
        table = self.tables[request]
        while len(table) * self._block_size < num_tokens:
            table.append(self._take() if self._free and self.may_take else self._evict(request, evictable))
        return table

    def _take(self) -> int:
        if self.may_take > 0:
            self.may_take -= 1
        return self._free.pop()

    def file(self, request: RequestId, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Keep the prompt blocks that are full now that `num_tokens` tokens are computed, unless their hash is held already."""
        table = self.tables[request]
        full = min(num_tokens // self._block_size, len(hashes))
        for index in range(self._num_filed[request], full):
            if hashes[index] not in self._held:
                self._held[hashes[index]] = table[index]
                self._hash_of[table[index]] = hashes[index]
        self._num_filed[request] = max(full, self._num_filed[request])

    def evict(self, names: Sequence[BlockHash]) -> None:
        """These blocks, which nobody uses, hold nothing from now on."""
        for name in names:
            if name not in self._held:
                raise RuntimeError(f"block {name:x}, to be evicted, is not held: machine and engine disagree")
            block = self._held.pop(name)
            del self._hash_of[block]
            self._free.append(block)

    @property
    def spare(self) -> int | None:
        """A free block, which stays free; None where there is none."""
        return self._free[-1] if self._free else None

    def release(self, request: RequestId) -> None:
        """Free the blocks that only this sequence knows of. Harmless if it has none."""
        self._num_filed.pop(request, None)
        self._free.extend(block for block in reversed(self.tables.pop(request, ())) if block not in self._hash_of)

    def _evict(self, request: RequestId, evictable: Iterator[BlockHash]) -> int:
        name = next(evictable, None)
        if name is None or name not in self._held:
            what = "nothing may be evicted" if name is None else f"block {name:x}, to be evicted, is not held"
            raise RuntimeError(f"no free KV block for request {request}, and {what}: machine and engine disagree")
        block = self._held.pop(name)
        del self._hash_of[block]
        return block
