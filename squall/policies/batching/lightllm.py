"""LightLLM: admits as much as memory will suffice for until the running requests have ended."""

from collections.abc import Sequence

from msgspec import Struct

from squall.core.blocks import blocks_of
from squall.core.types import FOREVER
from squall.core.views import BatchingView, Plan
from squall.policies.batching.bounds import at_least


class LightLlm(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lightllm"):
    """Past-future scheduling: prompts are admitted where the most memory that all will hold at once is there.

    A step computes either whole prompts or decodes. New prompts are tried for when nothing runs, and once every
    `max_waiting_iters` decode steps. Of each request the longest output that it may have is expected, so nobody is preempted. The
    test counts the last block of every request as a whole one; who is alone needs no test.

    Attributes:
        max_num_seqs: requests admitted and not finished.
        max_num_batched_tokens: prompt tokens in a step; a longer prompt is computed alone.
        max_waiting_iters: decode steps between two attempts to admit.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 4096
    max_waiting_iters: int = 10

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens)
        at_least("max_waiting_iters", self.max_waiting_iters)

    @property
    def prefix_cache(self) -> bool:
        return False

    def __call__(self, view: BatchingView) -> Plan:
        if not view.waiting:
            return Plan(FOREVER, open=view.num_running < self.max_num_seqs)
        room = view.free_blocks + view.decode_blocks
        if view.num_running >= self.max_num_seqs or blocks_of(view.waiting[0].target, view.block_size) > room:
            return Plan(1 if view.preempted else FOREVER, open=False)  # until somebody ends
        waited = view.steps_since_mark % self.max_waiting_iters
        is_due = not waited and view.steps_since_mark > 0
        if view.num_decodes and not is_due:
            return Plan(self.max_waiting_iters - waited, open=False)
        admit = self._admit(view) if not view.preempted else ()
        if admit:
            return Plan(1, admit=admit, decodes=0, mark=True)
        return Plan(1 if view.preempted else self.max_waiting_iters, open=False)

    def _admit(self, view: BatchingView) -> tuple[int, ...]:
        """Whole prompts from the head of the queue, as many as the peak allows."""
        admit: list[int] = []
        spans = list(view.spans())
        size = view.block_size
        free = view.free_blocks + view.decode_blocks
        total = 0
        for work in view.waiting:
            left = work.request.num_prompt_tokens + work.request.max_output_tokens - work.target
            spans.append((work.target + 1, max(0, left - 2)))
            total += work.target
            free -= blocks_of(work.target, size)
            if view.num_running + len(admit) >= self.max_num_seqs or free < 0:
                break
            if admit and total > self.max_num_batched_tokens:
                break
            if (admit or view.num_running) and _peak(spans, size) > view.num_blocks * size:
                break
            admit.append(work.target)
        return tuple(admit)


def _peak(spans: Sequence[tuple[int, int]], block_size: int) -> int:
    """The most tokens that requests hold at once, where each has (tokens now, tokens to come), and all advance together.

    It is reached when one of them ends: those that go on longer hold then what they have and as much as that one added.
    """
    peak = used = 0
    for i, (now, left) in enumerate(sorted(spans, key=lambda span: -span[1])):
        used += now + block_size - 1
        peak = max(peak, left * (i + 1) + used)
    return peak
