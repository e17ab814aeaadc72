"""How much of its peaks a GPU reaches, by the size of the work: curves of a few coefficients for each kind of GPU.

Knows no model. The coefficients of A100, H100 and H200 are fitted (least squares of logarithms, large errors counting less) to
public measurements in NVIDIA's aiconfigurator (Apache-2.0), of vLLM 0.14 on A100, 0.24 on H100 and H200: products with 512 rows
and columns or more (6,048 on A100, 23,579 on each other), attention with heads of 64, 128 and 256 values, NCCL's collectives,
vLLM's all-reduce, and experts on H200, whose curve serves the others. Those of an RTX 4090, which runs faster than its datasheet
says, are read off LLMServingSim's profile of Llama-3.1-8B (MIT). What kernels alone do not show is chosen by measured times per
output token of dense models on H100 and B200 in aiconfigurator: waiting for each other, a step's overhead, and that a decode's
attention starts in half the time in a captured graph. A GPU that was not measured takes the middle, with a wider interval.
"""

from math import hypot, sqrt

from msgspec import Struct
from msgspec.structs import replace

from squall.perf.hardware import Gpu


class GemmCurve(Struct, frozen=True):
    """Matrix products: `start_s`, then arithmetic and memory traffic overlapping, as the `overlap`-norm of the two.

    Attributes:
        compute, memory: shares of the peak and of the bandwidth that large products reach.
        overlap: 1 would be one after the other, infinite the longer of the two.
        quantise: passes over the inputs, in bytes a value, to bring them to the weights' type.
    """

    start_s: float
    compute: float
    memory: float
    overlap: float
    quantise: float = 0.0

    def seconds(self, arithmetic_s: float, traffic_s: float) -> float:
        """Of a product whose arithmetic and traffic would take so long at the peaks."""
        arithmetic, traffic, power = arithmetic_s / self.compute, traffic_s / self.memory, self.overlap
        if power == 2:
            return self.start_s + hypot(arithmetic, traffic)
        return self.start_s + float((arithmetic**power + traffic**power) ** (1 / power))


class AttentionCurve(Struct, frozen=True):
    """Attention.

    Attributes:
        decode_s, prefill_s: start and end of the kernel.
        decode_memory, decode_memory_8: share of the bandwidth that decodes reach with a 16-bit and an 8-bit cache.
        decode_tile: tokens that a sequence costs at least.
        prefill_compute: share of the peak.
        prefill_tile: tokens that a query token costs beside those it attends to: corners of tiles that are masked out.
    """

    decode_s: float
    decode_memory: float
    decode_memory_8: float
    decode_tile: float
    prefill_s: float
    prefill_compute: float
    prefill_tile: float


class LinkCurve(Struct, frozen=True):
    """A collective: `start_s`, `further_s` for each GPU after the second, and the transfer x at `share` of the link, to which
    the climb to that rate adds 2 * sqrt(x * climb_s)."""

    start_s: float
    further_s: float
    share: float
    climb_s: float

    def seconds(self, transfer_s: float, gpus: int) -> float:
        """Of a collective whose bytes would take so long at the link's full rate."""
        moving = transfer_s / self.share
        return self.start_s + self.further_s * (gpus - 2) + moving + 2 * sqrt(moving * self.climb_s)


class Efficiency(Struct, frozen=True):
    """What a kind of hardware makes of its peaks, and what it spends on top.

    Attributes:
        gemm, gemm_8: products with weights of 16 bits or computed so, and in 8 bits and less.
        experts, experts_8: the same for the products of a mixture of experts.
        stream: share of the bandwidth that element-wise kernels reach; `stream_s` is their start and end.
        all_reduce, ring, all_to_all: collectives; `ring` is all-gather and reduce-scatter.
        send_s: handing over to the next stage, beside the bytes.
        wait_s: what each further GPU adds to a collective by coming a little later.
        row_s: sampling for one request.
        step_s: what a step costs beside the GPU's own work (scheduling, inputs, hand-over).
        measured: whether kernels of this very kind of GPU were.
    """

    gemm: GemmCurve
    gemm_8: GemmCurve
    experts: GemmCurve
    experts_8: GemmCurve
    attention: AttentionCurve
    stream: float
    stream_s: float
    all_reduce: LinkCurve
    ring: LinkCurve
    all_to_all: LinkCurve
    send_s: float
    wait_s: float
    row_s: float
    step_s: float
    measured: bool = True


_H100 = Efficiency(
    gemm=GemmCurve(3.56e-6, 0.811, 0.870, 2.7),
    gemm_8=GemmCurve(6.5e-6, 0.707, 0.857, 1.2, 3.2),
    experts=GemmCurve(40e-6, 0.36, 0.86, 1.2),
    experts_8=GemmCurve(40e-6, 0.23, 0.86, 1.2),
    attention=AttentionCurve(6e-6, 0.864, 0.654, 172, 13.7e-6, 0.605, 559),
    stream=0.7,
    stream_s=2e-6,
    all_reduce=LinkCurve(4.0e-6, 0.15e-6, 0.394, 0.74e-6),
    ring=LinkCurve(5.3e-6, 0.8e-6, 0.375, 2.8e-6),
    all_to_all=LinkCurve(7.2e-6, 0.1e-6, 0.385, 3.5e-6),
    send_s=10e-6,
    wait_s=0.5e-6,
    row_s=2e-6,
    step_s=0.6e-3,
)
_H200 = replace(
    _H100,
    gemm=GemmCurve(3.83e-6, 0.802, 0.832, 3.0),
    gemm_8=GemmCurve(6.8e-6, 0.777, 0.790, 1.2, 5.1),
    attention=AttentionCurve(6e-6, 0.811, 0.481, 234, 13.5e-6, 0.596, 531),
    all_reduce=LinkCurve(4.1e-6, 0.11e-6, 0.399, 0.61e-6),
)
_A100 = replace(
    _H100,
    gemm=GemmCurve(5.66e-6, 0.845, 0.764, 1.62),
    gemm_8=GemmCurve(5.66e-6, 0.845, 0.764, 1.62),  # weights are widened to 16 bits on the way
    experts_8=GemmCurve(40e-6, 0.36, 0.76, 1.2),
    attention=AttentionCurve(9e-6, 0.673, 0.6, 94, 11.9e-6, 0.584, 336),
    all_reduce=LinkCurve(4.5e-6, 0.23e-6, 0.342, 0.9e-6),
    ring=LinkCurve(9.1e-6, 0.83e-6, 0.37, 8.5e-6),
    all_to_all=LinkCurve(11.2e-6, 0.25e-6, 0.363, 6.2e-6),
)
_UNMEASURED = replace(
    _H100,
    gemm=GemmCurve(4e-6, 0.8, 0.82, 2.0),
    gemm_8=GemmCurve(4e-6, 0.7, 0.82, 1.5, 2.0),
    attention=AttentionCurve(6e-6, 0.8, 0.6, 150, 13e-6, 0.59, 450),
    measured=False,
)
_RTX4090 = replace(
    _UNMEASURED,
    gemm=GemmCurve(4e-6, 1.03, 0.93, 2.7),
    attention=AttentionCurve(9e-6, 0.92, 0.7, 110, 8e-6, 0.78, 150),
    measured=True,
)
_CPU = replace(
    _UNMEASURED,
    gemm=GemmCurve(4e-6, 0.75, 0.8, 2.0),
    gemm_8=GemmCurve(4e-6, 0.75, 0.8, 2.0),
    experts=GemmCurve(40e-6, 0.6, 0.7, 2.0),
    experts_8=GemmCurve(40e-6, 0.6, 0.7, 2.0),
    attention=AttentionCurve(4e-6, 0.5, 0.5, 16, 4e-6, 0.4, 16),
    stream=0.5,
    stream_s=4e-6,
    all_reduce=LinkCurve(0.0, 0.0, 1.0, 0.0),
    ring=LinkCurve(0.0, 0.0, 1.0, 0.0),
    all_to_all=LinkCurve(0.0, 0.0, 1.0, 0.0),
    wait_s=0.0,
    row_s=50e-6,
)

_MEASURED = {
    "a100-80g": _A100,
    "a100-40g": _A100,
    "a100-80g-pcie": _A100,
    "a800-80g": _A100,
    "h100-sxm": _H100,
    "h200": _H200,
    "rtx4090": _RTX4090,
}

PCIE = LinkCurve(12e-6, 3e-6, 0.7, 5e-6)
"""Collectives without NVLink go through the host's memory or bridge, and start later; not measured."""

NETWORK = LinkCurve(25e-6, 4e-6, 0.8, 10e-6)
"""The same between machines, over RDMA; not measured."""


def efficiency_of(gpu: Gpu) -> Efficiency:
    """The curves of that GPU, by its name in the catalogue; of GPUs that were not measured, the middle of those that were."""
    if gpu.kind == "cpu":
        return _CPU
    found = _MEASURED.get(gpu.name, _UNMEASURED)
    if gpu.link == "pcie":
        return replace(found, all_reduce=PCIE, ring=PCIE, all_to_all=PCIE)
    return found
