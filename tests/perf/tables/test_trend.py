"""The trend finds the coefficients that made the times, whatever the operator."""

import numpy as np
import pytest

from squall.perf.tables.operations import OPERATIONS, Sizes
from squall.perf.tables.trend import Trend, fit_trend


def gemm_rows() -> Sizes:
    tokens, rows, columns = np.meshgrid([1.0, 16.0, 256.0, 4096.0], [1024.0, 8192.0], [1024.0, 28672.0])
    return {"dtype": "bf16", "tokens": tokens.ravel(), "rows": rows.ravel(), "columns": columns.ravel()}


def test_the_coefficients_come_back() -> None:
    gemm = OPERATIONS["gemm"]
    truth = Trend(gemm, 5e-6, 1 / 8e14, 1 / 2.6e12)
    rows = gemm_rows()
    arithmetic, traffic = gemm.law(rows)
    seconds = truth.fixed + np.hypot(arithmetic * truth.per_op, traffic * truth.per_byte)
    found = fit_trend(gemm, rows, seconds)
    assert (found.fixed, found.per_op, found.per_byte) == pytest.approx((5e-6, 1 / 8e14, 1 / 2.6e12), rel=1e-3)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_law_grows_with_every_size_that_a_step_can_vary(name: str) -> None:
    operation = OPERATIONS[name]
    at: Sizes = {
        "dtype": "bf16", "kv_dtype": "fp8", "head_dim": 128, "window": 64, "kv_heads": 8, "heads": 32, "chunk": 100, "before": 50,
        "batch": 4, "context": 100, "rows": 64, "columns": 64, "tokens": 8, "hidden": 512, "inter": 256, "experts": 16,
        "top_k": 2, "ep": 1, "tp": 1, "bytes": 4096, "gpus": 4, "value_dim": 128, "kv_rank": 512, "rope_dim": 64,
    }  # fmt: skip
    trend = Trend(operation, 1e-6, 1e-12, 1e-12)
    for size in operation.sizes:
        if size not in ("ep", "tp"):
            assert trend.seconds(at | {size: 2 * at[size]}) > trend.seconds(at), size


def test_pairs_are_counted_one_by_one() -> None:
    law = OPERATIONS["prefill_attention"].law
    at: Sizes = {
        "head_dim": 1,
        "window": 0,
        "kv_dtype": "bf16",
        "dtype": "bf16",
        "kv_heads": 1,
        "heads": 1,
        "chunk": 3,
        "before": 2,
    }
    assert law(at)[0] == 4 * (3 + 4 + 5)
    windowed = sum(min(seen, 4) for seen in (3, 4, 5))
    assert law(at | {"window": 4})[0] == pytest.approx(4 * (windowed + 1e-3 * 12))
