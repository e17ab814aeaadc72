"""Small runs for the tests of what is reported about them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from squall.config import Config, Slo
from squall.core.metrics import Gaps, Outcome, RequestRow, RunRecord
from squall.core.types import MILLISECOND, SECOND
from squall.report.run import StoredRun, read_run, write_run


def small_record(num_requests: int = 20, *, tokens: int = 5, tpot_ms: int = 50) -> RunRecord:
    """One request a second, each with a TTFT of half a second; the last one is rejected."""
    gaps = Gaps()
    rows = []
    for i in range(num_requests):
        arrived = i * SECOND
        first = arrived + SECOND // 2
        row = RequestRow(i, arrived, num_prompt_tokens=100 + i)
        if i == num_requests - 1:
            row.outcome, row.error = Outcome.REJECTED, "queue_full"
        else:
            row.replica, row.outcome, row.num_output_tokens = 0, Outcome.COMPLETED, tokens
            row.scheduled_at, row.first_token_at = arrived + SECOND // 10, first
            row.finished_at = first + (tokens - 1) * tpot_ms * MILLISECOND
            gaps.add_run(1, tokens - 1, tpot_ms * MILLISECOND * 16, 0)
        rows.append(row)
    return RunRecord(
        "simulated", rows, gaps, ended_at=num_requests * SECOND, gpu_nanos=num_requests * SECOND, latency_source="roofline"
    )


@pytest.fixture
def record() -> Callable[..., RunRecord]:
    return small_record


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., StoredRun]:
    """Writes a small run under `tmp_path` and reads it back."""

    def write(name: str = "run", **shape: int) -> StoredRun:
        path = tmp_path / name
        write_run(path, small_record(**shape), Config(slo=Slo(ttft_s=1.0, tbt_s=0.06)), usd_per_gpu_hour=3.6)
        return read_run(path)

    return write
