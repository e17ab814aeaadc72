"""Which work goes into the next step. Arithmetic on a read-only view; the configuration class is the policy.

Knows no blocks by name, no clock and no engine: the replica takes blocks, preempts and runs.
"""

from msgspec import Struct


class Vllm(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm"):
    """vLLM V1: decodes first, then the partial prefill, then the queue's head, all within one token budget.

    Attributes:
        max_num_seqs: requests in the batch, decoding or prefilling.
        max_num_batched_tokens: tokens a step computes; longer prompts are cut into chunks.
        prefix_cache: whether full prompt blocks are shared between requests.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefix_cache: bool = True


Batching = Vllm
