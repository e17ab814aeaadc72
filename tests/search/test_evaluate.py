"""The capacity of one configuration: that of a fine grid, however the search for it went, and what else there is to say."""

from typing import Any

import pytest

from squall.core.types import SECOND
from squall.search.capacity import place_below, rate_at
from squall.search.evaluate import Trial, evaluate
from squall.search.setting import Workshop, fleet_size
from tests.search.conftest import job, question, tree

CHOICES: list[dict[str, Any]] = [
    {"batching.max_num_seqs": 8},
    {"batching.max_num_seqs": 64, "batching.max_num_batched_tokens": 512},
    {"cluster.gpu": "h100-sxm", "batching.max_num_batched_tokens": 8192},
    {"cluster.gpu": "l40s", "fleet.replicas": 2},
    {"replica.num_blocks": 400},
]


@pytest.mark.parametrize("choice", CHOICES)
def test_capacity_is_that_of_a_fine_grid(choice: dict[str, Any]) -> None:
    """To 3 %: near the edge, more load helps now and then, by a hair."""
    search, base = question(num_requests=300, warm_up=30), tree()
    base["workload"] = base["workload"] | {"num_requests": 300}
    asked = job(choice, base, num_requests=300, warm_up=30)
    workshop = Workshop(search)
    result = evaluate(workshop, asked)
    assert result.status == "done"
    assert result.capacity_rps is not None
    found = workshop.setting(asked)
    trial = Trial(search, asked, found)
    place = place_below(result.capacity_rps, search.tolerance)
    grid = range(place - 8, min(place + 8, place_below(found.highest_rps, search.tolerance)) + 1)
    passing = [at for at in grid if trial.play(rate_at(at, search.tolerance))[0].passed]
    assert abs(max(passing) - place) <= 3


@pytest.mark.parametrize("choice", CHOICES[:2])
def test_it_does_not_depend_on_where_the_search_began(choice: dict[str, Any]) -> None:
    workshop = Workshop(question())
    found = evaluate(workshop, job(choice))
    assert found.capacity_rps is not None
    for near in (0.1, 1.0, 3.0):
        assert evaluate(workshop, job(choice, near_rps=near * found.capacity_rps)).capacity_rps == found.capacity_rps
    assert evaluate(workshop, job(choice, need=0.5 * (found.score or 0))).capacity_rps == found.capacity_rps


def test_who_cannot_win_is_rejected_with_one_simulation_or_none() -> None:
    workshop = Workshop(question())
    found = evaluate(workshop, job())
    assert found.score is not None
    beaten = evaluate(workshop, job(need=found.score))
    assert (beaten.status, beaten.probes) == ("outbid", 1)
    assert beaten.score_at_most is not None
    assert beaten.score_at_most <= found.score
    assert beaten.token_steps < found.token_steps / 3
    assert evaluate(workshop, job(need=1e6)).probes == 0
    assert evaluate(workshop, job(need=found.score * 0.98)).score == found.score


def test_a_limit_that_nothing_keeps() -> None:
    result = evaluate(Workshop(question()), job(base=tree(slo={"tbt_p99_s": 0.001})))
    assert (result.status, result.binding) == ("infeasible", "tbt_p99")
    assert result.usage["tbt_p99"] > 1
    crowded = evaluate(Workshop(question()), job(base=tree(slo={"ttft_p90_s": 0.02})))
    assert (crowded.status, crowded.binding) == ("infeasible", "ttft_p90")
    assert "ttft_p90 is broken at any rate" in crowded.reason


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"cluster.gpu": "h1000"}, "cluster.gpu 'h1000' is unknown"),
        ({"cluster.gpu": "t4"}, "computes no bf16"),
        ({"model.name": "llama-2-70b"}, "does not fit on a100-80g"),
        ({"replica.tp": 3}, "tp"),
        ({"replica.tp": 16}, "16 GPUs"),
        ({"batching.max_num_seqs": 4096}, "max_num_batched_tokens must be at least"),
        ({"replica.tpp": 2}, "no key 'tpp'"),
        ({"workload.path": "/nowhere.csv", "workload.kind": "trace"}, "nowhere.csv"),
    ],
)
def test_what_cannot_be_run_says_why(choice: dict[str, Any], reason: str) -> None:
    result = evaluate(Workshop(question()), job(choice))
    assert result.status == "invalid"
    assert reason in result.reason
    assert result.probes == 0


@pytest.mark.parametrize(
    ("asked", "choice", "reason"),
    [
        ({"max_gpus_per_replica": 1}, {"replica.tp": 2}, "a replica of 2 GPUs is larger than max_gpus_per_replica (1)"),
        ({"max_gpus": 3}, {"fleet.replicas": 4}, "4 GPUs are more than max_gpus (3)"),
        ({"available": {"a100": 1}}, {"replica.tp": 2, "cluster.gpu": "a100"}, "more than can be had (1)"),
        ({"budget_usd_per_hour": 2.0}, {}, "2.29 USD an hour is above the budget of 2.00"),
        ({"pricing": "spot"}, {}, "no spot price is known; give search.prices.a100-80g.spot"),
        ({"prices": {"a100-80g": {"on_demand": 0}}}, {}, "no price is known"),
    ],
)
def test_what_may_not_be_run_says_why(asked: dict[str, Any], choice: dict[str, Any], reason: str) -> None:
    result = evaluate(Workshop(question(**asked)), job(choice))
    assert result.status == "invalid"
    assert reason in result.reason


def test_prices() -> None:
    spot = question(pricing="spot", prices={"a100-80g": {"on_demand": 2.0, "spot": 0.5}, "h100": {"on_demand": 3.0}})
    assert evaluate(Workshop(spot), job()).usd_per_gpu_hour == 0.5
    assert evaluate(Workshop(spot), job({"cluster.gpu": "h100"})).usd_per_gpu_hour == 3.0
    assert evaluate(Workshop(question()), job({"cluster.usd_per_gpu_hour": 1.25})).usd_per_gpu_hour == 1.25


def as_it_is(choice: dict[str, Any] | None = None, **asked: Any) -> Any:
    return evaluate(Workshop(question(**asked)), job(choice, num_requests=0, warm_up=0))


def test_costs_of_a_workload_as_it_is() -> None:
    usd = as_it_is(objective="usd")
    assert usd.status == "done"
    assert usd.gpu_hours > 60 / 3600 * 0.9  # a rate of one, sixty requests
    assert usd.cost_usd == pytest.approx(usd.gpu_hours * 2.29)
    assert usd.score == -usd.cost_usd
    assert as_it_is(objective="gpu_hours").score == -usd.gpu_hours
    assert as_it_is(objective="energy_kwh").energy_kwh == pytest.approx(usd.gpu_hours * 0.4)
    two = as_it_is({"fleet.replicas": 2}, objective="usd")
    assert two.cost_usd == pytest.approx(2 * usd.cost_usd, rel=0.05)


def test_latency_at_a_budget() -> None:
    a100, h100 = (as_it_is({"cluster.gpu": gpu}, objective="latency", latency_of="e2e_p90") for gpu in ("a100-80g", "h100-sxm"))
    assert h100.score > a100.score
    assert -h100.score == h100.curves.at("e2e", 0.9)


def test_stretched_times_lower_capacity() -> None:
    workshop = Workshop(question())
    rates = [evaluate(workshop, job(factor=factor)).capacity_rps or 0.0 for factor in (0.8, 1.0, 1.25)]
    assert rates[0] > rates[1] > rates[2]


def test_vidurs_criterion_is_more_generous() -> None:
    own, vidurs = (evaluate(Workshop(question(criterion=criterion)), job()) for criterion in ("slo", "vidur"))
    assert (vidurs.capacity_rps or 0) >= (own.capacity_rps or 0)


def test_a_policy_that_breaks_is_one_failed_configuration() -> None:
    result = evaluate(Workshop(question()), job({"route": {"kind": "tests_search_breaking:Breaking"}}))
    assert result.status == "invalid"
    assert "cannot be imported" in result.reason


def test_fleet_sizes() -> None:
    workshop = Workshop(question())
    assert fleet_size(workshop.setting(job({"fleet.replicas": 3})).config) == (3, 3)
    assert workshop.setting(job({"fleet.replicas": 3, "replica.tp": 2})).most_gpus == 6
    elastic = workshop.setting(job({"fleet.replicas": {"min": 1, "max": 4}, "replica.tp": 2}))
    assert (elastic.least_gpus, elastic.most_gpus) == (2, 8)
    apart = {"mode": "disaggregated", "prefill": {"min": 2, "max": 4}, "decode": 1}
    assert fleet_size(workshop.setting(job({"fleet": apart})).config) == (3, 5)


def test_a_fleet_that_may_grow_begins_up_and_costs_what_it_held() -> None:
    elastic = {"fleet": {"replicas": {"min": 1, "max": 4}}, "scale": {"kind": "concurrency", "target": 4.0}}
    result = as_it_is(elastic, objective="usd")
    assert result.status == "done"
    assert 1 <= result.num_gpus <= 4
    first = result.curves.at("ttft", 0.01)
    assert first < 1.0  # weights of 16 GB from an object store would take seconds


def test_prefill_and_decode_apart() -> None:
    result = as_it_is({"fleet": {"mode": "disaggregated", "prefill": 1, "decode": 1}}, objective="usd")
    assert result.status == "done"
    assert result.cost_usd == pytest.approx(2 * as_it_is(objective="usd").cost_usd, rel=0.2)


def test_uncertainty_is_that_of_the_sources_unless_it_is_given() -> None:
    found = Workshop(question()).setting(job())
    low, high = found.uncertainty(question())
    assert 0.5 < low < 0.95 < 1.05 < high < 2
    assert found.uncertainty(question(uncertainty=0.2)) == (0.8, 1.2)


def test_the_gap_of_one_second_is_a_second() -> None:
    """Usage relates to limits in seconds."""
    result = evaluate(Workshop(question()), job())
    assert result.curves is not None
    assert result.usage["ttft_p90"] == pytest.approx((result.curves.at("ttft", 0.9) or 0) / (SECOND / 1e9))
