"""The decoding requests of a replica, in groups that advance together: a step costs the same whatever their number.

Knows sums over a group and its step counter; a request is touched only when it joins, leaves or changes its group. Does not
know how long a request decodes, nor whether there are blocks for it.
"""

from __future__ import annotations

from squall.core.blocks import most_blocks
from squall.core.types import BlockHash, Nanos, Request, RequestId


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
        ahead: tokens in the KV cache less steps of that group, the same all the while it decodes there.
        started: the engine has worked on it, though it waits.
    """

    __slots__ = (
        "ahead", "blocks", "complete", "computed", "generated", "group", "hashes", "request", "reserved", "shared",
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
        self.ahead = 0
        self.started = False

    def new_blocks(self, tokens: int, block_size: int) -> int:
        """Blocks that it takes to compute so many more tokens of a prefill."""
        needed = -(-(self.computed + tokens) // block_size)
        if needed < self.reserved:
            needed = self.reserved
        return needed - self.blocks

    def reserve(self, blocks: int, block_size: int) -> None:
        """It will hold so many blocks from its first step on. Raises ValueError for more than its prompt and less than all."""
        request = self.request
        room = blocks * block_size
        self.reserved = blocks
        self.complete = room >= request.num_prompt_tokens + request.max_output_tokens - 1
        if room - block_size >= self.target and not self.complete:
            raise ValueError(
                f"the policy reserves {blocks} blocks for request {request.id}: more than its prompt fills and fewer than "
                f"the {most_blocks(request, block_size)} that it may come to need"
            )


class DecodeGroup:
    """Sums over some decodes.

    A request that joins with `target` tokens in the KV cache writes slot `target` (0-based) in its first step and attends to
    `target + 1` tokens, so it takes a new block at the steps where `target + steps done` is a multiple of the block size,
    unless it holds all the blocks that it may need already.

    Attributes:
        id: which of a replica's groups it is.
        size: requests in the group.
        step: steps done since the beginning.
        base: tokens that they attend to in the next step, their own new ones included, but for the `size * step` that the steps
            have added: so a step changes nothing but `step`.
        growth_at: blocks that a step takes, by the step modulo the block size.
    """

    __slots__ = ("_block_size", "_complete", "base", "growth_at", "id", "size", "step")

    def __init__(self, block_size: int, id: int = 0) -> None:
        self.id = id
        self.size = 0
        self.step = 0
        self.base = 0
        self.growth_at = [0] * block_size
        self._block_size = block_size
        self._complete = 0  # members that take no blocks any more

    def join(self, work: Work) -> None:
        work.group = self
        work.ahead = ahead = work.target - self.step
        self.size += 1
        self.base += ahead + 1
        if work.complete:
            self._complete += 1
        else:
            self.growth_at[-ahead % self._block_size] += 1

    def leave(self, work: Work) -> int:
        """Take it out and bring its `generated` and `blocks` up to date; returns the tokens that it has in the KV cache."""
        ahead = work.ahead
        tokens = ahead + self.step
        self.size -= 1
        self.base -= ahead + 1
        if work.complete:
            self._complete -= 1
        else:
            size = self._block_size
            self.growth_at[-ahead % size] -= 1
            work.blocks = -(-tokens // size)
        work.generated += tokens - work.target
        work.group = None
        return tokens

    def give(self, work: Work, to: DecodeGroup) -> None:
        """Let it decode with another group from now on."""
        work.target = self.leave(work)
        to.join(work)

    def grows(self, work: Work) -> bool:
        """Whether a member takes a block at the next step."""
        return not work.complete and (work.ahead + self.step) % self._block_size == 0

    def next_blocks(self) -> int:
        """Blocks that the next step takes."""
        return self.growth_at[self.step % self._block_size]

    def blocks(self, steps: int) -> int:
        """Blocks that the next `steps` steps take."""
        growth = self.growth_at
        size = self._block_size
        at = self.step % size
        to = at + steps
        if to <= size:
            return sum(growth[at:to])
        cycles, rest = divmod(steps, size)
        to = at + rest
        taken = sum(growth[at:to]) if to <= size else sum(growth[at:]) + sum(growth[: to - size])
        return taken + cycles * (self.size - self._complete)

    def growth(self) -> list[int]:
        """Blocks that each of the next `block_size` steps takes; those after them take the same again."""
        at = self.step % self._block_size
        return self.growth_at[at:] + self.growth_at[:at]

    def steps_within(self, blocks: int, most: int) -> int:
        """Steps that take no more than `blocks` blocks: up to `most`, or a multiple of the block size where that is many."""
        growing = self.size - self._complete
        if not growing:
            return most
        if blocks >= growing:
            many = blocks // growing * self._block_size
            return many if many < most else most
        growth = self.growth_at
        at = self.step
        for steps in range(most):
            blocks -= growth[(at + steps) % self._block_size]
            if blocks < 0:
                return steps
        return most


def arrival(work: Work) -> tuple[Nanos, RequestId]:
    """Orders requests by arrival; ids decide ties."""
    return work.request.arrived_at, work.request.id
