"""One server, Poisson arrivals: the simulator against what queueing theory says in closed form.

A replica with one seat is the server; a step of one millisecond makes the service time the number of output tokens.
"""

from collections.abc import Callable
from random import Random

import pytest

from squall.config import Config, Queue, ReplicaSpec
from squall.core.metrics import RunRecord
from squall.core.types import MILLISECOND
from squall.policies.batching import Vllm
from squall.policies.route import RoundRobin
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

NUM_REQUESTS = 30_000
MEAN_STEPS = 20


def serve(load: float, output: Callable[[Random], int], *, seed: int = 1) -> RunRecord:
    """A single server at this load, with output lengths drawn by `output` (mean MEAN_STEPS)."""
    dice = Random(seed)
    mean_gap = MEAN_STEPS * MILLISECOND / load
    at = 0.0
    requests = []
    for id in range(NUM_REQUESTS):
        at += dice.expovariate(1) * mean_gap
        requests.append(OfferedRequest(id, round(at), 1, output(dice)))
    config = Config(
        batching=Vllm(max_num_seqs=1, max_num_batched_tokens=8, prefix_cache=False),
        route=RoundRobin(max_waiting=NUM_REQUESTS),
        queue=Queue(max_requests=NUM_REQUESTS),
        replica=ReplicaSpec(block_size=16),
    )
    return simulate(config, requests, Linear(fixed=16 * MILLISECOND), num_blocks=1_000)


def mean_wait(record: RunRecord) -> float:
    """Time from arrival to the first step, in mean service times."""
    waits = [row.scheduled_at - row.arrived_at for row in record.requests]
    return sum(waits) / len(waits) / (MEAN_STEPS * MILLISECOND)


def constant(_: Random) -> int:
    return MEAN_STEPS


def geometric(dice: Random) -> int:
    """The exponential distribution's sibling on whole numbers; its variance is mean^2 - mean."""
    count = 1
    while dice.random() > 1 / MEAN_STEPS:
        count += 1
    return count


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_md1_waits_as_long_as_theory_says(load: float) -> None:
    assert mean_wait(serve(load, constant)) == pytest.approx(load / (2 * (1 - load)), rel=0.06)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_mg1_with_geometric_service_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    second_moment = 2 - 1 / MEAN_STEPS  # of the service time, in squared means
    assert mean_wait(serve(load, geometric)) == pytest.approx(load * second_moment / (2 * (1 - load)), rel=0.08)


def test_the_server_is_busy_as_much_as_the_load_says() -> None:
    record = serve(0.6, constant)
    assert record.num_steps * MILLISECOND / record.ended_at == pytest.approx(0.6, rel=0.02)


def test_the_number_in_the_system_is_what_little_makes_of_the_time_in_it() -> None:
    record = serve(0.6, geometric)
    changes = sorted([(row.arrived_at, 1) for row in record.requests] + [(row.finished_at, -1) for row in record.requests])
    area = number = last = 0
    for at, change in changes:
        area += number * (at - last)
        number, last = number + change, at
    theory = 0.6 + 0.6**2 * (2 - 1 / MEAN_STEPS) / (2 * (1 - 0.6))
    assert area / record.ended_at == pytest.approx(theory, rel=0.08)
