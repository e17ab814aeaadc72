"""The directory of a fleet that was served becomes that of a run: its tables and summary are made out of its event log."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from squall.config import Config, load
from squall.core.metrics import RunRecord
from squall.errors import ConfigError
from squall.eventlog import open_log, read
from squall.live.folder import fill_folder, logs_of
from squall.report.html import page
from squall.report.run import read_run
from squall.report.served import count_served, is_served, served_in
from squall.report.summary import Lives
from squall.twin.rehearse import rehearse_with_events

SERVED = (
    "model.name=llama-3-8b",
    "cluster.gpu=a100-80g",
    "serve.engine=emulated",
    "replica.tp=2",
    "fleet.replicas=2",
    "slo.ttft_s=1",
    "slo.tbt_s=0.1",
    "workload.kind=synthetic",
    "workload.num_requests=20",
    "workload.arrivals={kind='poisson', rate_rps=20.0}",
    "workload.prompt={kind='fixed', tokens=200}",
    "workload.output={kind='uniform', low=2, high=80}",
)


def served(path: Path, settings: Sequence[str] = ()) -> tuple[Config, RunRecord]:
    """The directory as a head leaves it; what was in its log is a simulation's."""
    config = load(None, [*SERVED, *settings])
    record, events = rehearse_with_events(config)
    fill_folder(path, config)
    (path / "events.jsonl.zst").write_bytes(events)
    return config, record


def test_it_is_read_as_any_other_run_from_then_on(tmp_path: Path) -> None:
    _, record = served(tmp_path / "chat")
    summary = count_served(tmp_path / "chat").summary
    run = read_run(tmp_path / "chat")
    assert run.summary == summary
    lives, was = run.lives(), Lives.of(record.requests)
    for name in Lives.__struct_fields__:
        assert getattr(lives, name).tolist() == getattr(was, name).tolist()
    assert (summary.world, summary.completed, summary.num_steps) == ("emulated", 20, record.num_steps)
    assert summary.tbt_s is None
    assert summary.tpot_s is not None
    assert summary.gpu_seconds == pytest.approx(4 * record.ended_at / 1e9)
    assert summary.cost_usd is not None
    assert summary.slo_met is True


def test_a_promise_about_gaps_is_not_judged_and_others_are(tmp_path: Path) -> None:
    served(tmp_path / "kept", ["slo.tbt_p99_s=1"])
    served(tmp_path / "broken", ["slo.tbt_p99_s=1", "slo.ttft_p50_s=1e-9"])
    kept, broken = count_served(tmp_path / "kept"), count_served(tmp_path / "broken")
    assert (kept.summary.slo_met, kept.summary.slo_quantiles) == (None, ())
    assert (broken.summary.slo_met, [each.name for each in broken.summary.slo_quantiles]) == (False, ["ttft_p50_s"])
    assert "slo.tbt_p50_s and its like are about single gaps, and not judged" in kept.notes
    shown = page(kept)
    assert all(f"<p>{note}</p>" in shown for note in kept.notes)


def test_a_head_that_runs_is_counted_out_of_the_logs_of_its_processes(tmp_path: Path) -> None:
    _, record = served(tmp_path)
    events = tmp_path / "events.jsonl.zst"
    lines = list(read(events))
    events.unlink()
    for name, wanted in (("head", range(-2, 0)), ("0-17", range(1)), ("1-18", range(1, 2))):
        with open_log(logs_of(tmp_path) / f"events-{name}.jsonl.zst") as log:
            for line in lines:
                if line.machine in wanted:
                    log.write(line)
    run = count_served(tmp_path)
    assert run.summary.num_output_tokens == sum(row.num_output_tokens for row in record.requests)
    assert len(run.notes) == 2
    (logs_of(tmp_path) / "events-1-18.jsonl.zst").unlink()
    without = count_served(tmp_path)
    assert without.summary.completed == 20
    assert without.summary.num_output_tokens < run.summary.num_output_tokens
    assert "completed requests the last step is in no log here" in without.notes[2]


def test_without_a_log_there_is_nothing_to_count(tmp_path: Path) -> None:
    fill_folder(tmp_path / "off", load(None, SERVED))
    assert is_served(tmp_path / "off")
    with pytest.raises(ConfigError, match=r"off has no event log to count from \(serve.event_log\)"):
        count_served(tmp_path / "off")
    open_log(logs_of(tmp_path / "off") / "events-head.jsonl.zst").close()
    with pytest.raises(ConfigError, match=r"off cannot be reported yet: nothing is in its event log so far"):
        count_served(tmp_path / "off")
    with pytest.raises(ConfigError, match=r"has no summary.json; where a fleet was served, `squall report .*off` makes one"):
        read_run(tmp_path / "off")


def test_several_models_have_a_directory_each(tmp_path: Path) -> None:
    for name in ("code", "chat"):
        fill_folder(tmp_path / "both" / name, load(None, SERVED))
    assert served_in(tmp_path / "both") == [tmp_path / "both" / "chat", tmp_path / "both" / "code"]
    assert served_in(tmp_path / "both" / "chat") == []
    assert not is_served(tmp_path / "both")
