"""Vidur's definitions, from its own recorded batches to its own recorded metrics; and from an observed run of ours."""

import csv
import gzip
from collections.abc import Iterator
from math import nan
from pathlib import Path

import numpy as np
import pytest
from msgspec import Struct

from squall.config import Config, ReplicaSpec
from squall.core.types import MILLISECOND
from squall.policies.batching import Vllm
from squall.report.vidur import Lives, lives_of, request_metrics
from squall.sim.linear import Linear
from squall.sim.observe import Observer, watched
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

RUNS = (
    "g01_readme_l3-8b_a100_sarathi", "g02_l2-7b_a100_vllm_codetrace_replay", "g03_l2-7b_a100_orca_uniform_poisson",
    "g04_l2-7b_a100_ft_fixed_poisson", "g05_l2-7b_a100_lightllm_zipf_gamma", "g06_l2-70b_a100dgx_tp2_sarathi_arxiv_REALATTN",
    "g07_l2-7b_a100_vllm_preempt", "g08_cl34b_a100dgx_tp2pp2_sarathi_REALATTN", "g10_qwen72b_h100dgx_tp4_sarathi_offline",
    "g12_l2-7b_a100_3rep_random_sarathi", "g14_l2-70b_h100dgx_tp4_vllm_code", "g15_l2-7b_a100_linreg_sarathi",
)  # fmt: skip


class Traced(Struct):
    """A request of a recorded run, on its way through the recorded batches."""

    arrived: float
    prompt: float
    output: float
    prefill: float
    decode: float
    processed: float = 0.0
    prefilled: bool = False
    scheduled: float = nan
    first: float = nan
    completed: float = nan
    execution: float = 0.0
    away: float = 0.0
    last: float = 0.0
    restarts: float = 0.0

    def restart(self) -> None:
        """What it has, output included, is prompt from now on."""
        self.prefill, self.decode = self.processed, self.prompt + self.output - self.processed
        self.processed, self.prefilled = 0.0, False
        self.restarts += 1

    def work(self, began: float, took: float) -> None:
        """A stage works on it."""
        if self.last:
            self.away += began - self.last
        self.execution += took
        self.last = began + took

    def advance(self, tokens: int, now: float) -> None:
        """A batch has passed its last stage."""
        self.processed += tokens
        if not self.prefilled and self.processed == self.prefill:
            self.prefilled = True
            self.processed += 1
            if self.restarts == 0:
                self.first = now
        if self.processed == self.prompt + self.output:
            self.completed = now


def rows(path: Path) -> Iterator[dict[str, str]]:
    data = path.read_bytes()
    yield from csv.DictReader((gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines())


def trace(folder: Path) -> list[Traced]:
    """The requests of a recorded run, after its batches."""
    requests = {}
    for row in rows(folder / "requests.csv"):
        prompt, output = float(row["num_prefill_tokens"]), float(row["num_decode_tokens"])
        requests[int(row["request_id"])] = Traced(float(row["arrived_at"]), prompt, output, prompt, output)
    stages = list(rows(folder / "batch_stages.csv.gz"))
    last = max(int(row["stage_id"]) for row in stages)
    for row in stages:
        stage, began, took = int(row["stage_id"]), float(row["scheduled_at_s"]), float(row["execution_time_s"])
        for part in row["req:tokens:processed_before"].split(";"):
            id, tokens, before = map(int, part.split(":"))
            request = requests[id]
            if stage == 0 and before != request.processed:
                request.restart()
            if np.isnan(request.scheduled):
                request.scheduled = began
            request.work(began, took)
            if stage == last:
                request.advance(tokens, began + took)
    return [requests[id] for id in sorted(requests)]


@pytest.mark.shared
@pytest.mark.parametrize("run", RUNS)
def test_recorded_batches_come_to_the_recorded_metrics(shared: Path, run: str) -> None:
    folder = shared / "data" / "vidur_golden" / run
    traced = trace(folder)
    names = (
        "arrived", "scheduled", "first", "completed", "execution", "away", "prompt", "output", "prefill", "decode", "restarts",
    )  # fmt: skip
    found = request_metrics(Lives(*(np.array([getattr(request, name) for request in traced]) for name in names)))
    expected = list(rows(folder / "request_metrics.csv"))
    columns = [name for name in expected[0] if name != "Request Id"]
    assert list(found) == columns
    for name in columns:
        if "pp2" in run and (name == "request_scheduling_delay" or name.startswith("prefill_time")):
            continue  # counted from when the batch was formed, which the records do not tell where its first stage was busy
        recorded = [float(row[name]) if row[name] else nan for row in expected]
        np.testing.assert_allclose(found[name], recorded, rtol=0, atol=1e-9, err_msg=name)


def test_a_run_of_ours_in_vidurs_words() -> None:
    """Request 0 takes 7 steps of a millisecond; request 1 loses its KV after 5 tokens, waits 2 ms, and is done 2 steps later."""
    requests = [OfferedRequest(0, MILLISECOND, 12, 7), OfferedRequest(1, MILLISECOND, 12, 7)]
    latency = Linear(fixed=16 * MILLISECOND)
    observer = Observer(latency, 4)
    log, created = watched([observer])
    config = Config(batching=Vllm(8, 64, prefix_cache=False), replica=ReplicaSpec(block_size=4))
    record = simulate(config, requests, latency, 8, log=log, created=created)
    ids, lives = lives_of(record.requests, observer.observed)
    metrics = request_metrics(lives)
    assert ids.tolist() == [0, 1]
    expected: dict[str, list[float]] = {
        "request_e2e_time": [0.007, 0.009],
        "request_e2e_time_normalized": [0.001, 0.0045],  # after the restart 2 of its tokens are decode tokens
        "request_execution_time": [0.007, 0.007],
        "request_preemption_time": [0.0, 0.002],
        "request_scheduling_delay": [0.0, 0.0],
        "prefill_e2e_time": [0.001, 0.001],
        "prefill_time_execution_plus_preemption_normalized": [0.001 / 12, 0.001 / 17],
        "decode_time_execution_plus_preemption_normalized": [0.006 / 7, 0.004],
        "request_num_decode_tokens": [7, 7],
        "request_num_restarts": [0, 1],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(metrics[name], values, rtol=0, atol=1e-12, err_msg=name)
    assert np.isnan(metrics["request_inter_arrival_delay"][0])
    assert metrics["request_inter_arrival_delay"][1] == 0


def test_what_never_happened_is_no_number() -> None:
    requests = [OfferedRequest(0, 0, 500, 2), OfferedRequest(1, 0, 8, 2)]
    latency = Linear(fixed=16 * MILLISECOND)
    observer = Observer(latency, 4)
    log, created = watched([observer])
    record = simulate(Config(replica=ReplicaSpec(block_size=4)), requests, latency, 8, log=log, created=created)
    metrics = request_metrics(lives_of(record.requests, observer.observed)[1])
    assert [np.isnan(metrics[name][0]) for name in ("request_e2e_time", "request_execution_time", "prefill_e2e_time")] == [
        True
    ] * 3
    assert metrics["request_e2e_time"][1] == pytest.approx(0.002)
