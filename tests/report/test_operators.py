"""Operators of a run: their sizes, how often they ran, and that their times are those of the steps."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from squall.config import Config, from_tree
from squall.core.metrics import RunRecord
from squall.report.deployed import deployed
from squall.report.operators import MOST_SHAPES, _shapes, explainers, operators
from squall.report.run import write_run
from squall.report.steps import Stretches
from squall.twin.rehearse import rehearse

PROMPT, OUTPUT, REQUESTS, LAYERS = 200, 20, 12, 32


def config(**more: object) -> Config:
    tree = {
        "model": {"name": "llama-3-8b"},
        "cluster": {"gpu": "h100-sxm"},
        "latency": {"kind": "roofline"},
        "run": {"operators": True},
        "workload": {
            "kind": "synthetic",
            "arrivals": {"kind": "fixed", "rate_rps": 1},
            "prompt": {"kind": "fixed", "tokens": PROMPT},
            "output": {"kind": "fixed", "tokens": OUTPUT},
            "num_requests": REQUESTS,
        },
        **more,
    }
    return from_tree("", tree)


def table(on: Config) -> tuple[RunRecord, pl.DataFrame]:
    record = rehearse(on)
    assert record.observed is not None
    return record, operators(record.observed, on, explainers(on))


def test_each_operator_ran_in_every_step_with_the_tokens_of_that_step() -> None:
    """Twelve requests, each alone: one step with 200 tokens and nineteen with one token after 201, 202, ... ones."""
    record, found = table(config())
    assert record.num_steps == REQUESTS * OUTPUT
    rows = {row["operator"]: row for row in found.iter_rows(named=True)}
    decode, prefill = rows["decode attention"], rows["prefill attention"]
    assert (decode["steps"], decode["calls"]) == (REQUESTS * (OUTPUT - 1), REQUESTS * (OUTPUT - 1) * LAYERS)
    assert decode["size_mean"] == pytest.approx(PROMPT + 1 + (OUTPUT - 2) / 2, abs=8)  # rounded to 16 tokens
    assert (prefill["steps"], prefill["calls"], prefill["size_max"]) == (REQUESTS, REQUESTS * LAYERS, PROMPT)
    tokens = [row for row in rows.values() if row["kind"] == "token" and row["size_max"] == PROMPT]
    assert tokens
    for row in tokens:
        assert row["steps"] == REQUESTS * OUTPUT
        assert row["size_mean"] == pytest.approx((PROMPT + OUTPUT - 1) / OUTPUT)


@pytest.mark.parametrize("replica", [{}, {"tp": 2, "pp": 2}])
def test_their_times_together_are_the_time_busy(replica: dict[str, int]) -> None:
    on = config(replica=replica)
    record, found = table(on)
    assert record.observed is not None
    busy_s = Stretches(record.observed).durations().sum() / 1e9
    assert found["seconds"].sum() == pytest.approx(busy_s, rel=0.03)
    assert set(found["stage"]) == set(range(on.replica.pp))
    assert ("communication" in set(found["kind"])) == bool(replica)


def test_pools_are_told_apart() -> None:
    on = config(fleet={"pools": [{}, {"gpu": "a100-80g"}]}, route={"kind": "round_robin"})
    _, found = table(on)
    by_pool = found.group_by("pool").agg(pl.col("seconds").sum(), pl.col("steps").max()).sort("pool")
    assert list(by_pool["steps"]) == [REQUESTS * OUTPUT // 2] * 2
    assert by_pool["seconds"][1] > 1.3 * by_pool["seconds"][0]  # 2.0 against 3.35 TB/s


def test_many_different_steps_are_rounded_until_they_are_few() -> None:
    count = 20_000
    zero, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    columns = {
        "num_decodes": one, "decode_context": np.arange(1, count + 1) * 97, "num_prefills": zero, "num_prefill_tokens": zero,
        "prefill_pairs": zero, "num_logits": one, "offset": zero, "count": one * 3,
    }  # fmt: skip
    shapes = _shapes(columns)
    assert 500 < len(shapes) <= MOST_SHAPES
    assert sum(shapes.values()) == 3 * count
    mean = sum(shape[1] * steps for shape, steps in shapes.items()) / (3 * count)
    assert mean == pytest.approx(97 * (count + 1) / 2 + 1, rel=0.001)


def test_the_run_directory_holds_them(tmp_path: Path) -> None:
    on = config()
    write_run(tmp_path / "run", rehearse(on), on, None, on=deployed(on), operators=explainers(on))
    assert "size_mean" in pl.read_parquet(tmp_path / "run" / "operators.parquet").columns


def test_several_prompts_in_a_step_are_one_step_and_all_their_tokens() -> None:
    """Three prompts of 100 at once: a step of 300 tokens, whose attention is one call a layer."""
    workload = {
        "kind": "synthetic", "arrivals": {"kind": "all_at_once"}, "num_requests": 3,
        "prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 2},
    }  # fmt: skip
    _, found = table(config(workload=workload))
    rows = {row["operator"]: row for row in found.iter_rows(named=True)}
    prefill = rows["prefill attention"]
    assert (prefill["steps"], prefill["calls"], prefill["size_max"]) == (1, LAYERS, 300)
    assert (rows["embedding"]["steps"], rows["embedding"]["size_max"]) == (2, 300)
    assert rows["head"]["size_max"] == 3
