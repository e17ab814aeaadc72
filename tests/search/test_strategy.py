"""Every strategy finds what trying everything finds; the careful ones simulate far less; nothing depends on who works."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest

from squall.errors import ConfigError
from squall.search.evaluate import evaluate
from squall.search.inquiry import Candidate, Inquiry
from squall.search.pool import Inline, Processes
from squall.search.result import Job, Result
from squall.search.sampler import sampled
from squall.search.setting import Workshop
from squall.search.space import choices, dimensions
from squall.search.spec import Search
from squall.search.store import Store
from squall.search.strategy import exhaustive, halving, ranked, thorough
from tests.search.conftest import SPACE, question, tree

SPACES: list[dict[str, Any]] = [
    SPACE,
    {
        "cluster.gpu": ["a100-80g", "l40s", "h100-sxm"],
        "batching.max_num_batched_tokens": [512, 8192],
        "replica.kv_dtype": {"values": ["auto", "fp8"], "when": {"cluster.gpu": "l40s"}},
        "batching.max_num_seqs": {"from": 8, "to": 128, "factor": 4},
    },
]


def inquiry(search: Search, base: dict[str, Any] | None = None) -> Inquiry:
    workshop = Workshop(search)
    return Inquiry(search, base or tree(), workshop, Inline(workshop), Store(None), "code")


def survey(found: Inquiry) -> list[Candidate]:
    return found.survey(choices(dimensions(found.search.space), found.search, found.tree))


def everything(search: Search, base: dict[str, Any] | None = None) -> tuple[list[Result], int]:
    """All capacities, and the token-steps that they took."""
    found = inquiry(search, base)
    results = found.ask(survey(found), None)
    return ranked(results), found.token_steps


@pytest.mark.parametrize("space", SPACES)
def test_exhaustive_search_finds_the_best_with_a_part_of_the_work(space: dict[str, Any]) -> None:
    search = question(space=space, top=1)
    best, all_of_it = everything(search)
    found = inquiry(search)
    results = exhaustive(found, survey(found), 1)
    assert len(results) == len(found.results)
    assert ranked(results)[0].score == best[0].score
    assert found.token_steps < 0.6 * all_of_it
    for result in results:  # what is said of the others is true
        truth = next(other for other in best if other.number == result.number)
        assert result.score_at_most is not None
        assert truth.score is not None
        assert truth.score <= result.score_at_most * 1.03


POLICIES: dict[str, Any] = {
    "batching": [
        {"kind": kind, "max_num_seqs": seqs}
        for kind in ("vllm", "sarathi", "vllm_v0", "orca", "faster_transformer", "lightllm", "blitz")
        for seqs in (16, 64)
    ],
}


def test_of_all_policies_the_best_is_found_though_a_short_sample_says_who_comes_first() -> None:
    search = question(space=POLICIES, top=2, num_requests=120, warm_up=12)
    base = tree()
    base["workload"]["num_requests"] = 120
    best, all_of_it = everything(search, base)
    found = inquiry(search, base)
    results = thorough(found, list(choices(dimensions(POLICIES), search, base)))
    assert len(results) == len(found.results) == 14
    assert [result.score for result in ranked(results)[:2]] == [result.score for result in best[:2]]
    assert found.token_steps < 0.8 * all_of_it  # of so few configurations


def test_those_that_are_looked_into_first_change_no_answer() -> None:
    search = question(top=1)
    found, other = inquiry(search), inquiry(search)
    candidates = survey(found)
    first = exhaustive(found, candidates, 1)
    last = min(candidates, key=lambda candidate: candidate.ceiling)
    assert ranked(exhaustive(other, survey(other), 1, leaders=[last]))[0].score == ranked(first)[0].score


def test_who_is_rejected_by_a_bound_is_known_by_what_it_costs() -> None:
    found = inquiry(question(top=1))
    bound = [result for result in exhaustive(found, survey(found), 1) if result.probes == 0]
    assert bound
    for result in bound:
        assert (result.gpu, result.usd_per_gpu_hour) in (("a100-80g", 2.29), ("h100-sxm", 2.95))
        assert result.num_gpus == result.choice["replica.tp"]


@pytest.mark.parametrize("space", SPACES)
def test_so_do_halving_and_the_sampler(space: dict[str, Any]) -> None:
    search = question(space=space, top=1, trials=12, round=6)
    best, _ = everything(search)
    halved = inquiry(search)
    assert ranked(halving(halved, list(choices(dimensions(space), search, halved.tree))))[0].score == best[0].score
    assert len(halved.results) == len(best)
    pytest.importorskip("optuna", reason="the sampler is an extra: pip install 'squall[search]'")
    assert ranked(sampled(inquiry(search), dimensions(space), 0))[0].score == best[0].score


def test_the_sampler_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("squall.search.sampler.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"needs optuna.*squall\[search\]"):
        sampled(inquiry(question()), dimensions(SPACE), 0)


def test_a_fleet_that_is_too_small_rejects_smaller_ones() -> None:
    search = question(objective="usd", space={"fleet.replicas": [1, 2, 3, 4, 16]}, top=1, round=1)
    base = tree()
    base["workload"]["arrivals"]["rate_rps"] = 20.0
    found = inquiry(search, base | {"cluster": {"gpu": "a100-80g", "nodes": 4}})
    results = exhaustive(found, survey(found), 1)
    statuses = {result.choice["fleet.replicas"]: result.status for result in results}
    best, _ = everything(search, found.tree)
    assert ranked(results)[0].choice == best[0].choice
    assert statuses[1] == "infeasible"
    assert "outbid" in statuses.values()  # larger ones cost more, for certain


def without_work(results: Iterable[Result]) -> bytes:
    return msgspec.json.encode(sorted(results, key=lambda result: result.number))


def test_the_answer_does_not_depend_on_the_number_of_workers() -> None:
    search = question(round=4)
    alone = inquiry(search)
    exhaustive(alone, survey(alone), 2)
    pool = Processes(search, 2)
    try:
        several = Inquiry(search, tree(), Workshop(search), pool, Store(None), "code")
        exhaustive(several, survey(several), 2)
    finally:
        pool.close()
    assert without_work(several.results.values()) == without_work(alone.results.values())


class Backwards:
    """Results come in another order than they were asked for."""

    def __init__(self, search: Search) -> None:
        self._workshop = Workshop(search)

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        for job in list(jobs)[::-1]:
            yield evaluate(self._workshop, job)

    def close(self) -> None:
        pass


def test_nor_on_the_order_in_which_they_are_done() -> None:
    search = question(round=4)
    one, other = inquiry(search), Inquiry(search, tree(), Workshop(search), Backwards(search), Store(None), "code")
    for found in (one, other):
        exhaustive(found, survey(found), 2)
    assert without_work(one.results.values()) == without_work(other.results.values())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"space": {"replica.tpp": [1, 2]}}, "none of the 2 configurations can be run.*no key 'tpp'"),
        ({"space": {"cluster.gpu": ["h1000"]}}, "cluster.gpu 'h1000' is unknown"),
        ({"exclude": ({"replica.tp": [1, 2]},)}, "search.exclude leaves no combination"),
    ],
)
def test_a_space_of_which_nothing_can_be_run_is_one_line(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        survey(inquiry(question(**asked)))
    assert "\n" not in str(error.value)


def test_a_key_that_only_some_combinations_have_but_none_knows_is_a_mistake() -> None:
    space = {"cluster.gpu": ["a100", "h100"], "batching.chunkiness": {"values": [1], "when": {"cluster.gpu": "h100"}}}
    with pytest.raises(ConfigError, match=r"search.space: batching.chunkiness: .*no key 'chunkiness'"):
        survey(inquiry(question(space=space)))


def test_what_cannot_be_run_is_kept_with_its_reason() -> None:
    told: list[Result] = []
    search = question(space={"replica.tp": [1, 3]})
    workshop = Workshop(search)
    tell: Callable[[Result], None] = told.append
    found = Inquiry(search, tree(), workshop, Inline(workshop), Store(None), "code", tell)
    assert [candidate.job.choice for candidate in survey(found)] == [{"replica.tp": 1}]
    assert [(result.status, result.choice) for result in told] == [("invalid", {"replica.tp": 3})]
