"""docs/policies.md against the code: its example runs, and its table leaves nothing out."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from squall.config import Config, Fleet, ReplicaSpec, dumps, load
from squall.core.metrics import Outcome
from squall.core.types import MILLISECOND
from squall.policies.route import Random, Route
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()


def _section(title: str) -> str:
    return re.split(r"\n## ", PAGE.split(f"## {title}", 1)[1])[0]


def _block(language: str) -> str:
    [block] = re.findall(rf"```{language}\n(.*?)```", _section("A route policy of your own"), re.DOTALL)
    return str(block)


@pytest.fixture
def my_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """The example, saved as the page says."""
    (tmp_path / "my_routes.py").write_text(_block("python"))
    (tmp_path / "run.toml").write_text(_block("toml"))
    monkeypatch.syspath_prepend(tmp_path)
    yield load(tmp_path / "run.toml")
    sys.modules.pop("my_routes", None)


def test_the_example_is_short() -> None:
    assert len(_block("python").splitlines()) < 40


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
