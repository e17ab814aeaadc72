"""`squall search` as a user types it: what it says, what it leaves behind, what it answers afterwards, and how it ends early."""

import logging
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w

from squall.cli import main
from squall.config import load
from squall.search.command import Options, question, run
from squall.search.output import read
from squall.search.result import Job
from squall.search.setting import Workshop
from squall.search.space import choices, dimensions, with_choice
from tests.search.conftest import SPACE, tree

ROOT = Path(__file__).resolve().parents[2]
SEARCH = {"num_requests": 60, "span_s": 0, "warm_up": 6, "seeds": 2, "top": 2, "space": {**SPACE, "replica.tp": [1, 2, 3]}}


Squall = Callable[..., tuple[int, str, str]]


@pytest.fixture
def squall(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Squall:
    """Runs `squall search ARGUMENTS` in an empty directory, on one process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["squall", "search", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        return int(code or 0), said.out, said.err

    return run


def written(path: Path, **search: Any) -> Path:
    path.write_text(tomli_w.dumps(tree() | {"search": SEARCH | search}))
    return path


def test_a_search_from_end_to_end(squall: Squall, tmp_path: Path) -> None:
    config = written(tmp_path / "search.toml")
    code, out, err = squall(config, "--workers", 1, "--out", "found", "--rate", 40)
    assert code == 0, err
    assert "24 configurations: " in out
    assert "8 cannot be run" in out
    assert "vllm serve meta-llama/Meta-Llama-3-8B --tensor-parallel-size" in out
    assert "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B" in out
    assert "for 40 req/s" in out
    assert "next: squall simulate found/best.toml" in out
    found = tmp_path / "found"
    assert {file.name for file in found.iterdir()} == {
        "search.toml", "answers.json", "results.parquet", "best.toml", "best.txt", "report.html",
    }  # fmt: skip
    table = pl.read_parquet(found / "results.parquet")
    assert table.height == 24
    assert set(table["status"]) <= {"done", "outbid", "invalid", "infeasible"}
    assert table.filter(pl.col("status") == "invalid")["replica.tp"].unique().to_list() == [3]
    answers = read(found)
    winner = answers.finalists[0]
    assert winner.result.score is not None
    assert len(winner.capacities) == 2
    best = load(found / "best.toml")
    assert best.replica.tp == winner.result.choice["replica.tp"]
    assert "Plotly.newPlot" in (found / "report.html").read_text()

    asked_again = squall(found, "--price", "h100-sxm=0.01")
    assert asked_again[0] == 0
    assert "gpu=h100-sxm" in asked_again[1].splitlines()[0]
    code, out, _ = squall(found, "--limit", "ttft_p90_s=0.0001")
    assert "would have to run" in out
    assert squall(found, "--price", "h100=0.01")[1] == asked_again[1]  # by another of its names
    assert squall(found, "--price", "t4=1")[2].endswith("found runs on it; they run on a100-80g, h100-sxm\n")
    assert squall(found, "--price", "foo=1")[2].startswith("squall: error: --price foo: 'foo' is unknown: ")
    assert squall(found, "--price", "h100-sxm=-1")[0] == 2
    assert squall(found)[1].count("vllm serve") == 1

    code, out, _ = squall(found / "search.toml", "--workers", 1, "--out", "again")
    assert "0 of them simulated now" in out
    assert read(tmp_path / "again").results == answers.results


def test_only_a_model_a_workload_and_an_slo(tmp_path: Path) -> None:
    options = Options(model="llama-2-70b", trace="chat-lmsys-1m", gpus="a100,h100", limits=("ttft_p90_s=2", "tbt_p99_s=0.2"))
    base, search = question(options)
    assert search.slo == {"ttft_p90_s": 2.0, "tbt_p99_s": 0.2}
    assert search.space["cluster.gpu"] == ["a100", "h100"]
    assert {"replica.tp", "replica.pp", "batching.kind"} <= search.space.keys()
    assert base["workload"]["name"] == "chat-lmsys-1m"
    assert base["workload"]["arrivals"]["kind"] == "poisson"


def test_another_workload(tmp_path: Path) -> None:
    long = {**tree()["workload"], "prompt": {"kind": "fixed", "tokens": 2000}, "output": {"kind": "fixed", "tokens": 20}}
    config = written(
        tmp_path / "search.toml", seeds=1, top=1, workloads={"long": long}, space={"batching.max_num_batched_tokens": [512, 8192]}
    )
    lines: list[str] = []
    place = run(Options(place=config, workers=1, store=tmp_path / "s.jsonl", out=tmp_path / "found"), lines.append)
    assert place is not None
    losses = read(place).losses
    assert losses.keys() == {"workload", "long"}
    assert losses["workload"]["workload"] == 1.0
    crossed = losses["workload"]["long"]
    assert crossed is None or crossed >= 1.0
    assert any(line.startswith("the best for workload, used for long,") for line in lines)


def test_an_slo_that_nothing_keeps_says_what_comes_nearest(squall: Squall, tmp_path: Path) -> None:
    config = written(tmp_path / "search.toml", space={"cluster.gpu": ["a100-80g", "h100-sxm"]})
    code, out, err = squall(config, "--workers", 1, "--out", "found", "--set", "slo.tbt_p99_s=0.001")
    assert code == 0, err
    assert "no configuration keeps the limits; tbt_p99 is what breaks first in 2 of them" in out
    misses = out.split("the nearest misses:")[1].splitlines()
    assert "gpu=h100-sxm" in misses[2]
    assert "gpu=a100-80g" in misses[3]
    assert not (tmp_path / "found" / "best.toml").exists()
    page = (tmp_path / "found" / "report.html").read_text()
    assert "nothing keeps the limits; the nearest misses:" in page
    assert 'src="http' not in page
    assert "<link" not in page.partition("<script")[0]


def test_nor_does_any_fleet_for_a_given_workload(squall: Squall, tmp_path: Path) -> None:
    config = written(tmp_path / "search.toml", space={"fleet.replicas": [1, 2]}, objective="usd")
    code, out, err = squall(config, "--workers", 1, "--out", "found", "--set", "slo.e2e_p99_s=0.05")
    assert code == 0, err
    misses = out.split("the nearest misses:")[1].splitlines()
    assert "replicas=2" in misses[2]
    assert "e2e_p99" in misses[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "nowhere.toml: no such configuration file"),
        (["search.toml", "--set", "search.topp=3"], "[search] has no key 'topp'; did you mean 'top'?"),
        (["search.toml", "--set", "search.space={}", "--gpus", "h1000"], "none of the"),
        (["search.toml", "--set", "search.warm_up=60"], "warm_up is 60; it must be below num_requests"),
        (["search.toml", "--set", "workload.num_requests=6"], "it has 6 requests, and search.warm_up does not count the first 6"),
        (["search.toml", "--limit", "ttft=2"], "'ttft' is no metric and quantile"),
        (["search.toml", "--limit", "ttft_p90_s"], "expected NAME=NUMBER"),
        (["search.toml", "--objective", "cheap"], "search.objective"),
        (["search.toml", "--price", "foo=1"], "--price foo: 'foo' is unknown: "),
        (["search.toml", "--price", "h100-sxn=1"], "--price h100-sxn: 'h100-sxn' is unknown: did you mean h100-sxm"),
        (["search.toml", "--price", "t4=1"], "no configuration of this search runs on it; they run on a100-80g, h100-sxm"),
        (["search.toml", "--price", "h100-sxm=-1"], "--price h100-sxm=-1: expected GPU=USD, with USD an hour, 0 or more"),
        (["search.toml", "--price", "h100-sxm=nan"], "expected GPU=USD"),
        (["search.toml", "--price", "h100-sxm"], "expected GPU=USD"),
        (["search.toml", "--set", "search.prices.foo.spot=1"], "search.toml: search.prices.foo: 'foo' is unknown"),
        (["search.toml", "--set", "search.prices.h100.on_demnd=1"], "no key 'on_demnd'; did you mean 'on_demand'?"),
        (["search.toml", "--set", "search.prices.h100.spot=-1"], "search.prices.h100.spot = -1: expected USD an hour, 0 or"),
        (["search.toml", "--set", "search.prices.h100.spot=inf"], "search.prices.h100.spot = inf: expected USD an hour"),
        (["search.toml", "--set", "search.prices.h100=2"], "search.prices.h100 = 2: expected a table of on_demand, reserved"),
        (["search.toml", "--set", "search.available.h10=2"], "search.available.h10: 'h10' is unknown: did you mean h100"),
        (["search.toml", "--set", "search.available.h100=-2"], "search.available.h100 = -2: expected how many there are"),
        (["search.toml", "--set", "search.slo.ttft_p90_s='x'"], "search.slo.ttft_p90_s = 'x': expected a number of seconds"),
        (["--model", "llama-3-8b", "--ttft-p90", "2"], "there is no [workload]"),
        (["--model", "llama-3-8b", "--trace", "chat-lmsys-1m"], "there is no objective to keep"),
        (["search.toml", "--out", "."], ". exists already"),
        (["."], "holds no search: it has no answers.json"),
    ],
)
def test_mistakes_are_one_line(squall: Squall, tmp_path: Path, arguments: list[str], message: str) -> None:
    written(tmp_path / "search.toml")
    code, _, err = squall(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("squall: error: ")
    assert err.count("\n") == 1


def ended_early(tmp_path: Path, how: signal.Signals) -> tuple[list[str], int, str, str]:
    """The words of a search that was sent a signal once it knew a little; its exit code and what it said."""
    space = {**SPACE, "batching.max_num_seqs": {"from": 4, "to": 40, "step": 1}}
    config = written(tmp_path / "search.toml", space=space, top=80)
    store = tmp_path / "store.jsonl"
    words = ["search", str(config), "--workers", "2", "--store", str(store)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    child = subprocess.Popen(
        [sys.executable, "-m", "squall", *words, "--out", "found"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment,
    )  # fmt: skip
    try:
        until = time.monotonic() + 90
        while not (store.exists() and store.read_bytes().count(b"\n") >= 3):
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        child.send_signal(how)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    return words[1:], child.returncode, out, err


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_what_is_known(tmp_path: Path, how: signal.Signals, code: int) -> None:
    _, returned, out, err = ended_early(tmp_path, how)
    assert returned == code, err
    assert "Traceback" not in err
    assert "interrupted: run the same command again to go on" in out
    answers = read(tmp_path / "found")
    assert not answers.complete
    assert len(answers.results) >= 3
    assert tomllib.loads((tmp_path / "found" / "best.toml").read_text())["model"]["name"] == "llama-3-8b"


def test_what_a_killed_search_had_found_out_is_told_without_simulating(squall: Squall, tmp_path: Path) -> None:
    words, _, _, _ = ended_early(tmp_path, signal.SIGKILL)
    assert not (tmp_path / "found").exists()
    known = (tmp_path / "store.jsonl").read_bytes()
    code, out, err = squall(*words, "--known", "--out", "found")
    assert (code, err) == (0, "")
    assert "0 of them simulated now, 0 token-steps" in out
    assert "run the same command without --known to go on from there" in out
    answers = read(tmp_path / "found")
    assert not answers.complete
    assert answers.finalists
    assert (tmp_path / "found" / "report.html").exists()
    assert (tmp_path / "store.jsonl").read_bytes() == known
    code, _, err = squall(*words, "--known", "--store", "other.jsonl")
    assert code == 2
    assert "other.jsonl knows nothing of this search; leave --known out, or name another file with --store" in err


def test_a_search_that_is_refused_leaves_the_log_as_it_was(squall: Squall, tmp_path: Path) -> None:
    config = written(tmp_path / "search.toml")
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "mine").write_text("")
    code, _, err = squall(config, "--workers", 1, "--out", "found")
    assert (code, err.count("\n")) == (2, 1), err
    code, _, err = squall(config, "--workers", 1, "--store", tmp_path)
    assert (code, err.count("\n")) == (2, 1), err
    assert not logging.getLogger("squall.workload.build").filters


def test_the_other_example_varies_whole_tables() -> None:
    base, search = question(Options(place=ROOT / "examples" / "search-elastic.toml"))
    found = list(choices(dimensions(search.space), search, base))
    assert len(found) == 24
    workshop = Workshop(search)
    for choice in found[::5]:
        setting = workshop.setting(Job(0, choice, with_choice(base, choice)))
        assert setting.least_gpus < setting.most_gpus <= 16


def test_the_example_is_a_search() -> None:
    base, search = question(Options(place=ROOT / "examples" / "search.toml"))
    assert base["model"]["name"] == "meta-llama/Meta-Llama-3-8B"
    assert search.prices["l40s"].spot == 0.8
    assert load(ROOT / "examples" / "search.toml").slo.ttft_p90_s == 1.0  # and other commands do not mind
