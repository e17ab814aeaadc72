"""The datasheet alone, judged on GPUs of which nothing was used: neither kernels, nor times per token of a deployment.

For each GPU that deployments were measured on, the curves are the middle (geometric mean, number by number) of those fitted to
the kernels of GPUs of other generations, and what no kernel shows (a step's overhead, waiting, how much of a kernel's start a
decode in a graph keeps) is chosen by every fourth dense deployment on those GPUs, in a coarse search with steady states' sums.
"""

from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import asdict, replace

from benchmarks.scoreboard.rows import Row, errors
from benchmarks.scoreboard.silicon import GPUS, SAME, WEIGHTS, dense, predict
from squall.core.actions import Chunk, RunSteps
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout, stages
from squall.perf.efficiency import Efficiency, efficiency_of
from squall.perf.hardware import resolve_gpu
from squall.perf.roofline import RooflineSource

FITTED = {"a100-80g": "ampere", "h100-sxm": "hopper", "h200": "hopper"}
"""GPUs whose kernels curves were fitted to."""
GENERATIONS = {"hopper": ("h100_sxm",), "blackwell": ("b200_sxm", "gb200")}
"""Which deployments were measured on which."""
STEP_S, WAIT_S, START = (2e-4, 4e-4, 6e-4, 8e-4, 1e-3), (0.0, 5e-7, 1e-6, 2e-6), (0.5, 1.0)


def compare(shared: Path, every: int = 1) -> list[Row]:
    """The lines of the scoreboard: one a generation, and all together. `every`: one of so many points is judged."""
    rows, all_off = [], []
    for generation, systems in GENERATIONS.items():
        points = dense(shared)
        others = points.filter(~pl.col("system").is_in(list(systems))).gather_every(4)
        efficiency = chosen(curves_without(generation), list(others.iter_rows(named=True)))
        shares = []
        for point in points.filter(pl.col("system").is_in(list(systems))).gather_every(every).iter_rows(named=True):
            answer = predict(point, efficiency)
            if answer is not None:
                shares.append(answer[1] / point["silicon_tpot_ms"])
        off = errors(shares, [1.0] * len(shares))
        all_off += off.tolist()
        where = (
            f"dense models on {', '.join(GPUS[name] for name in systems)}, datasheet, curves and overheads of other generations"
        )
        rows.append(Row(f"heldout.{generation}.tpot", "TPOT, median error", where, len(off), float(np.median(off)), 20.0))
    where = "the two together: GPUs of which nothing was used"
    return [*rows, Row("heldout.tpot", "TPOT, median error", where, len(all_off), median(all_off), 20.0)]


def curves_without(generation: str) -> Efficiency:
    """The middle of the curves of other generations, whose decodes start as their kernels do."""
    kept = [efficiency_of(resolve_gpu(name)) for name, other in FITTED.items() if other != generation]
    whole = [replace(each, attention=replace(each.attention, decode_s=2 * each.attention.decode_s)) for each in kept]
    middle: Efficiency = _middle(whole)
    return replace(middle, measured=False)


def _middle(several: list[Any]) -> Any:
    first = several[0]
    if isinstance(first, Struct):
        return type(first)(**{name: _middle([getattr(each, name) for each in several]) for name in asdict(first)})
    if isinstance(first, bool) or min(several) <= 0:
        return fmean(several) if not isinstance(first, bool) else first
    return exp(fmean(log(value) for value in several))


def chosen(curves: Efficiency, points: list[dict[str, Any]]) -> Efficiency:
    """With the overheads that come nearest to these points' times per token: the least median error."""
    tried = []
    for start in START:
        kept = _with(curves, start, 0.0, 0.0)
        parts = [part for point in points if (part := _parts(kept, point)) is not None]
        for step_s, wait_s in product(STEP_S, WAIT_S):
            off = [abs((own + step_s + wait_s * waits) / truth - 1) for own, waits, truth in parts]
            tried.append((median(off), start, step_s, wait_s))
    return _with(curves, *min(tried)[1:])


def _with(curves: Efficiency, start: float, step_s: float, wait_s: float) -> Efficiency:
    attention = replace(curves.attention, decode_s=start * curves.attention.decode_s)
    return replace(curves, attention=attention, step_s=step_s, wait_s=wait_s)


def _parts(efficiency: Efficiency, point: dict[str, Any]) -> tuple[float, float, float] | None:
    """Of a steady state: seconds a token without overheads, how often a GPU waits in a step, and the measured time."""
    sheet, spec = resolve_gpu(GPUS[point["system"]]), resolve_model(SAME.get(point["model_path"], point["model_path"]))
    weights, tp = WEIGHTS[point["gemm_quant_mode"]], point["tp_size"]
    layout = Layout(tp=tp, weight_dtype=weights, kv_dtype="bf16" if weights == "bf16" else "fp8")
    try:
        latency = Composed(spec, sheet.name, layout, [RooflineSource(sheet, efficiency=efficiency)], efficiency)
    except ConfigError:
        return None
    clients, prompt, output = point["batch_size"], point["isl"], point["osl"]
    decode = latency.run(RunSteps(1, 1, clients, clients * (prompt + output // 2), ()), 1)[0].first / 16e9
    whole = latency.run(RunSteps(1, 1, 0, 0, (Chunk(0, 0, prompt, 0, True),)), 1)[0].first / 16e9
    waits = (tp - 1) * sum(stage.meetings for stage in stages(spec, layout))
    return decode + clients * whole / output, float(waits), point["silicon_tpot_ms"] / 1e3
