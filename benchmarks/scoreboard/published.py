"""Single steps and throughputs that others published: Splitwise's table, TensorRT-LLM's and NIM's pages, inference-perf.

Only rows whose setup is complete. Operators come from the reference tables of A100, H100 and H200 (vLLM's kernels), whatever
engine the figures are of.
"""

from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

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
"""What starting a kernel costs an engine of 2023, which captures no graphs (Splitwise's; its token time does not fall below
28 ms on H100 and 43 ms on A100, however many GPUs share the model)."""


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


def splitwise(shared: Path, every: int = 1) -> list[Row]:
    """Prompt and token time of Llama-2-70B, as one step each."""
    frame = pl.read_csv(shared / "data" / "published" / "splitwise_sim_perf_model.csv").filter(
        (pl.col("model") == "llama2-70b") & pl.col("hardware").is_in(["a100-80gb", "h100-80gb"])
    )
    points = ["hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
    frame = frame.group_by(points, maintain_order=True).agg(pl.col("prompt_time", "token_time").median()).gather_every(every)
    prompt, token = [], []
    for row in frame.iter_rows(named=True):
        gpu = {"a100-80gb": "a100-80g", "h100-80gb": "h100-sxm"}[row["hardware"]]
        model = latency(shared, gpu, "llama-2-70b", row["tensor_parallel"], "bf16", "bf16", LAUNCH_S)
        batch, length = row["batch_size"], row["prompt_size"]
        chunks = tuple(Chunk(id, 0, length, 0, True) for id in range(batch))
        prompt.append(model.run(RunSteps(1, 1, 0, 0, chunks), 1)[0].first / 16e6)
        context = length + row["token_size"] // 2
        token.append(model.run(RunSteps(1, 1, batch, batch * context, ()), 1)[0].first / 16e6)
    setup = "Splitwise, Llama-2-70B on A100 and H100, TP 2 to 8 (an engine of 2023, without graphs)"
    off = [errors(prompt, frame["prompt_time"].to_list()), errors(token, frame["token_time"].to_list())]
    return [
        *spread_rows("splitwise.prompt", "prompt time", setup, off[0], 15.0),
        *spread_rows("splitwise.token", "token time", setup, off[1], 15.0),
    ]


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
