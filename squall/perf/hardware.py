"""What a GPU can do, by name: the datasheet, and what an hour of it costs. "cpu" is this machine, measured.

Knows no model and no efficiency: these are peaks, and dense ones. Prices are dated list prices to be overridden, not advice;
public lists differ by a factor of three. A TOML file in the place of a name overrides any figure, or describes another GPU.
"""

import difflib
import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

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
        pcie_bandwidth: bytes a second and direction to the host (NVLink-C2C where that takes its place).
        usd_per_hour: of one GPU, on demand; 0 where no price is known.
        price: where and when that price was seen.
        source: of the other figures.
        int8_flops, fp4_flops: operations a second; None where it has no such arithmetic.
        power_w: what the board may draw; 0 where it is not known.
        has_bf16: GPUs before Ampere compute in fp16 only.
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
    int8_flops: float | None = None
    fp4_flops: float | None = None
    power_w: float = 0.0
    has_bf16: bool = True


# name, TFLOPS in 16 bits, fp8, int8, fp4, GiB found, GB/s, link, its GB/s a direction, PCIe GB/s, W, USD/h | price | source
_ROWS = """
a100-40g      312    -      624    -      39.4  1555 nvlink           300 32  400  1.29 | Lambda list, 2025           | NVIDIA A100 datasheet (SXM)
a100-80g      312    -      624    -      79.2  2039 nvlink           300 32  400  2.29 | RunPod list, 2025           | NVIDIA A100 datasheet (SXM)
a100-80g-pcie 312    -      624    -      79.2  1935 pcie              32 32  300  1.99 | RunPod list, 2025           | NVIDIA A100 datasheet (PCIe)
a800-80g      312    -      624    -      79.2  2039 nvlink           200 32  400  2.29 | as a100-80g (2025)          | NVIDIA A800 datasheet: an A100 with 400 GB/s of NVLink, both directions
h100-sxm      989    1979   1979   -      79.2  3350 nvlink           450 64  700  2.95 | Nebius list, 2025           | NVIDIA H100 datasheet (SXM)
h100-pcie     756    1513   1513   -      79.1  2000 pcie              64 64  350  2.49 | Lambda list, 2025           | NVIDIA H100 datasheet (PCIe)
h200          989    1979   1979   -      139.8 4800 nvlink           450 64  700  3.50 | Nebius list, 2025           | NVIDIA H200 datasheet (SXM)
b200          2250   4500   4500   9000   178.4 8000 nvlink           900 64  1000 5.98 | RunPod, March 2026          | NVIDIA B200 datasheet
b300          2250   4500   -      13500  267.7 8000 nvlink           900 128 1100 2.34 | owner's cost by SemiAnalysis, 2026, no list | NVIDIA B300 figures in InferenceX
gb200         2500   5000   -      10000  185.0 8000 nvlink           900 450 1200 2.21 | owner's cost by SemiAnalysis, 2026, no list | NVIDIA GB200 NVL72 datasheet
l4            121    242    242    -      22.0  300  pcie              32 32  72   0.80 | AWS us-east-1, early 2026   | NVIDIA L4 datasheet
l40s          362    733    733    -      44.4  864  pcie              32 32  350  1.55 | Nebius list, 2025           | NVIDIA L40S datasheet
a10g          70     -      140    -      22.0  600  pcie              32 32  150  1.01 | AWS us-east-1, early 2026   | AWS G5 (NVIDIA publishes no A10G sheet)
a40           149.7  -      299.3  -      44.4  696  pcie              32 32  300  0.79 | RunPod list, 2025           | NVIDIA A40 datasheet
t4            65     -      130    -      14.6  320  pcie              16 16  70   0.53 | AWS us-east-1, early 2026   | NVIDIA T4 datasheet
rtx4090       165.2  330.3  330.3  -      23.52 1008 pcie              32 32  450  0.74 | RunPod list, 2025           | NVIDIA Ada whitepaper
rtx-pro-6000  467.8  935.6  935.6  1871.2 94.5  1792 pcie              64 64  600  1.57 | RunPod, March 2026          | NVIDIA figures in aiconfigurator (server edition)
mi300x        1307   2615   2615   -      192.0 5300 infinity-fabric  448 64  750  1.99 | typical list, 2026          | AMD MI300X datasheet
mi325x        1307   2615   2615   -      256.0 6000 infinity-fabric  448 64  1000 1.28 | owner's cost by SemiAnalysis, 2026, no list | AMD MI325X figures in InferenceX
"""  # noqa: E501

_WITHOUT_BF16 = {"t4"}


def _gpu(row: str) -> Gpu:
    figures, price, source = (part.strip() for part in row.split("|"))
    name, flops, fp8, int8, fp4, gib, gbs, link, link_gbs, pcie_gbs, watts, usd = figures.split()
    return Gpu(
        name=name, kind="gpu", flops=float(flops) * _TERA, fp8_flops=_tera(fp8), memory_bytes=int(float(gib) * _GIB),
        bandwidth=float(gbs) * _GIGA, link=link, link_bandwidth=float(link_gbs) * _GIGA, pcie_bandwidth=float(pcie_gbs) * _GIGA,
        usd_per_hour=float(usd), price=price, source=source, int8_flops=_tera(int8), fp4_flops=_tera(fp4), power_w=float(watts),
        has_bf16=name not in _WITHOUT_BF16,
    )  # fmt: skip


def _tera(figure: str) -> float | None:
    return None if figure == "-" else float(figure) * _TERA


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in map(_gpu, _ROWS.strip().splitlines())}

_ALIASES = {
    "a100": "a100-80g", "a100-80gb": "a100-80g", "a100-sxm": "a100-80g", "a100-40gb": "a100-40g", "a100-pcie": "a100-80g-pcie",
    "a800": "a800-80g", "h100": "h100-sxm", "h100-80g": "h100-sxm", "h200-sxm": "h200", "b200-sxm": "b200", "b300-sxm": "b300",
    "rtx-4090": "rtx4090", "4090": "rtx4090", "rtx6000-pro": "rtx-pro-6000",
}  # fmt: skip


def resolve_gpu(name: str) -> Gpu:
    """The GPU of that name, or of a TOML file (see `read_gpu`); "cpu" measures this machine, in a fifth of a second: keep it.

    Raises ConfigError, with close matches, for an unknown name.
    """
    if name.endswith(".toml"):
        return read_gpu(Path(name).expanduser())
    key = name.lower().replace("_", "-")
    if key == "cpu":
        return measure_cpu()
    gpu = GPUS.get(_ALIASES.get(key, key))
    if gpu is None:
        close = difflib.get_close_matches(key, [*GPUS, *_ALIASES, "cpu"], n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"known are cpu, {', '.join([*GPUS][:5])}, ..."
        raise ConfigError(f"cluster.gpu {name!r} is unknown: {hint}")
    return gpu


# -- a GPU of one's own

_KEYS: dict[str, tuple[str, float]] = {
    "bf16_tflops": ("flops", _TERA), "fp8_tflops": ("fp8_flops", _TERA), "int8_tops": ("int8_flops", _TERA),
    "fp4_tflops": ("fp4_flops", _TERA), "memory_gib": ("memory_bytes", _GIB), "bandwidth_gbs": ("bandwidth", _GIGA),
    "link_gbs": ("link_bandwidth", _GIGA), "pcie_gbs": ("pcie_bandwidth", _GIGA), "power_w": ("power_w", 1.0),
    "usd_per_hour": ("usd_per_hour", 1.0),
}  # fmt: skip
"""Keys with a number: the field that each sets, and its unit."""

_TEXTS = ("name", "link", "price", "source")
_NEEDED = ("bf16_tflops", "memory_gib", "bandwidth_gbs", "pcie_gbs")
_NOT_IN_SHEET = Gpu(
    "", "gpu", 0.0, None, 0, 0.0, "pcie", 0.0, 0.0, usd_per_hour=0.0, price="not given", source="the user's own figures"
)


def read_gpu(path: Path) -> Gpu:
    """A GPU from a TOML file: `base` names one of the catalogue, every other key replaces a figure of it.

    Without `base`, 16-bit TFLOPS, memory, its bandwidth and PCIe's are needed. Raises ConfigError naming the key.
    """
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"cluster.gpu {path}: no such file; give a GPU's name or a TOML file that describes one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cluster.gpu {path}: cannot be read ({error})") from None
    base = keys.pop("base", None)
    if base is not None and (not isinstance(base, str) or base.endswith(".toml")):
        raise ConfigError(f"{path}: base is {base!r}; it must be the name of a GPU in the catalogue")
    missing = [key for key in _NEEDED if key not in keys] if base is None else []
    if missing:
        raise ConfigError(f"{path}: {missing[0]} is missing; add it, or base = the name of a similar GPU")
    gpu = replace(_NOT_IN_SHEET if base is None else resolve_gpu(base), name=path.stem)
    changes = dict(_change(path, key, value) for key, value in keys.items())
    if base is None:
        changes.setdefault("link_bandwidth", changes["pcie_bandwidth"])
    return replace(gpu, **changes)


def _change(path: Path, key: str, value: Any) -> tuple[str, Any]:
    """The field that a key of the file sets, and its value in our units."""
    if key in _TEXTS and isinstance(value, str) and value:
        return key, value
    if key == "has_bf16" and isinstance(value, bool):
        return key, value
    if key in _KEYS:
        field, unit = _KEYS[key]
        least = 0 if key in ("usd_per_hour", "power_w") else 1e-9
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
            raise ConfigError(f"{path}: {key} is {value!r}; it must be a number above 0")
        return field, int(value * unit) if field == "memory_bytes" else value * unit
    if key in _TEXTS or key == "has_bf16":
        raise ConfigError(f"{path}: {key} is {value!r}; it must be {'true or false' if key == 'has_bf16' else 'a text'}")
    known = [*_KEYS, *_TEXTS, "has_bf16", "base"]
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    raise ConfigError(f"{path}: {key} is unknown; {hint}")


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
