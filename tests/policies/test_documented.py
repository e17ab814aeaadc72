"""docs/policies.md against the code: its example runs, and its table leaves nothing out."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from squall.config import Config, ReplicaSpec, dumps, load
from squall.core.actions import AnyAction, RunSteps
from squall.core.events import AnyEvent
from squall.core.metrics import Outcome
from squall.core.types import FOREVER, MILLISECOND, MachineId, Nanos
from squall.fleet_tables import Fleet
from squall.policies.batching import Batching
from squall.policies.route import Random, Route
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()


def _section(title: str) -> str:
    return re.split(r"\n## ", PAGE.split(f"## {title}", 1)[1])[0]


def _block(language: str, kind: str = "route") -> str:
    [block] = re.findall(rf"```{language}\n(.*?)```", _section(f"A {kind} policy of your own"), re.DOTALL)
    return str(block)


@pytest.fixture
def my_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """The example, saved as the page says."""
    (tmp_path / "my_routes.py").write_text(_block("python"))
    (tmp_path / "run.toml").write_text(_block("toml"))
    monkeypatch.syspath_prepend(tmp_path)
    yield load(tmp_path / "run.toml")
    sys.modules.pop("my_routes", None)


@pytest.mark.parametrize("kind", ["route", "batching"])
def test_the_example_is_short(kind: str) -> None:
    assert len(_block("python", kind).splitlines()) < 40


def test_the_batching_example_serves_and_computes_prompts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_batching.py").write_text(_block("python", "batching"))
    (tmp_path / "run.toml").write_text(_block("toml", "batching"))
    monkeypatch.syspath_prepend(tmp_path)
    config = load(tmp_path / "run.toml")
    requests = [OfferedRequest(id, id * MILLISECOND, 20, 15) for id in range(60)]
    prompts: list[int] = []
    ends: list[list[Nanos]] = []

    def log(now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        prompts.extend(len(run.chunks) for run in actions if isinstance(run, RunSteps) and run.chunks)

    for max_steps in (1, FOREVER):
        prompts.clear()
        record = simulate(config, requests, Linear(fixed=16 * MILLISECOND), 40, max_steps=max_steps, log=log)
        assert {row.outcome for row in record.requests} == {Outcome.COMPLETED}
        assert max(prompts) >= 8
        ends.append([row.finished_at for row in record.requests])
    assert ends[0] == ends[1]
    sys.modules.pop("my_batching", None)


def test_the_example_serves_and_finds_what_prompts_share(my_config: Config) -> None:
    requests = []
    for id in range(60):
        hashes = tuple(1000 * (id % 6) + place for place in range(1, 33))
        requests.append(OfferedRequest(id, id * 50 * MILLISECOND, 520, 4, block_hashes=hashes))

    def num_cached(config: Config) -> int:
        config = structs.replace(config, fleet=Fleet(replicas=6), replica=ReplicaSpec(block_size=16))
        record = simulate(config, requests, Linear(fixed=16 * MILLISECOND), num_blocks=1000)
        assert {row.outcome for row in record.requests} == {Outcome.COMPLETED}
        return sum(row.num_cached_tokens for row in record.requests)

    assert type(my_config.route).__name__ == "SoonestToken"
    assert num_cached(my_config) == 54 * 512  # only the first of each family computes its prompt
    assert num_cached(structs.replace(my_config, route=Random())) < 54 * 512


def test_the_example_survives_the_resolved_configuration(my_config: Config, tmp_path: Path) -> None:
    again = tmp_path / "resolved.toml"
    again.write_text(dumps(my_config))
    assert load(again) == my_config


@pytest.mark.parametrize("kind", get_args(Route), ids=lambda kind: str(kind.__name__))
def test_every_kind_is_in_the_table_with_all_its_keys(kind: Any) -> None:
    [row] = re.findall(rf"^\| `{kind.__struct_config__.tag}`.*$", _section("Route"), re.MULTILINE)
    keys = row.rsplit("|", 2)[1]
    assert sorted(re.findall(r"`(\w+)`", keys)) == sorted(kind.__struct_fields__)


@pytest.mark.parametrize("kind", get_args(Batching), ids=lambda kind: str(kind.__name__))
def test_every_batching_kind_is_in_the_table_with_all_its_keys(kind: Any) -> None:
    [row] = re.findall(rf"^\| `{kind.__struct_config__.tag}`.*$", _section("Batching"), re.MULTILINE)
    keys = row.rsplit("|", 2)[1]
    assert sorted(re.findall(r"`(\w+)`", keys)) == sorted(kind.__struct_fields__)
