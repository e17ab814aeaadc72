"""What aiconfigurator itself predicts for the same deployments, where its package is installed with all that it needs.

Its aggregated estimate is asked for each point's batch, lengths, TP and number types, with 8192 context tokens a step as in ours.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from benchmarks.scoreboard.rows import Row, errors

_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
}  # fmt: skip
_VERSIONS = {"vllm": "0.24.0", "trtllm": "1.3.0rc20", "sglang": "0.5.14"}
"""Whose tables of aiconfigurator-core 0.12 are current."""


def compare(points: pl.DataFrame) -> list[Row]:
    """Its median errors at points that `silicon.compare` returned; no line where it cannot be asked.

    Args:
        points: with the columns of silicon_points.csv.
    """
    predict = _predictor()
    if predict is None:
        return []
    found = [(point, answer) for point in points.iter_rows(named=True) if (answer := predict(point)) is not None]
    setup = "the same points, aiconfigurator's own estimate"
    rows = []
    for index, metric in enumerate(("tpot", "ttft")):
        off = errors([answer[index] for _, answer in found], [point[f"silicon_{metric}_ms"] for point, _ in found])
        rows.append(Row(f"theirs.{metric}.median", f"{metric.upper()}, median error", setup, len(off), float(np.median(off))))
    return rows


def _predictor() -> Callable[[dict[str, Any]], tuple[float, float] | None] | None:
    """(TPOT, TTFT) in ms of a point, as the package says."""
    try:
        from aiconfigurator_core.sdk import common, config
        from aiconfigurator_core.sdk.backends.factory import get_backend
        from aiconfigurator_core.sdk.models import get_model
        from aiconfigurator_core.sdk.perf_database import get_database
    except ImportError:
        return None
    logging.getLogger("aiconfigurator_core").setLevel(logging.CRITICAL)

    @cache
    def deployed(system: str, engine: str, model: str, tp: int, weights: str) -> tuple[Any, Any, Any]:
        cache_type = "bfloat16" if weights == "bfloat16" else "fp8"
        wanted = config.ModelConfig(
            tp_size=tp,
            gemm_quant_mode=common.GEMMQuantMode[weights],
            kvcache_quant_mode=common.KVCacheQuantMode[cache_type],
            fmha_quant_mode=common.FMHAQuantMode["bfloat16"],
            moe_tp_size=1,
            moe_ep_size=1,
        )
        return (
            get_model(_MODELS.get(model, model), wanted, engine),
            get_database(system, engine, _VERSIONS[engine]),
            get_backend(engine),
        )

    def predict(point: dict[str, Any]) -> tuple[float, float] | None:
        weights = point["gemm_quant_mode"] or "bfloat16"
        try:
            model, tables, engine = deployed(point["system"], point["backend"], point["model_path"], point["tp_size"], weights)
            asked = config.RuntimeConfig(batch_size=point["batch_size"], isl=point["isl"], osl=point["osl"])
            answer = engine.run_agg(model, tables, asked, ctx_tokens=8192).get_summary_df().iloc[0]
        except Exception as error:  # whatever it raises for a point that it does not know
            logging.getLogger(__name__).warning("%s: %s", point["id"], error)
            return None
        return float(answer["tpot"]), float(answer["ttft"])

    return predict
