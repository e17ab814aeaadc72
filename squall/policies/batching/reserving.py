"""Policies that reserve all the memory a request may come to need, and so never preempt: Orca, FasterTransformer, Blitz."""

from msgspec import Struct

from squall.core.blocks import blocks_of, most_blocks
from squall.core.types import FOREVER
from squall.core.views import BatchingView, Plan, WorkView
from squall.policies.batching.bounds import at_least, most_in_batch


class Orca(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="orca"):
    """Iteration-level batching: whole prompts join the running decodes whenever a seat and their memory are free.

    Attributes:
        max_num_seqs: requests admitted and not finished; one batch of a pipeline holds its share of them.
        reserve_tokens: reserved for each request, even where it can need less; 0 reserves its prompt and its longest output.
    """

    max_num_seqs: int = 32
    reserve_tokens: int = 0

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs)
        at_least("reserve_tokens", self.reserve_tokens, 0)

    @property
    def prefix_cache(self) -> bool:
        return False

    def __call__(self, view: BatchingView) -> Plan:
        most = most_in_batch(self.max_num_seqs, view.num_stages)
        seats = min(self.max_num_seqs - view.num_running, most - view.num_decodes)
        admit, reserve = _admit(view, seats, self.reserve_tokens, view.free_blocks)
        if admit:
            return Plan(1, admit=admit, reserve=reserve, decodes=most)
        return Plan(FOREVER, open=seats > 0 and not view.waiting, decodes=most)


class FasterTransformer(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="faster_transformer"):
    """Request-level batching: a batch is made up once and runs until its last request ends; nobody joins it.

    What ends early frees its memory at once, but not its seat.

    Attributes:
        max_num_seqs: requests in a batch; one batch of a pipeline holds its share of them.
        reserve_tokens: reserved for each request, even where it can need less; 0 reserves its prompt and its longest output.
    """

    max_num_seqs: int = 32
    reserve_tokens: int = 0

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs)
        at_least("reserve_tokens", self.reserve_tokens, 0)

    @property
    def prefix_cache(self) -> bool:
        return False

    def __call__(self, view: BatchingView) -> Plan:
        if view.num_decodes:
            return Plan(FOREVER, open=False)
        admit, reserve = _admit(view, most_in_batch(self.max_num_seqs, view.num_stages), self.reserve_tokens, view.free_blocks)
        return Plan(1, admit=admit, reserve=reserve)


class BlitzBatching(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="blitz"):
    """BlitzScale's `next_batch`: batches of whole prompts within three budgets; decodes pause while one is computed.

    Of the head of the queue as many are taken as keep within every budget. A request that exceeds one by itself is taken alone:
    it holds up nobody for ever.

    Attributes:
        max_num_batched_tokens: prompt tokens in a batch.
        max_total_tokens: tokens in a batch, prompts and longest outputs, each request in whole blocks.
        max_num_seqs: requests admitted and not finished.
    """

    max_num_batched_tokens: int = 4096
    max_total_tokens: int = 16_000
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        at_least("max_num_batched_tokens", self.max_num_batched_tokens)
        at_least("max_total_tokens", self.max_total_tokens)
        at_least("max_num_seqs", self.max_num_seqs)

    @property
    def prefix_cache(self) -> bool:
        return False

    def __call__(self, view: BatchingView) -> Plan:
        most = most_in_batch(self.max_num_seqs, view.num_stages)
        seats = min(self.max_num_seqs - view.num_running, most)
        admit, reserve = _admit(view, seats, 0, view.free_blocks + view.decode_blocks)
        count = self._within_budgets(admit, reserve, view.block_size)
        if count:
            return Plan(1, admit=admit[:count], reserve=reserve[:count], decodes=0)
        return Plan(FOREVER, open=seats > 0 and not view.waiting, decodes=most)

    def _within_budgets(self, admit: tuple[int, ...], reserve: tuple[int, ...], block_size: int) -> int:
        """How many of these keep within the budgets of tokens."""
        prompts = total = 0
        for i, (tokens, blocks) in enumerate(zip(admit, reserve, strict=True)):
            prompts += tokens
            total += blocks * block_size
            if i and (prompts > self.max_num_batched_tokens or total > self.max_total_tokens):
                return i
        return len(admit)


def _admit(view: BatchingView, seats: int, reserve_tokens: int, free: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Whole prompts from the head of the queue, and the blocks that each reserves."""
    admit: list[int] = []
    reserve: list[int] = []
    for work in view.waiting:
        blocks = _reserved(work, view, reserve_tokens)
        free -= blocks
        if seats <= len(admit) or free < 0:
            break
        admit.append(work.target)
        reserve.append(blocks)
    return tuple(admit), tuple(reserve)


def _reserved(work: WorkView, view: BatchingView, reserve_tokens: int) -> int:
    most = most_blocks(work.request, view.block_size)
    if not reserve_tokens:
        return most
    return max(most, min(view.num_blocks, blocks_of(reserve_tokens, view.block_size)))
