"""A real vLLM run on an RTX 4090 against its simulation with the operator profile that was measured for it (LLMServingSim).

The run is overloaded: 300 requests at ten a second, 41,408 tokens of KV cache, some 200 preemptions. Whatever was computed stays
in the prefix cache until its blocks are needed, as in vLLM: what a preempted request had (without it the simulation takes 5 %
longer), and prompts that later ones go on from (`COMMON`). The cohorts in which requests are admitted follow from the blocks
that are free: one request more or less in a cohort moves it by 14 s, and E2E p50 by 3 %.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
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
NULL_BLOCKS = 1
"""vLLM sets one of its blocks aside, as the place of those that a request no longer needs."""

COMMON = {
    47: (40, 455), 66: (35, 633), 93: (82, 629), 139: (117, 996), 173: (153, 460), 183: (152, 38), 184: (151, 579),
    209: (201, 607), 227: (226, 520),
}  # fmt: skip
"""Which earlier request a prompt begins as, and for how many tokens: later turns of one conversation (183: one opening).

The run's records are lengths and do not tell. Read off the prompts (LLMServingSim, MIT:
`workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl`), of those pairs of which that project's simulation finds the earlier one still
cached: 4,848 tokens in whole blocks."""

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
    return rows


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
    batching = Vllm(
        engine["max_num_seqs"],
        engine["max_num_batched_tokens"],
        prefix_cache_outputs=True,
        whole_prompts=meta["resolved_config"]["scheduler_config"]["scheduler_reserve_full_isl"],
    )
    record = simulate(Config(batching=batching), offered(measured), latency, meta["kv_cache"]["num_gpu_blocks"] - NULL_BLOCKS)
    rows = sorted(record.requests, key=lambda row: row.id)
    arrived, first, last = (
        np.array([getattr(row, key) for row in rows]) / 1e9 for key in ("arrived_at", "first_token_at", "finished_at")
    )
    outputs = np.array([row.num_output_tokens for row in rows])
    return {"ttft": first - arrived, "tpot": (last - first) / (outputs - 1), "e2e": last - arrived}


def offered(measured: list[dict[str, Any]]) -> list[OfferedRequest]:
    """The run's requests, with the blocks that prompts have in common."""
    began = min(row["arrival_time"] for row in measured)
    requests: list[OfferedRequest] = []
    for id, row in enumerate(measured):
        prompt, output = row["input_toks"], row["output_toks"]
        hashes = [(id << 20) + block + 1 for block in range((prompt + output) // BLOCK)]
        if id in COMMON:
            earlier, tokens = COMMON[id]
            common = tokens // BLOCK
            hashes[:common] = requests[earlier].block_hashes[:common]
        arrived = round((row["arrival_time"] - began) * 1e9)
        requests.append(OfferedRequest(id, arrived, prompt, output, block_hashes=tuple(hashes)))
    return requests
