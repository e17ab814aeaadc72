"""Replaying a log: fresh machines want what the logged ones wanted, and the first difference is told."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from squall.core.actions import AnyAction, Send
from squall.core.controller import Controller
from squall.core.events import (
    AnyEvent,
    Arrived,
    Cancelled,
    Progressed,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaUp,
    StepsDone,
    Submitted,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import FleetPlan
from squall.core.fleet_view import ReplicaView
from squall.core.machine import Machine
from squall.core.replica import Replica
from squall.core.router import Router
from squall.core.types import CONTROLLER, MILLISECOND, ROUTER, SECOND, MachineId, Nanos, Request
from squall.errors import ConfigError
from squall.eventlog import Created, EventLog, Record, open_log, read
from squall.policies.batching import Vllm
from squall.policies.route import LeastLoaded, Pull, RoundRobin, Route
from squall.policies.scale import Fixed
from squall.sim.driver import Driver
from squall.sim.linear import Linear
from squall.sim.loading import Delays, Loader
from squall.sim.world import World
from squall.twin.observe import Mismatch, observe, rebuild
from squall.workload.spec import OfferedRequest

PRICES = Linear(fixed=160_000, token=1_600, context=16)


def simulate(log: EventLog, requests: Sequence[OfferedRequest], route: Route, num_blocks: int, cancelled: Sequence[int]) -> None:
    """Two replicas, a router and a controller, on a virtual clock, all logged."""
    machines: dict[MachineId, Machine] = {
        ROUTER: Router(route, max_queued_requests=8, max_queued_tokens=10**6, max_retries=2),
        CONTROLLER: Controller(FleetPlan.fixed(2), Fixed()),
        0: Replica(0, Vllm(max_num_seqs=16, max_num_batched_tokens=64), num_blocks, 16),
        1: Replica(1, Vllm(max_num_seqs=16, max_num_batched_tokens=64), num_blocks, 16),
    }
    for id, machine in machines.items():
        log.created(0, id, machine)
    pools = dict.fromkeys((0, 1), (num_blocks, 16))
    driver = Driver(machines, World(requests, PRICES), Loader(pools, Delays(load=MILLISECOND)), log=log.record)
    offered: list[tuple[Nanos, AnyEvent]] = [(r.arrived_at, Arrived(as_request(r))) for r in requests]
    offered += [(r.arrived_at + MILLISECOND // 2, Cancelled(r.id)) for r in requests if r.id in cancelled]
    driver.run(sorted(offered, key=lambda pair: pair[0]))


def as_request(offered: OfferedRequest) -> Request:
    return Request(offered.id, offered.arrived_at, offered.num_prompt_tokens, offered.num_output_tokens)


REQUESTS = st.lists(st.tuples(st.integers(0, 2_000_000), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(
    shapes=REQUESTS,
    route=st.sampled_from([LeastLoaded(), RoundRobin(), Pull(max_outstanding=3)]),
    num_blocks=st.integers(6, 40),
    cancelled=st.sets(st.integers(0, 24)),
)
def test_a_simulated_run_is_reproduced_by_fresh_machines(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, int, int]],
    route: Route,
    num_blocks: int,
    cancelled: set[int],
) -> None:
    arrivals = sorted(at for at, _, _ in shapes)
    requests = [
        OfferedRequest(id, at, prompt, output) for id, at, (_, prompt, output) in zip(count(), arrivals, shapes, strict=False)
    ]
    path = tmp_path_factory.mktemp("run") / "events.jsonl.zst"
    with open_log(path) as log:
        simulate(log, requests, route, num_blocks, sorted(cancelled))
    observation = observe(read(path))
    assert observation.mismatches == []
    assert sum(observation.num_events.values()) == sum(record.event is not None for record in read(path))
    assert set(observation.num_events) >= {ROUTER, CONTROLLER}


class Weighted(Struct, frozen=True):
    """A user's own route policy, in a module of his own."""

    weight: float = 1.0

    def rank(self, replica: ReplicaView) -> float:
        return self.weight * replica.num_tokens


def request(id: int) -> Request:
    return Request(id, 0, 100, 50)


def log_of(path: Path, machine: Machine, id: MachineId, events: Sequence[AnyEvent]) -> list[Record]:
    """`machine` is made and takes in `events`, one a millisecond."""
    with open_log(path) as log:
        log.created(0, id, machine)
        for number, event in enumerate(events):
            log.record(number * MILLISECOND, id, event, machine.handle(event, number * MILLISECOND))
    return list(read(path))


ROUTER_EVENTS: list[AnyEvent] = [
    ReplicaUp(0, 100, 16), ReplicaUp(1, 100, 16), Arrived(request(0)), Arrived(request(1)), Arrived(request(2)),
    Progressed(0, first=(0,)), ReplicaDown(0, lost=True), Progressed(1, (1,), (1,)), Cancelled(2),
]  # fmt: skip

CONTROLLER_EVENTS: list[AnyEvent] = [
    Woke(), ReplicaStarted(0), WeightsLoaded(0, 100, 16), Warmed(0), ReplicaLost(0, "killed"), Woke(),
]  # fmt: skip

REPLICA_EVENTS: list[AnyEvent] = [
    Submitted(request(0)), Woke(), StepsDone(1, 1), Submitted(request(1)), StepsDone(2, 1), Cancelled(0), StepsDone(3, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("id", "machine", "events"),
    [
        (ROUTER, Router(LeastLoaded(), 10, 1000, 1), ROUTER_EVENTS),
        (ROUTER, Router(Weighted(2.0), 10, 1000, 1), ROUTER_EVENTS),
        (CONTROLLER, Controller(FleetPlan.fixed(1), Fixed()), CONTROLLER_EVENTS),
        (0, Replica(0, Vllm(), 100, 16), REPLICA_EVENTS),
    ],
)
def test_each_machine_is_reproduced_through_failures_too(
    id: MachineId, machine: Machine, events: list[AnyEvent], tmp_path: Path
) -> None:
    observation = observe(log_of(tmp_path / "log", machine, id, events))
    assert observation.exact
    assert observation.num_events == {id: len(events)}


def test_a_restarted_replica_is_a_fresh_machine(tmp_path: Path) -> None:
    for _ in range(2):
        log_of(tmp_path / "log", Replica(0, Vllm(), 100, 16), 0, REPLICA_EVENTS)
    assert observe(read(tmp_path / "log")).num_events == {0: 2 * len(REPLICA_EVENTS)}


def test_a_machine_that_decides_otherwise_is_named_with_the_instant_and_both_answers(tmp_path: Path) -> None:
    records = log_of(tmp_path / "log", Router(LeastLoaded(), 10, 1000, 1), ROUTER, ROUTER_EVENTS)
    wrong: list[AnyAction] = [Send(1, Submitted(request(0)))]
    records[3] = replace(records[3], actions=wrong)
    observation = observe(records)
    actual = [Send(0, Submitted(request(0)))]
    assert observation.mismatches == [Mismatch(ROUTER, 3, 2 * MILLISECOND, Arrived(request(0)), wrong, actual)]
    assert observation.num_events == {ROUTER: 2}
    assert not observation.exact
    first, expected, found = str(observation.mismatches[0]).splitlines()
    assert first.startswith("the router, event 3, at 2000000 ns: Arrived(request=Request(id=0")
    assert expected.startswith("  expected Send(to=1")
    assert found.startswith("  actual   Send(to=0")


def test_another_policy_than_the_logged_one_is_noticed(tmp_path: Path) -> None:
    records = log_of(tmp_path / "log", Router(LeastLoaded(), 10, 1000, 1), ROUTER, ROUTER_EVENTS)
    observation = observe(records, make=lambda _: Router(Weighted(-1.0), 10, 1000, 1))
    assert [mismatch.number for mismatch in observation.mismatches] == [4]  # the second request


def test_an_event_that_cannot_happen_is_a_mismatch_and_not_a_crash(tmp_path: Path) -> None:
    records = log_of(tmp_path / "log", Controller(FleetPlan.fixed(1), Fixed()), CONTROLLER, CONTROLLER_EVENTS[:2])
    records.append(Record(SECOND, CONTROLLER, Warmed(0), []))
    (mismatch,) = observe(records).mismatches
    assert (
        mismatch.actual
        == "IllegalTransition: replica 0 got Warmed while loading: 0.000s Launched starting > 0.001s ReplicaStarted loading"
    )


def test_a_log_without_the_making_of_a_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="replica 3 acts at 7 ns, but how it was made is not logged before"):
        observe([Record(7, 3, Woke())])


@pytest.mark.parametrize(
    ("created", "message"),
    [
        (Created("Oracle", {}), "unknown machine 'Oracle'; one of Router, HandoffRouter, DisaggregatedRouter, Controller"),
        (Created("Controller", {"plan": {}}), "Controller of .* cannot be made: 'scale'"),
        (Created("Controller", {"plan": {}, "scale": {"kind": "moody"}}), "cannot be made: Invalid value 'moody'"),
        (Created("Controller", {"plan": {}, "scale": {"kind": "no.such:Thing"}}), "cannot be made: No module named 'no'"),
    ],
)
def test_a_machine_that_is_not_known_here_is_named(created: Created, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebuild(created)
