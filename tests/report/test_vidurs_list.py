"""Every metric that Vidur reports has a home in a run directory of ours: a column, a row over time, or a key of the summary.

The list is restated from a reading of Vidur (commit 7d47513). Homes are looked up in a run that was written with all that [run]
can ask for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from squall.config import Cluster, Config, ReplicaSpec, Run
from squall.core.types import MILLISECOND
from squall.policies.batching import Vllm
from squall.report.operators import explainers
from squall.report.run import write_run
from squall.sim.linear import Linear
from squall.sim.observe import Observer, watched
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

HOMES = {
    # requests
    "request_e2e_time": ("vidur_metrics.request_e2e_time", "summary.e2e_s", "requests.finished_at", "requests.arrived_at"),
    "request_e2e_time_normalized": ("vidur_metrics.request_e2e_time_normalized",),
    "request_execution_time": ("vidur_metrics.request_execution_time",),
    "request_execution_time_normalized": ("vidur_metrics.request_execution_time_normalized",),
    "request_model_execution_time": ("vidur_metrics.request_model_execution_time",),
    "request_model_execution_time_normalized": ("vidur_metrics.request_model_execution_time_normalized",),
    "request_preemption_time": ("vidur_metrics.request_preemption_time", "summary.detail.preempted_s"),
    "request_scheduling_delay": ("vidur_metrics.request_scheduling_delay", "summary.queue_s", "requests.scheduled_at"),
    "request_execution_plus_preemption_time": ("vidur_metrics.request_execution_plus_preemption_time",),
    "request_execution_plus_preemption_time_normalized": ("vidur_metrics.request_execution_plus_preemption_time_normalized",),
    "prefill_e2e_time": ("vidur_metrics.prefill_e2e_time", "summary.ttft_s", "requests.first_token_at"),
    "prefill_time_execution_plus_preemption": ("vidur_metrics.prefill_time_execution_plus_preemption",),
    "prefill_time_execution_plus_preemption_normalized": ("vidur_metrics.prefill_time_execution_plus_preemption_normalized",),
    "decode_time_execution_plus_preemption_normalized": (
        "vidur_metrics.decode_time_execution_plus_preemption_normalized", "summary.tpot_s",
    ),
    "request_inter_arrival_delay": ("vidur_metrics.request_inter_arrival_delay", "series.arrivals"),
    "request_num_tokens": ("vidur_metrics.request_num_tokens",),
    "request_num_prefill_tokens": ("vidur_metrics.request_num_prefill_tokens", "requests.num_prompt_tokens"),
    "request_num_decode_tokens": ("vidur_metrics.request_num_decode_tokens", "requests.num_output_tokens"),
    "request_pd_ratio": ("vidur_metrics.request_pd_ratio",),
    "request_num_restarts": ("vidur_metrics.request_num_restarts", "requests.preemptions", "summary.detail.restarts"),
    # tokens
    "decode_token_execution_plus_preemption_time": ("summary.tbt_s", "gaps.first"),
    "prefill_completion (series)": ("series.first_tokens",),
    "decode_completion (series)": ("series.decode_tokens_per_s",),
    # batches
    "batch_num_tokens": ("summary.detail.batch_tokens",),
    "batch_num_prefill_tokens": ("summary.detail.prefill_tokens", "steps.num_prefill_tokens"),
    "batch_num_decode_tokens": ("summary.detail.decode_tokens", "steps.num_decodes"),
    "batch_size": ("summary.detail.batch_size", "steps.num_prefills"),
    "batch_execution_time": ("summary.detail.step_s", "steps.duration"),
    # over time
    "request_arrival (series)": ("series.arrivals",),
    "request_completion (series)": ("series.completions",),
    # utilisation
    "replica_memory_usage": ("summary.detail.kv", "replicas.kv_mean", "replicas.kv_max", "series.kv_share", "steps.kv_blocks"),
    "replica_stage_busy_time_percent": ("summary.detail.busy", "replicas.busy", "replicas.held", "series.busy_share"),
    "replica_stage_mfu": ("summary.detail.mfu", "replicas.mfu"),
    # operators, one by one and together
    "operators: input sizes": ("operators.size_mean", "operators.size_max", "steps.decode_context", "steps.prefill_context"),
    "operators: times": ("operators.seconds", "operators.calls"),
    "operators: time of all together": ("steps.duration", "summary.detail.busy_s", "summary.detail.idle_s"),
}  # fmt: skip


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """All columns and keys of a run, as "file.column" and "summary.key.key"."""
    latency = Linear(fixed=16 * MILLISECOND)
    requests = [OfferedRequest(i, i * MILLISECOND, 12, 7) for i in range(4)]
    config = Config(
        cluster=Cluster(gpu="h100-sxm"),
        batching=Vllm(8, 64, prefix_cache=False),
        replica=ReplicaSpec(block_size=4),
        run=Run(steps=True, trace=True, series_s=0.001, operators=True, compat="vidur"),
    )
    observer = Observer(latency, 4)
    log, created = watched([observer])
    record = simulate(config, requests, latency, 12, log=log, created=created)
    record.observed = observer.observed
    path = tmp_path_factory.mktemp("runs") / "run"
    summary = msgspec.to_builtins(write_run(path, record, config, 1.0, operators=explainers(config)))
    assert summary["preemptions"] > 0
    return set(_columns(path)) | set(_keys("summary", summary))


def _columns(path: Path) -> Iterator[str]:
    for file in path.glob("*.parquet"):
        yield from (f"{file.stem}.{column}" for column in pl.read_parquet_schema(file))


def _keys(prefix: str, tree: dict[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}.{key}"
        if isinstance(value, dict):
            yield from _keys(f"{prefix}.{key}", value)


@pytest.mark.parametrize("metric", HOMES)
def test_a_metric_of_vidurs_has_a_home(metric: str, homes: set[str]) -> None:
    assert set(HOMES[metric]) - homes == set()


def test_the_homes_are_described() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for place in {home for places in HOMES.values() for home in places}:
        name = place.split(".")[-1]
        assert f"`{name}`" in page, place
