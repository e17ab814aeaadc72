"""Single steps and throughputs that others published: Splitwise's table, TensorRT-LLM's and NIM's pages, inference-perf.

Only rows whose setup is complete. Operators come from the reference tables of A100, H100 and H200 (vLLM's kernels), whatever
engine the figures are of.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.scoreboard import coverage
from benchmarks.scoreboard.rows import Row, errors, spread_rows
from benchmarks.scoreboard.silicon import FRONT_S, requests
from squall.config import Config, ReplicaSpec
from squall.core.actions import Chunk, RunSteps
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.efficiency import efficiency_of
from squall.perf.hardware import resolve_gpu
from squall.perf.operators import OperatorSource
from squall.perf.roofline import RooflineSource
from squall.perf.tables.aiconfigurator import of_system, read_aiconfigurator
from squall.perf.tables.reading import tables_in
from squall.perf.tables.source import TableSource
from squall.policies.batching import Vllm
from squall.sim.run import simulate
from squall.workload.build import build
from squall.workload.spec import FixedLength, OfferedRequest, PoissonArrivals, SyntheticWorkload

LAUNCH_S = 30e-6
"""What starting a kernel costs an engine of 2023 about, which captures no graphs."""


Priced = list[tuple[Composed, dict[str, Any]]]


@cache
def tables(shared: Path, gpu: str) -> TableSource:
    sheet = resolve_gpu(gpu)
    return read_aiconfigurator(of_system(tables_in(shared / "data" / "op_profiles"), sheet), sheet, "vllm").source()


@cache
def latency(shared: Path, gpu: str, model: str, tp: int, weights: str, kv: str, launch_s: float = 0.0) -> Composed:
    sheet = resolve_gpu(gpu)
    layout = Layout(tp=tp, weight_dtype=weights, kv_dtype=kv)
    sources: list[OperatorSource] = [tables(shared, gpu), RooflineSource(sheet)]
    return Composed(resolve_model(model), sheet.name, layout, sources, efficiency_of(sheet), launch_s=launch_s)


SPLITWISE = {"a100-80gb": "a100-80g", "h100-80gb": "h100-sxm"}
LAUNCHES_S = tuple(step * 1e-6 for step in range(20, 62, 3))


def splitwise(shared: Path) -> list[Row]:
    """Prompt and token time of Llama-2-70B, as one step each.

    The engine of 2023 is `kind = "roofline"` and `launch_s`, which is chosen for each GPU by the token times on eight of them;
    the rows on two and four are judged. Tables of today's kernels are shown beside it.
    """
    frame = pl.read_csv(shared / "data" / "published" / "splitwise_sim_perf_model.csv").filter(
        (pl.col("model") == "llama2-70b") & pl.col("hardware").is_in(list(SPLITWISE))
    )
    points = ["hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
    frame = frame.group_by(points, maintain_order=True).agg(pl.col("prompt_time", "token_time").median())
    chosen, judged = frame.filter(pl.col("tensor_parallel") == 8), frame.filter(pl.col("tensor_parallel") < 8)
    prompt, token, inside = [], [], []
    for hardware, gpu in SPLITWISE.items():
        launch_s = min(LAUNCHES_S, key=lambda each: _off_token(chosen, hardware, gpu, each))
        for row in judged.filter(pl.col("hardware") == hardware).iter_rows(named=True):
            model = datasheet(gpu, "llama-2-70b", row["tensor_parallel"], launch_s)
            prompt.append(_prompt_ms(model, row) / row["prompt_time"])
            token.append(_token_ms(model, row) / row["token_time"])
            inside.append(coverage.inside(model, _decodes(row), _token_ms(model, row) / row["token_time"]))
    today = [(latency(shared, SPLITWISE[row["hardware"]], "llama-2-70b", row["tensor_parallel"], "bf16", "bf16", LAUNCH_S), row)
             for row in frame.iter_rows(named=True)]  # fmt: skip
    setup = "Splitwise, Llama-2-70B, A100 and H100, TP 2 and 4: datasheet and launch_s, chosen on TP 8"
    kernels = "the same with TP 8, kernels of today, launch_s = 30 us"
    return [
        *spread_rows("splitwise.2023.prompt", "prompt time", setup, errors(prompt, [1.0] * len(prompt)), 15.0),
        *spread_rows("splitwise.2023.token", "token time", setup, errors(token, [1.0] * len(token)), 15.0),
        *coverage.rows("splitwise", "token times inside the 90 % interval", setup, inside),
        *spread_rows("splitwise.prompt", "prompt time", kernels, _errors(today, _prompt_ms, "prompt_time"), None),
        *spread_rows("splitwise.token", "token time", kernels, _errors(today, _token_ms, "token_time"), None),
    ]


@cache
def datasheet(gpu: str, model: str, tp: int, launch_s: float) -> Composed:
    sheet = resolve_gpu(gpu)
    return Composed(
        resolve_model(model), sheet.name, Layout(tp=tp), [RooflineSource(sheet)], efficiency_of(sheet), launch_s=launch_s
    )


def _off_token(frame: pl.DataFrame, hardware: str, gpu: str, launch_s: float) -> float:
    rows = list(frame.filter(pl.col("hardware") == hardware).iter_rows(named=True))
    return float(np.median(_errors([(datasheet(gpu, "llama-2-70b", 8, launch_s), row) for row in rows], _token_ms, "token_time")))


def _errors(rows: Priced, price: Callable[[Composed, dict[str, Any]], float], column: str) -> NDArray[np.float64]:
    return errors([price(model, row) for model, row in rows], [row[column] for _, row in rows])


def _prompt_ms(model: Composed, row: dict[str, Any]) -> float:
    chunks = tuple(Chunk(id, 0, row["prompt_size"], 0, True) for id in range(row["batch_size"]))
    return model.run(RunSteps(1, 1, 0, 0, chunks), 1)[0].first / 16e6


def _token_ms(model: Composed, row: dict[str, Any]) -> float:
    return model.run(_decodes(row), 1)[0].first / 16e6


def _decodes(row: dict[str, Any]) -> RunSteps:
    batch = row["batch_size"]
    return RunSteps(1, 1, batch, batch * (row["prompt_size"] + row["token_size"] // 2), ())


def nim(shared: Path) -> list[Row]:
    """Closed loops of NVIDIA NIM, Llama-3.3-70B in fp8 on two H100."""
    frame = pl.read_csv(shared / "data" / "published" / "nvidia_trtllm_nim.csv", infer_schema_length=None).filter(
        (pl.col("gpu") == "2xH100-80GB") & pl.col("metric").is_in(["ttft", "itl"])
    )
    off: dict[str, list[float]] = {"ttft": [], "itl": []}
    model = latency(shared, "h100-sxm", "llama-3.3-70b", 2, "fp8", "fp8")
    for row in frame.iter_rows(named=True):
        clients, prompt, output = (int(row[key]) for key in ("batch_or_concurrency", "isl", "osl"))
        offered = list(requests({"id": "", "isl": prompt, "osl": output}, clients, 3))
        config = Config(replica=ReplicaSpec(tp=2), batching=Vllm(256, 8192))
        done = simulate(config, offered, model, 20_000).requests
        ttft = 1e3 * FRONT_S + float(np.mean([row.first_token_at - row.arrived_at for row in done if row.id >= clients])) / 1e6
        itl = float(np.mean([(row.finished_at - row.first_token_at) / (row.num_output_tokens - 1) for row in done])) / 1e6
        off[row["metric"]].append(float(errors([ttft if row["metric"] == "ttft" else itl], [float(row["value"])])[0]))
    setup = "NVIDIA NIM 1.8, Llama-3.3-70B fp8 on 2 x H100, closed loop"
    return [
        Row(f"nim.{name}", f"{name.upper()}, median error", setup, len(some), float(np.median(some)))
        for name, some in off.items()
        if some
    ]


def throughput(shared: Path) -> list[Row]:
    """Output tokens a second of TensorRT-LLM 1.0 at its most, dense models on H100 and H200: everything arrives at once."""
    models = {"Llama-3.3-70B": "llama-3.3-70b", "Llama-3.1-8B": "llama-3.1-8b"}
    frame = pl.read_csv(shared / "data" / "published" / "nvidia_trtllm_nim.csv", infer_schema_length=None).filter(
        pl.col("model").is_in(list(models))
        & pl.col("gpu").is_in(["H100", "H200"])
        & (pl.col("metric") == "total_output_throughput")
    )
    off = []
    for row in frame.iter_rows(named=True):
        gpu, prompt, output, tp = (
            {"H100": "h100-sxm", "H200": "h200"}[row["gpu"]],
            int(row["isl"]),
            int(row["osl"]),
            int(row["tp"]),
        )
        model, sheet = latency(shared, gpu, models[row["model"]], tp, "fp8", "fp8"), resolve_gpu(gpu)
        spec = model.model
        free = 0.9 * sheet.memory_bytes - spec.num_params / tp - 3e9
        blocks = int(free / (16 * spec.kv_bytes_per_token("fp8", tp)))
        seats = max(1, min(2048, blocks * 16 // (prompt + output)))
        offered = [OfferedRequest(id, 0, prompt, output) for id in range(3 * seats)]
        config = Config(replica=ReplicaSpec(tp=tp), batching=Vllm(2048, 8192))
        record = simulate(config, offered, model, blocks)
        rate = 3 * seats * output / (record.ended_at / 1e9)
        off.append(float(errors([rate], [float(row["value"])])[0]))
    setup = "TensorRT-LLM 1.0, Llama 8B and 70B fp8 on H100 and H200, at full load"
    return [Row("trtllm.throughput", "output tokens a second, median error", setup, len(off), float(np.median(off)))]


def inference_perf(shared: Path) -> list[Row]:
    """vLLM 0.11 under Poisson arrivals, Llama-3-8B on one H100; the mean time to the first token and of a whole request."""
    frame = pl.read_csv(shared / "data" / "published" / "inference_perf_kubecon_h100_llama3_8b.csv", infer_schema_length=None)
    plain = pl.col("source").str.contains("/vllm/results")  # not its variants with speculation, other weights or the old engine
    frame = frame.filter(plain & pl.col("metric").is_in(["ttft_mean", "request_latency_mean"]))
    model = latency(shared, "h100-sxm", "llama-3-8b", 1, "bf16", "bf16")
    off: dict[str, list[float]] = {"ttft_mean": [], "request_latency_mean": []}
    seen: dict[tuple[float, int, int], tuple[float, float]] = {}
    for row in frame.iter_rows(named=True):
        rate = float(row["batch_or_concurrency"].removeprefix("qps="))
        key = (rate, round(float(row["isl"])), round(float(row["osl"])))
        if key not in seen:
            load = SyntheticWorkload(PoissonArrivals(rate), FixedLength(key[1]), FixedLength(key[2]), max(60, int(30 * rate)))
            done = simulate(Config(batching=Vllm(256, 2048)), build(load, 0, Path()), model, 24_000).requests
            seen[key] = (
                float(np.mean([r.first_token_at - r.arrived_at for r in done])) / 1e6,
                float(np.mean([r.finished_at - r.arrived_at for r in done])) / 1e6,
            )
        answer = 1e3 * FRONT_S + seen[key][0 if row["metric"] == "ttft_mean" else 1]
        off[row["metric"]].append(float(errors([answer], [float(row["value"])])[0]))
    setup = "inference-perf, vLLM 0.11, Llama-3-8B on one H100, Poisson arrivals"
    names = {"ttft_mean": "mean TTFT", "request_latency_mean": "mean latency of a request"}
    return [
        Row(f"inference_perf.{key}", f"{names[key]}, median error", setup, len(some), float(np.median(some)))
        for key, some in off.items()
    ]
