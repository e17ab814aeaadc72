"""A real vLLM run on an RTX 4090 against its simulation with the operator profile that was measured for it (LLMServingSim).

The run is overloaded: 300 requests at ten a second, 41,408 tokens of KV cache, 190 to 250 preemptions. What a preempted request
had computed stays in the prefix cache until its blocks are needed (vLLM's prefix caching was on), so every prompt gets hashes of
its own: without them the simulation takes 5 % longer.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from benchmarks.scoreboard.rows import Row
from squall.config import Config
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.efficiency import efficiency_of
from squall.perf.hardware import resolve_gpu
from squall.perf.roofline import RooflineSource
from squall.perf.tables.llmservingsim import read_llmservingsim
from squall.policies.batching import Vllm
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

OVERHEAD_S = 1e-4
"""A step beside its kernels: scheduling runs beside them (async_scheduling was on), and steps are replayed from graphs."""

BLOCK = 16
Values = NDArray[np.float64]


def compare(shared: Path) -> list[Row]:
    """The lines of the scoreboard."""
    folder = shared / "data" / "traces" / "llmservingsim_measured"
    lines = (folder / "RTX4090_Llama-3.1-8B_requests.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines]
    meta = json.loads((folder / "RTX4090_Llama-3.1-8B_meta.json").read_text())
    real, played = of_engine(measured), of_simulation(shared, measured, meta)
    setup = "vLLM 0.19, RTX 4090, Llama-3.1-8B, 300 requests"
    rows = []
    for metric in ("ttft", "tpot", "e2e"):
        told, truth = figures(played[metric]), figures(real[metric])
        rows += [
            Row(
                f"rtx4090.{metric}.{name}",
                f"{metric.upper()} {name}",
                setup,
                len(measured),
                100 * abs(told[name] / truth[name] - 1),
                2.0,
            )
            for name in truth
        ]
    ticks = pl.read_csv(folder / "RTX4090_Llama-3.1-8B_timeseries.csv")
    return [*rows, shared_blocks(measured, ticks, meta["kv_cache"]["num_gpu_blocks"])]


def shared_blocks(measured: list[dict[str, Any]], ticks: pl.DataFrame, num_blocks: int) -> Row:
    """How many KV blocks fewer the run used than its requests fill: what their prompts have in common.

    Looked at where everyone who has been admitted runs, nobody being preempted, and the pool is nearly full; a request is taken
    to advance evenly. The prompts themselves are not published, so that the simulation cannot share them.
    """
    columns = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    queued, begun, first, last, prompt, output = (np.array([row[name] for row in measured], dtype=float) for name in columns)
    filled, used = [], []
    for tick, running, per_cent in ticks.select("t", "running", "kv_cache_pct").iter_rows():
        now = queued.min() + tick
        there = (begun <= now) & (last > now)
        if there.sum() == running and per_cent > 90:
            done = np.clip((now - first) / (last - first), 0, 1) * output
            filled.append(np.ceil((prompt + done)[there] / BLOCK).sum())
            used.append(per_cent / 100 * num_blocks)
    setup = "vLLM 0.19, RTX 4090: what the simulation does not know"
    less = 100 * (1 - float(np.sum(used) / np.sum(filled)))
    return Row("rtx4090.shared", "KV blocks that requests had in common", setup, len(used), less, None, "%")


def figures(values: Values) -> dict[str, float]:
    return {"mean": float(np.mean(values))} | {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}


def of_engine(measured: list[dict[str, Any]]) -> dict[str, Values]:
    """What its own clock says; arrivals are by another clock, which the shortest way into the queue relates to it."""
    shift = min(row["arrival_time"] - row["queued_ts"] for row in measured)
    arrived, first, last = (
        np.array([row[key] for row in measured]) for key in ("arrival_time", "first_token_ts", "last_token_ts")
    )
    arrived = arrived - shift
    outputs = np.array([row["output_toks"] for row in measured])
    return {"ttft": first - arrived, "tpot": (last - first) / (outputs - 1), "e2e": last - arrived}


def of_simulation(shared: Path, measured: list[dict[str, Any]], meta: dict[str, Any]) -> dict[str, Values]:
    gpu, model = resolve_gpu("rtx4090"), resolve_model(meta["model"])
    source = read_llmservingsim(shared / "data" / "op_profiles" / "rtx4090_llama-3.1-8b", gpu).source()
    sampling = source.sampling(32)
    assert sampling is not None
    efficiency = replace(efficiency_of(gpu), row_s=0.0)
    overhead = OVERHEAD_S + sampling.seconds
    latency = Composed(model, gpu.name, Layout(), [source, RooflineSource(gpu)], efficiency, overhead_s=overhead)
    engine = meta["engine_kwargs"]
    config = Config(batching=Vllm(engine["max_num_seqs"], engine["max_num_batched_tokens"]))
    record = simulate(config, offered(measured), latency, meta["kv_cache"]["num_gpu_blocks"])
    rows = sorted(record.requests, key=lambda row: row.id)
    arrived, first, last = (
        np.array([getattr(row, key) for row in rows]) / 1e9 for key in ("arrived_at", "first_token_at", "finished_at")
    )
    outputs = np.array([row.num_output_tokens for row in rows])
    return {"ttft": first - arrived, "tpot": (last - first) / (outputs - 1), "e2e": last - arrived}


def offered(measured: list[dict[str, Any]]) -> list[OfferedRequest]:
    """The run's requests, each prompt unlike any other."""
    began = min(row["arrival_time"] for row in measured)
    return [
        OfferedRequest(
            id,
            round((row["arrival_time"] - began) * 1e9),
            row["input_toks"],
            row["output_toks"],
            block_hashes=tuple((id << 20) + block + 1 for block in range(row["input_toks"] // BLOCK)),
        )
        for id, row in enumerate(measured)
    ]
