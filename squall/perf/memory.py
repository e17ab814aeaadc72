"""How much KV cache fits beside the weights: an account in bytes, the fullest GPU's share.

Knows no allocator and no engine; the named reserves stand for what they take.
"""

from msgspec import Struct

from squall.errors import ConfigError
from squall.perf.dtypes import DTYPE_BYTES, dtype_name
from squall.perf.hardware import Gpu
from squall.perf.layers import Experts
from squall.perf.roofline import default_dtype
from squall.perf.spec import Layers, ModelSpec

_MIB = 1 << 20
RUNTIME_RESERVE = 224 * _MIB
"""Driver context, libraries and their workspaces on one GPU. With graphs, fragmentation and activations as below it meets what
vLLM 0.19 left for KV on an RTX 4090 (2,588 blocks for Llama-3.1-8B) within 1 %; only the sum was measured, not the parts."""

GRAPH_BYTES_PER_LAYER = 8 * _MIB
"""Captured graphs of some fifty batch sizes."""

FRAGMENTATION = 0.04
"""Of the activations: pieces of the allocator's that nothing fits into."""

LINK_RESERVE = 400 * _MIB
"""Buffers of the collectives, where GPUs share a model (NCCL 2.27: 342 to 392 MiB)."""

LOGITS_BYTES = 16
"""For each value of a step's logits: 32-bit logits, probabilities, and their sorted copies while sampling."""

CPU_KV_BYTES = 1024 * _MIB
"""KV cache on a CPU: a machine's memory has other uses too, so it is not filled. `replica.num_blocks` overrides it."""


class Memory(Struct, frozen=True):
    """Where the bytes of one GPU go, the fullest of its replica.

    Attributes:
        total: what the GPU has; the parts below add up to it.
        activations: of the largest step.
        runtime: context, libraries, and the buffers of collectives.
        unused: kept back by `gpu_memory_utilization`.
        kv: may be used for blocks; below one block, or negative, where the model does not fit.
        num_blocks: that fit into `kv`.
        block_size: tokens of a block.
        sequence: bytes of one sequence of the longest context, which need not exceed `kv`.
    """

    total: int
    weights: int
    activations: int
    graphs: int
    fragmentation: int
    runtime: int
    unused: int
    kv: int
    num_blocks: int
    block_size: int
    sequence: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the blocks hold, whatever sequences they belong to."""
        return self.num_blocks * self.block_size

    @property
    def num_sequences(self) -> int:
        """Sequences of the longest context that fit side by side, windows taken into account."""
        return max(0, self.kv) // self.sequence if self.sequence else 0

    @property
    def reserve(self) -> int:
        """What is neither weights, activations nor KV cache."""
        return self.graphs + self.fragmentation + self.runtime


class Deployment(Struct, frozen=True):
    """How a model is put on GPUs, as far as memory is concerned: the keys of `[replica]` and `[batching]` of the same names.

    Attributes:
        ep: GPUs that experts are dealt out over.
        max_model_len: the longest context to make room for; None asks for one block.
        graphs: whether decode steps are captured as graphs.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int | None = None
    graphs: bool = True

    @property
    def num_gpus(self) -> int:
        """Of one replica. Experts dealt out over more GPUs than `tp` need that many."""
        return max(self.tp, self.ep) * self.pp


def measure(model: ModelSpec, gpu: Gpu, plan: Deployment) -> Memory:
    """Accounts for one GPU's memory, whether the model fits or not. Raises ConfigError for settings that make no sense."""
    _check(model, gpu, plan)
    asked = default_dtype(model, gpu) if plan.dtype == "auto" else plan.dtype
    plain, _ = model.dtypes(asked)
    kv_dtype = plain if plan.kv_dtype == "auto" else dtype_name(plan.kv_dtype)
    weights = model.weight_bytes(plan.tp, asked, pp=plan.pp, ep=plan.ep)
    activations = _activation_bytes(model, plan, plain)
    graphs, fragmentation, runtime = _reserves(model, gpu, plan, activations)
    left = int(gpu.memory_bytes * plan.gpu_memory_utilization) - weights - activations - graphs - fragmentation - runtime
    kv = min(left, CPU_KV_BYTES) if gpu.kind == "cpu" else left
    block = plan.block_size * model.kv_bytes_per_token(kv_dtype, plan.tp, pp=plan.pp)
    context = -(-(plan.max_model_len or 1) // plan.block_size) * plan.block_size
    sequence = model.kv_bytes(context, kv_dtype, plan.tp, pp=plan.pp)
    unused = gpu.memory_bytes - weights - activations - graphs - fragmentation - runtime - kv
    return Memory(
        gpu.memory_bytes, weights, activations, graphs, fragmentation, runtime, unused, kv,
        max(0, kv) // block if block else 0, plan.block_size, sequence,
    )  # fmt: skip


def account(
    model: ModelSpec,
    gpu: Gpu,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> Memory:
    """Accounts for one GPU's memory. Raises ConfigError when not even one block is left, naming a `tp` that would do."""
    plan = Deployment(
        tp, pp, ep, dtype, kv_dtype, block_size, gpu_memory_utilization, max_num_batched_tokens, max_num_seqs
    )  # fmt: skip
    memory = measure(model, gpu, plan)
    if memory.num_blocks < 1:
        raise ConfigError(_does_not_fit(model, gpu, plan, memory))
    return memory


def _check(model: ModelSpec, gpu: Gpu, plan: Deployment) -> None:
    model.check_tp(plan.tp, plan.ep)
    if not 0 < plan.gpu_memory_utilization <= 1:
        raise ConfigError(f"replica.gpu_memory_utilization is {plan.gpu_memory_utilization}; it must be above 0 and at most 1")
    for key in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
        if getattr(plan, key) < 1:
            raise ConfigError(
                f"{'replica' if key == 'block_size' else 'batching'}.{key} is {getattr(plan, key)}; it must be at least 1"
            )
    longest = plan.max_model_len
    if longest is not None and not 1 <= longest <= model.max_position:
        raise ConfigError(f"replica.max_model_len is {longest}; {model.name} knows {model.max_position} positions at most")
    for key, dtype in (("replica.dtype", plan.dtype), ("replica.kv_dtype", plan.kv_dtype)):
        if dtype != "auto":
            dtype_name(dtype, key)
    check_dtype(model, gpu, plan.dtype)


def check_dtype(model: ModelSpec, gpu: Gpu, dtype: str) -> None:
    """Raises ConfigError for arithmetic that the GPU does not have.

    Weights of fewer bits than it computes in are no obstacle: they are widened on the way.
    """
    plain, _ = model.dtypes(default_dtype(model, gpu) if dtype == "auto" else dtype)
    if plain == "bf16" and not gpu.has_bf16:
        raise ConfigError(f"{gpu.name} computes no bf16, the type of {model.name}; use replica.dtype = fp16")


def _reserves(model: ModelSpec, gpu: Gpu, plan: Deployment, activations: int) -> tuple[int, int, int]:
    """Graphs, fragmentation, runtime; a CPU needs none of them."""
    if gpu.kind == "cpu":
        return 0, 0, 0
    layers = -(-model.num_layers // plan.pp)
    graphs = layers * GRAPH_BYTES_PER_LAYER if plan.graphs else 0
    return graphs, int(FRAGMENTATION * activations), RUNTIME_RESERVE + (LINK_RESERVE if plan.num_gpus > 1 else 0)


def _activation_bytes(model: ModelSpec, plan: Deployment, dtype: str) -> int:
    """The most that is alive at once: two copies of the residual beside the widest part of any layer; then the logits."""
    tokens, rows = plan.max_num_batched_tokens, min(plan.max_num_seqs, plan.max_num_batched_tokens)
    widest = max(_width(group, model.hidden_size, plan) for group in model.layers)
    layer = tokens * (2 * model.hidden_size + widest) * DTYPE_BYTES[dtype]
    return int(layer + rows * model.vocab_size * LOGITS_BYTES)


def _width(group: Layers, hidden: int, plan: Deployment) -> float:
    """Values of one token alive inside a layer, on one GPU. Results of chosen experts are as wide as the residual, each."""
    attention = group.cached.width / plan.tp if group.cached else 0.0
    if group.mlp is None:
        return attention
    routed = group.mlp.num_active * hidden if isinstance(group.mlp, Experts) else 0
    return max(attention, group.mlp.width / plan.tp + routed)


def _does_not_fit(model: ModelSpec, gpu: Gpu, plan: Deployment, memory: Memory) -> str:
    """One line: by how much, and what would help. A share of the weights that needs at most 80 % leaves room for the rest."""
    usable = memory.total * plan.gpu_memory_utilization
    missing = missing_bytes(memory)
    shares = [n for n in (2, 3, 4, 6, 8, 16, 32) if n > plan.tp and model.can_share(n, plan.ep)]
    fitting = [n for n in shares if memory.weights * plan.tp / n < 0.8 * usable]
    fix = f"use replica.tp = {fitting[0]}" if fitting else "use a GPU with more memory, or a smaller or quantised model"
    needs = f"weights ({memory.weights / 1e9:.1f} GB a GPU), work space and one KV block need {missing / 1e9:.1f} GB more than"
    place = f"{model.name} with replica.tp = {plan.tp} does not fit on {gpu.name}"
    return f"{place}: {needs} the {usable / 1e9:.1f} GB that each gives it; {fix}"


def missing_bytes(memory: Memory) -> int:
    """Bytes by which one GPU is too small for one sequence of the longest context; 0 where it fits."""
    return max(0, memory.sequence - memory.kv)
