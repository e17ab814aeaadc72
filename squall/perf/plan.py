"""Which shares of a model fit on a GPU, and what would make the others fit: the memory account, asked many times.

Knows no prices of steps: what fits need not be fast.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from squall.errors import ConfigError
from squall.perf.hardware import Gpu
from squall.perf.memory import Deployment, Memory, measure, missing_bytes
from squall.perf.quantization import Quantization
from squall.perf.spec import ModelSpec

MOST_GPUS = 64
"""The largest `tp` that a remedy proposes."""


class Option(Struct, frozen=True):
    """One way to put a model on GPUs.

    Attributes:
        memory: None where the model cannot be cut like that.
        obstacle: why it does not work, in one line; None where it does.
        remedies: single changes that would make it fit, as options of `squall plan`, those without further GPUs first.
    """

    deployment: Deployment
    memory: Memory | None
    obstacle: str | None = None
    remedies: tuple[str, ...] = ()


def options(model: ModelSpec, gpu: Gpu, wanted: Deployment, tps: Iterable[int]) -> list[Option]:
    """The account for every `tp`. Raises ConfigError for settings that make no sense, and where no `tp` can share the model."""
    deployments = [replace(wanted, tp=tp) for tp in tps]
    if not any(model.can_share(plan.tp, plan.ep) for plan in deployments):
        model.check_tp(deployments[0].tp, deployments[0].ep)
    return [_option(model, gpu, deployment) for deployment in deployments]


def _option(model: ModelSpec, gpu: Gpu, deployment: Deployment) -> Option:
    if not model.can_share(deployment.tp, deployment.ep):
        possible = ", ".join(str(tp) for tp in range(1, 17) if model.can_share(tp, deployment.ep))
        return Option(
            deployment, None, f"the model cannot be shared evenly; tp {possible} can" if possible else "ep is too large"
        )
    memory = measure(model, gpu, deployment)
    missing = missing_bytes(memory)
    if not missing:
        return Option(deployment, memory)
    obstacle = f"{missing / 1e9:.1f} GB a GPU too small for one sequence of {deployment.max_model_len or 1:,} tokens"
    return Option(deployment, memory, obstacle, tuple(_remedies(model, gpu, deployment)))


def _remedies(model: ModelSpec, gpu: Gpu, deployment: Deployment) -> Iterator[str]:
    """Each single change that suffices; of those that come in sizes only the smallest that does."""
    for family in _changes(model, gpu, deployment):
        for said, changed in family:
            if _fits(model, gpu, changed):
                yield said
                break


def _fits(model: ModelSpec, gpu: Gpu, deployment: Deployment) -> bool:
    try:
        return not missing_bytes(measure(model, gpu, deployment))
    except ConfigError:
        return False


_Change = tuple[str, Deployment]


def _changes(model: ModelSpec, gpu: Gpu, now: Deployment) -> Iterator[list[_Change]]:
    """Kinds of changes, each from the smallest to the largest: settings, fewer bits, a shorter context, more GPUs."""
    if now.gpu_memory_utilization < 0.95:
        yield [("--gpu-memory-utilization 0.95", replace(now, gpu_memory_utilization=0.95))]
    if now.kv_dtype == "auto":
        yield [("--kv-dtype fp8", replace(now, kv_dtype="fp8"))]
    sizes = [size for size in (1024, 512, 256) if size < now.max_num_batched_tokens]
    yield [(f"--max-num-batched-tokens {size}", replace(now, max_num_batched_tokens=size)) for size in sizes]
    yield [(f"--max-num-seqs {n}", replace(now, max_num_seqs=n)) for n in (128, 64, 16) if n < now.max_num_seqs]
    context = now.max_model_len or 1
    shorter = [n for n in (131072, 65536, 32768, 16384, 8192, 4096, 2048) if n < context]
    yield [(f"--context {n}", replace(now, max_model_len=n)) for n in shorter]
    if now.dtype == "auto" and model.quantization is None:
        types = ["fp8", "int4"] if gpu.fp8_flops else ["int8", "int4"]
        yield [(f"--dtype {dtype} (a quantised checkpoint)", replace(now, dtype=dtype)) for dtype in types]
    more = [tp for tp in (2**n for n in range(1, 7)) if now.tp < tp <= MOST_GPUS]
    yield [(f"--tp {tp}", replace(now, tp=tp)) for tp in more]
    if model.num_experts:
        yield [(f"--ep {ep}", replace(now, ep=ep)) for ep in (2**n for n in range(1, 7)) if now.ep < ep <= MOST_GPUS]
    stages = [pp for pp in (2, 4, 8) if now.pp < pp <= model.num_layers]
    yield [(f"--pp {pp}", replace(now, pp=pp)) for pp in stages]


_PROMISES = {"fp8": ("fp8",), "int4": ("int4", "4bit", "awq", "gptq"), "int8": ("int8", "8bit"), "nvfp4": ("nvfp4", "fp4")}


def doubt(model: ModelSpec) -> str | None:
    """A line where the name promises fewer bits than the files declare: only what they declare is counted."""
    words = model.name.lower().replace("_", "-").split("/")[-1].split("-")
    promised = [dtype for dtype, names in _PROMISES.items() if any(name in words for name in names)]
    stored: Quantization | None = model.quantization
    if not promised or stored is not None:
        return None
    return f"the name says {promised[0]}, but its config.json declares no quantisation: counted as {model.dtype}"
