"""When a simulation may end early, and that its verdict is the same as that of a whole one."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.config import Config, Slo
from squall.core.metrics import Outcome, RunRecord
from squall.core.types import MILLISECOND, SECOND
from squall.policies.batching import Vllm
from squall.search.curves import curves
from squall.search.sample import Sample, sample_of
from squall.search.spec import Limit
from squall.search.watch import Decided, Verdict, Watch
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

CONFIG = Config(batching=Vllm(4, 64))
STEPS = Linear(fixed=16 * MILLISECOND, token=16 * 10_000, context=16 * 50)

LIMITS = st.lists(
    st.builds(
        Limit,
        st.sampled_from(["ttft", "tbt", "tpot", "e2e", "queue"]),
        st.sampled_from([0.5, 0.9, 0.99, 1.0]),
        st.integers(1, 3_000).map(lambda value: value * MILLISECOND),
    ),
    min_size=1,
    max_size=3,
)


def sample(count: int, gap_ms: float, output: int = 12) -> Sample:
    return sample_of(
        [OfferedRequest(i, round(i * gap_ms * MILLISECOND), 40 + 13 * (i % 7), output + i % 5) for i in range(count)]
    )


def play(limits: list[Limit], sample: Sample, slo: Slo = Slo(), **how: bool) -> tuple[Verdict, RunRecord | None]:  # noqa: B008
    watch = Watch(limits, slo, sample, 5, **how)
    record = None
    with suppress(Decided):
        record = simulate(CONFIG, list(sample.requests), STEPS, 60, watch=watch)
    return watch.verdict(), record


@settings(deadline=None, max_examples=60)
@given(LIMITS, st.sampled_from([1.0, 6.0, 15.0, 60.0]))
def test_an_early_verdict_is_that_of_a_whole_run(limits: list[Limit], gap_ms: float) -> None:
    offered = sample(120, gap_ms)
    early, _ = play(limits, offered)
    whole, record = play(limits, offered, early=False)
    assert record is not None
    assert early.passed == whole.passed
    assert early.token_steps <= whole.token_steps
    measured = curves(record, 5, offered.num_gaps)
    kept = [measured.at(limit.metric, limit.quantile) for limit in limits]
    assert whole.passed == all(
        value is None or value * SECOND <= limit.limit + 1000 for value, limit in zip(kept, limits, strict=True)
    )  # fmt: skip


def test_a_hopeless_run_ends_long_before_its_end() -> None:
    offered = sample(400, 1.0)
    limits = [Limit("ttft", 0.9, 50 * MILLISECOND)]
    verdict, record = play(limits, offered)
    whole, _ = play(limits, offered, early=False)
    assert record is None
    assert (verdict.passed, verdict.binding) == (False, "ttft_p90")
    assert verdict.token_steps < 0.4 * whole.token_steps


def test_a_run_that_cannot_fail_any_more_ends_too() -> None:
    offered = sample(400, 60.0)
    limits = [Limit("ttft", 0.5, 10 * SECOND)]
    verdict, record = play(limits, offered)
    assert record is None
    assert verdict.passed
    assert verdict.ended_at < 0.7 * 400 * 60 * MILLISECOND
    assert play(limits, offered, to_the_end=True)[1] is not None


def test_refused_requests_are_outside_of_every_limit() -> None:
    offered = sample_of([OfferedRequest(i, i * SECOND, 40 if i % 2 else 4_000, 3) for i in range(40)])
    for metric in ("ttft", "tpot", "e2e", "queue"):
        verdict, record = play([Limit(metric, 0.6, 100 * SECOND)], offered, early=False)
        assert record is not None
        assert {row.outcome for row in record.requests} == {Outcome.COMPLETED, Outcome.REJECTED}
        assert not verdict.passed
        assert play([Limit(metric, 0.5, 100 * SECOND)], offered)[0].passed


@pytest.mark.parametrize(("tbt_s", "passed"), [(0.001, False), (1.0, True)])
def test_objectives_without_a_quantile_hold_together(tbt_s: float, passed: bool) -> None:
    slo = Slo(ttft_s=5.0, tbt_s=tbt_s, e2e_s=30.0, attainment=0.9)
    verdict, record = play([Limit("slo", 0.9, 1)], sample(60, 30.0), slo, early=False)
    assert record is not None
    assert verdict.passed == passed
    assert verdict.binding == ("" if passed else "slo_p90")


def test_waiting_requests_are_judged_by_what_happens_to_them() -> None:
    """Nobody knows when they arrive, so no time that passes before can be held against them."""
    chain = [OfferedRequest(0, 0, 20, 5)]
    chain += [OfferedRequest(i, i, 20, 5, session=1, after=i - 1, think=SECOND) for i in range(1, 40)]
    verdict, _ = play([Limit("ttft", 1.0, 500 * MILLISECOND)], sample_of(chain))
    assert verdict.passed


def test_curves_know_what_never_came() -> None:
    offered = sample_of([OfferedRequest(i, i * SECOND, 4_000 if i == 9 else 40, 3) for i in range(10)])
    _, record = play([], offered, early=False)
    assert record is not None
    found = curves(record, 0, offered.num_gaps)
    assert found.at("ttft", 0.9) == pytest.approx(0.0014, abs=1e-6)  # a step of a millisecond and forty tokens
    assert found.at("ttft", 0.91) == float("inf")
    assert found.at("tbt", 0.95) == float("inf")
    assert found.at("e2e", 0.5) is not None
