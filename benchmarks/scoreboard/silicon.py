"""Time to first token and per output token of NVIDIA's measured deployments, in the simulator with measured operator times.

The points say model, GPU, engine, TP, lengths and concurrency, not how many requests were sent. Each group's TTFT can only come
from one way of sending, which is assumed for it: InferenceX's (ids that begin with a date) draw lengths between 80 and 100 % and
send ten requests a client; SGLang's send one request a client, all at once; the others ten of nearly equal length (90 to 100 % of
the output: clients that start together do not stay together). A client's request passes a tokenizer and HTTP before the engine
sees it: `FRONT_S`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec.structs import replace

from benchmarks.scoreboard import coverage
from benchmarks.scoreboard.rows import Row, errors, spread_rows
from squall.config import Config, ReplicaSpec
from squall.core.actions import RunSteps
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.dtypes import DTYPE_BYTES
from squall.perf.efficiency import Efficiency, efficiency_of
from squall.perf.hardware import Gpu, resolve_gpu
from squall.perf.model import ModelSpec
from squall.perf.roofline import RooflineSource
from squall.perf.tables.installed import installed_source
from squall.policies.batching import Vllm
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

SAID = {
    "measured": "measured operators", "roofline": "curves of each GPU", "datasheet": "datasheet alone, as if never measured",
}  # fmt: skip
GPUS = {
    "h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200", "gb300": "gb300",
}  # fmt: skip
WEIGHTS = {None: "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4"}
SAME = {
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B", "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
}  # fmt: skip
"""Checkpoints in another number type, and the model that they are."""
DENSE = "Llama-3.1|Qwen3-32B"
FRONT_S = 0.03
SENT = 10
"""Requests a client; two of them are simulated, the second standing for all that follow it."""


def points(shared: Path) -> pl.DataFrame:
    """The measured points."""
    return pl.read_csv(shared / "data" / "published" / "silicon_points.csv", infer_schema_length=None)


@cache
def priced(
    gpu: str, engine: str, model: str, tp: int, weights: str, kv: str, kind: str | Efficiency
) -> tuple[ModelSpec, Gpu, Composed]:
    """The latency model of a deployment: from "measured" tables, from efficiencies fitted to "roofline" kernels of this GPU,
    from the "datasheet" with the efficiencies of GPUs in general, or with those given."""
    sheet, spec = resolve_gpu(gpu), resolve_model(model)
    known = sheet if kind != "datasheet" else replace(sheet, name="a GPU that nobody measured")
    efficiency = kind if isinstance(kind, Efficiency) else efficiency_of(known)
    datasheet = RooflineSource(known, efficiency=efficiency)
    sources = [measured(gpu, engine), datasheet] if kind == "measured" else [datasheet]
    layout = Layout(tp=tp, weight_dtype=weights, kv_dtype=kv)
    return spec, sheet, Composed(spec, sheet.name, layout, sources, efficiency)


def known_model(name: str) -> str | None:
    """The name under which the catalogue has a model."""
    try:
        return resolve_model(SAME.get(name, name)).name
    except ConfigError:
        return None


@cache
def measured(gpu: str, engine: str) -> Any:
    return installed_source(resolve_gpu(gpu), engine)


def predict(point: dict[str, Any], kind: str | Efficiency = "measured") -> tuple[float, float] | None:
    """(TTFT, TPOT) in ms as their benchmarks average them; None for a deployment that does not fit."""
    tp, clients = point["tp_size"], point["batch_size"]  # of one replica; `concurrency` is of all
    weights = WEIGHTS[point["gemm_quant_mode"]]
    spec, sheet, latency = deployed(point, kind)
    kv = "bf16" if weights == "bf16" else "fp8"
    free = 0.9 * sheet.memory_bytes - spec.num_params * DTYPE_BYTES[weights] / tp - 3e9
    blocks = int(free / (16 * spec.kv_bytes_per_token(kv, tp)))
    if blocks * 16 < point["isl"] + point["osl"]:
        return None
    waves = 1 if point["backend"] == "sglang" else 3
    config = Config(replica=ReplicaSpec(tp=tp), batching=Vllm(max(256, clients), max(8192, clients)))
    record = simulate(config, list(requests(point, clients, waves)), latency, blocks)
    rows = sorted(record.requests, key=lambda row: row.id)
    ttft = np.array([row.first_token_at - row.arrived_at for row in rows]) / 1e6
    tpot = np.array([(row.finished_at - row.first_token_at) / (row.num_output_tokens - 1) for row in rows]) / 1e6
    return 1e3 * FRONT_S + averaged(ttft, clients), averaged(tpot, clients)


def typical(point: dict[str, Any], kind: str) -> tuple[Composed, RunSteps]:
    """A deployment's prices and its typical step: all decode, half through their outputs."""
    clients = point["batch_size"]
    return deployed(point, kind)[2], RunSteps(1, 1, clients, clients * (point["isl"] + point["osl"] // 2), ())


def deployed(point: dict[str, Any], kind: str | Efficiency) -> tuple[ModelSpec, Gpu, Composed]:
    """See `priced`."""
    weights = WEIGHTS[point["gemm_quant_mode"]]
    model = SAME.get(point["model_path"], point["model_path"])
    kv = "bf16" if weights == "bf16" else "fp8"
    return priced(GPUS[point["system"]], point["backend"], model, point["tp_size"], weights, kv, kind)


def averaged(values: np.ndarray, clients: int) -> float:
    """Over the requests that were sent: the first of each client, and the later ones, of which a few were simulated."""
    first, later = values[:clients], values[clients:]
    return float(first.mean() if not len(later) else (first.mean() + (SENT - 1) * later.mean()) / SENT)


def requests(point: dict[str, Any], clients: int, waves: int) -> Iterator[OfferedRequest]:
    """What closed-loop clients send."""
    least = (0.8, 0.8) if point["id"][:2] == "20" else (1.0, 0.9)
    dice = np.random.default_rng(0)
    for id in range(clients * waves):
        lengths = zip(least, (point["isl"], point["osl"]), strict=True)
        prompt, output = (int(dice.integers(int(part * most), most + 1)) for part, most in lengths)
        yield OfferedRequest(id, 0, prompt, output, after=id - clients if id >= clients else -1)


def compare(shared: Path, every: int = 1, kind: str = "measured") -> tuple[list[Row], pl.DataFrame]:
    """The lines of the scoreboard, and every point.

    Args:
        every: one of so many points.
    """
    judged = dense(shared)
    found, told, left_out = [], [], 0
    for point in judged.gather_every(every).iter_rows(named=True):
        try:
            answer = predict(point, kind)
        except ConfigError:
            answer = None
        if answer is None:
            left_out += 1
        else:
            found.append({**point, "ttft_ms": answer[0], "tpot_ms": answer[1]})
            told.append(coverage.inside(*typical(point, kind), answer[1] / point["silicon_tpot_ms"]))
    frame = pl.DataFrame(found, infer_schema_length=None)
    goals = {"measured": (12.0, 25.0), "datasheet": (20.0, None)}.get(kind, (None, None))
    where = f"silicon points, dense models, {SAID[kind]}, closed loop"
    rows = []
    for metric, goal in zip(("tpot", "ttft"), goals, strict=True):
        off = errors(frame[f"{metric}_ms"].to_list(), frame[f"silicon_{metric}_ms"].to_list())
        rows += spread_rows(f"silicon.{kind}.{metric}", metric.upper(), where, off, goal)
    rows += coverage.rows(f"silicon.{kind}.tpot", "TPOTs inside a step's 90 % interval", where, told)
    rows.append(Row(f"silicon.{kind}.not_priced", "dense points that do not fit", where, len(judged), left_out, None, "points"))
    if kind == "measured":
        rows += experts(points(shared), every)
    return rows, frame


_SIMULATED = (pl.col("mode") == "agg") & pl.col("concurrency").is_not_null()
_IS_DENSE = pl.col("model_path").str.contains(DENSE)
_ALONE = (pl.col("attention_dp_size").fill_null(1) <= 1) & (pl.col("moe_ep_size").fill_null(1) <= 1) & (pl.col("tp_size") <= 8)


def dense(shared: Path) -> pl.DataFrame:
    """The points of dense models."""
    return points(shared).filter(_SIMULATED & _IS_DENSE)


def others(shared: Path) -> pl.DataFrame:
    """The points that are not simulated: experts or data parallel, disaggregated, or without a number of clients."""
    return points(shared).filter(~(_SIMULATED & (_IS_DENSE | _ALONE)))


def experts(everything: pl.DataFrame, every: int) -> list[Row]:
    """Mixtures of experts that share every layer over TP alone, where the catalogue knows the model; no goal.

    Args:
        every: one of five times so many points.
    """
    mixed = everything.filter(_SIMULATED & ~_IS_DENSE & _ALONE)
    token, first, left_out = [], [], 0
    for point in mixed.gather_every(5 * every).iter_rows(named=True):
        try:
            answer = predict(point)
        except (ConfigError, KeyError):  # a model or a number type that we have no sizes of
            answer = None
        if answer is None:
            left_out += 1
        else:
            first.append(answer[0] / point["silicon_ttft_ms"])
            token.append(answer[1] / point["silicon_tpot_ms"])
    where = "silicon points, experts shared by TP alone, one in five, measured operators"
    rows = [Row("silicon.experts.not_priced", "of these, unknown models", where, len(token) + left_out, left_out, None, "points")]
    for name, shares in (("tpot", token), ("ttft", first)):
        if shares:
            off = errors(shares, [1.0] * len(shares))
            rows.append(
                Row(f"silicon.experts.{name}.median", f"{name.upper()}, median error", where, len(off), float(np.median(off)))
            )
    return rows
