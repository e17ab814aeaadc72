"""Sarathi-Serve: decodes in every step, and prompts in pieces that fill it up."""

from typing import Literal

from msgspec import Struct

from squall.core.types import FOREVER
from squall.core.views import ALL_DECODE, ALL_DECODE_CLOSED, BatchingView, Plan
from squall.policies.batching.bounds import Preemption, at_least, check_swap, fraction, most_in_batch, watermark_blocks


class Sarathi(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sarathi"):
    """Stall-free batching: all decodes, then pieces of prompts up to `chunk_size` tokens together with them.

    Begun prompts go before new ones, in order. A prompt gets the blocks for all of it with its first piece, where `watermark`
    remains. Decodes go also where they alone exceed `chunk_size`; prompts wait then. After a preemption nobody is admitted for
    one step.

    Attributes:
        max_num_seqs: requests admitted and not finished; one batch of a pipeline holds its share of them.
        chunk_size: tokens that a step computes.
        watermark: part of all KV blocks that an admission leaves free; waived where nothing runs.
        prefix_cache: whether full prompt blocks are shared between requests.
        prefix_cache_outputs: whether those that a request has generated are, too, once it has ended; in simulations.
        quirks: "vidur" preempts as Vidur does: a decode needs a free block also where it does not take one.
        preemption: who runs out of blocks computes its tokens again ("recompute"), or its blocks are copied to the host's memory
            and back ("swap", in simulations), as long as there is room; one pipeline stage only.
        swap_blocks: blocks of host memory for that, of each replica.
    """

    max_num_seqs: int = 256
    chunk_size: int = 512
    watermark: float = 0.01
    prefix_cache: bool = False
    quirks: Literal["none", "vidur"] = "none"
    prefix_cache_outputs: bool = False
    preemption: Preemption = "recompute"
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs)
        at_least("chunk_size", self.chunk_size)
        fraction("watermark", self.watermark)
        check_swap(self.preemption, self.swap_blocks)

    @property
    def max_num_batched_tokens(self) -> int:
        """The most tokens of a step."""
        return max(self.chunk_size, self.max_num_seqs)

    def __call__(self, view: BatchingView) -> Plan:
        keep = 0
        if self.quirks == "vidur" and view.num_decodes > 1:
            if not view.free_blocks and not view.latest_grows():
                return Plan(preempt=True)
            keep = 1
        most = self.max_num_seqs
        if view.num_stages > 1:
            most = most_in_batch(most, view.num_stages)
        decodes = view.num_decodes
        if decodes > most:
            decodes = most
        waiting, prefilling = view.waiting, view.prefilling
        if not waiting and not prefilling:
            open = decodes < self.chunk_size and view.num_running < self.max_num_seqs
            if not keep and decodes < most:
                return ALL_DECODE if open else ALL_DECODE_CLOSED
            return Plan(FOREVER, open=open, decodes=most, keep=keep)
        budget = self.chunk_size - decodes
        seats = most - decodes
        chunks: list[int] = []
        for work in prefilling:
            if budget <= 0 or seats <= 0:
                break
            tokens = work.target - work.computed
            if tokens > budget:
                if not chunks:
                    return Plan((tokens - 1) // budget, (budget,), open=False, decodes=most, keep=keep)
                tokens = budget
            chunks.append(tokens)
            budget -= tokens
            seats -= 1
        if view.preempted:
            return Plan(1, tuple(chunks), decodes=most)
        if waiting and budget > 0:
            admit, reserve = self._admit(view, seats, budget)
            if admit:
                return Plan(1, tuple(chunks), admit, decodes=most, reserve=reserve)
        if chunks:
            return Plan(1, tuple(chunks), decodes=most)
        return Plan(FOREVER, open=not waiting and budget > 0 and seats > 0, decodes=most, keep=keep)

    def _admit(self, view: BatchingView, seats: int, budget: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens of each request from the head of the queue that there is room for, and the blocks of its whole prompt."""
        admit: list[int] = []
        reserve: list[int] = []
        size = view.block_size
        free = view.free_blocks
        running = view.num_running
        most = self.max_num_seqs - running
        if seats > most:
            seats = most
        for work in view.waiting:
            if seats <= 0 or budget <= 0:
                break
            tokens = work.target
            blocks = -(-tokens // size)
            free -= blocks
            if work.hashes:
                cached, in_use = view.cached(work)
                tokens -= cached * size
                free += in_use
            if free < watermark_blocks(self.watermark, view.num_blocks, running + len(admit)):
                break
            if tokens > budget:
                tokens = budget
            admit.append(tokens)
            reserve.append(blocks)
            seats -= 1
            budget -= tokens
        return tuple(admit), tuple(reserve)
