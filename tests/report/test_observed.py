"""What is made of an observed simulation: utilisation, series, timeline. Every expected value was worked out by hand."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from msgspec.structs import replace

from squall.config import Config, ReplicaSpec, Run, Slo
from squall.core.metrics import UNSET, Observed, Outcome, RequestRow, RunRecord
from squall.core.types import MILLISECOND, SECOND
from squall.errors import ConfigError
from squall.fleet_tables import Fleet
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import GPUS
from squall.policies.batching import Vllm
from squall.report.deployed import BUSY_SHARES, IDLE_SHARE, Deployed, deployed
from squall.report.detail import detail, held, usage
from squall.report.run import REPLICAS, SERIES, STEPS, TRACE, VIDUR, read_run, write_run
from squall.report.series import series
from squall.report.steps import Stretches
from squall.report.trace import trace
from squall.sim.linear import Linear
from squall.sim.observe import Observer, watched
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

MS = MILLISECOND


def play(*requests: OfferedRequest, replicas: int = 1, stages: tuple[int, ...] = (1,), num_blocks: int = 10) -> RunRecord:
    """A step takes a millisecond, a block holds four tokens."""
    latency = Linear(fixed=16 * MS, shares=stages)
    config = Config(
        batching=Vllm(8, 64, prefix_cache=False),
        fleet=Fleet(replicas=replicas),
        replica=ReplicaSpec(block_size=4, pp=len(stages)),
    )
    observer = Observer(latency, 4)
    log, created = watched([observer])
    record = simulate(config, requests, latency, num_blocks, log=log, created=created)
    record.observed = observer.observed
    return record


def offered(id: int, at_ms: float, prompt: int, output: int) -> OfferedRequest:
    return OfferedRequest(id, round(at_ms * MS), prompt, output)


def seen(record: RunRecord) -> Observed:
    assert record.observed is not None
    return record.observed


def on_a_gpu(**changes: Any) -> Deployed:
    model = resolve_model("llama-3-8b")
    return replace(Deployed(model, GPUS["a100-80g"], 1, 1, 4, "bf16", "bf16", "bf16"), **changes)


def test_batches_busy_and_idle_time() -> None:
    """Prefill of 8 tokens at 2 ms, decodes at 3 and 4 ms; the run ends at 5 ms, on the second of two replicas nothing happens."""
    record = play(offered(0, 2, 8, 3), replicas=2)
    use = usage(record, seen(record), None)
    assert use.replica.tolist() == [0, 1]
    assert (use.held.tolist(), use.busy.tolist(), use.num_steps.tolist()) == ([5 * MS, 5 * MS], [3 * MS, 0], [3, 0])
    assert (use.num_prefill_tokens.tolist(), use.num_decode_tokens.tolist()) == ([8, 0], [2, 0])
    found = detail(record, seen(record), use, None)
    assert (found.busy_s, found.idle_s) == (0.003, 0.007)
    assert found.busy.mean == pytest.approx(0.3)
    assert (found.busy.min, found.busy.max) == (0.0, 0.6)
    assert found.batch_tokens is not None
    assert found.batch_tokens.mean == pytest.approx(10 / 3)
    assert found.batch_tokens.max == 8
    assert found.batch_size is not None
    assert found.batch_size.mean == 1
    assert found.step_s is not None
    assert found.step_s.mean == 0.001
    assert (found.preempted_s, found.mfu, found.mfu_busy, found.memory) == (None, None, None, None)


def test_kv_is_what_requests_hold_over_time() -> None:
    """No block in the first millisecond, 2 in the second, 3 in the third (token 9), of 10; the run lasts 5 ms."""
    record = play(offered(0, 2, 8, 3))
    use = usage(record, seen(record), None)
    assert use.kv_mean[0] == pytest.approx((0 + 2 + 3) / 10 / 5)
    assert use.kv_max[0] == pytest.approx(0.3)


def test_a_preempted_request_is_counted_and_timed() -> None:
    record = play(offered(0, 0, 12, 7), offered(1, 0, 12, 7), num_blocks=8)
    found = detail(record, seen(record), usage(record, seen(record), None), None)
    assert found.preempted_s is not None
    assert found.preempted_s.max == 0.002
    assert found.restarts is not None
    assert (found.restarts.mean, found.restarts.max) == (0.5, 1)


def test_operations_are_those_of_matrices_head_and_attention() -> None:
    on = on_a_gpu()
    record = play(offered(0, 0, 8, 3))
    columns = Stretches(seen(record)).columns
    model = on.model
    head = 2 * model.vocab_size * model.hidden_size
    matrices = model.flops_per_token() - head
    pair = model.flops_per_token(1) - model.flops_per_token()
    prefill = 8 * matrices + head + pair * (8 * 9 // 2)
    decode = 2 * (matrices + head) + pair * (9 + 10)
    assert on.flops(columns).sum() == pytest.approx(prefill + decode, rel=1e-12)
    use = usage(record, seen(record), on)
    assert use.mfu[0] == pytest.approx((prefill + decode) / (0.003 * 312e12), rel=1e-9)


def test_a_window_bounds_what_a_token_attends_to() -> None:
    on = on_a_gpu()
    attention = replace(on.model.attention, window=4)
    windowed = replace(on.model, layers=tuple(replace(group, attention=attention) for group in on.model.layers))
    columns = Stretches(seen(play(offered(0, 0, 30, 9)))).columns
    all_of_it, part = on.flops(columns).sum(), on_a_gpu(model=windowed).flops(columns).sum()
    pair = on.model.flops_per_token(1) - on.model.flops_per_token()
    assert all_of_it - part == pytest.approx(pair * (30 * 31 / 2 - 30 * 4 + sum(range(31, 39)) - 8 * 4), rel=1e-9)


def test_energy_is_idle_power_and_what_the_tokens_of_a_step_ask_for() -> None:
    record = play(offered(0, 2, 8, 3))
    use = usage(record, seen(record), on_a_gpu())
    low, high = BUSY_SHARES
    prefill = low + (high - low) * np.log(8) / np.log(128)
    assert use.joules[0] == pytest.approx(400 * (0.002 * IDLE_SHARE + 0.001 * prefill + 0.002 * low))
    assert on_a_gpu().busy_joules({"num_decodes": np.array([500]), "num_prefill_tokens": np.array([0])}, np.array([SECOND])) == (
        pytest.approx(high * 400)
    )


def test_memory_is_weights_and_blocks() -> None:
    on = on_a_gpu()
    record = play(offered(0, 0, 8, 3))
    found = detail(record, seen(record), usage(record, seen(record), on), on)
    assert found.memory is not None
    most = (on.model.weight_bytes() + 3 * 4 * on.model.kv_bytes_per_token("bf16")) / on.gpu.memory_bytes
    assert found.memory.max == pytest.approx(most)


PHASES = [(0, 0, "starting", "prefill"), (5, 0, "ready", "prefill"), (7, 1, "starting", "decode"), (9, 0, "off", "prefill")]


def test_a_replica_is_held_from_its_start_to_its_end() -> None:
    observed = Observed(4, pools={0: 10, 1: 10}, phases=PHASES)
    assert held(observed, 20) == {0: 9, 1: 13}
    assert held(Observed(4, pools={0: 10}), 20) == {0: 20}


def test_stages_are_busy_one_after_the_other_and_their_times_are_their_own() -> None:
    """Two stages of 0.25 and 0.75 ms: a request alone keeps each busy for its part of three steps."""
    record = play(offered(0, 0, 8, 3), stages=(1, 3))
    use = usage(record, seen(record), None)
    assert use.stage.tolist() == [0, 1]
    assert use.busy.tolist() == [3 * MS // 4, 9 * MS // 4]
    assert seen(record).execution == {0: 3 * MS}
    found = detail(record, seen(record), use, None)
    assert found.step_s is not None
    assert (found.step_s.mean, found.step_s.max) == (0.001, 0.001)
    assert found.batch_size is not None
    assert use.num_steps.tolist() == [3, 3]


def test_steps_on_their_way_through_a_pipeline_overlap() -> None:
    record = play(*(offered(i, 0, 60, 4) for i in range(4)), stages=(1, 1), num_blocks=200)
    rows = pl.concat([pl.DataFrame(piece) for piece in Stretches(seen(record)).steps()])
    for stage in (0, 1):
        part = rows.filter(pl.col("stage") == stage).sort("started_at")
        assert (part["started_at"].diff().drop_nulls() >= part["duration"][:-1]).all()
    assert rows["duration"].sum() > record.ended_at
    spent = {row.id: row.finished_at - row.scheduled_at for row in record.requests}
    assert all(0 < seen(record).execution[id] <= spent[id] for id in spent)


# -- over time


def test_a_series_counts_events_and_averages_levels() -> None:
    """Bins of 2 ms of a run of 5: the request arrives at 1 ms, runs at once until 5 ms."""
    record = play(offered(0, 1, 8, 4))
    rows = series(record, Slo(ttft_s=0.0005), every_s=0.002, gpus_per_replica=4)
    assert rows["at_s"].to_list() == pytest.approx([0, 0.002, 0.004])
    assert rows["arrivals"].to_list() == [1, 0, 0]
    assert rows["first_tokens"].to_list() == [0, 1, 0]
    assert rows["completions"].to_list() == [0, 0, 1]
    assert rows["slo_violations"].to_list() == [0, 0, 1]
    assert rows["running"].to_list() == pytest.approx([0.5, 1, 1])
    assert rows["waiting"].to_list() == pytest.approx([0, 0, 0])
    assert rows["steps"].to_list() == [1, 2, 1]
    assert rows["busy_share"].to_list() == pytest.approx([0.5, 1, 1])
    assert rows["prefill_tokens_per_s"].to_list() == pytest.approx([4000, 0, 0])
    assert rows["decode_tokens_per_s"].to_list() == pytest.approx([0, 1000, 1000])
    assert rows["kv_blocks"].to_list() == pytest.approx([0, 2.5, 3])
    assert rows["replicas_ready"].to_list() == pytest.approx([1, 1, 1])
    assert rows["gpu_seconds"].to_list() == pytest.approx([0.008, 0.008, 0.004])


def test_a_step_over_several_bins_gives_each_its_share() -> None:
    record = play(offered(0, 0, 8, 2))
    rows = series(record, Slo(), every_s=0.0004, gpus_per_replica=1)
    assert rows["prefill_tokens_per_s"].to_list() == pytest.approx([8000, 8000, 4000, 0, 0])
    assert "slo_violations" not in rows.columns


def test_replicas_are_counted_by_phase_and_by_role() -> None:
    record = RunRecord("simulated", [], play().gaps, ended_at=20, observed=Observed(4, pools={0: 10, 1: 10}, phases=PHASES))
    [row] = series(record, Slo(), every_s=1.0, gpus_per_replica=2).iter_rows(named=True)
    assert row["replicas_starting"] == pytest.approx((5 + 13) / 20)
    assert row["replicas_ready"] == row["replicas_ready_prefill"] == pytest.approx(4 / 20)
    assert row["gpu_seconds"] == pytest.approx((9 + 13) * 2 / SECOND)


def test_the_unfinished_count_as_waiting_or_running_to_the_end_and_break_their_promise() -> None:
    rows = [
        RequestRow(0, 0, 8, scheduled_at=SECOND, outcome=Outcome.UNFINISHED),
        RequestRow(1, SECOND, 8, outcome=Outcome.UNFINISHED),
        RequestRow(2, SECOND, 8, finished_at=SECOND, outcome=Outcome.REJECTED),
    ]
    record = RunRecord("simulated", rows, play().gaps, ended_at=4 * SECOND)
    found = series(record, Slo(e2e_s=9), every_s=2.0, gpus_per_replica=1)
    assert found["waiting"].to_list() == [1, 1]
    assert found["running"].to_list() == [0.5, 1]
    assert found["rejections"].to_list() == [1, 0]
    assert found["slo_violations"].to_list() == [1, 2]
    assert "busy_share" not in found.columns


def test_too_fine_a_series_is_refused_by_its_key() -> None:
    record = RunRecord("simulated", [], play().gaps, ended_at=3600 * SECOND)
    with pytest.raises(ConfigError, match=r"run\.series_s is 0\.001, too fine"):
        series(record, Slo(), every_s=0.001, gpus_per_replica=1)


# -- as a timeline


def events_of(record: RunRecord, from_s: float = 0.0, most_events: int = 1_000) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    found = msgspec.json.decode(trace(record, seen(record), from_s, most_events))
    return [event for event in found["traceEvents"] if event["ph"] != "M"], found["otherData"]


def test_a_timeline_holds_runs_requests_and_phases() -> None:
    record = play(offered(0, 0, 8, 4), offered(1, 0.5, 8, 1))
    events, about = events_of(record)
    assert about["complete"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    runs = [(e["ts"], e["dur"], e["name"], e["args"]["steps"]) for e in events if e["ph"] == "X"]
    assert runs == [(0, 1000, "prefill", 1), (1000, 1000, "mixed", 1), (2000, 2000, "decode", 2)]
    spans = [(e["ph"], e["name"], e["ts"]) for e in events if e["ph"] in "be" and e["id"] == 1]
    assert spans == [
        ("b", "request 1", 500), ("b", "queue", 500), ("e", "queue", 1000), ("b", "prefill", 1000), ("e", "prefill", 2000),
        ("e", "request 1", 2000),
    ]  # fmt: skip
    assert {e["name"] for e in events if e["ph"] == "i"} == {"starting", "loading", "warming", "ready"}


def test_every_span_that_begins_ends_inside_its_parent() -> None:
    record = play(*(offered(i, i / 3, 9, 1 + i % 5) for i in range(12)), offered(12, 3, 900, 2))
    events, _ = events_of(record)
    for id in range(13):
        open_spans: list[str] = []
        for event in events:
            if event["ph"] in "be" and event["id"] == id:
                if event["ph"] == "b":
                    open_spans.append(event["name"])
                else:
                    assert open_spans.pop() == event["name"]
        assert open_spans == []


def test_a_timeline_that_is_too_long_is_cut_and_says_so() -> None:
    record = play(*(offered(i, i, 9, 3) for i in range(50)))
    events, about = events_of(record, most_events=40)
    assert not about["complete"]
    assert 0 < about["until_s"] < record.ended_at / SECOND
    assert 40 <= len(events) <= 60
    begun = sorted((e["id"], e["name"]) for e in events if e["ph"] == "b")
    assert begun == sorted((e["id"], e["name"]) for e in events if e["ph"] == "e")
    later, about = events_of(record, from_s=0.04)
    assert about["from_s"] == 0.04
    assert min(event["ts"] + event.get("dur", 0) for event in later if event["ph"] == "X") > 40_000
    assert len(later) < len(events_of(record)[0])


def test_an_unfinished_request_has_no_end() -> None:
    record = play()
    record.requests = [RequestRow(0, 0, 8, scheduled_at=5, first_token_at=UNSET, outcome=Outcome.UNFINISHED)]
    events, _ = events_of(record)
    assert [(e["ph"], e["name"]) for e in events if e["ph"] in "be"] == [
        ("b", "request 0"), ("b", "queue"), ("e", "queue"), ("b", "prefill"),
    ]  # fmt: skip


# -- in the run directory


def test_only_what_was_asked_for_is_written(tmp_path: Path) -> None:
    record = play(offered(0, 0, 8, 4))
    everything = Run(steps=True, trace=True, series_s=0.001, compat="vidur")
    for name, run, files in (
        ("little", Run(detail=True), {REPLICAS}),
        ("much", everything, {REPLICAS, STEPS, TRACE, SERIES, VIDUR}),
    ):
        config = Config(run=run)
        summary = write_run(tmp_path / name, record, config, None, on=on_a_gpu())
        assert {path.name for path in (tmp_path / name).iterdir()} - files == {
            "config.toml", "requests.parquet", "gaps.parquet", "summary.json",
        }  # fmt: skip
        assert summary.detail is not None
        assert summary.energy_j is not None
        assert read_run(tmp_path / name).summary == summary
    assert pl.read_parquet(tmp_path / "much" / STEPS).height == 4
    assert read_run(tmp_path / "little").series() is None
    over_time = read_run(tmp_path / "much").series()
    assert over_time is not None
    assert over_time.height == 4


def test_a_run_that_nobody_observed_has_no_detail(tmp_path: Path) -> None:
    record = play(offered(0, 0, 8, 4))
    record.observed = None
    summary = write_run(tmp_path / "run", record, Config(run=Run(series_s=0.001)), None)
    assert (summary.detail, summary.energy_j) == (None, None)
    assert (tmp_path / "run" / SERIES).is_file()


def test_what_it_ran_on_is_what_the_configuration_says() -> None:
    on = deployed(Config(model=replace(Config().model, name="llama-3-8b"), cluster=replace(Config().cluster, gpu="h100-sxm")))
    assert isinstance(on, Deployed)
    assert (on.gpu.name, on.weight_dtype, on.kv_dtype, on.num_gpus) == ("h100-sxm", "bf16", "bf16", 1)
    assert on.peak_flops == 989e12
    assert replace(on, weight_dtype="fp8").peak_flops == 1979e12
