"""The page needs no network, holds what it should and survives hostile text."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squall.config import Config, Run, Slo
from squall.core.metrics import Outcome, RequestRow
from squall.core.types import MILLISECOND, SECOND
from squall.report.html import levels, page, rates, tokens, write_report
from squall.report.run import StoredRun, read_run, write_run
from squall.report.summary import Lives
from squall.sim.linear import Linear
from squall.sim.observe import Observer, watched
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

Stored = Callable[..., StoredRun]


def charts_of(text: str) -> list[dict[str, Any]]:
    found = re.search(r"^const charts = (.*);$", text, re.MULTILINE)
    assert found
    return list(json.loads(found[1].replace("<\\/", "</")))


def test_the_report_is_one_page_that_fetches_nothing(stored: Stored) -> None:
    path = write_report(stored())
    text = path.read_text()
    outside_plotly = re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.DOTALL)
    assert len(outside_plotly) < 200_000 < len(text)
    assert "Plotly.newPlot" in outside_plotly
    assert not re.search(r"(src|href)\s*=|https?://|@import", outside_plotly)


def test_the_report_shows_distributions_load_summary_and_configuration(stored: Stored) -> None:
    text = page(stored())
    charts = charts_of(text)
    assert [[trace["name"] for trace in chart["data"]] for chart in charts] == [
        ["TTFT", "TBT", "E2E"], ["arrived", "completed"], ["output tokens"], ["waiting", "at work"],
    ]  # fmt: skip
    tbt = charts[0]["data"][1]
    assert set(tbt["x"]) == {0.05}
    assert (tbt["y"][0], tbt["y"][-1]) == (0, 1)
    assert "<td>SLO attainment</td><td>0.95</td>" in text
    assert "<td>TTFT ≤ 1 s" in text
    assert "ttft_s = 1.0" in text


def test_markup_in_a_configuration_is_shown_and_not_run(stored: Stored) -> None:
    run = stored()
    (run.path / "config.toml").write_text("[model]\nname = '</pre><script>alert(1)</script>'\n")
    text = page(StoredRun(run.path, run.summary, (run.path / "config.toml").read_text()))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_rates_and_tokens_add_up_to_what_happened(stored: Stored) -> None:
    lives = stored().lives()
    arrived, completed = rates(lives)
    (made,) = tokens(lives)
    width = arrived["x"][1] - arrived["x"][0]
    assert sum(arrived["y"]) * width == pytest.approx(20)
    assert sum(completed["y"]) * width == pytest.approx(19)
    assert sum(made["y"]) * width == pytest.approx(19 * 5)


def test_a_rejected_request_never_waits_and_an_unfinished_one_waits_to_the_end() -> None:
    rows = [
        RequestRow(
            0, 0, 10, scheduled_at=2 * SECOND, first_token_at=3 * SECOND, finished_at=4 * SECOND, outcome=Outcome.COMPLETED
        ),
        RequestRow(1, SECOND, 10, outcome=Outcome.REJECTED),
        RequestRow(2, SECOND, 10, outcome=Outcome.UNFINISHED),
        RequestRow(3, SECOND, 10, finished_at=3 * SECOND, outcome=Outcome.CANCELLED),
    ]
    waiting, working = levels(Lives.of(rows))

    def at(trace: dict[str, Any], second: float) -> int:
        return int(trace["y"][int(np.searchsorted(trace["x"], second, side="right")) - 1])

    assert [at(waiting, s) for s in (0.5, 1.5, 2.5, 3.5)] == [1, 3, 2, 1]
    assert [at(working, s) for s in (1.5, 2.5, 3.9)] == [0, 1, 1]


@pytest.mark.parametrize("num_requests", [0, 1])
def test_an_empty_run_has_a_report_too(stored: Stored, num_requests: int) -> None:
    charts = charts_of(page(stored(num_requests=num_requests)))
    assert len(charts) == 4


def test_a_series_of_the_engines_is_drawn_and_their_numbers_are_told(tmp_path: Path) -> None:
    latency = Linear(fixed=16 * MILLISECOND)
    observer = Observer(latency, 16)
    log, created = watched([observer])
    requests = [OfferedRequest(i, i * MILLISECOND, 12, 7) for i in range(4)]
    record = simulate(Config(), requests, latency, 12, log=log, created=created)
    record.observed = observer.observed
    write_run(tmp_path / "run", record, Config(run=Run(series_s=0.001), slo=Slo(ttft_s=0.0001, ttft_p90_s=2.0)), None)
    text = page(read_run(tmp_path / "run"))
    charts = {chart["layout"]["title"]["text"]: [trace["name"] for trace in chart["data"]] for chart in charts_of(text)}
    assert charts["Tokens per second computed, of prompts and of answers"] == ["prefill", "decode"]
    assert charts["Share of the time that stages are busy, and of the KV blocks held"] == ["busy", "KV"]
    assert charts["Replicas by phase"] == ["ready"]
    assert charts["Requests that broke their promise, per bin"] == ["violations"]
    assert "<td>requests a step</td>" in text
    assert "<td>ttft_p90_s</td>" in text
