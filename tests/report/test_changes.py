"""What a run tells of how its fleet changed: files, page and lines, of a small elastic fleet."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from squall.config import Config, Run, from_tree
from squall.core.fleet_view import Place, Transfer
from squall.core.metrics import Decision, LinkLevels, RunRecord, weights_delivered
from squall.core.types import SECOND
from squall.report.changes import latest_decisions
from squall.report.html import page
from squall.report.links import link_series
from squall.report.run import LINKS, StoredRun, read_run, write_run
from squall.twin.rehearse import rehearse, usd_per_gpu_hour

ELASTIC = """
[model]
name = "llama-3-8b"
[cluster]
gpu = "a100-80g"
nodes = 2
[fleet]
mode = "disaggregated"
prefill = { min = 1, max = 3 }
decode = { min = 1, max = 3 }
[scale]
kind = "blitz"
[load]
kind = "auto"
[workload]
kind = "synthetic"
num_requests = 150
arrivals = { kind = "poisson", rate_rps = 60 }
prompt = { kind = "fixed", tokens = 2000 }
output = { kind = "fixed", tokens = 20 }
"""


def elastic() -> Config:
    return from_tree("here", tomllib.loads(ELASTIC))


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StoredRun]:
    """The fleet's run with what `[run]` asks for; each is simulated once."""
    kept: dict[tuple[Any, ...], StoredRun] = {}

    def simulated(**asked: Any) -> StoredRun:
        key = tuple(asked.items())
        if key not in kept:
            config = replace(elastic(), run=Run(**asked))
            path = tmp_path_factory.mktemp("runs") / "run"
            write_run(path, rehearse(config), config, usd_per_gpu_hour(config))
            kept[key] = read_run(path)
        return kept[key]

    return simulated


def charts_of(run: StoredRun) -> dict[str, list[dict[str, Any]]]:
    found = re.search(r"^const charts = (.*);$", page(run), re.MULTILINE)
    assert found
    return {chart["layout"]["title"]["text"]: chart["data"] for chart in json.loads(found[1].replace("<\\/", "</"))}


def test_every_decision_has_its_reason_and_every_load_its_row_unasked(run_of: Callable[..., StoredRun]) -> None:
    run = run_of()
    decisions, transfers = run.decisions(), run.transfers()
    assert decisions is not None
    assert transfers is not None
    assert min(map(len, decisions["why"].to_list())) > 0
    ups = (decisions["after"] - decisions["before"]).to_list()
    assert sum(up for up in ups if up > 0) == run.summary.scale_ups > 0
    assert set(transfers["what"]) == {"weights"}
    assert transfers["layers_at"].to_list() == [None] * len(transfers)
    assert run.links() is None
    for row in transfers.iter_rows(named=True):
        assert row["replica"] in row["route"]
        assert row["bytes_per_s"] == pytest.approx(row["num_bytes"] * SECOND / row["duration"])
        assert row["path"][-1].startswith(f"gpu{row['replica']}.")
    assert not (run.path / LINKS).exists()


def test_a_series_adds_handoffs_links_layers_and_dollars_and_changes_nothing(run_of: Callable[..., StoredRun]) -> None:
    plain, run = run_of(), run_of(series_s=0.25)
    assert (plain.path / "requests.parquet").read_bytes() == (run.path / "requests.parquet").read_bytes()
    assert (plain.path / "decisions.parquet").read_bytes() == (run.path / "decisions.parquet").read_bytes()
    transfers, links, series = run.transfers(), run.links(), run.series()
    assert transfers is not None
    assert links is not None
    assert series is not None
    kv = transfers.filter(transfers["what"] == "kv")
    assert sorted(kv["request"]) == list(range(150))
    for row in transfers.filter(transfers["what"] == "weights").iter_rows(named=True):
        assert len(row["layers_at"]) == 32
        assert row["layers_at"] == sorted(row["layers_at"])
        assert row["started_at"] < row["layers_at"][0]
        assert row["layers_at"][-1] <= row["started_at"] + row["duration"]
    crossed = dict.fromkeys(links["link"].unique(), 0.0)
    for row in links.iter_rows(named=True):
        crossed[row["link"]] += row["bytes_per_s"] * min(0.25, run.summary.makespan_s - row["at_s"])
    sent = dict.fromkeys(crossed, 0.0)
    for row in transfers.iter_rows(named=True):
        for name in row["path"]:
            sent[name] += row["num_bytes"]  # replicas of one GPU: all of it crosses each link
    assert crossed == pytest.approx(sent, rel=1e-5)
    assert max(links["utilisation"].to_list()) <= 1 + 1e-9
    assert series["cost_usd"].sum() == pytest.approx(run.summary.cost_usd, rel=1e-3)
    assert {"replicas_loading_prefill", "replicas_ready_prefill", "replicas_ready_decode"} < set(series.columns)


def test_the_page_shows_why_and_what_was_moved(run_of: Callable[..., StoredRun]) -> None:
    run = run_of(series_s=0.25)
    charts, decisions = charts_of(run), run.decisions()
    assert decisions is not None
    wanted = charts["Replicas wanted (a mark tells why), and those that take requests"]
    assert [trace["name"] for trace in wanted] == ["prefill wanted", "decode wanted", "prefill ready", "decode ready"]
    prefill = decisions.filter(decisions["role"] == "prefill")
    assert wanted[0]["y"] == [prefill["before"][0], *prefill["after"], prefill["after"][-1]]
    assert prefill["why"][0] in wanted[0]["text"][1]
    titles = " ".join(charts)
    for part in ("Weights on their way", "Links of each kind", "Flows on the link", "GPU seconds so far", "Dollars so far"):
        assert part in titles
    text = page(run)
    assert f"Decisions ({len(decisions)})" in text
    assert "<td>kv, handoff</td><td>150</td>" in text
    plain = charts_of(run_of())
    assert any("Weights on their way" in title for title in plain)
    assert not any("Links" in title for title in plain)


def small(record: RunRecord, path: Path) -> StoredRun:
    write_run(path, record, Config(), None)
    return read_run(path)


def test_the_latest_decisions_are_lines(
    record: Callable[..., RunRecord], tmp_path: Path, run_of: Callable[..., StoredRun]
) -> None:
    assert latest_decisions(small(record(), tmp_path / "fixed")) == []
    lines = latest_decisions(run_of())
    decisions = run_of().decisions()
    assert decisions is not None
    last = decisions.row(-1, named=True)
    assert lines[-1].endswith(f"{last['role']}: {last['before']} -> {last['after']} replicas: {last['why']}")
    assert len(lines) == 1 + min(5, len(decisions))


def test_reasons_are_text_and_no_markup(
    record: Callable[..., RunRecord], tmp_path: Path, run_of: Callable[..., StoredRun]
) -> None:
    hostile = "<script>alert(1)</script>"
    fleet = rehearse(elastic()).fleet
    made = replace(record(), fleet=fleet, decisions=[Decision(SECOND, "both", 1, 2, hostile)])
    text = page(small(made, tmp_path / "run"))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_of_very_many_loads_single_layers_are_left_out_of_the_page(record: Callable[..., RunRecord], tmp_path: Path) -> None:
    transfer = Transfer("m", Place("host", 0), (1,), "host")
    loads_of = [weights_delivered(1, transfer, 100, at * SECOND, SECOND, (), (at * SECOND + 5,)) for at in range(201)]
    [trace] = next(
        data
        for title, data in charts_of(small(replace(record(), weights=loads_of), tmp_path / "run")).items()
        if "Weights" in title
    )
    assert len(trace["x"]) == 201 * 3


def test_a_links_rate_is_its_mean_in_each_bin_and_idle_bins_are_left_out() -> None:
    levels = [(SECOND // 2, 8, 1), (SECOND, 4, 2), (2 * SECOND, 0, 0), (4 * SECOND, 0, 3), (5 * SECOND, 0, 0)]
    edges = np.arange(7, dtype=np.int64) * SECOND
    rows = link_series([LinkLevels("a", 16, levels)], edges).rows()
    assert rows == [(0.0, "a", 4.0, 0.25, 0.5), (1.0, "a", 4.0, 0.25, 2.0), (4.0, "a", 0.0, 0.0, 3.0)]
    assert link_series([], edges).is_empty()
