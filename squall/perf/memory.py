"""How much KV cache fits beside the weights: an account in bytes, one GPU's share.

Knows no allocator and no engine; the named reserves stand for what they take.
"""

from msgspec import Struct

from squall.errors import ConfigError
from squall.perf.hardware import Gpu
from squall.perf.model import ModelSpec, dtype_bytes, dtype_name
from squall.perf.roofline import default_dtype

_MIB = 1 << 20
RUNTIME_RESERVE = 512 * _MIB
"""Driver context, captured graphs, workspaces and fragmentation of one GPU. With the activations below it meets what vLLM 0.19
left for KV on an RTX 4090 (2,588 blocks for Llama-3.1-8B) within 1 %."""

LINK_RESERVE = 400 * _MIB
"""Buffers of the collectives, where GPUs share a model (NCCL 2.27: 342 to 392 MiB)."""

LOGITS_BYTES = 16
"""For each value of a step's logits: 32-bit logits, probabilities, and their sorted copies while sampling."""

CPU_KV_BYTES = 1024 * _MIB
"""KV cache on a CPU: a machine's memory has other uses too, so it is not filled. `replica.num_blocks` overrides it."""


class Memory(Struct, frozen=True):
    """Where the bytes of one GPU go. `kv` may be used for blocks; `num_blocks` of them fit."""

    total: int
    weights: int
    activations: int
    reserve: int
    unused: int
    kv: int
    num_blocks: int
    block_size: int


def account(
    model: ModelSpec,
    gpu: Gpu,
    *,
    tp: int = 1,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> Memory:
    """Accounts for one GPU's memory. Raises ConfigError when not even one block is left, naming a `tp` that would do."""
    model.check_tp(tp)
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError(f"replica.gpu_memory_utilization is {gpu_memory_utilization}; it must be above 0 and at most 1")
    if block_size < 1:
        raise ConfigError(f"replica.block_size is {block_size}; it must be at least 1")
    asked = default_dtype(model, gpu) if dtype == "auto" else dtype
    plain, _ = model.dtypes(asked)
    weights = model.weight_bytes(tp, asked)
    activations = _activation_bytes(model, tp, plain, max_num_batched_tokens, max_num_seqs)
    reserve = 0 if gpu.kind == "cpu" else RUNTIME_RESERVE + (LINK_RESERVE if tp > 1 else 0)
    usable = int(gpu.memory_bytes * gpu_memory_utilization)
    left = usable - weights - activations - reserve
    kv = min(left, CPU_KV_BYTES) if gpu.kind == "cpu" else left
    block = block_size * model.kv_bytes_per_token(plain if kv_dtype == "auto" else dtype_name(kv_dtype), tp)
    if kv < block:
        raise ConfigError(_does_not_fit(model, gpu, tp, block - left, usable, weights))
    unused = gpu.memory_bytes - weights - activations - reserve - kv
    return Memory(gpu.memory_bytes, weights, activations, reserve, unused, kv, kv // block, block_size)


def _activation_bytes(model: ModelSpec, tp: int, dtype: str, tokens: int, rows: int) -> int:
    """The most that is alive at once: two copies of the residual beside the MLP's gate, up and product; then the logits."""
    per_token = 2 * model.hidden_size + max(3 * model.intermediate_size, 2 * model.q_size + 2 * model.kv_size) / tp
    return int(tokens * per_token * dtype_bytes(dtype) + min(rows, tokens) * model.vocab_size * LOGITS_BYTES)


def _does_not_fit(model: ModelSpec, gpu: Gpu, tp: int, missing: int, usable: int, weights: int) -> str:
    """One line: by how much, and what would help. A share of the weights that needs at most 80 % leaves room for the rest."""
    fitting = [n for n in (2, 3, 4, 6, 8, 16, 32) if n > tp and model.can_share(n) and weights * tp / n < 0.8 * usable]
    fix = f"use replica.tp = {fitting[0]}" if fitting else "use a GPU with more memory, or a smaller or quantised model"
    needs = f"weights ({weights / 1e9:.1f} GB a GPU), work space and one KV block need {missing / 1e9:.1f} GB more than"
    place = f"{model.name} with replica.tp = {tp} does not fit on {gpu.name}"
    return f"{place}: {needs} the {usable / 1e9:.1f} GB that each gives it; {fix}"
