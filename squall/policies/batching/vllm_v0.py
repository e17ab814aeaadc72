"""vLLM V0: prompts before decodes, never in one step."""

from typing import Literal

from msgspec import Struct

from squall.core.types import FOREVER
from squall.core.views import ALL_DECODE, ALL_DECODE_CLOSED, BatchingView, Plan
from squall.policies.batching.bounds import Preemption, at_least, check_swap, fraction, most_in_batch, watermark_blocks


class VllmV0(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm_v0"):
    """vLLM V0 without chunked prefill: whenever somebody can be admitted, a step of whole prompts; the decodes pause for it.

    The queue is served in order. A prompt is admitted where its blocks are free and `watermark` remains, and while the batch,
    all of it padded to its longest prompt, keeps within `max_num_batched_tokens`; a prompt longer than that is served alone.
    After a preemption the decodes go first.

    Attributes:
        max_num_seqs: requests admitted and not finished; one batch of a pipeline holds its share of them.
        max_num_batched_tokens: prompts in a step times the longest of them.
        watermark: part of all KV blocks that an admission leaves free; waived where nothing runs.
        prefix_cache: whether full prompt blocks are shared between requests.
        prefix_cache_outputs: whether those that a request has generated are, too, once it has ended; in simulations.
        quirks: "vidur" preempts as Vidur does: a decode needs a free block also where it does not take one.
        preemption: who runs out of blocks computes its tokens again ("recompute"), or its blocks are copied to the host's memory
            and back ("swap", in simulations), as long as there is room; one pipeline stage only.
        swap_blocks: blocks of host memory for that, of each replica.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    watermark: float = 0.01
    prefix_cache: bool = False
    quirks: Literal["none", "vidur"] = "none"
    prefix_cache_outputs: bool = False
    preemption: Preemption = "recompute"
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens)
        fraction("watermark", self.watermark)
        check_swap(self.preemption, self.swap_blocks)

    def __call__(self, view: BatchingView) -> Plan:
        waiting, preempted, running = view.waiting, view.preempted, view.num_running
        most = self.max_num_seqs
        if view.num_stages > 1:
            most = most_in_batch(most, view.num_stages)
        if waiting and not preempted:
            admit = self._admit(view, most, running)
            if admit:
                return Plan(1, admit=admit, decodes=0)
        open = not waiting and running < self.max_num_seqs
        if self.quirks == "none":
            if view.num_decodes <= most and not preempted:
                return ALL_DECODE if open else ALL_DECODE_CLOSED
            return Plan(1 if preempted else FOREVER, open=open, decodes=most)
        if not view.free_blocks and view.num_decodes > 1 and not view.latest_grows():
            return Plan(preempt=True)
        return Plan(1 if preempted else FOREVER, open=open, decodes=most, keep=1)

    def _admit(self, view: BatchingView, seats: int, running: int) -> tuple[int, ...]:
        """Whole prompts from the head of the queue, as many as there is room for."""
        admit: list[int] = []
        size = view.block_size
        free = view.free_blocks + view.decode_blocks
        most = self.max_num_seqs - running
        if seats > most:
            seats = most
        longest = 0
        for work in view.waiting:
            if seats <= 0:
                break
            tokens = work.target
            free -= -(-tokens // size)
            if work.hashes:
                cached, in_use = view.cached(work)
                tokens -= cached * size
                free += in_use
            if longest < tokens:
                longest = tokens
            if free < watermark_blocks(self.watermark, view.num_blocks, running + len(admit)):
                break
            if admit and (len(admit) + 1) * longest > self.max_num_batched_tokens:
                break
            admit.append(tokens)
            seats -= 1
        return tuple(admit)
