"""The yardsticks of live scaling: the vectors of the specification, an independent search, and how near the schedules come."""

import random
import sys
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ConfigError
from squall.sim.zigzag import Case, Schedule, best_effort, evenly, follow, optimum, stop_the_world, zigzag
from squall.sim.zigzag_ilp import paper_ilp


def test_seven_batches_of_seven_layers() -> None:
    case = evenly(7, 7, 6)
    assert stop_the_world(case).ends == (7, 14, 21, 28, 35, 42, 49)
    assert stop_the_world(case).average == 28.0
    assert best_effort(case).ends == (7, 12, 17, 21, 25, 29, 33)
    assert round(best_effort(case).average, 2) == 20.57
    assert zigzag(case).ends == (7, 12, 17, 21, 24, 27, 29)
    assert round(zigzag(case).average, 2) == 19.57
    assert zigzag(case).splits == ((1, 6), (2, 5), (2, 5), (3, 4), (4, 3), (4, 3), (5, 2))


def test_twelve_batches_of_thirty_two_layers() -> None:
    case = evenly(12, 32, 6)
    figures = [(round(found.average, 1), found.makespan) for found in (stop_the_world(case), best_effort(case), zigzag(case))]
    assert figures == [(208.0, 384), (135.7, 226), (124.7, 200)]


def test_one_batch_never_gains_nor_loses() -> None:
    case = evenly(1, 5, 2)
    assert zigzag(case).ends == best_effort(case).ends == stop_the_world(case).ends == optimum(case).ends == (5,)


def test_the_source_works_alone_until_the_first_layer_is_in() -> None:
    assert zigzag(Case(3, (100, 100, 100))).splits == ((0, 3), (0, 3), (0, 3))
    assert zigzag(Case(3, (4, 4, 4))).ends == (3, 6, 7)  # the third is the target's own; all its layers came at 4


def test_whole_weights_from_the_start_halve_the_work() -> None:
    case = Case(4, (0, 0, 0, 0))
    assert zigzag(case).makespan <= 9
    assert optimum(case).makespan <= 9


def _cases(number: int) -> list[Case]:
    dice = random.Random(20250707)
    cases = []
    for _ in range(number):
        batches, layers = dice.randint(1, 5), dice.randint(2, 6)
        at = [dice.randint(0, 3)]
        for _ in range(layers - 1):
            at.append(at[-1] + dice.randint(0, 8))
        cases.append(Case(batches, tuple(at)))
    return cases


def test_on_a_thousand_cases_no_schedule_beats_the_optimum_and_zigzag_is_near_it() -> None:
    ratios = []
    for case in _cases(1000):
        best = optimum(case).average
        assert best <= min(zigzag(case).average, best_effort(case).average, stop_the_world(case).average)
        ratios.append(zigzag(case).average / best)
    assert sum(ratios) / len(ratios) < 1.05


def _brute_force(case: Case) -> int:
    """The least sum of ends, found without any of the search's shortcuts: either may be idle, and batches have names."""
    layers = case.num_layers

    @cache
    def least(done: tuple[int, ...], busy: int, now: int) -> float:
        batches = range(len(done))
        if all(had == layers for had in done):
            return 0
        if now > 4 * layers * len(done):
            return float("inf")
        best = float("inf")
        for pulled in [None, *(b for b in batches if done[b] < layers)] if not busy else [None]:
            after, left, price = list(done), busy, 0
            if pulled is not None:
                left = layers - done[pulled]
                price, after[pulled] = now + left, layers
            ready = sum(at <= now for at in case.arrivals)
            for runs in [None, *(b for b in batches if after[b] < ready)]:
                then, more = list(after), 0
                if runs is not None:
                    then[runs] += 1
                    more = now + 1 if then[runs] == layers else 0
                best = min(best, price + more + least(tuple(then), max(left - 1, 0), now + 1))
        return best

    return int(least((0,) * case.num_batches, 0, 0))


@pytest.mark.parametrize(
    "case",
    [evenly(2, 3, 2), evenly(3, 2, 2), evenly(3, 3, 1), Case(3, (1, 2, 5)), Case(2, (0, 0, 9, 9)), Case(4, (2, 3))],
    ids=str,
)
def test_the_optimum_is_that_of_a_search_without_shortcuts(case: Case) -> None:
    assert sum(optimum(case).ends) == _brute_force(case)


@given(st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_every_schedule_keeps_the_rules(batches: int, gaps: list[int]) -> None:
    case = Case(batches, tuple(sum(gaps[: layer + 1]) for layer in range(len(gaps))))
    for schedule in (zigzag(case), best_effort(case)):
        assert [sum(split) for split in schedule.splits] == [case.num_layers] * batches
        for end, (had, _) in zip(schedule.ends, schedule.splits, strict=True):
            assert end >= case.num_layers
            assert not had or end > case.arrivals[had - 1]
        assert schedule.makespan <= stop_the_world(case).makespan + 1
    assert follow(case, stop_the_world(case).splits) == stop_the_world(case)


def test_splits_of_a_schedule_can_be_followed() -> None:
    case = evenly(7, 7, 6)
    assert follow(case, zigzag(case).splits).average <= zigzag(case).average
    with pytest.raises(ConfigError, match="splits must be 7 pairs that share 7 layers"):
        follow(case, ((1, 6),))


@pytest.mark.parametrize(
    ("batches", "arrivals", "what"), [(0, (0,), "num_batches"), (1, (), "arrivals"), (1, (3, 2), "arrivals")]
)
def test_a_case_that_cannot_be_is_refused(batches: int, arrivals: tuple[int, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Case(batches, arrivals)


# -- the paper's program


def test_the_papers_program_keeps_its_own_constraints() -> None:
    pytest.importorskip("scipy", reason="the ILP is solved by scipy")
    for batches, layers, every in ((7, 7, 6), (12, 32, 6), (5, 8, 2), (1, 4, 3)):
        splits = paper_ilp(batches, layers, every).splits
        target, source = [had for had, _ in splits], [left for _, left in splits]
        assert target[0] == 1
        for i in range(1, batches):
            assert sum(target[: i + 1]) <= sum(source[:i])
            assert every * (target[i] - 1) <= sum(target[:i]) + (batches - i) * (target[i] - 1)


def test_the_papers_program_is_no_bound_of_the_discrete_model() -> None:
    pytest.importorskip("scipy", reason="the ILP is solved by scipy")
    case, found = evenly(7, 7, 6), paper_ilp(7, 7, 6)
    assert found.average < optimum(case).average  # it counts on layers before they are in
    played = follow(case, found.splits)
    assert played.average >= optimum(case).average


def test_without_scipy_the_papers_program_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"needs scipy: pip install 'squall\[ilp\]'"):
        paper_ilp(2, 2, 2)


def test_averages_are_of_all_batches() -> None:
    assert Schedule((1, 2, 6), ()).average == 3
