"""Small runs whose every instant can be worked out by hand."""

from collections.abc import Sequence

import pytest

from squall.config import Config, Queue, ReplicaSpec
from squall.core.actions import AnyAction, RunSteps
from squall.core.events import AnyEvent, Arrived, Progressed, ReplicaUp, StepsDone, Submitted, Woke
from squall.core.metrics import UNSET, Outcome, RunRecord
from squall.core.types import CONTROLLER, MILLISECOND, ROUTER, MachineId, Nanos, RequestId
from squall.fleet_tables import Fleet
from squall.policies.batching import Vllm
from squall.policies.route import Pull, RoundRobin, Route
from squall.sim.linear import Linear
from squall.sim.loading import Delays
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

MS = MILLISECOND
A_MS_A_STEP = Linear(fixed=16 * MS)

Log = list[tuple[Nanos, MachineId, AnyEvent, Sequence[AnyAction]]]


def offered(id: RequestId, at_ms: float, prompt: int, output: int) -> OfferedRequest:
    return OfferedRequest(id, round(at_ms * MS), prompt, output)


def play(
    *requests: OfferedRequest,
    num_blocks: int = 100,
    replicas: int = 1,
    batching: Vllm = Vllm(8, 64),  # noqa: B008 - frozen
    route: Route = RoundRobin(),  # noqa: B008 - frozen
    queue: Queue = Queue(),  # noqa: B008 - frozen
    latency: Linear = A_MS_A_STEP,
    delays: Delays = Delays(),  # noqa: B008 - frozen
    cancellations: Sequence[tuple[Nanos, RequestId]] = (),
) -> tuple[RunRecord, Log]:
    log: Log = []
    record = simulate(
        Config(
            batching=batching,
            route=route,
            queue=queue,
            fleet=Fleet(replicas=replicas),
            replica=ReplicaSpec(block_size=4, tp=2),
        ),
        requests,
        latency,
        num_blocks,
        delays=delays,
        cancellations=cancellations,
        log=lambda *entry: log.append(entry),
    )
    return record, log


def test_one_request_takes_one_step_a_token() -> None:
    record, _ = play(offered(0, 5, prompt=10, output=4))
    [row] = record.requests
    assert (row.arrived_at, row.scheduled_at, row.first_token_at, row.finished_at) == (5 * MS, 5 * MS, 6 * MS, 9 * MS)
    assert (row.num_prompt_tokens, row.num_output_tokens, row.replica, row.outcome) == (10, 4, 0, Outcome.COMPLETED)
    assert (record.world, record.latency_source, record.num_steps, record.ended_at) == ("simulated", "linear", 4, 9 * MS)


def test_gaps_are_the_lengths_of_the_steps_and_grow_with_the_context() -> None:
    record, _ = play(offered(0, 0, prompt=10, output=4), latency=Linear(fixed=16_000, context=16))
    gaps = record.gaps
    assert list(zip(gaps.weight, gaps.count, gaps.first, gaps.increment, strict=True)) == [(1, 3, 16_000 + 11 * 16, 16)]


def test_a_request_that_arrives_during_a_step_begins_at_its_end() -> None:
    record, _ = play(offered(0, 0, 10, 5), offered(1, 1.5, 10, 2))
    second = record.requests[1]
    assert (second.scheduled_at, second.first_token_at, second.finished_at) == (2 * MS, 3 * MS, 4 * MS)


def test_a_request_that_arrives_at_a_boundary_waits_for_the_next_one() -> None:
    record, _ = play(offered(0, 0, 10, 5), offered(1, 2, 10, 2))
    assert record.requests[1].scheduled_at == 3 * MS


def test_requests_that_arrive_at_one_instant_share_the_first_step() -> None:
    record, log = play(offered(0, 3, 10, 1), offered(1, 3, 10, 1))
    assert [row.finished_at for row in record.requests] == [4 * MS, 4 * MS]
    assert [type(event) for now, id, event, _ in log if id == 0 and now == 3 * MS] == [Submitted, Submitted, Woke]


def test_within_an_instant_ends_come_first_then_messages_then_arrivals_then_wake_ups() -> None:
    _, log = play(offered(0, 0, 10, 1), offered(1, 0, 10, 5), offered(2, 1, 10, 1), replicas=3)
    assert [(id, type(event)) for now, id, event, _ in log if now == MS] == [
        (0, StepsDone), (1, StepsDone), (ROUTER, Progressed), (ROUTER, Progressed), (ROUTER, Arrived), (2, Submitted), (2, Woke),
    ]  # fmt: skip


def test_late_binding_gives_the_next_request_to_whoever_is_free_first() -> None:
    record, _ = play(offered(0, 0, 10, 9), offered(1, 0, 10, 3), offered(2, 1, 10, 2), replicas=2, route=Pull(1))
    assert [row.replica for row in record.requests] == [0, 1, 1]
    assert record.requests[2].scheduled_at == 3 * MS


def test_a_preempted_request_sees_one_long_gap() -> None:
    """Both hold 4 blocks of 8; at 4 ms each needs a fifth, and request 1 gives way until request 0 is done at 6 ms."""
    record, _ = play(offered(0, 0, 12, 7), offered(1, 0, 12, 7), num_blocks=8, batching=Vllm(8, 64, prefix_cache=False))
    first, second = record.requests
    assert (first.preemptions, first.finished_at) == (0, 7 * MS)
    assert (second.preemptions, second.first_token_at) == (1, 1 * MS)
    gaps = [
        (first // 16, weight * count)
        for weight, count, first in zip(record.gaps.weight, record.gaps.count, record.gaps.first, strict=True)
    ]
    assert sum(count for gap, count in gaps if gap == MS) == 11
    [(long, once)] = [entry for entry in gaps if entry[0] != MS]
    assert once == 1
    assert second.finished_at == first.finished_at + 2 * MS
    assert second.finished_at - second.first_token_at == long + 5 * MS


def test_what_the_router_refuses_is_a_row_with_the_reason() -> None:
    record, _ = play(offered(0, 0, 500, 2), offered(1, 0, 10, 2))
    refused, served = record.requests
    assert (refused.outcome, refused.error, refused.finished_at) == (Outcome.REJECTED, "too_large", 0)
    assert (refused.scheduled_at, refused.replica, refused.num_output_tokens) == (UNSET, -1, 0)
    assert served.outcome is Outcome.COMPLETED


def test_a_full_queue_refuses() -> None:
    requests = [offered(id, 0, 10, 5) for id in range(4)]
    record, _ = play(*requests, route=Pull(1), queue=Queue(max_requests=2))
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED] * 3 + [Outcome.REJECTED]
    assert record.requests[3].error == "queue_full"


def test_a_client_that_goes_away_stops_its_request_at_the_next_boundary() -> None:
    record, _ = play(offered(0, 0, 10, 9), cancellations=[(round(3.5 * MS), 0)])
    [row] = record.requests
    assert (row.outcome, row.finished_at, row.num_output_tokens) == (Outcome.CANCELLED, round(3.5 * MS), 4)
    assert record.ended_at == 4 * MS


def test_a_client_that_goes_away_before_its_request_runs_takes_it_out_of_the_queue() -> None:
    record, _ = play(offered(0, 0, 10, 9), offered(1, 0, 10, 9), route=Pull(1), cancellations=[(2 * MS, 1)])
    row = record.requests[1]
    assert (row.outcome, row.scheduled_at, row.num_output_tokens) == (Outcome.CANCELLED, UNSET, 0)


def test_going_away_after_the_end_changes_nothing() -> None:
    record, _ = play(offered(0, 0, 10, 2), cancellations=[(50 * MS, 0)])
    assert record.requests[0].outcome is Outcome.COMPLETED


def test_the_fleet_is_up_before_the_first_arrival() -> None:
    _, log = play(offered(0, 0, 10, 1), replicas=2)
    up = [event for _, id, event, _ in log if isinstance(event, ReplicaUp)]
    assert up == [ReplicaUp(0, 100, 4), ReplicaUp(1, 100, 4)]
    assert {now for now, id, _, _ in log if id == CONTROLLER} == {0}


def test_a_fleet_that_needs_time_lets_the_first_requests_wait() -> None:
    delays = Delays(process=2 * MS, load=7 * MS, capture=1 * MS)
    record, _ = play(offered(0, 3, 10, 1), offered(1, 4, 10, 1), delays=delays)
    assert [row.scheduled_at for row in record.requests] == [10 * MS, 10 * MS]


def test_accelerator_time_is_counted_for_every_gpu_of_every_replica() -> None:
    record, _ = play(offered(0, 0, 10, 5), replicas=3)
    assert record.gpu_nanos == 3 * 2 * 5 * MS


def test_requests_may_come_in_any_order() -> None:
    record, _ = play(offered(1, 9, 10, 1), offered(0, 2, 10, 1))
    assert [(row.id, row.finished_at) for row in record.requests] == [(1, 10 * MS), (0, 3 * MS)]


def test_a_run_of_many_steps_is_one_event() -> None:
    _, log = play(offered(0, 0, 10, 90))
    runs = [action for *_, actions in log for action in actions if isinstance(action, RunSteps)]
    assert [run.num_decodes for run in runs] == [0, 1]
    assert [event.steps for *_, event, _ in log if isinstance(event, StepsDone)] == [1, 89]


def test_a_step_lasts_at_least_a_nanosecond() -> None:
    with pytest.raises(ValueError, match="fixed must be at least 16"):
        Linear(fixed=15)
