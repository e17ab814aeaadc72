"""Which replicas were sent which beginnings of prompts: what a policy that wants prefix hits asks.

A belief, not the truth: a replica may have evicted what is remembered here, and may not have computed it yet. Knows block
hashes and replica ids, no load and no policy.

One hash in every `stride` blocks is remembered, of each replica at most as many as its KV pool has room for, and of each hash the
`MAX_HOLDERS` replicas that got it last. So memory has a bound, and a request costs its number of blocks / `stride`, whatever the
number of replicas.
"""

from collections import OrderedDict
from collections.abc import Sequence

from squall.core.types import BlockHash, ReplicaId

MAX_HOLDERS = 8
"""Enough to choose the least loaded among; a beginning that everybody has needs no longer list."""


class PrefixIndex:
    """Remembers what was sent where, the longest unused forgotten first.

    Args:
        apart: tokens from one remembered place in a prompt to the next: the precision of a match, and the price of memory.
    """

    __slots__ = ("_apart", "_holders", "_room", "_sent", "_stride")

    def __init__(self, apart: int) -> None:
        self._apart = apart
        self._stride = 1  # blocks
        self._sent: dict[ReplicaId, OrderedDict[BlockHash, None]] = {}  # of each replica, longest unused first
        self._room: dict[ReplicaId, int] = {}
        self._holders: dict[BlockHash, list[ReplicaId]] = {}  # in the order in which they got it; says the same as `_sent`

    def __len__(self) -> int:
        """Pairs of a hash and a replica that are remembered."""
        return sum(map(len, self._sent.values()))

    def add(self, replica: ReplicaId, num_blocks: int, block_size: int) -> None:
        """An empty replica. All have one block size: hashes are of blocks of one size."""
        self._stride = max(1, self._apart // block_size)
        self._sent[replica] = OrderedDict()
        self._room[replica] = max(1, num_blocks // self._stride)

    def forget(self, replica: ReplicaId) -> None:
        """It is gone, and what it held."""
        del self._room[replica]
        for block in self._sent.pop(replica):
            self._drop(block, replica)

    def record(self, replica: ReplicaId, hashes: Sequence[BlockHash]) -> None:
        """`replica` is sent a prompt with these blocks. Its beginning counts as used last, so that the end is forgotten first."""
        sent = self._sent[replica]
        for block in reversed(hashes[self._stride - 1 :: self._stride]):
            if block in sent:
                sent.move_to_end(block)
                continue
            sent[block] = None
            holders = self._holders.setdefault(block, [])
            holders.append(replica)
            if len(holders) > MAX_HOLDERS:
                del self._sent[holders.pop(0)][block]
        for _ in range(len(sent) - self._room[replica]):
            oldest, _ = sent.popitem(last=False)
            self._drop(oldest, replica)

    def longest(self, hashes: Sequence[BlockHash]) -> tuple[int, Sequence[ReplicaId]]:
        """The longest remembered beginning of a prompt with these blocks: its number of blocks, and who was sent it."""
        stride, holders = self._stride, self._holders
        for end in range(len(hashes) // stride * stride, 0, -stride):
            found = holders.get(hashes[end - 1])
            if found is not None:
                return end, found
        return 0, ()

    def _drop(self, block: BlockHash, replica: ReplicaId) -> None:
        holders = self._holders[block]
        holders.remove(replica)
        if not holders:
            del self._holders[block]
