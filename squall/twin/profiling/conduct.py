"""The whole of `squall profile operators`: from a configuration to a profile file, by way of operators, steps and collectives.

Knows the order of things; what each part does, the other modules know.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace

from squall.config import Config
from squall.errors import ConfigError, ModelError, ProfileError
from squall.live.engine.decoder import native_fits
from squall.live.engine.kernels import Kernels, load_kernels
from squall.live.engine.weights import DTYPES
from squall.live.models import find
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.hardware import Gpu, resolve_gpu
from squall.perf.memory import check_dtype
from squall.perf.model import ModelSpec, read_model
from squall.perf.operators import OperatorSource
from squall.perf.profile import Point
from squall.perf.roofline import RooflineSource, layout_of
from squall.perf.tables.profile import CPU, Header, OperatorProfile, save
from squall.report.progress import progress
from squall.twin.profile import medians
from squall.twin.profiling import collectives
from squall.twin.profiling.bench import CAPTURED, OperatorBench, widths
from squall.twin.profiling.journal import Journal, Row, Setup
from squall.twin.profiling.operators import counted, header, machine, measure, profile_of, with_overhead
from squall.twin.profiling.questions import Limits, Questions, questions
from squall.twin.profiling.steps import Fit, engine, fit_overhead, runs, whole_steps
from squall.twin.profiling.timing import CpuTimer, CudaTimer, GraphTimer, Timer, cpu_clock

Say = Callable[[str], None]

COLLECTIVES = 0.1
"""Their share of the time."""

_LONGEST_CPU, _LONGEST_GPU = 8192, 32768
_CACHE_CPU, _CACHE_GPU = 256 << 20, 4 << 30
_POOL_CPU, _POOL_GPU = 1 << 30, 8 << 30
_STEP = "step"


class Wanted(Struct, frozen=True):
    """What to measure.

    Attributes:
        tps: degrees whose shares; empty for all of 1, 2, 4 and 8 that the model can be shared by.
        budget_s: seconds, about.
        steps, collectives, graphs: whether these are measured, too.
        out: the file to write.
    """

    config: Config
    tps: tuple[int, ...]
    budget_s: float
    steps: bool
    collectives: bool
    graphs: bool
    out: Path


class Ground(Struct, frozen=True):
    """What is measured, on what: all that the parts need to know."""

    model: ModelSpec
    folder: Path | None
    gpu: Gpu
    layouts: tuple[Layout, ...]
    device: torch.device
    kernels: Kernels | None
    threads: int
    block_size: int
    limits: Limits

    @property
    def how(self) -> str:
        """The engine's part of the profile's header."""
        if self.device.type != "cpu":
            return f"PyTorch {torch.__version__} on {torch.cuda.get_device_name(self.device)}"
        return f"{self.threads} thread(s), {'native kernels' if self.kernels else 'PyTorch ' + torch.__version__}"

    def setup(self, mode: str) -> Setup:
        """For the journal."""
        layout = self.layouts[0]
        place = f"{machine()}, {self.how}"
        return Setup(
            self.model.name, self.model.num_params, place, layout.dtype, layout.kv_dtype, self.block_size, mode
        )  # fmt: skip


def conduct(wanted: Wanted, say: Say) -> list[Path]:
    """Measure and write the profile; with CUDA graphs a second one beside it. Returns the files.

    Raises SquallError: the model or device cannot be had, or the time was too short; what was measured is kept beside `out`.
    """
    if wanted.out.exists():
        raise ConfigError(f"{wanted.out} exists already; choose another file (--out) or remove it")
    ground = _ground(wanted)
    asked = _asked(ground, say)
    with Journal(_beside(wanted.out), ground.setup("eager")) as journal:
        rows = _eager(wanted, ground, asked, journal, say)
        profile = profile_of(rows, _header(ground, ground.how), str(journal.path))
        fit = _fitted(ground, profile, rows, say)
        profile = with_overhead(profile, fit.step_s if fit else None)
        save(profile, wanted.out)
        journal.remove()
    say("; ".join(f"{name}: {count:,} points" for name, count in counted(profile).items()))
    graphs = wanted.graphs and ground.device.type == "cuda"
    return [wanted.out, *([_captured(wanted, ground, profile, say)] if graphs else [])]


# -- the parts


def _eager(wanted: Wanted, ground: Ground, asked: Questions, journal: Journal, say: Say) -> list[Row]:
    """All that is run launch by launch: operators, whole steps, collectives."""
    timer: Timer = CpuTimer(cpu_clock(ground.threads)) if ground.device.type == "cpu" else CudaTimer()
    bench = _bench(ground, asked, timer)
    worlds = _worlds(wanted, ground, say)
    step = _stepping(ground, journal) if wanted.steps and _runs(ground, say) else None
    budget = wanted.budget_s * (1.0 - (COLLECTIVES if worlds else 0.0))
    with progress("measuring operators", budget) as show:
        spent = measure(asked.curves, bench.seconds, journal, budget, show, between=step)
    taken_over = f", {spent.earlier} taken over from a run that was stopped" if spent.earlier else ""
    say(f"{spent.points} points of operators measured{taken_over}" + ("; more would tell nothing new" if spent.sure else ""))
    for world in worlds:
        lines = collectives.lines(world)
        with collectives.joined(world, ground.device.type) as members:
            share = wanted.budget_s * COLLECTIVES / len(worlds)
            with progress(f"measuring collectives of {world}", share) as show:
                measure(lines, members.at, journal, share, show, insist=False)
    return journal.rows


def _stepping(ground: Ground, journal: Journal) -> Callable[[], None]:
    """What measures one whole step more at each call, and keeps it."""
    assert ground.folder is not None
    layout = ground.layouts[0]
    token_bytes = ground.model.kv_bytes_per_token(layout.kv_dtype, 1)
    pool = _POOL_CPU if ground.device.type == "cpu" else _POOL_GPU
    ready = engine(
        ground.folder,
        num_blocks=max(64, min(4096, pool // (token_bytes * ground.block_size))),
        block_size=ground.block_size,
        max_model_len=min(ground.limits.context, ground.model.max_position),
        device=str(ground.device),
        dtype=layout.dtype,
        threads=ground.threads,
    )
    clock = cpu_clock(ground.threads) if ground.device.type == "cpu" else time.perf_counter_ns
    points = whole_steps(ready, clock)

    def one_more() -> None:
        point = next(points, None)
        if point is not None:
            journal.add(_step_row(point))

    return one_more


def _fitted(ground: Ground, profile: OperatorProfile, rows: Sequence[Row], say: Say) -> Fit | None:
    """The overhead of a step, where whole steps were measured."""
    points = medians(_step_point(row) for row in rows if row.operator == _STEP)
    if len(points) < 2:
        return None
    layout = next(layout for layout in (*ground.layouts, replace(ground.layouts[0], tp=1)) if layout.tp == 1)
    roofline = RooflineSource(ground.gpu, dtype=layout.dtype)
    sources: list[OperatorSource] = [profile.source(), roofline]
    fit = fit_overhead(Composed(ground.model, ground.gpu.name, layout, sources, roofline.efficiency, 0.0), points)
    say(
        f"a step costs {1e3 * fit.step_s:.2f} ms beside its operators (from {fit.num_fitted} whole steps); of {fit.num_held_out} "
        f"others half are told within {100 * fit.median_error:.1f} %, nine in ten within {100 * fit.p90_error:.1f} %"
    )
    return fit


def _captured(wanted: Wanted, ground: Ground, eager: OperatorProfile, say: Say) -> Path:
    """The same operators replayed from CUDA graphs, in a profile of their own; what is not captured is as it was."""
    out = wanted.out.with_name(f"{wanted.out.stem}.graphs{wanted.out.suffix}")
    asked = _asked(ground, lambda _: None)
    curves = [curve for curve in asked.curves if curve.operator in CAPTURED]
    bench = _bench(ground, asked, CudaTimer(), GraphTimer())
    with Journal(_beside(out), ground.setup("graphs")) as journal:
        with progress("measuring graphs", wanted.budget_s) as show:
            measure(curves, bench.seconds, journal, wanted.budget_s, show)
        captured = profile_of(journal.rows, _header(ground, f"{ground.how}, graphs"), str(journal.path))
        others = {name: rows for name, rows in eager.rows.items() if name not in captured.rows}
        save(OperatorProfile(captured.header, {**captured.rows, **others}), out)
        journal.remove()
    say(f"{captured.num_rows:,} points of captured operators; the overhead of a step with graphs is not measured")
    return out


# -- what it stands on


def _ground(wanted: Wanted) -> Ground:
    config = wanted.config
    device = _device(config.serve.device)
    model, folder = _model(config.model.name)
    gpu = resolve_gpu(CPU if device.type == "cpu" else config.cluster.gpu)
    check_dtype(model, gpu, config.replica.dtype)
    tps = wanted.tps or tuple(tp for tp in (1, 2, 4, 8) if model.can_share(tp))
    layouts = tuple(layout_of(model, gpu, Layout(tp=tp), config.replica.dtype, config.replica.kv_dtype) for tp in sorted(tps))
    for layout in layouts:
        model.check_tp(layout.tp, 1)
    dtype = layouts[0].dtype
    if layouts[0].kv_dtype != dtype:
        raise ConfigError(f"replica.kv_dtype is {layouts[0].kv_dtype}; the built-in engine keeps KV as it computes: use {dtype}")
    threads = config.serve.compute_threads
    torch.set_num_threads(threads)
    kernels = load_kernels() if native_fits(DTYPES[dtype], device, threads) else None
    cpu = device.type == "cpu"
    context = config.replica.max_model_len or min(model.max_position, _LONGEST_CPU if cpu else _LONGEST_GPU)
    limits = Limits(
        getattr(config.batching, "max_num_batched_tokens", 2048), getattr(config.batching, "max_num_seqs", 256),
        min(context, model.max_position), _CACHE_CPU if cpu else _CACHE_GPU,
    )  # fmt: skip
    return Ground(model, folder, gpu, layouts, device, kernels, threads, config.replica.block_size, limits)


def _device(name: str) -> torch.device:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"serve.device is {name!r}; use 'cpu' or 'cuda'")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"serve.device is {name!r}, but this PyTorch sees no GPU; use 'cpu', or install a CUDA build")
    return torch.device(name)


def _model(name: str) -> tuple[ModelSpec, Path | None]:
    """The sizes, and the folder of its config.json where there is one here."""
    try:
        folder = find(name)
    except ModelError:
        return resolve_model(name), None
    return read_model(folder), folder


def _asked(ground: Ground, say: Say) -> Questions:
    asked = questions(ground.model, ground.layouts, ground.limits)
    known = widths(ground.model, asked.kernels).kernels
    for what in (*asked.left_out, *(name for name in asked.kernels if name not in known)):
        say(f"note: the built-in engine runs no {what}; the datasheet answers for it")
    return replace(asked, curves=[c for c in asked.curves if c.operator not in asked.kernels or c.operator in known])


def _bench(ground: Ground, asked: Questions, timer: Timer, captured: Timer | None = None) -> OperatorBench:
    dtype = DTYPES[ground.layouts[0].dtype]
    what = widths(ground.model, asked.kernels)
    return OperatorBench(what, ground.block_size, dtype, ground.device, ground.kernels, timer, captured)


def _runs(ground: Ground, say: Say) -> bool:
    if ground.folder is None:
        say(f"note: no config.json of {ground.model.name} is here, so no whole steps are measured")
        return False
    try:
        found = runs(ground.folder)
    except ModelError as error:
        say(f"note: no whole steps are measured: {error}")
        return False
    if not found:
        say(f"note: the built-in engine does not run {ground.model.name}, so no whole steps are measured")
    return found


def _worlds(wanted: Wanted, ground: Ground, say: Say) -> list[int]:
    """How many processes to join, each in turn."""
    if not wanted.collectives:
        return []
    most = torch.cuda.device_count() if ground.device.type == "cuda" else 4 * (os.cpu_count() or 1)
    asked = [layout.tp for layout in ground.layouts if layout.tp > 1]
    for world in asked:
        if world > most:
            say(f"note: collectives of {world} are not measured: there are devices for {most} here")
    return [world for world in asked if world <= most]


def _header(ground: Ground, how: str) -> Header:
    gpu = CPU if ground.device.type == "cpu" else ground.gpu.name
    return header(gpu, how, (ground.model.name,), [layout.tp for layout in ground.layouts], ground.block_size)


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.journal")


def _step_row(point: Point) -> Row:
    at: dict[str, int | str] = {
        "num_decodes": point.num_decodes, "decode_context": point.decode_context, "chunk_tokens": point.chunk_tokens,
        "chunk_offset": point.chunk_offset, "last": int(point.last),
    }  # fmt: skip
    return Row(_STEP, at, point.seconds)


def _step_point(row: Row) -> Point:
    try:
        decodes, context, chunk, offset, last = (int(row.at[name]) for name in Point.__struct_fields__[:5])
    except (KeyError, ValueError):
        raise ProfileError(f"a step of the journal is not one: {row.at}") from None
    return Point(decodes, context, chunk, offset, bool(last), row.seconds)
