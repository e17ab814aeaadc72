"""Mixtures of experts with expert or data parallelism, and prefill apart from decode: priced as steady states, not simulated.

A steady state is one sum: every replica decodes its share of the clients over their mean context, and where it also does
prompts, each of these once delays all others. Prompts on GPUs of their own are served one after the other; what they take beyond
that is Little's law (clients = rate * (first token + output * time per token)). `NOT_PRICED` says what is left out and why.
"""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from benchmarks.scoreboard.rows import Row, errors
from benchmarks.scoreboard.silicon import FRONT_S, GPUS, WEIGHTS, known_model, measured
from squall.core.actions import Chunk, RunSteps
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.efficiency import efficiency_of
from squall.perf.hardware import resolve_gpu
from squall.perf.roofline import Links, RooflineSource

NOT_PRICED = {
    "model": "a model of which we have no sizes",
    "workers": "the number of workers is not told",
    "shape": "experts cut and dealt out over more GPUs than attention is",
}
CHUNK = 8192


class Unpriced(Exception):
    """Carries a key of `NOT_PRICED`."""


@cache
def layout_prices(gpu: str, engine: str, model: str, layout: Layout) -> Composed:
    """The latency model of one replica, with measured operators where there are any."""
    sheet, spec = resolve_gpu(gpu), resolve_model(model)
    node = 72 if gpu.startswith("gb") else 8
    sources = [measured(gpu, engine), RooflineSource(sheet, Links(gpus_per_node=node))]
    return Composed(spec, sheet.name, layout, sources, efficiency_of(sheet))


def replica(point: dict[str, Any], part: str) -> Composed:
    """The prices of a replica; `part` is "", "prefill_" or "decode_", before the names of the columns. Raises Unpriced."""
    tp, dp, moe_tp, ep = (
        int(point[f"{part}{name}"] or 1) for name in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    )
    if tp * dp != moe_tp * ep and not (dp > 1 and ep == tp * dp and moe_tp == 1):
        raise Unpriced("shape")
    if (dp > 1 and moe_tp > 1) or tp > 16:
        raise Unpriced("shape")
    weights = WEIGHTS.get(point["gemm_quant_mode"])
    name = known_model(point["model_path"])
    if weights is None or name is None:
        raise Unpriced("model")
    layout = Layout(tp=tp, ep=ep if dp == 1 else tp * dp, weight_dtype=weights, kv_dtype="bf16" if weights == "bf16" else "fp8")
    try:
        return layout_prices(GPUS[point["system"]], point["backend"], name, layout)
    except (ConfigError, KeyError) as error:
        raise Unpriced("shape" if "replica." in str(error) else "model") from None


def seconds(latency: Composed, decodes: int, context: int, prompt: int = 0, before: int = 0) -> float:
    chunks = (Chunk(1 << 20, before, prompt, 0, True),) if prompt else ()
    return latency.run(RunSteps(1, 1, decodes, decodes * context, chunks), 1)[0].first / 16e9


def prompt_seconds(latency: Composed, length: int) -> float:
    """A whole prompt, in chunks."""
    return sum(seconds(latency, 0, 0, min(CHUNK, length - before), before) for before in range(0, length, CHUNK))


def together(point: dict[str, Any]) -> tuple[float, float]:
    """(time to first token, time per token) in s of replicas that do both."""
    latency = replica(point, "")
    clients, prompt, output = int(point["batch_size"]) * int(point["attention_dp_size"] or 1), point["isl"], point["osl"]
    clients = min(clients, int(point["concurrency"] or clients))
    decode = seconds(latency, clients, prompt + output // 2)
    own = prompt_seconds(latency, prompt)
    beside = own - seconds(latency, 0, 0, 1)
    return FRONT_S + own + decode, decode + clients * beside / output


def apart(point: dict[str, Any]) -> tuple[float, float]:
    """The same where prompts and decodes have GPUs of their own."""
    if not point["prefill_num_workers"] or not point["decode_num_workers"]:
        raise Unpriced("workers")
    prefill, decode = replica(point, "prefill_"), replica(point, "decode_")
    clients, prompt, output = int(point["concurrency"] or point["batch_size"] or 1), point["isl"], point["osl"]
    group = int(point["prefill_attention_dp_size"] or 1)  # as many prompts at once cost one each
    own = prompt_seconds(prefill, prompt)
    each = -(-clients // int(point["decode_num_workers"]))
    token = seconds(decode, max(1, each), prompt + output // 2)
    rate = min(int(point["prefill_num_workers"]) * group / own, clients / (own + output * token))
    return FRONT_S + max(own, clients / rate - output * token), token


def compare(everything: pl.DataFrame, every: int = 1) -> list[Row]:
    """The lines of the scoreboard, without a goal.

    Args:
        everything: the points that `silicon.compare` leaves.
        every: one of so many points.
    """
    rows: list[Row] = []
    why: Counter[str] = Counter()
    for mode, price, word in (("agg", together, "experts or data parallel"), ("disagg", apart, "prefill apart from decode")):
        off: dict[str, list[float]] = {"tpot": [], "ttft": []}
        for point in everything.filter(pl.col("mode") == mode).gather_every(every).iter_rows(named=True):
            try:
                ttft, tpot = price(point)
            except Unpriced as reason:
                why[str(reason)] += 1
                continue
            off["tpot"].append(1e3 * tpot / point["silicon_tpot_ms"])
            off["ttft"].append(1e3 * ttft / point["silicon_ttft_ms"])
        where = f"silicon points, {word}, steady state, measured operators"
        for name, shares in off.items():
            if shares:
                wrong = errors(shares, [1.0] * len(shares))
                label = f"{name.upper()}, median error"
                rows.append(Row(f"silicon.{mode}.{name}.median", label, where, len(wrong), float(np.median(wrong))))
    for key, text in NOT_PRICED.items():
        where = f"silicon points: {text}"
        rows.append(Row(f"silicon.not_priced.{key}", "points not priced", where, why[key], why[key], None, "points"))
    return rows
