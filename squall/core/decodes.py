"""The decoding requests of a replica, in groups that advance together: a step costs the same whatever their number.

Knows sums over a group and its step counter; a request is touched only when it joins, leaves or changes its group. Does not
know how long a request decodes, nor whether there are blocks for it.
"""

from __future__ import annotations

from typing import Final

from squall.core.blocks import blocks_of, most_blocks
from squall.core.types import BlockHash, Nanos, Request, RequestId

NEVER: Final = -1


class Work:
    """One request's progress at a replica.

    Attributes:
        hashes: of its full prompt blocks; empty without a prefix cache.
        target: tokens whose KV must exist before it decodes; moved on where it changes its group.
        generated: tokens produced so far; not kept up to date while it decodes.
        computed: prefill tokens whose KV exists.
        blocks: KV blocks held; not kept up to date while it decodes.
        reserved: KV blocks that it holds at least, from its first step on.
        complete: `reserved` is all that it may come to need.
        shared: the hashes among its blocks that are cached and counted as used by it.
        group: with which it decodes, or None.
        joined: the group's step at which it began to decode there, or NEVER.
        started: the engine has worked on it, though it waits.
    """

    __slots__ = (
        "blocks", "complete", "computed", "generated", "group", "hashes", "joined", "request", "reserved", "shared",
        "started", "target",
    )  # fmt: skip

    def __init__(
        self, request: Request, hashes: tuple[BlockHash, ...], target: int, generated: int, computed: int = 0, blocks: int = 0
    ) -> None:
        self.request = request
        self.hashes = hashes
        self.target = target
        self.generated = generated
        self.computed = computed
        self.blocks = blocks
        self.reserved = 0
        self.complete = False
        self.shared: tuple[BlockHash, ...] = ()
        self.group: DecodeGroup | None = None
        self.joined = NEVER
        self.started = False

    def new_blocks(self, tokens: int, block_size: int) -> int:
        """Blocks that it takes to compute so many more tokens of a prefill."""
        needed = -(-(self.computed + tokens) // block_size)
        if needed < self.reserved:
            needed = self.reserved
        return needed - self.blocks

    def reserve(self, blocks: int, block_size: int) -> None:
        """It will hold so many blocks from its first step on. Raises ValueError for more than its prompt and less than all."""
        most = most_blocks(self.request, block_size)
        self.reserved = blocks
        self.complete = blocks >= most
        if not self.complete and blocks > blocks_of(self.target, block_size):
            raise ValueError(
                f"the policy reserves {blocks} blocks for request {self.request.id}: more than its prompt fills and fewer than "
                f"the {most} that it may come to need"
            )


class DecodeGroup:
    """Sums over some decodes.

    A request that joins with `target` tokens in the KV cache writes slot `target` (0-based) in its first step and attends to
    `target + 1` tokens, so it takes a new block at the steps where `target + steps done` is a multiple of the block size,
    unless it holds all the blocks that it may need already.

    Attributes:
        id: which of a replica's groups it is.
        size: requests in the group.
        context: tokens that they attend to in the next step, their own new ones included.
        step: steps done since the beginning.
    """

    __slots__ = ("_block_size", "_complete", "_growth", "context", "id", "size", "step")

    def __init__(self, block_size: int, id: int = 0) -> None:
        self.id = id
        self.size = 0
        self.context = 0
        self.step = 0
        self._block_size = block_size
        self._complete = 0  # members that take no blocks any more
        self._growth = [0] * block_size  # blocks taken at a step, by the step modulo the block size

    def join(self, work: Work) -> None:
        step = self.step
        work.joined = step
        work.group = self
        self.size += 1
        self.context += work.target + 1
        if work.complete:
            self._complete += 1
        else:
            self._growth[(step - work.target) % self._block_size] += 1

    def leave(self, work: Work) -> int:
        """Take it out and bring its `generated` and `blocks` up to date; returns the steps that it did here."""
        joined, target = work.joined, work.target
        done = self.step - joined
        self.size -= 1
        self.context -= target + done + 1
        if work.complete:
            self._complete -= 1
        else:
            size = self._block_size
            self._growth[(joined - target) % size] -= 1
            work.blocks = -(-(target + done) // size)
        work.generated += done
        work.joined = NEVER
        work.group = None
        return done

    def give(self, work: Work, to: DecodeGroup) -> None:
        """Let it decode with another group from now on."""
        work.target += self.leave(work)
        to.join(work)

    def grows(self, work: Work) -> bool:
        """Whether a member takes a block at the next step."""
        return not work.complete and (work.target + self.step - work.joined) % self._block_size == 0

    def advance(self, steps: int) -> int:
        """Do so many steps; returns the blocks that they took."""
        at = self.step % self._block_size
        self.context += self.size * steps
        self.step += steps
        return self._growth[at] if steps == 1 else self._blocks(at, steps)

    def next_blocks(self) -> int:
        """Blocks that the next step takes."""
        return self._growth[self.step % self._block_size]

    def blocks(self, steps: int) -> int:
        """Blocks that the next `steps` steps take."""
        return self._blocks(self.step % self._block_size, steps)

    def _blocks(self, at: int, steps: int) -> int:
        """As `blocks`, from the step `at` modulo the block size on."""
        growth = self._growth
        size = self._block_size
        if at + steps <= size:
            return sum(growth[at : at + steps])
        cycles, rest = divmod(steps, size)
        to = at + rest
        taken = sum(growth[at:to]) if to <= size else sum(growth[at:]) + sum(growth[: to - size])
        return taken + cycles * (self.size - self._complete)

    def growth(self) -> list[int]:
        """Blocks that each of the next `block_size` steps takes; those after them take the same again."""
        at = self.step % self._block_size
        return self._growth[at:] + self._growth[:at]

    def steps_within(self, blocks: int, most: int) -> int:
        """Steps that take no more than `blocks` blocks: up to `most`, or a multiple of the block size where that is many."""
        growing = self.size - self._complete
        if not growing:
            return most
        if blocks >= growing:
            many = blocks // growing * self._block_size
            return many if many < most else most
        growth = self._growth
        at = self.step
        for steps in range(most):
            blocks -= growth[(at + steps) % self._block_size]
            if blocks < 0:
                return steps
        return most


def arrival(work: Work) -> tuple[Nanos, RequestId]:
    """Orders requests by arrival; ids decide ties."""
    return work.request.arrived_at, work.request.id
