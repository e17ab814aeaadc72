"""The smoke run of benchmarks/blitzscale.py, traffic that it makes, and its systems as configurations."""

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from squall.config import dumps, load
from squall.core.types import SECOND
from squall.workload.spec import OfferedRequest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    path = sys.path.copy()
    sys.path.insert(0, str(ROOT))
    yield
    sys.path[:] = path


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def evenly(count: int) -> list[OfferedRequest]:
    return [OfferedRequest(id, id * SECOND, 100 + id, 10) for id in range(count)]


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5, 10.0])
def test_denser_traffic_keeps_its_shape(factor: float) -> None:
    found = module("blitz.traffic").densified(evenly(1000), factor, 3)
    assert len(found) == pytest.approx(1000 * factor, rel=0.05)
    early = sum(request.arrived_at < 500 * SECOND for request in found)
    assert early == pytest.approx(500 * factor, rel=0.15)
    assert [request.id for request in found] == list(range(len(found)))
    assert [request.arrived_at for request in found] == sorted(request.arrived_at for request in found)
    assert {request.num_prompt_tokens for request in found} <= set(range(100, 1100))


def test_the_busiest_window_begins_at_a_minute() -> None:
    rows = evenly(600) + [OfferedRequest(0, 130 * SECOND + at, 7, 7) for at in range(50)]
    found = module("blitz.traffic").busiest(rows, 60.0)
    assert len(found) == 60 + 50
    assert min(request.arrived_at for request in found) == 0
    assert max(request.arrived_at for request in found) == 59 * SECOND


def test_bursty_traffic_has_the_statistics_that_it_claims() -> None:
    traffic = module("blitz.traffic")
    found = traffic.bursty(50.0, 300.0, 0)
    assert len(found) == pytest.approx(15_000, rel=0.03)
    prompt, output = traffic.means(found)
    assert (prompt, output) == (pytest.approx(621, rel=0.05), pytest.approx(126, rel=0.05))
    buckets = [0] * 150
    for request in found:
        buckets[request.arrived_at // (2 * SECOND)] += 1
    jumps = [after / before for before, after in pairwise(buckets) if before]
    assert max(jumps) > 3.5  # a change seldom falls between two buckets


def test_every_system_is_a_configuration_that_can_be_written_and_read(tmp_path: Path) -> None:
    cases = module("blitz.cases")
    for pair in cases.pairs():
        if not pair.is_there:
            continue
        for config in cases.systems(pair).values():
            file = tmp_path / "system.toml"
            file.write_text(dumps(config))
            assert load(file) == config


def test_the_vectors_of_live_scaling_and_the_load_times_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = module("blitzscale")
    assert benchmark.transfers_row(True)
    assert benchmark.zigzag_row(True)
    said = capsys.readouterr().out
    assert "splits (1,6) (2,5) (2,5) (3,4) (4,3) (4,3) (5,2)" in said


def test_a_fleet_that_breaks_and_scales_ends_everybody_once() -> None:
    cases, stress = module("blitz.cases"), module("blitz.stress")
    found = stress.stressed(cases.pairs()[1], 20)
    assert found.events >= 20
    assert found.lost > 0
    assert (found.wrong, found.over_budget) == (0, 0)


def test_the_fixed_fleets_of_the_examples_are_those_of_the_first_pair() -> None:
    cases = module("blitz.cases")
    systems = cases.systems(cases.pairs()[0])
    for name, file in (("DistServe (full)", "distserve-full"), ("DistServe (half)", "distserve-half")):
        assert systems[name].fleet == load(ROOT / "examples" / "baselines" / f"{file}.toml").fleet
