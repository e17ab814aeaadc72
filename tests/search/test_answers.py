"""What results mean: frontiers, other prices and limits, other rates, other workloads; worked out by hand."""

from typing import Any

import pytest

from squall.core.types import SECOND
from squall.search.answers import (
    Finalist,
    best,
    for_rate,
    frontier,
    losses,
    nearest_misses,
    order,
    repriced,
    robustness,
    summary_line,
    what_if,
)
from squall.search.curves import FRACTIONS, Curves
from squall.search.result import Result
from squall.search.spec import Limit, Search

SEARCH = Search()


def curves(ttft: float, tbt: float = 0.05) -> Curves:
    """Flat ones."""
    flat = {"ttft": ttft, "tbt": tbt, "tpot": tbt, "e2e": 9.0, "queue": 0.0}
    return Curves(**{name: (value,) * len(FRACTIONS) for name, value in flat.items()})


def done(number: int, gpu: str, rate: float, usd: float, gpus: int = 1, ttft: float = 1.0, tbt: float = 0.05) -> Result:
    score = rate / (gpus * usd)
    return Result(
        number=number, choice={"n": number}, status="done", score=score, score_at_most=score, gpu=gpu, num_gpus=gpus,
        usd_per_gpu_hour=usd, capacity_rps=rate, at_most_rps=rate, curves=curves(ttft, tbt),
    )  # fmt: skip


def beaten(number: int, gpu: str, at_most: float, usd: float) -> Result:
    return Result(
        number=number, choice={"n": number}, status="outbid", score_at_most=at_most / usd, gpu=gpu, num_gpus=1,
        usd_per_gpu_hour=usd, at_most_rps=at_most,
    )  # fmt: skip


def test_the_best_is_the_first_of_equals() -> None:
    found = best([done(3, "a", 4, 2), done(1, "b", 2, 1), done(2, "a", 1, 1)])
    assert found is not None
    assert found.number == 1
    assert best([beaten(0, "a", 1, 1)]) is None


def test_another_price_is_answered_where_bounds_allow() -> None:
    results = [done(0, "a", 10, 2), done(1, "b", 9, 2), beaten(2, "b", 8, 2), beaten(3, "c", 4, 2)]
    answer = what_if(results, SEARCH, prices={"b": 1.0})
    assert answer.best is not None
    assert (answer.best.number, answer.score, answer.open) == (1, 9.0, ())
    cheap = what_if(results, SEARCH, prices={"c": 0.5})
    assert cheap.best is not None
    assert cheap.best.number == 0
    assert [result.number for result in cheap.open] == [3]  # at most 4 / 0.5 = 8 against 10 / 2 = 5


def test_a_tighter_limit_is_answered_where_it_is_kept_already() -> None:
    results = [done(0, "a", 10, 1, ttft=1.0), done(1, "a", 8, 1, ttft=0.4), done(2, "a", 5, 1, ttft=0.9)]
    answer = what_if(results, SEARCH, limits=[Limit("ttft", 0.9, SECOND // 2)])
    assert answer.best is not None
    assert (answer.best.number, answer.score) == (1, 8.0)
    assert [result.number for result in answer.open] == [0]  # it has less than 10 then, perhaps more than 8
    loose = what_if(results, SEARCH, limits=[Limit("ttft", 0.9, SECOND)])
    assert loose.best is not None
    assert (loose.best.number, loose.open) == (0, ())
    none = what_if(results, SEARCH, limits=[Limit("ttft", 0.9, SECOND // 10)])
    assert none.best is None
    assert len(none.open) == 3


def test_repricing_costs() -> None:
    search = Search(objective="usd")
    result = Result(
        number=0, choice={}, status="done", score=-6.0, score_at_most=-6.0, gpu="a", usd_per_gpu_hour=2.0, cost_usd=6.0
    )  # fmt: skip
    again = repriced(result, search, {"a": 3.0})
    assert (again.cost_usd, again.score) == (9.0, -9.0)
    assert repriced(result, search, {"b": 3.0}) == result
    assert repriced(result, Search(objective="gpu_hours"), {"a": 3.0}).score == -6.0


def test_fleets_for_a_rate() -> None:
    fleets = for_rate([done(0, "a", 10, 3), done(1, "b", 4, 1), beaten(2, "c", 9, 1)], 20.0)
    assert [(fleet.result.number, fleet.copies, fleet.usd_per_hour) for fleet in fleets] == [(1, 5, 5.0), (0, 2, 6.0)]


def test_the_frontier_has_what_nothing_beats() -> None:
    results = [
        done(0, "a", 10, 1, ttft=1.0), done(1, "a", 5, 1, ttft=0.5), done(2, "a", 4, 1, ttft=0.6),
        done(3, "a", 3, 1, ttft=0.9, tbt=0.01), done(4, "a", 5, 1, ttft=0.5), beaten(5, "a", 99, 1),
    ]  # fmt: skip
    assert [result.number for result, _ in frontier(results, SEARCH)] == [0, 1, 3]
    [(_, (cost, ttft, tbt)), *_] = frontier(results, SEARCH)
    assert cost == pytest.approx(1000 / 36000)
    assert (ttft, tbt) == (1.0, 0.05)


def miss(number: int, **usage: float) -> Result:
    return Result(number=number, choice={}, status="infeasible", usage=usage)


def test_the_nearest_misses_exceed_their_worst_limit_least() -> None:
    results = [miss(0, a=3.0, b=1.1), miss(1, a=1.5, b=1.4), miss(2, a=0.9, b=2.0), miss(3), miss(4, a=-1.0)]
    assert [result.number for result in nearest_misses(results, 2)] == [1, 2]


def finalist(number: int, *capacities: float | None, slower: float = 1.0, faster: float = 1.0, gpu: str = "a") -> Finalist:
    return Finalist(done(number, gpu, 10, 1), capacities, slower, faster)


def test_seeds_make_an_interval_and_the_order() -> None:
    one = finalist(0, 9.0, 10.0, 11.0)
    assert one.capacity == 10.0
    low, high = one.interval() or (0, 0)
    assert low == pytest.approx(10 - 4.30 / 3**0.5, abs=0.01)
    assert high == pytest.approx(10 + 4.30 / 3**0.5, abs=0.01)
    assert finalist(1, 9.0).interval() is None
    assert finalist(1, 9.0, None).capacity == 0.0  # with another seed its limits hold nowhere
    assert [each.result.number for each in order([one, finalist(1, 12.0, 11.0), finalist(2, None)])] == [1, 0, 2]


def test_whether_the_winner_stays_the_winner() -> None:
    sure = robustness([finalist(0, 10.0, slower=9, faster=11), finalist(1, 8.0, slower=7, faster=8.5, gpu="b")])
    assert all("the winner stays the winner" in line for line in sure)
    close = robustness([finalist(0, 10.0, slower=8, faster=11), finalist(1, 9.9, slower=9, faster=10, gpu="b")])
    assert close == [
        "all steps slower alike: number 1 would win",
        "all steps faster alike: the winner stays the winner",
        "the winner's GPU slower and another's faster: number 1 (b) could win",
    ]
    assert robustness([finalist(0, 1.0)]) == []


@pytest.mark.parametrize(
    ("scores", "times"),
    [
        ({"a": {"a": 4.0, "b": 1.0}, "b": {"a": 2.0, "b": 2.0}}, {"a": {"a": 1.0, "b": 2.0}, "b": {"a": 2.0, "b": 1.0}}),
        ({"a": {"a": -4.0, "b": -3.0}, "b": {"a": None, "b": -2.0}}, {"a": {"a": 1.0, "b": 1.5}, "b": {"a": None, "b": 1.0}}),
    ],
)
def test_what_one_workloads_best_costs_under_another(scores: Any, times: Any) -> None:
    assert losses(scores) == times


def test_how_they_ended_in_words() -> None:
    assert summary_line([done(0, "a", 1, 1), beaten(1, "a", 1, 1), beaten(2, "a", 1, 1)]) == "1 measured, 2 rejected as worse"
