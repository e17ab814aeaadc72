"""Simulations in which requests wait for a replica that never comes: they are refused, and the simulation ends."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from squall.config import Cluster, Config, Model, ReplicaSpec
from squall.core.actions import AnyAction
from squall.core.events import AnyEvent, Submitted
from squall.core.fleet_view import RouteView
from squall.core.metrics import Outcome, RunRecord
from squall.core.types import SECOND, MachineId, Nanos, ReplicaId, Request
from squall.fleet_tables import Fault, Fleet, Hazards, Replicas
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.policies.scale import Fixed, Ttft
from squall.report.compare import headline
from squall.report.summary import summarise
from squall.sim.ground import ground
from squall.sim.linear import Linear
from squall.sim.prepare import prepare
from squall.sim.run import simulate
from squall.twin.rehearse import rehearse
from squall.workload.spec import FixedArrivals, FixedLength, OfferedRequest, SyntheticWorkload

GONE = (Fault(1.0, "node", 0), Fault(1.0, "node", 1))
WAITING = OfferedRequest(1, 2 * SECOND, 1000, 10)
TURNS = [OfferedRequest(0, 0, 1000, 10), WAITING, OfferedRequest(2, 0, 1000, 10, after=1, think=5)]
ELASTIC = Replicas(1, 2)


def config(scale: Any, replicas: int | Replicas, **more: Any) -> Config:
    return Config(
        model=Model("meta-llama/Llama-3.1-8B"),
        cluster=Cluster("h100-sxm", 2, 1),
        fleet=Fleet(replicas=replicas, up_interval_s=1.0),
        scale=scale,
        **more,
    )


def play(of: Config, requests: list[OfferedRequest], **more: Any) -> RunRecord:
    model, gpu = resolve_model(of.model.name), resolve_gpu(of.cluster.gpu)
    latency, _ = prepare(of, model, gpu)[:2]
    return simulate(of, requests, latency, 1000, ground=ground(of, model, gpu, latency, 1000), **more)


@pytest.mark.parametrize(("scale", "replicas"), [(Ttft(), ELASTIC), (Fixed(), ELASTIC), (Fixed(), 2)])
def test_when_all_nodes_are_gone_for_good_who_waits_is_refused_and_so_is_the_turn_after_it(scale: Any, replicas: Any) -> None:
    of = config(scale, replicas, faults=GONE)
    record = play(of, TURNS)
    ends = [(row.outcome, row.error) for row in record.requests]
    assert ends == [(Outcome.COMPLETED, ""), *[(Outcome.REJECTED, "no_capacity")] * 2]
    assert record.ended_at <= 3605 * SECOND
    assert "  refused     2 no capacity" in headline(summarise(record, of.slo, None))


def test_so_is_whoever_was_prefilled_when_no_decode_replica_comes_and_whoever_waits_behind_it() -> None:
    """Of two nodes, one for prompts, the one that decodes is gone for good; the KV that is held for it fills the other."""
    of = replace(config(Fixed(), 1, faults=GONE[1:]), fleet=Fleet("disaggregated", prefill=1, decode=1))
    record = play(of, [*TURNS, OfferedRequest(3, 2 * SECOND, 15_500, 10), OfferedRequest(4, 3 * SECOND, 15_500, 10)])
    ends = [(row.outcome, row.error, row.num_output_tokens) for row in record.requests]
    refused = (Outcome.REJECTED, "no_capacity")
    assert ends == [(Outcome.COMPLETED, "", 10), (Outcome.FAILED, "no_capacity", 1), *[(*refused, 0)] * 3]


def test_a_node_that_comes_back_is_waited_for_whenever_that_is() -> None:
    record = play(config(Ttft(), ELASTIC, faults=(replace(GONE[0], duration_s=4000.0), GONE[1])), TURNS)
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED] * 3
    assert record.requests[1].finished_at > 4000 * SECOND


def test_a_fleet_whose_replicas_die_before_they_are_up_refuses_in_the_end() -> None:
    record = play(config(Fixed(), 1, hazards=Hazards(replica_per_hour=3600)), [OfferedRequest(0, 0, 1000, 100_000)])
    assert record.requests[0].outcome is Outcome.REJECTED


def test_an_end_is_not_put_off_by_what_was_called_off() -> None:
    """A run of many steps that is cut leaves its end in the heap; a fleet that looks on every second does not wait for it."""
    requests = [OfferedRequest(0, 0, 100, 10_000)]
    of = config(Ttft(), ELASTIC)
    model, gpu = resolve_model(of.model.name), resolve_gpu(of.cluster.gpu)
    latency = Linear(fixed=16 * SECOND // 10)
    on = ground(of, model, gpu, latency, 1000)
    record = simulate(of, requests, latency, 1000, ground=on, cancellations=[(5 * SECOND, 0)])
    assert record.requests[0].outcome is Outcome.CANCELLED
    assert record.ended_at < 7 * SECOND


def test_a_pipeline_goes_on_when_a_replica_dies_with_batches_on_their_way() -> None:
    workload = SyntheticWorkload(FixedArrivals(20), FixedLength(1000), FixedLength(20), 40)
    of = config(Fixed(), 2, replica=ReplicaSpec(pp=2), faults=(Fault(1.0, "replica", 0),), workload=workload)
    record = rehearse(replace(of, cluster=Cluster("h100-sxm", 1, 8)))
    assert {row.outcome for row in record.requests} == {Outcome.COMPLETED}


class Stubborn(Struct, frozen=True):
    """The last replica for everybody, and for request 0 no other."""

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        return None if request.id == 0 and view.get(1) is None else view.replicas[-1].replica


def test_whoever_is_let_by_because_the_one_before_it_is_cancelled_goes_on_with_the_tokens_that_it_had() -> None:
    sent: list[Submitted] = []

    def log(_now: Nanos, _machine: MachineId, event: AnyEvent, _actions: Sequence[AnyAction]) -> None:
        if isinstance(event, Submitted) and event.request.id == 1:
            sent.append(event)

    of = config(Fixed(), 2, route=Stubborn(), faults=GONE[1:])
    requests = [OfferedRequest(0, 0, 100, 500), OfferedRequest(1, 0, 100, 500)]
    record = play(of, requests, cancellations=[(5 * SECOND, 0)], log=log)
    assert [(row.outcome, row.replica) for row in record.requests] == [(Outcome.CANCELLED, 1), (Outcome.COMPLETED, 0)]
    assert [event.request.num_output_tokens > 0 for event in sent] == [False, True]
