"""More of what users of other autoscalers ran into, by the numbers of those issues; see `test_elastic`, here and of `core`."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from squall.config import DEFAULTS, Cluster, Slo, dumps, from_tree, load
from squall.core.actions import AnyAction, Decided, Send, StartReplica
from squall.core.controller import Controller
from squall.core.events import (
    AnyEvent,
    Cancelled,
    Emptied,
    LoadFailed,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    RoleChanged,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import Bounds, FleetPlan, Patience, Slots
from squall.core.fleet_view import Capacity, ScaleView, Wanted
from squall.core.machine import Machine
from squall.core.metrics import Outcome
from squall.core.types import CONTROLLER, MILLISECOND, ROUTER, SECOND, MachineId, Nanos, Role
from squall.errors import ConfigError
from squall.fleet_tables import Fleet, Replicas
from squall.report.summary import summarise
from squall.sim.loading import Delays
from squall.twin.rehearse import rehearse
from squall.workload.spec import OfferedRequest
from tests.core.test_roles import DECODE, PREFILL, Counts, changed, down, fleet, turn, up
from tests.sim import test_disaggregated as apart
from tests.sim.test_elastic import CAPACITY, play

DOCS = Path(__file__).resolve().parents[2]


# -- 4: two parts of one plan, of which one fails (ai-dynamo/dynamo#12428)


def start(actions: list[AnyAction]) -> list[int]:
    return [action.replica for action in actions if isinstance(action, StartReplica)]


def test_what_one_role_gains_waits_for_what_the_other_gives_and_is_taken_back_if_that_takes_too_long() -> None:
    """Four slots, all used; three prefill replicas and one decode replica are wanted, and who is to go still decodes."""
    controller = fleet(slots=4)
    assert turn(controller, 3, 1) == [down(3)]
    assert controller.states[PREFILL].num_here == 2  # nothing was started: there is no place
    assert turn(controller, 2, 2) == up(3, DECODE)  # as if nothing had been
    assert [controller.states[role].num_ready for role in (PREFILL, DECODE)] == [2, 2]


def test_the_part_that_fails_is_tried_again_within_the_budget_and_given_up_with_the_plan() -> None:
    controller = fleet({2: 1}, slots=4)
    assert turn(controller, 3, 1) == changed(3, PREFILL)
    there = {0, 1, 2, 3}

    def follow(actions: list[AnyAction]) -> None:
        for replica in start(actions):
            assert replica not in there
            there.add(replica)
        assert len(there) <= 4

    there.discard(3)
    follow(controller.handle(ReplicaLost(3, "out of memory"), SECOND))
    follow(controller.handle(Woke(), 2 * SECOND))  # in the same place after a second: there is no other
    assert there == {0, 1, 2, 3}
    controller.handle(ReplicaStarted(3), 2 * SECOND)
    follow(controller.handle(LoadFailed(3, "again"), 2 * SECOND))
    there.discard(3)
    follow(controller.handle(ReplicaStopped(3), 2 * SECOND))
    assert turn(controller, 2, 1) == []  # the plan is given up, and nobody is pending for it
    assert [controller.states[role].num_here for role in (PREFILL, DECODE)] == [2, 1]
    follow(controller.handle(Woke(), 60 * SECOND))
    assert there == {0, 1, 2}


# -- 5: a new replica's first passes and the idea of what a replica can do (ai-dynamo/dynamo#12430)

PRICED = ("model.name=llama-3-8b", "cluster.gpu=a100-80g", "cluster.nodes=2", "load={kind='mock', load_s=5}")
ELASTIC = {
    "colocated": ("fleet.replicas={min=1, max=8}",),
    "disaggregated": ("fleet.mode=disaggregated", "fleet.prefill={min=1, max=6}", "fleet.decode={min=1, max=6}"),
}
WARM_AT_S = 30
SLOW = "{{at_s=0, kind='slow', which={}, duration_s={}, factor=0.1}}"
COLD = f"faults=[{', '.join(SLOW.format(replica, WARM_AT_S) for replica in range(1, 8))}]"
"""The first seconds of every replica but the first one, at a tenth of its speed."""


def workload(rate_rps: float, seconds: float, prompt: int, output: int) -> str:
    lengths = f"prompt={{kind='fixed', tokens={prompt}}}, output={{kind='fixed', tokens={output}}}"
    return f"workload={{kind='synthetic', duration_s={seconds}, arrivals={{kind='poisson', rate_rps={rate_rps}}}, {lengths}}}"


class Told:
    """What scale policies were told that a replica can do, and how many of each role were wanted at the end."""

    def __init__(self, *settings: str) -> None:
        self.capacities: set[Capacity | None] = set()
        self._controllers: list[Controller] = []
        self.record_of_run = rehearse(load(None, [*PRICED, *settings]), [self])
        [controller] = self._controllers
        self.wanted = {role: state.target for role, state in controller.states.items()}

    def created(self, _now: Nanos, _machine: MachineId, made: Machine) -> None:
        if isinstance(made, Controller):
            self._controllers.append(made)

    def record(self, _now: Nanos, machine: MachineId, _event: AnyEvent, _actions: Sequence[AnyAction]) -> None:
        if machine == CONTROLLER:
            self.capacities.add(self._controllers[0].capacity)


@pytest.mark.parametrize(
    ("scale", "mode"),
    [
        ("kind='ttft', ttft_s=0.5", "colocated"),
        ("kind='blitz'", "colocated"),
        ("kind='blitz'", "disaggregated"),
        ("kind='utilisation'", "disaggregated"),
    ],
)
def test_slow_first_passes_change_nothing_of_what_a_replica_is_taken_for_and_leave_no_larger_fleet(scale: str, mode: str) -> None:
    """More may be wanted while prompts wait behind slow passes; a window later it is as if all had been warm."""
    settings = (f"scale={{{scale}}}", "startup.process_s=2", "fleet.down_window_s=10", *ELASTIC[mode])
    settings = (*settings, workload(20, 120, 1000, 200), "run.duration_s=120")
    warm, cold = Told(*settings), Told(*settings, COLD)
    served = [row for row in cold.record_of_run.requests if row.scheduled_at < WARM_AT_S * SECOND and row.replica > 0]
    assert served  # by replicas that were slow
    assert cold.record_of_run.scale_ups > 0
    assert cold.capacities == warm.capacities != {None}
    assert len(cold.capacities) == 1
    assert cold.wanted == warm.wanted


def test_a_replica_is_taken_for_what_it_does_when_it_is_warm() -> None:
    """To 2 %: prompts of a whole step one after the other, and a full batch over half of the KV pool."""
    [capacity] = Told(
        "fleet.replicas={min=1, max=2}", "scale.kind=blitz", "batching.max_num_seqs=256", workload(1, 5, 100, 9)
    ).capacities
    assert capacity is not None
    prompts = Told(workload(1e6, 1e-4, 2048, 1)).record_of_run
    tokens = sum(row.num_prompt_tokens for row in prompts.requests)
    assert capacity.prefill_tokens_per_s == pytest.approx(tokens * SECOND / prompts.ended_at, rel=0.02)
    context = capacity.num_blocks * capacity.block_size // 2 // 256
    batch = Told("batching.max_num_seqs=256", workload(1e6, 3e-4, context - 200, 400)).record_of_run
    steps = summarise(batch, Slo(), None).tbt_s
    assert len(batch.requests) >= 256
    assert steps is not None  # p50 is one of a full batch, without prompts and half-way through the answers
    assert capacity.decode_tokens_per_s == pytest.approx(256 / steps.p50, rel=0.02)


# -- 10: what a removed replica said last (llm-d/llm-d-autoscaling#368)


def test_a_removed_replica_counts_for_nothing_at_once() -> None:
    requests = {0: 5, 1: 3, 2: 4, 3: 2}
    controller = fleet(requests)
    seen = controller.roles[DECODE]
    before = seen.num_blocks
    controller.handle(ReplicaLost(3, "gone"), SECOND)
    assert (seen.num_ready, seen.num_blocks) == (1, before // 2)
    assert 3 not in {member.replica for member in controller.states[DECODE].ready.values()}


# -- 18: a process is not a service (vllm-project/vllm#45551)


class One(Struct):
    count: int = 1

    def __call__(self, _view: ScaleView) -> Wanted:
        return Wanted({Role.BOTH: self.count}, "turned")


def test_each_stage_of_a_start_is_seen_with_what_is_left_of_it_and_the_router_hears_at_the_end() -> None:
    policy = One()
    controller = Controller(FleetPlan({Role.BOTH: Bounds(1, 4, 1)}, Slots(4, 4), patience=Patience(), capacity=CAPACITY), policy)
    controller.traffic = Counts({0: 1})
    controller.handle(Woke(), 0)
    for event in (ReplicaStarted(0), WeightsLoaded(0, 100, 16), Warmed(0)):
        controller.handle(event, 0)
    policy.count = 2
    began = 10 * SECOND
    assert start(controller.handle(Woke(), began)) == [1]
    seen = controller.roles[Role.BOTH]
    told: list[tuple[str, float | None, bool]] = []
    stages: tuple[AnyEvent, ...] = (ReplicaStarted(1), WeightsLoaded(1, 100, 16), Woke(), Warmed(1))
    for after, stage in enumerate(stages, start=1):
        actions = controller.handle(stage, began + after * SECOND)
        controller.handle(Woke(), began + after * SECOND)
        is_up = any(
            isinstance(action, Send) and action.to == ROUTER and isinstance(action.event, ReplicaUp) for action in actions
        )
        told.append((controller.fleet[1].phase.value, seen.next_ready_s, is_up))
    left = 0.0  # the first one took no time at all, so that is what was expected of the second
    assert told == [("loading", left, False), ("warming", left, False), ("warming", left, False), ("ready", None, True)]
    policy.count = 3
    controller.handle(Woke(), 20 * SECOND)
    controller.handle(Woke(), 21 * SECOND)
    assert seen.next_ready_s == 3.0  # the second one took four seconds


# -- 19: one role without the other (llm-d/llm-d-autoscaling#1531)


class Any2(Struct):
    """Any two numbers."""

    counts: dict[Role, int | None]

    def __call__(self, _view: ScaleView) -> Wanted:
        return Wanted({role: count for role, count in self.counts.items() if count is not None}, "drawn")


numbers = st.one_of(st.none(), st.integers(0, 5))


@settings(max_examples=200, deadline=None)
@example([(0, 0, True, 40)] * 3)  # nothing is wanted for longer than a window, and somebody waits
@given(st.lists(st.tuples(numbers, numbers, st.booleans(), st.integers(0, 40)), min_size=1, max_size=12))
def test_neither_role_is_ever_wanted_without_the_other_nor_none_while_somebody_waits(
    steps: list[tuple[int | None, int | None, bool, int]],
) -> None:
    policy = Any2({})
    counts = Counts({})
    controller = Controller(FleetPlan({PREFILL: Bounds(0, 4, 1), DECODE: Bounds(0, 4, 1)}, Slots(6, 6)), policy)
    controller.traffic = counts
    now = 0
    for prefill, decode, busy, seconds in steps:
        policy.counts = {PREFILL: prefill, DECODE: decode}
        counts.quiet.num_queued = int(busy)
        now += seconds * SECOND
        controller.handle(Woke(), now)
        targets = [controller.states[role].target for role in (PREFILL, DECODE)]
        assert (0 in targets) == (targets == [0, 0])
        assert not busy or 0 not in targets
        assert sum(state.num_here for state in controller.states.values()) <= 6
        for replica, member in controller.fleet.items():
            if member.phase.value == "draining":
                controller.handle(Emptied(replica), now)


# -- 20: a value that is documented and refused (kserve/kserve#5996)

PAGES = [DOCS / "README.md", *sorted((DOCS / "docs").glob("*.md"))]
TABLES = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, text in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL))
]
OF_OTHERS = ("base", "search")
"""Tables of files that are no configuration of a fleet."""


@pytest.mark.parametrize("text", TABLES)
def test_every_documented_table_is_read_and_written_and_read_again(text: str) -> None:
    for part in re.split(r"\n(?=\[workload\])", text):  # some show alternatives
        tree: dict[str, Any] = tomllib.loads(part)
        kinds = [str(table.get("kind")) for table in tree.values() if isinstance(table, dict)]
        if any(name in tree for name in OF_OTHERS) or any(":" in kind for kind in kinds):  # a policy of the reader's own
            continue
        if "scale" in tree and "fleet" not in tree:
            tree["fleet"] = {"replicas": {"min": 1, "max": 12}}
        if "faults" in tree:
            tree["cluster"] = {"gpu": "h100-sxm", "nodes": 2}
        config = from_tree("docs", tree)
        assert from_tree("again", tomllib.loads(dumps(config))) == config


NONE_AT_REST = {"min": 0, "max": 4}


@pytest.mark.parametrize(
    "table",
    [
        {"replicas": NONE_AT_REST},
        {"replicas": {**NONE_AT_REST, "initial": 0}},
        {"mode": "disaggregated", "prefill": NONE_AT_REST, "decode": NONE_AT_REST},
    ],
)
def test_zero_is_a_number_of_replicas(table: dict[str, Any]) -> None:
    config = from_tree("here", {"fleet": table})
    assert {bounds.minimum for bounds in config.fleet.bounds.values()} == {0}
    assert from_tree("again", tomllib.loads(dumps(config))) == config


def test_every_default_is_a_value_that_may_be_written() -> None:
    assert from_tree("defaults", tomllib.loads(dumps(DEFAULTS))) == DEFAULTS
    with pytest.raises(ConfigError):
        from_tree("here", {"fleet": {"replicas": {"min": -1, "max": 4}}})


# -- 30: nearly all clients go away at once (sgl-project/sglang#28651)


def test_a_storm_of_clients_that_give_up_leaves_nothing_and_whoever_comes_next_is_served_as_if_alone() -> None:
    """Of 200 requests within two seconds 177 are left, in every part of a life whose hand-off takes 0.2 s."""
    storm = [OfferedRequest(id, id * 10 * MILLISECOND, 160, 100) for id in range(200)]
    gone = [(request.arrived_at + (37 * request.id % 1000) * MILLISECOND, request.id) for request in storm if request.id % 9]
    late = OfferedRequest(200, 12 * SECOND, 160, 100)
    config = apart.apart(prefill=1, decode=2, delay_s=0.2)
    record, log, machines = apart.play(config, [*storm, late], num_blocks=200, gone=gone)
    outcomes = Counter(row.outcome for row in record.requests)
    assert outcomes[Outcome.CANCELLED] > 100
    assert outcomes[Outcome.CANCELLED] + outcomes[Outcome.COMPLETED] == 201
    apart.check_empty(machines)
    last = record.requests[200]
    assert last.first_token_at - last.arrived_at == 10 * MILLISECOND
    assert last.finished_at - last.arrived_at == (10 + 200 + 99 * 10) * MILLISECOND
    left = {now for now, _, event, _ in log if isinstance(event, Cancelled)}
    assert max(now for now, *_ in log if now < late.arrived_at) <= max(left) + 2 * SECOND  # who stayed has ended by then, too


# -- 34: more prompts at once than decode replicas have room for (lightseekorg/tokenspeed#1427)


def test_however_long_a_queue_for_decode_replicas_is_nobody_in_it_fails() -> None:
    requests = [OfferedRequest(id, 0, 400, 400) for id in range(40)]  # 50 blocks each; two of them fit at a time
    record, _, machines = apart.play(apart.apart(prefill=2), requests, num_blocks=120)
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED] * 40
    assert max(row.finished_at for row in record.requests) > 60 * SECOND  # they have waited for a minute
    assert sum(row.preemptions for row in record.requests) == 0
    apart.check_empty(machines)


# -- 36: roles that change to and fro under load (sgl-project/sglang#28403, vllm-project/vllm#56133)


class ToAndFro(Struct, frozen=True):
    """Three prefill replicas and one decode replica, and half a second later the other way round."""

    def __call__(self, view: ScaleView) -> Wanted:
        prefill = 1 if view.now // (SECOND // 2) % 2 else 3
        return Wanted({PREFILL: prefill, DECODE: 4 - prefill}, "by the clock")


def test_a_hundred_changes_of_roles_to_and_fro_lose_no_request_and_no_token() -> None:
    few = Replicas(1, 3, 2)
    fleet = Fleet("disaggregated", prefill=few, decode=few, up_interval_s=0.05, down_window_s=0.1)
    config = apart.apart(delay_s=0.01)
    config = replace(config, fleet=fleet, scale=ToAndFro(), cluster=Cluster("h100-sxm", 1, 4))
    requests = apart.steady(20, 110, prompt=200, output=20)
    record, log, machines = apart.play(config, requests, num_blocks=400)
    apart.check_ends(record, log, requests, 4)
    assert {row.outcome for row in record.requests} == {Outcome.COMPLETED}
    heard = [event for _, machine, event, _ in log if machine == ROUTER]
    to = sum(isinstance(event, RoleChanged) and event.role is DECODE for event in heard)
    fro = sum(isinstance(event, ReplicaUp) and event.role is PREFILL for event in heard)  # who decodes is emptied first
    assert min(to, fro) >= 200
    apart.check_empty(machines)


# -- 50: who drains goes on (smg-project/smg#1172)


class Shrinks(Struct, frozen=True):
    def __call__(self, view: ScaleView) -> Wanted:
        return Wanted({Role.BOTH: 2 if view.now < 4 * SECOND else 1}, "by the clock")


def test_tokens_come_from_a_replica_that_drains_as_before() -> None:
    """Two long answers on two replicas, of which one is withdrawn after four seconds: no gap is longer for that."""
    requests = [OfferedRequest(id, 0, 100, 2000) for id in range(2)]
    record, log = play(requests, Shrinks(), initial=2, window_s=1.0, delays=Delays())
    withdrawn = [now for now, _, _, actions in log if any(isinstance(a, Decided) and a.after == 1 for a in actions)]
    assert withdrawn
    assert withdrawn[0] < 10 * SECOND < min(row.finished_at for row in record.requests)
    assert {row.replica for row in record.requests} == {0, 1}
    assert [(row.outcome, row.num_output_tokens, row.preemptions) for row in record.requests] == [
        (Outcome.COMPLETED, 2000, 0)
    ] * 2
    steps = set(zip(record.gaps.first, record.gaps.increment, strict=True))
    assert steps == {(16 * 10_100_000, 0)}  # every step of 10.1 ms, in sixteenths of a nanosecond
