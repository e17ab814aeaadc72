"""What docs/vidur-search.md says of Vidur's best deployment: its published tables have a step take as long as our prices do."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from squall.core.actions import Chunk, RunSteps
from squall.search.setting import Workshop
from tests.search.conftest import setting

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    yield importlib.import_module("benchmarks.vidur.operators")
    for name in [name for name in sys.modules if name.startswith("benchmarks.vidur")]:
        del sys.modules[name]


@pytest.mark.shared
def test_published_tables_and_our_prices_agree_on_a_step(operators: ModuleType, shared: Path) -> None:
    search = operators.asked(**operators.FEW)
    workshop = Workshop(search)
    for gpu, off in (("h100", 0.05), ("a100", 0.1)):
        jobs = [operators.best_job(search, latency, gpu) for latency in (dict[str, str](), operators.imported(gpu))]
        ours, theirs = (operators.explained(workshop.setting(job).latency) for job in jobs)
        own, other = operators.sums(ours, theirs)
        assert own == pytest.approx(other, rel=off)
        assert other > 0.8 * 1e3 * sum(line.seconds for line in theirs)  # most of it is published


def test_what_every_stage_takes_longer_is_in_runs_and_stages(operators: ModuleType) -> None:
    latency = setting({"replica.pp": 2}).latency
    slower = operators.OnEveryStage(latency, 3_000_000)
    step = RunSteps(0, 1, 8, 8 * 100, (Chunk(0, 0, 64, 0, False),))
    assert [after - before for before, after in zip(latency.stages(step), slower.stages(step), strict=True)] == [3_000_000] * 2
    assert slower.run(step, 1)[0].first - latency.run(step, 1)[0].first == 16 * 6_000_000
