"""The table of `squall plan`: where a GPU's memory goes for each share of a model. Knows no accounting, only how to show it."""

from collections.abc import Iterator

from squall.perf.hardware import Gpu
from squall.perf.layers import Experts, LatentAttention
from squall.perf.memory import Deployment
from squall.perf.plan import Option, doubt
from squall.perf.roofline import default_dtype
from squall.perf.spec import ModelSpec

_HEADS = ("tp", "GPUs", "weights", "activations", "graphs", "other", "KV cache", "KV tokens", "sequences", "USD/h", "")


def plan_lines(model: ModelSpec, gpu: Gpu, options: list[Option]) -> Iterator[str]:
    """The model, the GPU, a row for every option, and what would make those fit that do not."""
    wanted = options[0].deployment
    yield _about_model(model, gpu, wanted)
    yield _about_gpu(gpu)
    note = doubt(model)
    if note:
        yield f"note: {note}"
    yield ""
    yield f"GB on the fullest GPU, {wanted.gpu_memory_utilization:.0%} of it in use; {_sequences(wanted)}"
    yield from _aligned([_HEADS, *(_row(gpu, option) for option in options)])
    yield from _advice(options)


def _about_model(model: ModelSpec, gpu: Gpu, wanted: Deployment) -> str:
    size = f"{model.num_params / 1e9:,.2f} billion parameters"
    if model.num_experts:
        size += f", {model.num_active_params / 1e9:,.2f} billion of them at work for a token ({_experts(model)})"
    plain, dtype = model.dtypes(default_dtype(model, gpu) if wanted.dtype == "auto" else wanted.dtype)
    kv_dtype = plain if wanted.kv_dtype == "auto" else wanted.kv_dtype
    kv = f"{model.kv_bytes_per_token(kv_dtype):,} bytes of KV cache a token in {kv_dtype}"
    return f"{model.name}: {size}, {model.num_layers} layers, weights in {dtype}, {_attention(model)}, {kv}"


def _experts(model: ModelSpec) -> str:
    mixture = next(group.mlp for group in model.layers if isinstance(group.mlp, Experts))
    return f"{mixture.num_active} of {mixture.num_experts} experts"


def _attention(model: ModelSpec) -> str:
    cached = [(group.count, group.cached) for group in model.layers if group.cached]
    count = sum(count for count, _ in cached)
    windows = {part.window for _, part in cached if part.window}
    sliding = sum(count for count, part in cached if part.window)
    kind = "latent attention" if any(isinstance(part, LatentAttention) for _, part in cached) else "attention"
    if sliding:
        return f"{kind} in {count} layers, of which {sliding} look back {min(windows):,} tokens"
    return f"{kind} in {count} layers" if count != model.num_layers else kind


def _about_gpu(gpu: Gpu) -> str:
    price = f", {gpu.usd_per_hour:.2f} USD/h ({gpu.price})" if gpu.usd_per_hour else ""
    power = f", {gpu.power_w:.0f} W" if gpu.power_w else ""
    rates = f"{gpu.flops / 1e12:,.4g} TFLOPS, {gpu.bandwidth / 1e9:,.0f} GB/s, {gpu.link} at {gpu.link_bandwidth / 1e9:,.0f} GB/s"
    return f"{gpu.name}: {gpu.memory_bytes / (1 << 30):.1f} GiB, {rates}{power}{price}"


def _sequences(wanted: Deployment) -> str:
    shares = [f"{count} {what}" for count, what in ((wanted.pp, "stages"), (wanted.ep, "GPUs share the experts")) if count > 1]
    return ", ".join([*shares, f"sequences of {wanted.max_model_len or 1:,} tokens"])


def _row(gpu: Gpu, option: Option) -> tuple[str, ...]:
    plan, memory = option.deployment, option.memory
    price = f"{gpu.usd_per_hour * plan.num_gpus:.2f}" if gpu.usd_per_hour else "-"
    start = (str(plan.tp), str(plan.num_gpus))
    if memory is None:
        return (*start, *("-" * 7), price, f"impossible: {option.obstacle}")
    other = memory.fragmentation + memory.runtime
    parts = [f"{part / 1e9:.1f}" for part in (memory.weights, memory.activations, memory.graphs, other)]
    if option.obstacle:
        return (*start, *parts, "-", "-", "-", price, f"does not fit: {option.obstacle}")
    return (*start, *parts, f"{memory.kv / 1e9:.1f}", f"{memory.kv_tokens:,}", f"{memory.num_sequences:,}", price, "fits")


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS) - 1)]
    for row in rows:
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        yield f"{numbers}  {row[-1]}".rstrip()


def _advice(options: list[Option]) -> Iterator[str]:
    for option in options:
        if option.remedies:
            yield f"tp {option.deployment.tp} would fit with any of: {', '.join(option.remedies)}"
        elif option.obstacle and option.memory is not None:
            yield f"tp {option.deployment.tp} fits with no single change; it needs several, or a GPU with more memory"
