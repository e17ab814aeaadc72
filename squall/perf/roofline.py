"""Step times from the datasheet: what a GPU's peaks and fixed efficiencies say of a model it has never run.

Knows no requests and no measurement of this deployment; the last resort, right to some tens of per cent. The efficiencies
below are fitted to public measurements in NVIDIA's aiconfigurator (Apache-2.0): times of vLLM's GEMM, attention and all-reduce
kernels on A100, H100 and H200, and for latencies that no kernel shows alone the measured time per output token of dense
models on H100 and B200. A GPU that is not among them is taken to behave alike; an RTX 4090 was measured up to a third faster.
"""

from collections.abc import Sequence
from math import hypot

from msgspec import Struct

from squall.core.types import Nanos
from squall.perf.hardware import Gpu
from squall.perf.latency import BatchShape, Progression
from squall.perf.model import ModelSpec, dtype_bytes, dtype_name
from squall.perf.prices import StepPrices


class Efficiency(Struct, frozen=True):
    """How much of its peaks a kind of hardware reaches, and what it spends on top.

    Attributes:
        gemm_compute: share of the peak that large matrix products reach.
        gemm_memory: share of the bandwidth that matrix products of few rows reach.
        stream: the same of element-wise kernels.
        prefill_attention, decode_attention: of the peak, and of the bandwidth.
        link: share of the link's bandwidth that an all-reduce reaches.
        link_latency_s, link_wait_s: of one all-reduce, whatever its size; and per further GPU, which comes a little later.
        kernel_s: start and end of one kernel, in a captured graph.
        row_s: sampling for one request.
        step_s: what a step costs beside the GPU's own work (scheduling, inputs, sampling, hand-over).
    """

    gemm_compute: float
    gemm_memory: float
    stream: float
    prefill_attention: float
    decode_attention: float
    link: float
    link_latency_s: float
    link_wait_s: float
    kernel_s: float
    row_s: float
    step_s: float


GPU_EFFICIENCY = Efficiency(
    gemm_compute=0.82,
    gemm_memory=0.77,
    stream=0.7,
    prefill_attention=0.55,
    decode_attention=0.75,
    link=0.65,
    link_latency_s=3.5e-6,
    link_wait_s=1.5e-6,
    kernel_s=2e-6,
    row_s=2e-6,
    step_s=1e-3,
)
CPU_EFFICIENCY = Efficiency(
    gemm_compute=0.75,
    gemm_memory=0.8,
    stream=0.5,
    prefill_attention=0.4,
    decode_attention=0.5,
    link=1.0,
    link_latency_s=0.0,
    link_wait_s=0.0,
    kernel_s=4e-6,
    row_s=50e-6,
    step_s=1e-3,
)

KERNELS_PER_LAYER = 9
"""Two norms, four matrix products, rotary embedding with the cache write, attention, activation."""


class Gemm(Struct, frozen=True):
    """A matrix product: seconds of arithmetic a token, and seconds of memory traffic for the weights and a token."""

    arithmetic: float
    weights: float
    traffic: float


def seconds(gemms: Sequence[Gemm], tokens: int) -> float:
    """One product after the other.

    Arithmetic and traffic of each overlap, but not fully: measured times lie near the root of the sum of squares.
    """
    total = 0.0
    for gemm in gemms:
        total += hypot(gemm.arithmetic * tokens, gemm.weights + gemm.traffic * tokens)
    return total


class Roofline:
    """A `LatencyModel` from a datasheet, and the times it is made of.

    Args:
        model: the sizes.
        gpu: the peaks; `tp` of them share every layer.
        tp: GPUs of one replica.
        dtype: of the weights; "auto" is the checkpoint's own on a GPU and fp32 on a CPU.
        kv_dtype: of the KV cache; "auto" is the activations'.
        efficiency: None takes the constants above.
        overhead_s: replaces the efficiency's `step_s`.

    Raises ConfigError where `tp` cannot share the model or a number type is unknown.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: Gpu,
        tp: int = 1,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        efficiency: Efficiency | None = None,
        overhead_s: float | None = None,
    ) -> None:
        model.check_tp(tp)
        self.model = model
        self.gpu = gpu
        self.tp = tp
        self.dtype, self.weight_dtype = model.dtypes(default_dtype(model, gpu) if dtype == "auto" else dtype)
        self.kv_dtype = self.dtype if kv_dtype == "auto" else dtype_name(kv_dtype)
        self.efficiency = efficiency or (CPU_EFFICIENCY if gpu.kind == "cpu" else GPU_EFFICIENCY)
        self.overhead_s = self.efficiency.step_s if overhead_s is None else overhead_s
        self.source = f"roofline ({model.name} on {tp} x {gpu.name}, {self.weight_dtype})"
        self._num_layers = model.num_layers
        self._layer = [self._gemm(rows, columns, self.weight_dtype) for rows, columns in self._layer_matrices()]
        self._head = [self._gemm(model.hidden_size, model.vocab_size / tp, self.dtype)]
        self._wait_s = self._rendezvous_s()
        self._token_s = self._elementwise_s() + 2 * self._transfer_s(model.hidden_size)
        self._context_s = self._cache_read_s()
        self._pair_s = self._attention_s()
        self.num_stages = 1
        self._prices = StepPrices(self.source, self)

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`."""
        return self._prices.run(shape, steps)

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        return self._prices.stages(shape)

    # -- the times of `prices.Work`

    def step_s(self) -> float:
        return self.overhead_s + self._num_layers * KERNELS_PER_LAYER * self.efficiency.kernel_s

    def tokens_s(self, tokens: int) -> float:
        """Every layer: its matrices, its element-wise kernels and two all-reduces."""
        return self._num_layers * (seconds(self._layer, tokens) + tokens * self._token_s + 2 * self._wait_s)

    def logits_s(self, rows: int) -> float:
        """The head, gathering its shares of the vocabulary, and sampling."""
        gather = self._wait_s + rows * self._transfer_s(self.model.vocab_size) / 2
        return seconds(self._head, rows) + gather + rows * self.efficiency.row_s

    def context_s(self) -> float:
        return self._context_s

    def chunk_s(self, tokens: int) -> tuple[float, float]:
        """Attention of a chunk is bound by arithmetic, unless the chunk is so short that reading the cache takes longer."""
        return self._pair_s * tokens * (tokens + 1) / 2, max(self._pair_s * tokens, self._context_s)

    # -- what they are made of

    def _layer_matrices(self) -> tuple[tuple[float, float], ...]:
        """(rows, columns) of a layer's weight matrices on one GPU: query, key and value; output; gate and up; down."""
        model, tp = self.model, self.tp
        kv = 2 * model.kv_heads_per_gpu(tp) * model.head_dim
        return (
            (model.hidden_size, model.q_size / tp + kv),
            (model.q_size / tp, model.hidden_size),
            (model.hidden_size, 2 * model.intermediate_size / tp),
            (model.intermediate_size / tp, model.hidden_size),
        )

    def _gemm(self, rows: float, columns: float, weight_dtype: str) -> Gemm:
        """The product of a token's `rows` values with a matrix of `rows` x `columns` weights."""
        bandwidth = self.gpu.bandwidth * self.efficiency.gemm_memory
        return Gemm(
            arithmetic=2 * rows * columns / (self._peak(weight_dtype) * self.efficiency.gemm_compute),
            weights=rows * columns * dtype_bytes(weight_dtype) / bandwidth,
            traffic=(rows + columns) * dtype_bytes(self.dtype) / bandwidth,
        )

    def _peak(self, dtype: str) -> float:
        """Operations a second with weights of that type; int4 and int8 weights are computed in 16 bits."""
        if dtype == "fp8" and self.gpu.fp8_flops is not None:
            return self.gpu.fp8_flops
        return self.gpu.flops / 2 if dtype == "fp32" and self.gpu.kind != "cpu" else self.gpu.flops

    def _cache_read_s(self) -> float:
        """One token's keys and values, all layers: a decode's attention reads them once."""
        bytes_ = self.model.kv_bytes_per_token(self.kv_dtype, self.tp)
        return bytes_ / (self.gpu.bandwidth * self.efficiency.decode_attention)

    def _attention_s(self) -> float:
        """Arithmetic for one pair of tokens, all layers: a product of query and key, and one of weight and value."""
        flops = 4 * self._num_layers * self.model.q_size / self.tp
        return flops / (self._peak(self.dtype) * self.efficiency.prefill_attention)

    def _elementwise_s(self) -> float:
        """One token in one layer: norms with the residual (two reads, two writes, twice), rotary embedding, activation, cache."""
        model = self.model
        whole = 8 * model.hidden_size
        shared = 2 * (model.q_size + 2 * model.kv_size) + 3 * model.intermediate_size
        return (whole + shared / self.tp) * dtype_bytes(self.dtype) / (self.gpu.bandwidth * self.efficiency.stream)

    def _transfer_s(self, values: int) -> float:
        """An all-reduce of so many values, as a ring: every GPU sends 2 (tp - 1) / tp of them."""
        sent = 2 * (self.tp - 1) / self.tp * values * dtype_bytes(self.dtype)
        return sent / (self.gpu.link_bandwidth * self.efficiency.link)

    def _rendezvous_s(self) -> float:
        """What an all-reduce costs whatever its size."""
        return self.efficiency.link_latency_s + self.efficiency.link_wait_s * (self.tp - 1) if self.tp > 1 else 0.0


def default_dtype(model: ModelSpec, gpu: Gpu) -> str:
    """What "auto" means: the checkpoint's own type on a GPU (bf16 for fp32 ones), fp32 on a CPU."""
    if gpu.kind == "cpu":
        return "fp32"
    return "bf16" if model.dtype == "fp32" else "auto"
