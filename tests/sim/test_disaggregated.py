"""Disaggregated fleets on the virtual clock: what a hand-off costs, over links or in a fixed time, and what breaks in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from squall.config import Cluster, Config, Model, ReplicaSpec
from squall.core.actions import AnyAction, SendKv, StartReplica, StopReplica
from squall.core.disaggregated import DisaggregatedRouter
from squall.core.events import Adopted, AnyEvent, KvFailed, KvSent, ReplicaLost
from squall.core.fleet_view import ScaleView, Wanted
from squall.core.machine import Machine
from squall.core.metrics import Outcome, RunRecord
from squall.core.replica import Replica
from squall.core.types import MILLISECOND, ROUTER, SECOND, MachineId, Nanos, RequestId, Role
from squall.fleet_tables import Fault, Fleet, Handoff, Replicas
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.policies.batching import Vllm
from squall.policies.scale import Scale
from squall.sim.ground import Ground, bare_ground, ground
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

TEN_MS_A_STEP = Linear(160 * MILLISECOND)
Log = list[tuple[Nanos, MachineId, AnyEvent, Sequence[AnyAction]]]


def play(
    config: Config,
    requests: Sequence[OfferedRequest],
    *,
    num_blocks: int = 100,
    on: Ground | None = None,
    gone: Sequence[tuple[Nanos, RequestId]] = (),
) -> tuple[RunRecord, Log, dict[MachineId, Machine]]:
    log: Log = []
    machines: dict[MachineId, Machine] = {}
    record = simulate(
        config, requests, TEN_MS_A_STEP, num_blocks, ground=on or bare_ground(config), cancellations=gone,
        log=lambda *entry: log.append(entry), created=lambda _, id, machine: machines.update({id: machine}),
    )  # fmt: skip
    return record, log, machines


def apart(prefill: int = 1, decode: int = 1, delay_s: float | None = 0.0, **more: object) -> Config:
    fleet = Fleet("disaggregated", prefill=prefill, decode=decode)
    return Config(fleet=fleet, batching=Vllm(32, 2048), handoff=Handoff(delay_s), **more)  # type: ignore[arg-type]


def test_the_first_token_counts_at_the_end_of_the_prefill_and_the_second_after_the_handoff() -> None:
    record, log, _ = play(apart(delay_s=0.025), [OfferedRequest(0, 0, 100, 4)])
    row = record.requests[0]
    assert row.first_token_at == 10 * MILLISECOND
    gaps = record.gaps
    assert [(w, c, f >> 4, i) for w, c, f, i in zip(gaps.weight, gaps.count, gaps.first, gaps.increment, strict=True)] == [
        (1, 1, 35 * MILLISECOND, 0),
        (1, 2, 10 * MILLISECOND, 0),
    ]
    assert row.finished_at == 65 * MILLISECOND
    assert [(now, event) for now, _, event, _ in log if isinstance(event, Adopted)] == [(35 * MILLISECOND, Adopted(1, 0))]


def test_a_request_that_ends_at_its_first_token_is_not_handed_off() -> None:
    record, log, _ = play(apart(), [OfferedRequest(0, 0, 100, 1)])
    assert record.requests[0].outcome is Outcome.COMPLETED
    assert not any(isinstance(action, SendKv) for *_, actions in log for action in actions)


def on_a_cluster(nodes: int, prefill: int, decode: int, **cluster: object) -> tuple[Config, Ground]:
    config = Config(
        model=Model("meta-llama/Llama-3.1-8B"),
        cluster=Cluster("h100-sxm", nodes, 1 if nodes > 1 else 8, **cluster),  # type: ignore[arg-type]
        replica=ReplicaSpec(),
        fleet=Fleet("disaggregated", prefill=prefill, decode=decode),
        batching=Vllm(32, 2048),
    )
    gpu = resolve_gpu("h100-sxm")
    return config, ground(config, resolve_model(config.model.name), gpu, TEN_MS_A_STEP, 1000)


KV = 2 * 8 * 128 * 2 * 32  # keys and values of 8 heads of 128 in two bytes, 32 layers: 128 KiB a token


def test_kv_crosses_nodes_over_their_nics_and_says_how_long_that_took() -> None:
    config, cluster = on_a_cluster(2, 1, 1, nic_gbps=100)
    _, log, _ = play(config, [OfferedRequest(0, 0, 1000, 4)], num_blocks=1000, on=cluster)
    (sent,) = [event for *_, event, _ in log if isinstance(event, KvSent)]
    assert sent.num_bytes == 1000 * KV
    assert sent.took == pytest.approx(1000 * KV / 12.5e9 * SECOND, rel=1e-6)
    assert [link for link in sent.path if ".nic" in link] == ["node0.nic0.out", "node1.nic0.in"]


def test_inside_a_domain_kv_takes_nvlink() -> None:
    config, cluster = on_a_cluster(1, 1, 1)
    _, log, _ = play(config, [OfferedRequest(0, 0, 1000, 4)], num_blocks=1000, on=cluster)
    (sent,) = [event for *_, event, _ in log if isinstance(event, KvSent)]
    assert sent.path == ("gpu0.nvlink.out", "gpu1.nvlink.in")


def test_two_that_send_to_one_share_its_link() -> None:
    config, cluster = on_a_cluster(3, 2, 1, nic_gbps=100)
    requests = [OfferedRequest(id, 0, 1000, 4) for id in range(2)]
    _, log, _ = play(config, requests, num_blocks=1000, on=cluster)
    took = [event.took for *_, event, _ in log if isinstance(event, KvSent)]
    assert took == pytest.approx([2 * 1000 * KV / 12.5e9 * SECOND] * 2, rel=1e-6)


def test_a_decode_replica_that_lacks_blocks_lets_the_next_one_wait_where_it_was_prefilled() -> None:
    requests = [OfferedRequest(id, 0, 400, 40) for id in range(4)]  # 28 blocks each
    record, log, machines = play(apart(delay_s=0.0), requests, num_blocks=60)
    adopted = [now for now, _, event, _ in log if isinstance(event, Adopted)]
    assert len(adopted) == 4
    assert adopted[2] >= record.requests[0].finished_at
    assert all(row.preemptions == 0 for row in record.requests)
    check_empty(machines)


def test_what_a_fleet_is_promised_beyond_its_blocks_is_preempted_and_computed_again_there() -> None:
    config = replace(apart(), handoff=Handoff(0.0, max_share=3.0))
    requests = [OfferedRequest(id, 0, 160, 200) for id in range(4)]
    record, _, machines = play(config, requests, num_blocks=60)
    assert sum(row.preemptions for row in record.requests) > 0
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
    check_empty(machines)


def check_empty(machines: dict[MachineId, Machine]) -> None:
    """Nobody holds a block, and nobody is expected anywhere."""
    for machine in machines.values():
        if isinstance(machine, Replica):
            assert machine.num_used_blocks == 0
            assert machine.handoffs is None or (machine.handoffs.num_held, machine.handoffs.num_expected) == (0, 0)
    router = machines[ROUTER]
    assert isinstance(router, DisaggregatedRouter)
    for role in (Role.PREFILL, Role.DECODE):
        demand = router.demand(role)
        assert (demand.num_queued, demand.num_queued_tokens, demand.num_waiting, demand.num_waiting_tokens) == (0, 0, 0, 0)
        assert (demand.num_running, demand.num_promised_tokens) == (0, 0)


def steady(rate: float, seconds: float, prompt: int = 200, output: int = 30) -> list[OfferedRequest]:
    return [OfferedRequest(id, round(id / rate * SECOND), prompt, output) for id in range(round(rate * seconds))]


def check_ends(record: RunRecord, log: Log, requests: Sequence[OfferedRequest], most: int) -> None:
    """Everybody ends once, no token is lost, and there were never more replicas than GPUs."""
    assert [row.id for row in record.requests] == [request.id for request in requests]
    gaps = sum(max(0, row.num_output_tokens - 1) for row in record.requests)
    assert sum(weight * count for weight, count in zip(record.gaps.weight, record.gaps.count, strict=True)) == gaps
    for request, row in zip(requests, record.requests, strict=True):
        assert row.outcome is not Outcome.UNFINISHED
        if row.outcome is Outcome.COMPLETED:
            assert row.num_output_tokens == request.num_output_tokens
    running: set[int] = set()
    for *_, event, actions in log:
        if isinstance(event, ReplicaLost):
            running.discard(event.replica)
        for action in actions:
            if isinstance(action, StartReplica):
                assert action.replica not in running
                running.add(action.replica)
            elif isinstance(action, StopReplica):
                running.discard(action.replica)
        assert len(running) <= most


def test_a_lost_prefill_replica_loses_no_token_of_what_it_held_and_sent() -> None:
    requests = steady(20, 3)
    fault = Fault(1.5, "replica", 0)
    record, log, machines = play(apart(2, 2, 0.15, faults=(fault,)), requests)
    check_ends(record, log, requests, 4)
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
    assert any(isinstance(event, ReplicaLost) for *_, event, _ in log)
    check_empty(machines)


def test_what_was_on_its_way_to_a_lost_decode_replica_is_offered_to_another_one() -> None:
    requests = steady(20, 3)
    fault = Fault(1.5, "replica", 2)
    record, log, machines = play(apart(2, 2, 0.15, faults=(fault,)), requests)
    check_ends(record, log, requests, 4)
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
    failed = {event.request for *_, event, _ in log if isinstance(event, KvFailed)}
    assert failed
    sent: Counter[RequestId] = Counter(event.request for *_, event, _ in log if isinstance(event, KvSent))
    assert all(sent[request] == 1 for request in failed)
    check_empty(machines)


class Wishes(Struct, frozen=True):
    """Numbers of replicas that somebody wants from so many milliseconds on."""

    steps: tuple[tuple[int, Role, int], ...]

    def __call__(self, view: ScaleView) -> Wanted:
        return Wanted({role: count for at, role, count in self.steps if at * MILLISECOND <= view.now}, "wished")


HAPPENINGS = st.one_of(
    st.builds(lambda at, which: Fault(at / 1000, "replica", which), st.integers(0, 3000), st.integers(0, 5)),
    st.builds(lambda at, which: Fault(at / 1000, "slow", which, 0.3), st.integers(0, 3000), st.integers(0, 5)),
    st.builds(lambda at: Fault(at / 1000, "node", 0, 0.5, 0.2), st.integers(0, 3000)),
)
WISHES = st.tuples(st.integers(0, 3000), st.sampled_from([Role.PREFILL, Role.DECODE]), st.integers(1, 3))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.lists(HAPPENINGS, max_size=6),
    wishes=st.lists(WISHES, max_size=6),
    cancelled=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 59)), max_size=10),
    delay_ms=st.sampled_from([0, 1, 7, 60, 400]),
    share=st.sampled_from([1.0, 3.0]),
    num_blocks=st.sampled_from([20, 60, 200]),
)
def test_whatever_breaks_and_whoever_changes_every_request_ends_once_and_all_blocks_come_back(
    faults: list[Fault], wishes: list[tuple[int, Role, int]], cancelled: list[tuple[int, RequestId]],
    delay_ms: int, share: float, num_blocks: int,
) -> None:  # fmt: skip
    requests = steady(20, 3, prompt=100, output=60)
    few = Replicas(1, 3, 2)
    fleet = Fleet("disaggregated", prefill=few, decode=few, up_interval_s=0.05, down_window_s=0.1, idle_ttl_s=0.2)
    steps = tuple(sorted(wishes, key=lambda wish: wish[0]))
    config = Config(
        fleet=fleet, scale=cast(Scale, Wishes(steps)), batching=Vllm(16, 256),
        handoff=Handoff(delay_ms / 1000, max_share=share), faults=tuple(faults),
        cluster=Cluster("h100-sxm", 1, 6), queue=replace(Config().queue, max_retries=20),
    )  # fmt: skip
    log: Log = []
    machines: dict[MachineId, Machine] = {}
    gone = [(requests[id].arrived_at + at * MILLISECOND, id) for at, id in cancelled]
    record = simulate(
        config, requests, TEN_MS_A_STEP, num_blocks, ground=bare_ground(config), cancellations=gone,
        log=lambda *entry: log.append(entry), created=lambda _, id, machine: machines.update({id: machine}),
    )  # fmt: skip
    check_ends(record, log, requests, 6)
    lost = {event.replica for *_, event, _ in log if isinstance(event, ReplicaLost)}
    check_empty({id: machine for id, machine in machines.items() if id not in lost})
