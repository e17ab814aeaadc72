"""Operator times from the datasheet: what a GPU's peaks, and curves of how near it comes to them, say of any operator.

Knows no measurement of this deployment: the last resort, which answers everything, right to some tens of per cent (the
spreads say how many). `efficiency` holds the curves.
"""

from math import hypot

from msgspec import Struct
from msgspec.structs import replace

from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.dtypes import dtype_bytes, dtype_name
from squall.perf.efficiency import NETWORK, Efficiency, LinkCurve, efficiency_of
from squall.perf.hardware import Gpu
from squall.perf.model import ModelSpec
from squall.perf.operators import AttentionShape, Estimate, Kernel, Provenance


class Links(Struct, frozen=True):
    """What joins the GPUs of a replica beyond their own link.

    Attributes:
        gpus_per_node: collectives of more GPUs go through the network.
        network_bandwidth: bytes a second and direction between nodes, for each GPU when all of them send.
    """

    gpus_per_node: int = 8
    network_bandwidth: float = 50e9


GEMM, ATTENTION, LINK, EXPERTS, STREAM = 0.25, 0.4, 0.3, 0.7, 0.5
"""Spreads where kernels of the very GPU were fitted: nine of ten of those points lie within."""

UNMEASURED = 1.6
"""How much wider they are for a GPU that was not measured."""


class RooflineSource:
    """An `OperatorSource` that knows everything."""

    name = "roofline"

    def __init__(self, gpu: Gpu, links: Links | None = None, efficiency: Efficiency | None = None, dtype: str = "bf16") -> None:
        self.gpu = gpu
        self.links = links or Links()
        self.efficiency = efficiency or efficiency_of(gpu)
        self.dtype = dtype
        self._wide = dtype_bytes(dtype)
        self._spread = 1.0 if self.efficiency.measured else UNMEASURED

    def gemm(self, tokens: int, rows: int, columns: int, dtype: str) -> Estimate:
        """See `OperatorSource.gemm`."""
        narrow = self._computes_narrow(dtype)
        curve = self.efficiency.gemm_8 if narrow else self.efficiency.gemm
        traffic = rows * columns * dtype_bytes(dtype) + tokens * (rows + columns) * self._wide
        seconds = curve.seconds(2.0 * tokens * rows * columns / self._peak(dtype), traffic / self.gpu.bandwidth)
        if curve.quantise and narrow:
            seconds += curve.quantise * tokens * rows / self.gpu.bandwidth
        return self._estimate(seconds, GEMM)

    def moe(self, tokens: int, hidden: int, inter: int, experts: int, top_k: int, dtype: str, tp: int, ep: int) -> Estimate:
        """See `OperatorSource.moe`. Weights are read of the experts that at least one token is expected to choose, were the
        choices even and independent; every token's inputs and results are moved as well."""
        dtype = dtype.removesuffix("_block")
        touched = expected_experts(experts, top_k, tokens) / ep
        width = inter / tp
        pairs = tokens * top_k / ep
        traffic = touched * 3 * hidden * width * dtype_bytes(dtype) + pairs * (2 * hidden + 3 * width) * self._wide
        curve = self.efficiency.experts_8 if self._computes_narrow(dtype) else self.efficiency.experts
        arithmetic = 6 * pairs * hidden * width / self._peak(dtype)
        return self._estimate(curve.seconds(arithmetic, traffic / self.gpu.bandwidth), EXPERTS)

    def elementwise(self, num_bytes: int, kernel: Kernel = "") -> Estimate:  # noqa: ARG002 - bytes alone count
        """See `OperatorSource.elementwise`."""
        rate = self.gpu.bandwidth * self.efficiency.stream
        return self._estimate(self.efficiency.stream_s + num_bytes / rate, STREAM)

    def sampling(self, rows: int) -> Estimate:
        """See `OperatorSource.sampling`."""
        return self._estimate(rows * self.efficiency.row_s, STREAM)

    def decode_attention(self, batch: int, context: int, shape: AttentionShape) -> Estimate:
        """See `OperatorSource.decode_attention`. Bound by reading the cache, of at least a tile of tokens a sequence; latent
        attention by its arithmetic as well, since all heads share what is read."""
        curve = self.efficiency.attention
        seen = hypot(context if shape.window is None else min(context, shape.window), curve.decode_tile)
        values = shape.kv_rank + shape.rope_dim if shape.kind == "mla" else shape.kv_heads * (shape.head_dim + _value_dim(shape))
        share = curve.decode_memory if dtype_bytes(shape.kv_dtype) >= 2 else curve.decode_memory_8
        reading = batch * seen * values * dtype_bytes(shape.kv_dtype) / (self.gpu.bandwidth * share)
        if shape.kind == "mla":
            flops = 2.0 * batch * seen * shape.heads * (2 * shape.kv_rank + shape.rope_dim)
            reading = hypot(reading, flops / (self._peak(shape.dtype) * curve.prefill_compute))
        return self._estimate(curve.decode_s + reading, ATTENTION)

    def prefill_attention(self, chunk: int, before: int, shape: AttentionShape) -> Estimate:
        """See `OperatorSource.prefill_attention`. Arithmetic for every pair of tokens, or reading the cache where that takes
        longer."""
        curve = self.efficiency.attention
        pairs = seen_pairs(chunk, before, shape.window) + chunk * curve.prefill_tile
        flops = 2.0 * shape.heads * (shape.head_dim + _value_dim(shape)) * pairs
        arithmetic = flops / (self._peak(shape.dtype) * curve.prefill_compute)
        kept = before + chunk if shape.window is None else min(before + chunk, shape.window + chunk)
        values = shape.kv_rank + shape.rope_dim if shape.kind == "mla" else shape.kv_heads * (shape.head_dim + _value_dim(shape))
        reading = kept * values * dtype_bytes(shape.kv_dtype) / (self.gpu.bandwidth * curve.decode_memory)
        return self._estimate(curve.prefill_s + max(arithmetic, reading), ATTENTION)

    def __eq__(self, other: object) -> bool:
        """What is known of the same GPU in the same way is the same."""
        return isinstance(other, RooflineSource) and self._known == other._known

    def __hash__(self) -> int:
        return hash(self._known)

    @property
    def _known(self) -> tuple[object, ...]:
        return self.gpu, self.links, self.efficiency, self.dtype

    # -- between GPUs

    def all_reduce(self, num_bytes: int, gpus: int) -> Estimate:
        """See `OperatorSource.all_reduce`: every GPU sends 2 (n - 1) / n of the tensor."""
        return self._collective(self.efficiency.all_reduce, 2 * (gpus - 1) / gpus * num_bytes, gpus)

    def all_gather(self, num_bytes: int, gpus: int) -> Estimate:
        """See `OperatorSource.all_gather`: every GPU sends (n - 1) / n of the tensor."""
        return self._collective(self.efficiency.ring, (gpus - 1) / gpus * num_bytes, gpus)

    def reduce_scatter(self, num_bytes: int, gpus: int) -> Estimate:
        """See `OperatorSource.reduce_scatter`: every GPU sends (n - 1) / n of the tensor."""
        return self._collective(self.efficiency.ring, (gpus - 1) / gpus * num_bytes, gpus)

    def all_to_all(self, num_bytes: int, gpus: int) -> Estimate:
        """See `OperatorSource.all_to_all`: what stays on the GPU is not sent."""
        return self._collective(self.efficiency.all_to_all, (gpus - 1) / gpus * num_bytes, gpus)

    def send(self, num_bytes: int, gpus: int) -> Estimate:
        """See `OperatorSource.send`."""
        network = gpus * 2 > self.links.gpus_per_node
        bandwidth = self.links.network_bandwidth if network else self.gpu.link_bandwidth
        share = NETWORK.share if network else 0.8
        start = NETWORK.start_s if network else self.efficiency.send_s
        return self._estimate(start + num_bytes / (bandwidth * share), LINK)

    def _collective(self, curve: LinkCurve, sent: float, gpus: int) -> Estimate:
        if gpus < 2:
            return self._estimate(0.0, LINK)
        bandwidth = self.gpu.link_bandwidth
        if gpus > self.links.gpus_per_node:
            curve, bandwidth = NETWORK, self.links.network_bandwidth
        return self._estimate(curve.seconds(sent / bandwidth, gpus), LINK)

    # -- peaks

    def _peak(self, dtype: str) -> float:
        """Operations a second with weights of that type; what the GPU does not compute in is widened to 16 bits first."""
        gpu = self.gpu
        if dtype == "fp8" and gpu.fp8_flops is not None:
            return gpu.fp8_flops
        if dtype == "nvfp4" and gpu.fp4_flops is not None:
            return gpu.fp4_flops
        return gpu.flops / 2 if dtype == "fp32" and gpu.kind != "cpu" else gpu.flops

    def _computes_narrow(self, dtype: str) -> bool:
        return (dtype == "fp8" and self.gpu.fp8_flops is not None) or (dtype == "nvfp4" and self.gpu.fp4_flops is not None)

    def _estimate(self, seconds: float, spread: float) -> Estimate:
        return Estimate(seconds, Provenance.ROOFLINE, spread * self._spread)


def _value_dim(shape: AttentionShape) -> int:
    return shape.value_dim or shape.head_dim


def expected_experts(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens choose together, `top_k` each, evenly and independently: n (1 - (1 - k / n)^t)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def seen_pairs(chunk: int, before: int, window: int | None) -> float:
    """Pairs of a token of the chunk and a token that it attends to, half of itself included; no more than a window each."""
    if window is None or before + chunk <= window:
        return chunk * (before + chunk / 2)
    growing = max(0, window - before)  # tokens whose window is not full yet
    return growing * (before + growing / 2) + (chunk - growing) * window


class Roofline(Composed):
    """A `LatencyModel` from a datasheet alone.

    Args:
        model: the sizes.
        gpu: the peaks.
        tp: GPUs that share every layer.
        dtype: of the weights; "auto" is the checkpoint's own on a GPU and fp32 on a CPU.
        kv_dtype: of the KV cache; "auto" is the activations'.
        efficiency: None takes the GPU's own curves.
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
        layout = layout_of(model, gpu, Layout(tp=tp), dtype, kv_dtype)
        source = RooflineSource(gpu, efficiency=efficiency, dtype=layout.dtype)
        super().__init__(model, gpu.name, layout, [source], source.efficiency, overhead_s)


def layout_of(model: ModelSpec, gpu: Gpu, layout: Layout, dtype: str, kv_dtype: str) -> Layout:
    """The layout with its number types filled in. Raises ConfigError for an unknown one."""
    plain, weights = model.dtypes(default_dtype(model, gpu) if dtype == "auto" else dtype)
    return replace(layout, dtype=plain, weight_dtype=weights, kv_dtype=plain if kv_dtype == "auto" else dtype_name(kv_dtype))


def default_dtype(model: ModelSpec, gpu: Gpu) -> str:
    """What "auto" means: the checkpoint's own type on a GPU (bf16 for fp32 ones), fp32 on a CPU."""
    if gpu.kind == "cpu":
        return "fp32"
    return "bf16" if model.dtype == "fp32" else "auto"
