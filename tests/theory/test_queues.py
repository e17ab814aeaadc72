"""One server or several, Poisson arrivals: the simulator against what queueing theory says in closed form.

A replica with one seat is the server. Where a request is a prompt and one token, its one step lasts a microsecond a prompt
token, so that a service time is whatever is drawn. Beside the formulas stands Lindley's recursion, which the simulator has to
follow to the nanosecond, request by request.

Tolerances are four standard errors of the mean wait, by batch means: waits of neighbours are correlated, means of long batches
hardly are. The seeds are fixed; that the errors are small enough for a wrong formula to fail is asserted, too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import exp, factorial, log, sqrt
from random import Random
from statistics import fmean, stdev

import pytest

from squall.config import Config, Queue, ReplicaSpec, Slo
from squall.core.metrics import RunRecord
from squall.core.types import MICROSECOND, MILLISECOND, SECOND
from squall.fleet_tables import Fleet
from squall.policies.batching import Vllm
from squall.policies.route import Pull, RoundRobin
from squall.report.series import series
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

NUM_REQUESTS = 12_000
MEAN = 20 * MILLISECOND  # of the service times
NUM_BATCHES = 20

Draw = Callable[[Random], float]
"""A service time, in means."""


def exponential(dice: Random) -> float:
    return dice.expovariate(1)


def constant(_: Random) -> float:
    return 1.0


def uniform(dice: Random) -> float:
    return dice.uniform(0.5, 1.5)


def hyperexponential(dice: Random) -> float:
    """Nine short ones for each long one, ten times as long: more variable than the exponential."""
    return dice.expovariate(1.9) if dice.random() < 0.9 else dice.expovariate(0.19)


SECOND_MOMENTS: dict[Draw, float] = {
    exponential: 2.0,
    constant: 1.0,
    uniform: 13 / 12,
    hyperexponential: 2 * (0.9 / 1.9**2 + 0.1 / 0.19**2),
}
MEANS: dict[Draw, float] = {hyperexponential: 0.9 / 1.9 + 0.1 / 0.19}


@cache
def serve(load: float, service: Draw, *, seed: int, servers: int = 1) -> tuple[RunRecord, list[tuple[int, int]]]:
    """So many servers at this load each. Returns the record, and every request's arrival and service time."""
    dice = Random(seed)
    mean_gap = MEAN / load / servers
    at = 0.0
    offered = []
    for _ in range(NUM_REQUESTS):
        at += dice.expovariate(1) * mean_gap
        offered.append((round(at), max(1, round(service(dice) * MEAN / MICROSECOND)) * MICROSECOND))
    requests = [OfferedRequest(id, arrived, took // MICROSECOND, 1) for id, (arrived, took) in enumerate(offered)]
    config = Config(
        batching=Vllm(max_num_seqs=1, max_num_batched_tokens=1 << 30, prefix_cache=False),
        route=Pull(1) if servers > 1 else RoundRobin(max_waiting=NUM_REQUESTS),
        queue=Queue(max_requests=NUM_REQUESTS, max_tokens=1 << 40),
        replica=ReplicaSpec(block_size=1 << 16),
        fleet=Fleet(replicas=servers),
    )
    a_microsecond_a_token = Linear(fixed=16, token=16 * MICROSECOND)
    return simulate(config, requests, a_microsecond_a_token, num_blocks=1 << 12), offered


def waits(record: RunRecord) -> list[float]:
    """From arrival to the step, in mean service times."""
    return [(row.scheduled_at - row.arrived_at) / MEAN for row in record.requests]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean, by the means of batches."""
    size = len(values) // NUM_BATCHES
    return stdev(fmean(values[i * size : (i + 1) * size]) for i in range(NUM_BATCHES)) / sqrt(NUM_BATCHES)


def assert_is_mean(values: Sequence[float], theory: float) -> None:
    error = standard_error(values)
    assert error < 0.1 * theory, "too few requests to tell"
    assert abs(fmean(values) - theory) < 4 * error


@pytest.mark.parametrize(
    ("service", "load", "seed"),
    [
        (exponential, 0.3, 1),
        (exponential, 0.6, 2),
        (constant, 0.6, 3),
        (constant, 0.8, 4),
        (uniform, 0.7, 5),
        (hyperexponential, 0.4, 6),
    ],
)
def test_one_server_waits_as_pollaczek_and_khinchine_say(service: Draw, load: float, seed: int) -> None:
    """W = rho E[S^2] / (2 E[S] (1 - rho)); of exponential times rho / (1 - rho), of constant ones half of it."""
    mean = MEANS.get(service, 1.0)
    record, _ = serve(load, service, seed=seed)
    busy = load * mean
    assert_is_mean(waits(record), load * SECOND_MOMENTS[service] / (2 * (1 - busy)))


@pytest.mark.parametrize(("service", "load", "seed"), [(exponential, 0.6, 2), (hyperexponential, 0.4, 6)])
def test_every_single_wait_is_lindleys(service: Draw, load: float, seed: int) -> None:
    """W' = max(0, W + S - A), with a nanosecond a step for its fixed price."""
    record, offered = serve(load, service, seed=seed)
    free_at = 0
    for row, (arrived, took) in zip(record.requests, offered, strict=True):
        began = max(arrived, free_at)
        assert (row.scheduled_at, row.finished_at) == (began, began + took + 1)
        free_at = row.finished_at


@pytest.mark.parametrize(("servers", "load"), [(2, 0.6), (3, 0.6)])
def test_several_servers_with_one_queue_wait_as_erlang_says(servers: int, load: float) -> None:
    """M/M/c: W = C(c, a) / (c - a) mean service times, where C is Erlang's probability of having to wait."""
    offered = servers * load
    full = offered**servers / factorial(servers) / (1 - load)
    must_wait = full / (sum(offered**k / factorial(k) for k in range(servers)) + full)
    record, _ = serve(load, exponential, seed=21, servers=servers)
    values = waits(record)
    assert_is_mean(values, must_wait / (servers - offered))
    assert_is_mean([float(value > 0) for value in values], must_wait)


def test_waits_behind_exponential_service_are_exponential() -> None:
    """P(W > t) = rho exp(-(1 - rho) t): at load 0.6 the median is ln(1.2) / 0.4."""
    values = waits(serve(0.6, exponential, seed=2)[0])
    assert_is_mean([float(value > log(1.2) / 0.4) for value in values], 0.5)
    assert_is_mean([float(value > 2.5) for value in values], 0.6 * exp(-1))


def test_the_server_is_busy_as_much_as_the_load_says() -> None:
    record, offered = serve(0.6, constant, seed=3)
    busy = sum(row.finished_at - row.scheduled_at for row in record.requests)
    assert busy == sum(took + 1 for _, took in offered)
    assert busy / record.ended_at == pytest.approx(0.6, rel=4 / sqrt(NUM_REQUESTS))  # the arrivals' own error


@pytest.mark.parametrize(("service", "load", "seed"), [(exponential, 0.6, 2), (hyperexponential, 0.4, 6)])
def test_the_number_in_the_system_is_what_little_makes_of_the_time_in_it(service: Draw, load: float, seed: int) -> None:
    """L = lambda W holds for every run that ends empty, whatever the law of its times; it is the series that counts."""
    record, _ = serve(load, service, seed=seed)
    rows = series(record, Slo(), every_s=7.0, gpus_per_replica=1)
    widths = [*rows["at_s"].diff().drop_nulls(), record.ended_at / SECOND - rows["at_s"][-1]]
    waiting, running = (
        sum(width * level for width, level in zip(widths, rows[name], strict=True)) for name in ("waiting", "running")
    )
    assert waiting == pytest.approx(sum(row.scheduled_at - row.arrived_at for row in record.requests) / SECOND, rel=1e-9)
    assert running == pytest.approx(sum(row.finished_at - row.scheduled_at for row in record.requests) / SECOND, rel=1e-9)


def test_steps_of_many_tokens_serve_as_long_as_one_step_does() -> None:
    """The same server, with answers of many tokens: M/G/1 whose service times are geometric, with second moment 2 - 1 / mean."""
    dice = Random(61)
    mean, load, at = 20, 0.6, 0.0
    requests = []
    for id in range(NUM_REQUESTS):
        at += dice.expovariate(1) * mean * MILLISECOND / load
        tokens = 1
        while dice.random() > 1 / mean:
            tokens += 1
        requests.append(OfferedRequest(id, round(at), 1, tokens))
    config = Config(
        batching=Vllm(max_num_seqs=1, max_num_batched_tokens=8, prefix_cache=False),
        route=RoundRobin(max_waiting=NUM_REQUESTS),
        queue=Queue(max_requests=NUM_REQUESTS),
    )
    record = simulate(config, requests, Linear(fixed=16 * MILLISECOND), num_blocks=1_000)
    values = [(row.scheduled_at - row.arrived_at) / (mean * MILLISECOND) for row in record.requests]
    assert_is_mean(values, load * (2 - 1 / mean) / (2 * (1 - load)))
