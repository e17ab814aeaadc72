"""What BlitzScale is compared with, as configurations that anybody can run: each does what tells it from the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from squall.config import Config, load
from squall.core.actions import AnyAction, LoadWeights, RunLayers, RunSteps
from squall.core.events import AnyEvent, ReplicaLost, ReplicaStopped, Warmed
from squall.core.machine import Machine
from squall.core.metrics import Outcome, RunRecord
from squall.core.types import CONTROLLER, SECOND, MachineId, Nanos, ReplicaId
from squall.twin.rehearse import rehearse

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILES = {path.stem: path for path in (*sorted((EXAMPLES / "baselines").glob("*.toml")), EXAMPLES / "blitz-burst.toml")}
STOPPED = ("stop-the-world", "multicast", "network", "allcache", "serverlessllm", "knative")
"""Those whose replicas work only with all their weights."""


class Watch:
    """How weights were to come, and which replicas worked before they had all of them."""

    def __init__(self) -> None:
        self.loads: list[LoadWeights] = []
        self.too_early: set[ReplicaId] = set()
        self._whole: set[ReplicaId] = set()

    def created(self, now: Nanos, machine: MachineId, made: Machine) -> None:
        pass

    def record(self, _now: Nanos, machine: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        if machine == CONTROLLER:
            if isinstance(event, Warmed):
                self._whole.add(event.replica)
            elif isinstance(event, ReplicaLost | ReplicaStopped):
                self._whole.discard(event.replica)
            self.loads += [action for action in actions if isinstance(action, LoadWeights)]
        elif machine not in self._whole and any(isinstance(action, RunSteps | RunLayers) for action in actions):
            self.too_early.add(machine)


@cache
def played(name: str) -> tuple[Config, RunRecord, Watch]:
    """The example as it is: a minute of traffic."""
    config, watch = load(FILES[name]), Watch()
    return config, rehearse(config, [watch]), watch


def kinds(record: RunRecord) -> set[str]:
    return {each.kind for each in record.weights}


def test_every_file_is_a_system_of_the_comparison() -> None:
    fixed = {"distserve-full", "distserve-half"}
    assert set(FILES) == {*STOPPED, *fixed, "blitz-burst"}
    page = (EXAMPLES.parent / "docs" / "blitzscale.md").read_text()
    for name, path in FILES.items():
        assert f"`{path.relative_to(EXAMPLES)}`" in page
        assert path.read_text().startswith("# ")
        assert name == "blitz-burst" or f"squall simulate examples/baselines/{name}.toml" in path.read_text()


@pytest.mark.parametrize("name", FILES)
def test_systems_differ_in_how_they_scale_and_load_and_serve_everybody(name: str) -> None:
    config, record, _ = played(name)
    ours = load(FILES["blitz-burst"])
    assert replace(config, fleet=ours.fleet, scale=ours.scale, load=ours.load) == ours
    assert len(record.requests) > 1000
    assert {row.outcome for row in record.requests} == {Outcome.COMPLETED}


@pytest.mark.parametrize(("name", "sizes"), [("distserve-full", (6, 2)), ("distserve-half", (3, 1))])
def test_a_fixed_fleet_holds_its_gpus_and_loads_nothing(name: str, sizes: tuple[int, int]) -> None:
    config, record, watch = played(name)
    assert (config.fleet.prefill, config.fleet.decode) == sizes
    assert record.gpu_nanos == record.ended_at * 4 * sum(sizes)
    assert (record.scale_ups, record.scale_downs, record.weights) == (0, 0, [])
    assert watch.too_early == set()


@pytest.mark.parametrize("name", STOPPED)
def test_nobody_works_before_all_its_weights_are_there(name: str) -> None:
    _, record, watch = played(name)
    assert record.scale_ups > 0
    assert record.weights
    assert watch.too_early == set()
    assert {action.transfer.live_partner for action in watch.loads} == {None}


def test_but_with_live_scaling_they_do() -> None:
    _, _, watch = played("blitz-burst")
    assert watch.too_early != set()
    assert {action.transfer.live_partner for action in watch.loads} > {None}


@pytest.mark.parametrize(("name", "ways"), [("stop-the-world", {"chain"}), ("multicast", {"chain", "p2p"})])
def test_a_multicast_goes_through_several_replicas_and_a_planned_one_not_where_nvlink_is_nearer(
    name: str, ways: set[str]
) -> None:
    _, record, _ = played(name)
    assert kinds(record) == ways
    assert max(len(each.route) for each in record.weights) > 1
    assert {each.replica // 2 for each in record.weights if each.kind == "p2p"} <= {
        int(each.source.removeprefix("gpu ")) // 2 for each in record.weights if each.kind == "p2p"
    }


def test_over_the_network_each_replica_has_a_source_of_its_own_choice() -> None:
    _, record, _ = played("network")
    assert kinds(record) == {"p2p"}
    assert {len(each.route) for each in record.weights} == {1}


WAVES = (
    "scale={kind='schedule', steps=[{at_s=10, prefill=3}, {at_s=100, prefill=1}, {at_s=120, prefill=3}, {at_s=140, prefill=1},"
    "{at_s=200, prefill=3}]}",
    "workload={kind='synthetic', duration_s=300, arrivals={kind='fixed', rate_rps=1}, prompt={kind='fixed', tokens=100},"
    "output={kind='fixed', tokens=10}}",
)
"""Two replicas more, and again: 20 s after they went, and 60 s after."""


@pytest.mark.parametrize(
    ("name", "came"),
    [("serverlessllm", ["disk", "host", "disk"]), ("knative", ["disk", "host", "disk"]), ("allcache", ["host"] * 3)],
)
def test_a_copy_in_memory_is_there_until_thirty_seconds_after_its_last_use_or_always(name: str, came: list[str]) -> None:
    record = rehearse(load(FILES[name], WAVES))
    found = [(each.began_at / SECOND, each.kind, each.source[-1]) for each in record.weights]
    assert found[::2] == found[1::2] == [(at, kind, "1") for at, kind in zip((10, 120, 200), came, strict=True)]


def test_knative_counts_requests_and_the_others_plan_by_tokens() -> None:
    for name in STOPPED:
        changes = [each for each in played(name)[1].decisions if each.before != each.after]
        assert {"unfinished" in each.why for each in changes} == {name == "knative"}
