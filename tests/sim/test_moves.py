"""Replicas that are emptied instead of waited for: how long a move takes, where it goes, and what may break in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from squall.config import Cluster, Config, Model, ReplicaSpec
from squall.core.actions import SendKv
from squall.core.events import Adopted, Emptied, Kept, KvSent, MoveWanted, Submitted, Surrendered
from squall.core.machine import Machine
from squall.core.metrics import Outcome, RunRecord
from squall.core.replica import Replica
from squall.core.router import Router
from squall.core.types import MILLISECOND, ROUTER, SECOND, MachineId, RequestId, Role
from squall.fleet_tables import Fault, Fleet, Handoff, Replicas
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.policies.batching import Vllm
from squall.policies.scale import Scale
from squall.sim.ground import bare_ground, ground
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest
from tests.sim.chaos import _alive, case, check, check_replay
from tests.sim.chaos import play as play_case
from tests.sim.test_chaos import said
from tests.sim.test_disaggregated import KV, TEN_MS_A_STEP, Log, Wishes, check_ends, play, steady

NOTICE = Fault(0.05, "node", 0, 10.0, 0.1)
"""Node 0 goes at 150 ms; its replica is withdrawn at 100 ms, half of the notice later."""


def two(delay_s: float | None = 0.025, seats: int = 8, **more: Any) -> Config:
    """Two replicas, a node each."""
    return Config(
        fleet=Fleet(replicas=2, drain="move"), batching=Vllm(seats, 2048), handoff=Handoff(delay_s),
        cluster=Cluster("h100-sxm", 2, 1, nic_gbps=100), **{"faults": (NOTICE,), **more},
    )  # fmt: skip


def gaps(record: RunRecord) -> list[tuple[int, int, int]]:
    """Requests, tokens, and milliseconds before each."""
    found = record.gaps
    assert not any(found.increment)
    columns = zip(found.weight, found.count, found.first, strict=True)
    return [(weight, count, (first >> 4) // MILLISECOND) for weight, count, first in columns]


def test_a_move_costs_the_rest_of_a_step_and_the_transfer() -> None:
    """10 ms a step: withdrawn at 100 ms, held at the next boundary, at 110 ms, there at 135 ms, and the next token at 145 ms."""
    record, log, machines = play(two(), [OfferedRequest(0, 0, 100, 20)])
    assert gaps(record) == [(1, 10, 10), (1, 1, 35), (1, 8, 10)]
    row = record.requests[0]
    assert (row.outcome, row.num_output_tokens, row.preemptions) == (Outcome.COMPLETED, 20, 0)
    assert row.finished_at == (145 + 8 * 10) * MILLISECOND
    (sent,) = [action for *_, actions in log for action in actions if isinstance(action, SendKv)]
    assert sent == SendKv(0, 1, 0, 0, 100 + 11 - 1)  # the eleventh token has no KV yet
    assert [(now, event) for now, _, event, _ in log if isinstance(event, Adopted)] == [(135 * MILLISECOND, Adopted(1, 0))]
    assert [now for now, _, event, _ in log if event == Emptied(0)] == [135 * MILLISECOND]
    check_free(machines, {0})  # it was stopped at that instant


def test_kv_takes_the_links_of_the_cluster() -> None:
    config = replace(two(None), model=Model("meta-llama/Llama-3.1-8B"), replica=ReplicaSpec())
    on = ground(config, resolve_model(config.model.name), resolve_gpu("h100-sxm"), TEN_MS_A_STEP, 1000)
    _, log, _ = play(config, [OfferedRequest(0, 0, 1000, 20)], num_blocks=1000, on=on)
    (sent,) = [event for *_, event, _ in log if isinstance(event, KvSent)]
    assert sent.num_bytes == (1000 + 11 - 1) * KV
    assert sent.took == pytest.approx(sent.num_bytes / 12.5e9 * SECOND, rel=1e-6)
    assert [link for link in sent.path if ".nic" in link] == ["node0.nic0.out", "node1.nic0.in"]


def test_who_waits_or_is_in_prefill_begins_elsewhere() -> None:
    requests = [OfferedRequest(0, 0, 100, 40), OfferedRequest(1, 0, 100, 40), OfferedRequest(2, 20 * MILLISECOND, 100, 5)]
    record, log, machines = play(two(seats=1), requests)
    assert [event for *_, event, _ in log if isinstance(event, Surrendered)] == [Surrendered(0, (2,))]
    assert [id for _, id, event, _ in log if isinstance(event, Submitted) and event.request.id == 2] == [0, 1]
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
    check_free(machines, {0})


def test_who_finds_no_room_elsewhere_decodes_where_it_is() -> None:
    requests = [OfferedRequest(0, 0, 100, 30), OfferedRequest(1, 0, 100, 30)]
    fault = replace(NOTICE, notice_s=1.0, at_s=0.01)
    record, log, _ = play(replace(two(), faults=(fault,)), requests, num_blocks=12)  # each may come to need 9
    assert not [event for *_, event, _ in log if isinstance(event, MoveWanted)]
    assert {milliseconds for _, _, milliseconds in gaps(record)} == {10}


def shrinking(delay_s: float, **more: Any) -> Config:
    """Two replicas of which one is to go after 100 ms: the one with fewer requests, 1."""
    wishes = Wishes(((0, Role.BOTH, 2), (100, Role.BOTH, 1)))
    fleet = Fleet(replicas=Replicas(1, 2, 2), drain="move", up_interval_s=0.05, down_window_s=0.05, idle_ttl_s=0.1)
    return Config(
        fleet=fleet, scale=cast(Scale, wishes), batching=Vllm(8, 2048), handoff=Handoff(delay_s),
        cluster=Cluster("h100-sxm", 2, 1), **more,
    )  # fmt: skip


THREE = [OfferedRequest(id, 0, 100, 100) for id in range(3)]


def test_when_whoever_takes_a_request_dies_its_replica_goes_on_with_it() -> None:
    config = shrinking(0.3, faults=(Fault(0.4, "replica", 0),))
    record, log, machines = play(config, THREE)
    assert next(event for *_, event, _ in log if isinstance(event, MoveWanted)) == MoveWanted((1,))
    assert Kept(1, (1,)) in [event for *_, event, _ in log]
    assert all(row.outcome is Outcome.COMPLETED and row.num_output_tokens == 100 for row in record.requests)
    check_free(machines, {0})


def test_when_the_replica_that_is_emptied_dies_its_requests_go_on_from_the_tokens_they_have() -> None:
    record, log, machines = play(shrinking(0.3, faults=(Fault(0.4, "replica", 1),)), THREE)
    again = [event.request for _, id, event, _ in log if isinstance(event, Submitted) and event.request.id == 1 and id == 0]
    assert len(again) == 1
    assert again[0].num_output_tokens > 10
    assert all(row.outcome is Outcome.COMPLETED and row.num_output_tokens == 100 for row in record.requests)
    check_free(machines, {1})


@pytest.mark.parametrize("at_ms", [105, 200, 300, 450])
def test_who_goes_away_in_any_part_of_a_move_leaves_nothing(at_ms: int) -> None:
    record, _, machines = play(shrinking(0.2), THREE, gone=[(at_ms * MILLISECOND, 1)])
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.COMPLETED]
    check_free(machines, {1})


def check_free(machines: dict[MachineId, Machine], lost: set[int]) -> None:
    for id, machine in machines.items():
        if isinstance(machine, Replica) and id not in lost:
            assert (machine.num_used_blocks, machine.num_running, machine.num_waiting) == (0, 0, 0)
            assert machine.handoffs is None or (machine.handoffs.num_held, machine.handoffs.num_expected) == (0, 0)
    router = machines[ROUTER]
    assert isinstance(router, Router)
    assert (router.num_queued, router.num_outstanding) == (0, 0)
    for role in (Role.BOTH, Role.PREFILL, Role.DECODE):
        demand = router.demand(role)
        assert (demand.num_queued, demand.num_queued_tokens, demand.num_waiting, demand.num_waiting_tokens) == (0, 0, 0, 0)
        assert (demand.num_running, demand.num_promised_tokens) == (0, 0)


WISHES = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 4)), min_size=1, max_size=10)
FAULTS = st.lists(
    st.one_of(
        st.builds(lambda at, which: Fault(at / 1000, "replica", which), st.integers(0, 3000), st.integers(0, 3)),
        st.builds(lambda at, which: Fault(at / 1000, "node", which, 0.5, 0.4), st.integers(0, 3000), st.integers(0, 3)),
    ),
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(
    wishes=WISHES, faults=FAULTS, gone=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 39)), max_size=8),
    delay_ms=st.sampled_from([0, 7, 150]), num_blocks=st.sampled_from([20, 60, 200]), seats=st.sampled_from([2, 16]),
    share=st.sampled_from([1.0, 3.0]), max_steps=st.sampled_from([1, 10**9]),
)  # fmt: skip
def test_whoever_comes_goes_and_dies_requests_end_once_with_all_their_tokens(
    wishes: list[tuple[int, int]], faults: list[Fault], gone: list[tuple[int, RequestId]],
    delay_ms: int, num_blocks: int, seats: int, share: float, max_steps: int,
) -> None:  # fmt: skip
    requests = steady(14, 3, prompt=100, output=60)
    fleet = Fleet(replicas=Replicas(1, 4, 2), drain="move", up_interval_s=0.05, down_window_s=0.1, idle_ttl_s=0.2)
    config = Config(
        fleet=fleet, scale=cast(Scale, Wishes(tuple(sorted((at, Role.BOTH, count) for at, count in wishes)))),
        batching=Vllm(seats, 256), handoff=Handoff(delay_ms / 1000, max_share=share), faults=tuple(faults),
        cluster=Cluster("h100-sxm", 4, 1), queue=replace(Config().queue, max_retries=20),
    )  # fmt: skip
    log: Log = []
    machines: dict[MachineId, Machine] = {}
    cancelled = [(requests[id].arrived_at + at * MILLISECOND, id) for at, id in gone]
    record = simulate(
        config, requests, TEN_MS_A_STEP, num_blocks, ground=bare_ground(config), cancellations=cancelled, max_steps=max_steps,
        log=lambda *entry: log.append(entry), created=lambda _, id, machine: machines.update({id: machine}),
    )  # fmt: skip
    check_ends(record, log, requests, 4)
    check_free(machines, {id for id in machines if id >= 0} - _alive(log))


# In the last one a request that had lost its KV at a decode replica was given back.
SEEDS: Sequence[tuple[str, bool, int]] = [
    *((mode, live, seed) for mode in ("colocated", "disaggregated") for live in (True, False) for seed in range(2000, 2003)),
    ("disaggregated", False, 561),
]


@pytest.mark.parametrize(("mode", "live", "seed"), SEEDS)
def test_runs_in_which_anything_may_break_are_those_of_single_steps_and_can_be_repeated(
    mode: str, live: bool, seed: int, tmp_path: Path
) -> None:
    of = case(seed, mode, live=live, drain="move")
    many = play_case(of, path=tmp_path / "log")
    check(of, many)
    check_replay(of, many, tmp_path / "log")
    single = play_case(of, max_steps=1)
    assert said(many.log) == said(single.log)
    assert many.record.requests == single.record.requests
