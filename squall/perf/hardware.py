"""What a GPU can do, by name: the datasheet, and what an hour of it costs. "cpu" is this machine, measured.

Knows no model and no efficiency: these are peaks. Prices are dated list prices to be overridden, not advice.
"""

import difflib
import os
import time
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from squall.errors import ConfigError

_TERA, _GIGA, _GIB = 1e12, 1e9, 1 << 30


class Gpu(Struct, frozen=True):
    """One accelerator (or, with `kind` "cpu", this machine's cores).

    Attributes:
        flops: dense floating-point operations a second in 16-bit arithmetic (fp32 on a CPU).
        fp8_flops: the same in 8-bit arithmetic; None where it has none.
        memory_bytes: what a process finds in all, a little less than the name says.
        bandwidth: bytes a second from its memory.
        link: what joins the GPUs of one node.
        link_bandwidth: bytes a second and direction of that link, per GPU.
        pcie_bandwidth: bytes a second and direction to the host.
        usd_per_hour: of one GPU, on demand.
        price: where and when that price was seen.
        source: of the other figures.
    """

    name: str
    kind: str
    flops: float
    fp8_flops: float | None
    memory_bytes: int
    bandwidth: float
    link: str
    link_bandwidth: float
    pcie_bandwidth: float
    usd_per_hour: float
    price: str
    source: str


def _gpu(
    name: str, tflops: float, fp8_tflops: float | None, gib: float, gbs: float, link: str, link_gbs: float, pcie_gbs: float,
    usd: float, price: str, source: str,
) -> Gpu:  # fmt: skip
    fp8 = None if fp8_tflops is None else fp8_tflops * _TERA
    sizes = (tflops * _TERA, fp8, int(gib * _GIB), gbs * _GIGA, link, link_gbs * _GIGA, pcie_gbs * _GIGA)
    return Gpu(name, "gpu", *sizes, usd_per_hour=usd, price=price, source=source)


_AWS, _NEBIUS = "AWS us-east-1 list, early 2026", "Nebius list, 2025"
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 312, None, 39.4, 1555, "nvlink", 300, 32, 1.29, "Lambda list, 2025", "NVIDIA A100 datasheet"),
        _gpu("a100-80g", 312, None, 79.2, 2039, "nvlink", 300, 32, 2.29, "RunPod list, 2025", "NVIDIA A100 datasheet (SXM)"),
        _gpu("a100-80g-pcie", 312, None, 79.2, 1935, "pcie", 32, 32, 1.99, "RunPod list, 2025", "NVIDIA A100 datasheet (PCIe)"),
        _gpu("h100-sxm", 989, 1979, 79.2, 3350, "nvlink", 450, 64, 2.95, _NEBIUS, "NVIDIA H100 datasheet (SXM)"),
        _gpu("h100-pcie", 756, 1513, 79.1, 2000, "pcie", 64, 64, 2.49, "Lambda list, 2025", "NVIDIA H100 datasheet (PCIe)"),
        _gpu("h200", 989, 1979, 139.8, 4800, "nvlink", 450, 64, 3.50, _NEBIUS, "NVIDIA H200 datasheet (SXM)"),
        _gpu("b200", 2250, 4500, 178.4, 8000, "nvlink", 900, 64, 5.98, "RunPod, March 2026", "NVIDIA B200 datasheet"),
        _gpu("l4", 121, 242, 22.0, 300, "pcie", 32, 32, 0.80, _AWS, "NVIDIA L4 datasheet"),
        _gpu("l40s", 362, 733, 44.4, 864, "pcie", 32, 32, 1.55, _NEBIUS, "NVIDIA L40S datasheet"),
        _gpu("a10g", 70, None, 22.0, 600, "pcie", 32, 32, 1.01, _AWS, "AWS G5 (NVIDIA publishes no A10G sheet)"),
        _gpu("t4", 65, None, 14.6, 320, "pcie", 16, 16, 0.53, _AWS, "NVIDIA T4 datasheet"),
        _gpu("rtx4090", 165.2, 330.3, 23.52, 1008, "pcie", 32, 32, 0.74, "RunPod list, 2025", "NVIDIA Ada whitepaper"),
        _gpu("mi300x", 1307, 2615, 192.0, 5300, "infinity fabric", 448, 64, 1.99, "typical list, 2026", "AMD MI300X datasheet"),
    )
}

_ALIASES = {
    "a100": "a100-80g", "a100-80gb": "a100-80g", "a100-sxm": "a100-80g", "a100-40gb": "a100-40g", "h100": "h100-sxm",
    "h100-80g": "h100-sxm", "h200-sxm": "h200", "b200-sxm": "b200", "rtx-4090": "rtx4090",
}  # fmt: skip


def resolve_gpu(name: str) -> Gpu:
    """The GPU of that name; "cpu" measures this machine (a fifth of a second: keep the answer).

    Raises ConfigError, with close matches, for an unknown name.
    """
    key = name.lower().replace("_", "-")
    if key == "cpu":
        return measure_cpu()
    gpu = GPUS.get(_ALIASES.get(key, key))
    if gpu is None:
        known = [*GPUS, *_ALIASES, "cpu"]
        close = difflib.get_close_matches(key, known, n=3, cutoff=0.5) or [*GPUS, "cpu"]
        raise ConfigError(f"cluster.gpu {name!r} is unknown: did you mean {', '.join(close)}?")
    return gpu


# -- this machine


def measure_cpu() -> Gpu:
    """This machine as an accelerator: what one thread reaches, the most a worker uses by default."""
    flops, bandwidth = _matmul_flops(), _stream_bandwidth()
    return Gpu(
        "cpu", "cpu", flops, None, _total_memory(), bandwidth, "memory", bandwidth / 2, bandwidth / 2,
        usd_per_hour=0.0, price="not rented", source="measured on this machine, one thread",
    )  # fmt: skip


def _matmul_flops() -> float:
    """fp32 operations that one core does a second in a matrix product of ordinary size."""
    size = 512
    left = np.full((size, size), 0.5, dtype=np.float32)
    out = np.empty_like(left)
    return 2 * size**3 / _best_of(12, lambda: np.matmul(left, left, out=out))


def _stream_bandwidth() -> float:
    """Bytes that one core reads a second, from an array larger than the caches."""
    array = np.ones(16 << 20, dtype=np.float32)
    return array.nbytes / _best_of(4, lambda: float(array.sum()))


def _best_of(times: int, work: Callable[[], object]) -> float:
    """CPU seconds, all threads together, of the cheapest of some runs: the others met noise.

    CPU time, because a BLAS library may use every core and a busy machine may give us none for a while.
    """
    best = float("inf")
    for _ in range(times):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return max(best, 1e-9)


def _total_memory() -> int:
    """Bytes of memory of this machine, or 8 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 << 30
