"""vLLM V1: decodes and prompts in one step."""

from msgspec import Struct

from squall.core.views import ALL_DECODE, ALL_DECODE_CLOSED, BatchingView, Plan
from squall.policies.batching.bounds import Preemption, check_swap


class Vllm(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm"):
    """vLLM V1: decodes first, then the partial prefill, then the queue's head, all within one token budget.

    The queue is served in order: a head that does not fit keeps all others waiting. After a preemption nobody is admitted
    for one step.

    Attributes:
        max_num_seqs: requests in the batch, decoding or prefilling.
        max_num_batched_tokens: tokens a step computes; longer prompts are cut into chunks. At least `max_num_seqs`.
        prefix_cache: whether full prompt blocks are shared between requests.
        prefix_cache_outputs: whether those that a request has generated are, too, once it has ended; in simulations.
        preemption: who runs out of blocks computes its tokens again ("recompute"), or its blocks are copied to the host's memory
            and back ("swap", in simulations), as long as there is room; one pipeline stage only.
        swap_blocks: blocks of host memory for that, of each replica.
        whole_prompts: who is admitted finds free blocks for all that it has to compute, not for its first piece alone; they are
            not set aside (vLLM's `scheduler_reserve_full_isl`, on in 0.19).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefix_cache: bool = True
    prefix_cache_outputs: bool = False
    preemption: Preemption = "recompute"
    swap_blocks: int = 0
    whole_prompts: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), not {self.max_num_batched_tokens}: "
                "every decode needs one token of the budget"
            )
        check_swap(self.preemption, self.swap_blocks)

    def __call__(self, view: BatchingView) -> Plan:
        waiting, prefilling = view.waiting, view.prefilling
        seats = self.max_num_seqs - view.num_running
        if not waiting and not prefilling:
            return ALL_DECODE if seats > 0 else ALL_DECODE_CLOSED
        budget = self.max_num_batched_tokens - view.num_decodes
        free = view.free_blocks
        chunks: tuple[int, ...] = ()
        if prefilling:
            partial = prefilling[0]  # the only one: a prompt is cut only where it uses up the budget
            left = partial.target - partial.computed
            if left > budget:
                return Plan((left - 1) // budget, (budget,), open=False)
            chunks = (left,)
            budget -= left
            free -= -(-partial.target // view.block_size) - partial.blocks
        if view.preempted:
            return Plan(1, chunks)
        admit = self._admit(view, seats, budget, free) if waiting and seats > 0 and budget > 0 else ()
        if admit or chunks:
            return Plan(1, chunks, admit)
        return ALL_DECODE if seats > 0 and not waiting else ALL_DECODE_CLOSED

    def _admit(self, view: BatchingView, seats: int, budget: int, free: int) -> tuple[int, ...]:
        """Tokens for each request from the head of the queue that there is room for."""
        admit: list[int] = []
        size = view.block_size
        for work in view.waiting:
            have = in_use = 0
            if work.hashes:
                cached, in_use = view.cached(work)
                have = cached * size
            tokens = work.target - have
            if tokens > budget:
                tokens = budget
            blocks = -(-(have + tokens) // size) - in_use
            if (-(-work.target // size) - in_use if self.whole_prompts else blocks) > free:
                break
            admit.append(tokens)
            free -= blocks
            seats -= 1
            budget -= tokens
            if seats == 0 or budget == 0:
                break
        return tuple(admit)
