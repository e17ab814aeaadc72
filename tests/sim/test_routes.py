"""Whole runs under every route policy: what affinity gains, that runs of steps change no choice, and that all is spread."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from squall.config import Config, ReplicaSpec
from squall.core.metrics import Outcome, RunRecord
from squall.core.types import FOREVER, MILLISECOND
from squall.fleet_tables import Fleet
from squall.policies.batching import Vllm
from squall.policies.route import (
    LeastKv,
    LeastLoaded,
    LeastOutstanding,
    PowerOfTwo,
    PrefixAffinity,
    Random,
    RoundRobin,
    Route,
    Session,
)
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.build import build
from squall.workload.spec import FixedLength, OfferedRequest, PoissonArrivals, SessionsWorkload, UniformLength

LATENCY = Linear(fixed=16 * 5 * MILLISECOND, token=16 * 20_000)
"""Five milliseconds a step, and 20 us for each token of it."""


def play(
    route: Route, requests: list[OfferedRequest], replicas: int = 8, num_blocks: int = 2000, max_steps: int = FOREVER
) -> RunRecord:
    config = Config(
        batching=Vllm(64, 1024),
        route=route,
        fleet=Fleet(replicas=replicas),
        replica=ReplicaSpec(block_size=16),
    )
    record = simulate(config, requests, LATENCY, num_blocks, max_steps=max_steps)
    assert {row.outcome for row in record.requests} == {Outcome.COMPLETED}
    return record


def conversations() -> list[OfferedRequest]:
    """Each turn repeats all before it; turns of many conversations come in between."""
    workload = SessionsWorkload(
        arrivals=PoissonArrivals(4.0),
        turns=FixedLength(6),
        prompt=UniformLength(200, 600),
        output=UniformLength(10, 60),
        num_sessions=80,
        think_s=4.0,
        waits=False,
    )
    return build(workload, seed=1, base_dir=Path())


def hit_rate(record: RunRecord) -> float:
    return sum(row.num_cached_tokens for row in record.requests) / sum(row.num_prompt_tokens for row in record.requests)


def mean_ttft(record: RunRecord) -> float:
    return sum(row.first_token_at - row.arrived_at for row in record.requests) / len(record.requests)


def test_affinity_finds_most_of_what_conversations_repeat_and_answers_sooner_for_it() -> None:
    requests = conversations()
    turns, whole = play(RoundRobin(), requests), play(LeastLoaded(), requests)
    prefix, session = play(PrefixAffinity(), requests), play(Session(), requests)
    for affine in (prefix, session):
        assert hit_rate(affine) > 2 * hit_rate(turns)
        assert mean_ttft(affine) < mean_ttft(turns)
        assert mean_ttft(affine) < mean_ttft(whole)
    assert hit_rate(prefix) > 0.6


def test_a_prompt_that_everybody_shares_does_not_pile_up_on_one_replica() -> None:
    """Field issue 42: all have the same long beginning, so all would follow the first one."""
    shared = tuple(range(1, 65))
    requests = [OfferedRequest(id, id * 10 * MILLISECOND, 1040, 50, block_hashes=shared) for id in range(400)]
    record = play(PrefixAffinity(max_excess=4096), requests)
    served = Counter(row.replica for row in record.requests)
    assert len(served) == 8
    assert hit_rate(record) > 0.9


@pytest.mark.parametrize("route", [PowerOfTwo(), LeastOutstanding(), LeastKv()], ids=lambda route: type(route).__name__)
def test_who_looks_at_the_load_lets_requests_wait_less_than_random_does(route: Route) -> None:
    requests = [
        OfferedRequest(id, id * 25 * MILLISECOND, 2000 if id % 7 == 0 else 100, 100 if id % 5 else 400) for id in range(600)
    ]
    assert mean_ttft(play(route, requests, replicas=4)) < mean_ttft(play(Random(), requests, replicas=4))


@st.composite
def crowds(draw: st.DrawFn) -> list[OfferedRequest]:
    """Many coincidences, little room, few beginnings and sessions."""
    requests, at = [], 0
    for id in range(draw(st.integers(2, 30))):
        at += draw(st.sampled_from([0, 0, 5, 7, 10])) * MILLISECOND
        prompt, group = draw(st.integers(1, 200)), draw(st.integers(0, 3))
        hashes = tuple(1000 * group + place + 1 for place in range(prompt // 16))
        requests.append(OfferedRequest(id, at, prompt, draw(st.integers(1, 40)), block_hashes=hashes, session=group))
    return requests


ROUTES: list[Route] = [
    Random(), PowerOfTwo(), LeastOutstanding(), LeastKv(), Session(max_excess=100),
    PrefixAffinity(max_excess=100, prefix_apart=16),
]  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=crowds(), route=st.sampled_from(ROUTES), replicas=st.integers(1, 4))
def test_no_choice_depends_on_how_many_steps_are_run_at_once(requests: list[OfferedRequest], route: Route, replicas: int) -> None:
    many, single = (play(route, requests, replicas, num_blocks=20, max_steps=steps) for steps in (FOREVER, 1))
    assert many.requests == single.requests
