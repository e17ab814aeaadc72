"""Requests that wait for the end of another one: clients with one question at a time, and conversations."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from squall.config import Config, Queue, load
from squall.core.metrics import Outcome
from squall.core.types import MILLISECOND, SECOND
from squall.fleet_tables import Fleet
from squall.policies.route import LeastLoaded, Pull
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.twin.rehearse import rehearse
from squall.workload.spec import OfferedRequest

LATENCY = Linear(16 * MILLISECOND, token=160_000, context=1_600, work=160)
CLOSED = (
    "model.name=llama-3-8b",
    "cluster.gpu=a100-80g",
    "workload.kind=synthetic",
    "workload.num_requests=60",
    "workload.arrivals={kind='closed_loop', concurrency=4, think_s=0.5}",
    "workload.prompt={kind='uniform', low=50, high=500}",
    "workload.output={kind='uniform', low=1, high=80}",
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[OfferedRequest, ...]:
    requests: list[OfferedRequest] = []
    for id in range(draw(st.integers(1, 25))):
        after = draw(st.integers(-1, id - 1)) if id else -1
        think = draw(st.integers(0, 3)) * MILLISECOND
        at = requests[after].arrived_at + think if after >= 0 else draw(st.integers(0, 20)) * MILLISECOND
        prompt, output = draw(st.integers(1, 60)), draw(st.integers(1, 20))
        requests.append(OfferedRequest(id, at, prompt, output, after=after, think=think if after >= 0 else 0))
    return tuple(requests)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=conversations(), replicas=st.integers(1, 2), pull=st.booleans())
def test_whoever_waits_arrives_once_its_client_has_thought_whatever_the_length_of_runs(
    requests: tuple[OfferedRequest, ...], replicas: int, pull: bool
) -> None:
    config = Config(fleet=Fleet(replicas=replicas), route=Pull(2) if pull else LeastLoaded())
    record = simulate(config, requests, LATENCY, 12)
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests)
    for offered, row in zip(requests, record.requests, strict=True):
        begins = record.requests[offered.after].finished_at + offered.think if offered.after >= 0 else offered.arrived_at
        assert row.arrived_at == begins
    assert simulate(config, requests, LATENCY, 12, max_steps=1).requests == record.requests


def test_a_refused_or_cancelled_request_releases_who_waits_for_it() -> None:
    requests = [
        OfferedRequest(0, 0, 100, 50),
        OfferedRequest(1, 0, 10_000, 1),  # larger than any KV pool
        OfferedRequest(2, 0, 10, 2, after=0, think=SECOND),
        OfferedRequest(3, 0, 10, 2, after=1, think=2 * SECOND),
    ]
    cancellations = [(20 * MILLISECOND, 0)]
    record = simulate(Config(queue=Queue(max_requests=10)), requests, LATENCY, 100, cancellations=cancellations)
    assert [row.outcome.value for row in record.requests] == ["cancelled", "rejected", "completed", "completed"]
    assert [row.arrived_at for row in record.requests[2:]] == [20 * MILLISECOND + SECOND, 2 * SECOND]


def test_a_closed_loop_keeps_its_concurrency_and_obeys_littles_law() -> None:
    record = rehearse(load(None, CLOSED))
    rows = record.requests
    assert all(row.outcome is Outcome.COMPLETED for row in rows)
    changes = sorted([(row.arrived_at, 1) for row in rows] + [(row.finished_at, -1) for row in rows])
    inside = most = area = last = 0
    for at, change in changes:
        area += inside * (at - last)
        inside, last = inside + change, at
        most = max(most, inside)
    assert most == 4
    assert area == sum(row.finished_at - row.arrived_at for row in rows)


def test_the_next_turn_of_a_session_waits_for_the_answer_and_finds_its_history_cached() -> None:
    settings = [
        *CLOSED[:2],
        "workload={kind='sessions', num_sessions=12, think_s=0.2, turns={kind='fixed', tokens=4}, system_tokens=64,"
        " arrivals={kind='poisson', rate_rps=2}, prompt={kind='uniform', low=50, high=200}, output={kind='fixed', tokens=40}}",
    ]
    rows = rehearse(load(None, settings)).requests
    assert len(rows) == 48
    assert all(row.outcome is Outcome.COMPLETED for row in rows)
    assert sum(row.num_cached_tokens for row in rows) > sum(row.num_prompt_tokens for row in rows) // 3
