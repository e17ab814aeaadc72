"""The decoding requests of a replica, all of which advance together: a step costs the same whatever their number.

Knows sums over the group and the step counter; a request is touched only when it joins and when it leaves. Does not know how
long a request decodes, nor whether there are blocks for it.
"""

from typing import Final

from squall.core.types import FOREVER, BlockHash, Request

NEVER: Final = -1


class Work:
    """One request's progress at a replica.

    Attributes:
        hashes: of its full prompt blocks; empty without a prefix cache.
        target: tokens whose KV prefill must bring about.
        generated: tokens produced so far; not kept up to date while it decodes.
        computed: prefill tokens whose KV exists.
        blocks: KV blocks held; not kept up to date while it decodes.
        shared: the hashes among its blocks that are cached and counted as used by it.
        joined: the group's step at which it began to decode, or NEVER.
    """

    __slots__ = ("blocks", "computed", "generated", "hashes", "joined", "request", "shared", "target")

    def __init__(
        self, request: Request, hashes: tuple[BlockHash, ...], target: int, generated: int, computed: int = 0, blocks: int = 0
    ) -> None:
        self.request = request
        self.hashes = hashes
        self.target = target
        self.generated = generated
        self.computed = computed
        self.blocks = blocks
        self.shared: tuple[BlockHash, ...] = ()
        self.joined = NEVER


class DecodeGroup:
    """Sums over all decodes.

    A request that joins with `target` tokens in the KV cache writes slot `target` (0-based) in its first step and attends to
    `target + 1` tokens, so it takes a new block at the steps where `target + steps done` is a multiple of the block size.

    Attributes:
        size: requests in the group.
        context: tokens that they attend to in the next step, their own new ones included.
        step: steps done since the beginning.
    """

    __slots__ = ("_block_size", "_growth", "context", "size", "step")

    def __init__(self, block_size: int) -> None:
        self.size = 0
        self.context = 0
        self.step = 0
        self._block_size = block_size
        self._growth = [0] * block_size  # blocks taken at a step, by the step modulo the block size

    def join(self, work: Work) -> None:
        step = self.step
        work.joined = step
        self.size += 1
        self.context += work.target + 1
        self._growth[(step - work.target) % self._block_size] += 1

    def leave(self, work: Work) -> None:
        """Take it out and bring its `generated` and `blocks` up to date."""
        done = self.step - work.joined
        self.size -= 1
        self.context -= work.target + 1 + done
        self._growth[(work.joined - work.target) % self._block_size] -= 1
        work.generated += done
        work.blocks = -(-(work.target + done) // self._block_size)
        work.joined = NEVER

    def advance(self, steps: int) -> int:
        """Do so many steps; returns the blocks that they took."""
        taken = self.blocks(steps) if steps > 1 else self._growth[self.step % self._block_size]
        self.context += self.size * steps
        self.step += steps
        return taken

    def next_blocks(self) -> int:
        """Blocks that the next step takes."""
        return self._growth[self.step % self._block_size]

    def blocks(self, steps: int) -> int:
        """Blocks that the next `steps` steps take."""
        growth = self._growth
        size = self._block_size
        at = self.step % size
        if at + steps <= size:
            return sum(growth[at : at + steps])
        cycles, rest = divmod(steps - size + at, size)
        return sum(growth[at:]) + cycles * self.size + sum(growth[:rest])

    def growth(self) -> list[int]:
        """Blocks that each of the next `block_size` steps takes; those after them take the same again."""
        at = self.step % self._block_size
        return self._growth[at:] + self._growth[:at]

    def steps_within(self, blocks: int) -> int:
        """Steps that take no more than `blocks` blocks: the most, or a multiple of the block size where that is many."""
        if not self.size:
            return FOREVER
        if blocks >= self.size:
            return blocks // self.size * self._block_size
        growth = self._growth
        at = self.step
        steps = 0
        while True:
            blocks -= growth[(at + steps) % self._block_size]
            if blocks < 0:
                return steps
            steps += 1
