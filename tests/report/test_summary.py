"""What the numbers of a summary mean, on runs small enough to work out by hand."""

import msgspec
import pytest

from squall.config import Slo
from squall.core.metrics import Gaps, Outcome, RequestRow, RunRecord
from squall.core.types import MILLISECOND, SECOND, Nanos
from squall.report.summary import Summary, summarise


def row(
    request: int,
    outcome: Outcome = Outcome.COMPLETED,
    *,
    arrived: Nanos = 0,
    ttft: Nanos = SECOND,
    tpot: Nanos = 0,
    tokens: int = 1,
) -> RequestRow:
    """A request that waited a quarter of its TTFT and then ran evenly."""
    first = arrived + ttft
    return RequestRow(
        request, arrived, num_prompt_tokens=10, num_output_tokens=tokens, scheduled_at=arrived + ttft // 4,
        first_token_at=first, finished_at=first + (tokens - 1) * tpot, outcome=outcome,
    )  # fmt: skip


def record(*rows: RequestRow, ended_at: Nanos = 10 * SECOND, gaps: Gaps | None = None) -> RunRecord:
    return RunRecord("simulated", list(rows), gaps or Gaps(), ended_at, num_steps=3, num_events=7, gpu_nanos=2 * 3600 * SECOND)


def summary(*rows: RequestRow, slo: Slo | None = None, gaps: Gaps | None = None) -> Summary:
    return summarise(record(*rows, gaps=gaps), slo or Slo(), usd_per_gpu_hour=2.5)


def test_times_count_from_arrival_and_tpot_leaves_the_first_token_out() -> None:
    one = summary(row(0, arrived=3 * SECOND, ttft=2 * SECOND, tpot=100 * MILLISECOND, tokens=11))
    assert one.ttft_s is not None
    assert one.tpot_s is not None
    assert one.e2e_s is not None
    assert one.queue_s is not None
    assert (one.queue_s.mean, one.ttft_s.mean, one.tpot_s.mean, one.e2e_s.mean) == (0.5, 2.0, 0.1, 3.0)


def test_rates_are_over_the_makespan() -> None:
    two = summary(row(0, tokens=30), row(1, tokens=20), row(2, Outcome.FAILED, tokens=5))
    assert (two.throughput_rps, two.output_tokens_per_s) == (0.2, 5.5)


def test_one_token_has_no_tpot_but_several_have_and_nothing_measured_is_none() -> None:
    assert summary(row(0, tokens=1)).tpot_s is None
    both = summary(row(0, tokens=1), row(1, tokens=3, tpot=SECOND))
    assert both.tpot_s is not None
    assert both.tpot_s.mean == both.tpot_s.max == 1.0
    nothing = summarise(RunRecord("simulated", [], Gaps()), Slo(ttft_s=1), None)
    assert (nothing.ttft_s, nothing.tbt_s, nothing.e2e_s, nothing.slo_attainment, nothing.throughput_rps) == (
        None,
        None,
        None,
        None,
        0.0,
    )


def test_tbt_pools_all_gaps_of_all_requests() -> None:
    gaps = Gaps()
    gaps.add_run(weight=98, count=1, first=16 * MILLISECOND, increment=0)
    gaps.add(3 * MILLISECOND, weight=2)
    pooled = summary(row(0, tokens=3), gaps=gaps).tbt_s
    assert pooled is not None
    assert (pooled.p50, pooled.max) == (0.001, 0.003)
    assert pooled.mean == pytest.approx(0.00104)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REJECTED, Outcome.UNFINISHED, Outcome.CANCELLED])
def test_whatever_does_not_complete_violates_the_slo(outcome: Outcome) -> None:
    half = summary(row(0), row(1, outcome), slo=Slo(ttft_s=1.0))
    assert (half.slo_attainment, half.goodput_rps) == (0.5, 0.1)
    assert half.completed == 1


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft_s=1.0), True),
        (Slo(ttft_s=0.999), False),
        (Slo(tbt_s=0.1), True),
        (Slo(tbt_s=0.099), False),
        (Slo(e2e_s=2.0), True),
        (Slo(e2e_s=1.999), False),
        (Slo(ttft_s=1.0, tbt_s=0.1, e2e_s=1.9), False),
    ],
)
def test_a_request_meets_the_slo_when_it_is_within_every_objective(slo: Slo, met: bool) -> None:
    assert summary(row(0, ttft=SECOND, tpot=100 * MILLISECOND, tokens=11), slo=slo).slo_attainment == float(met)


def test_one_token_meets_any_tbt_objective() -> None:
    assert summary(row(0, tokens=1), slo=Slo(tbt_s=1e-9)).slo_attainment == 1.0


def test_without_objectives_there_is_no_attainment() -> None:
    assert (summary(row(0)).slo_attainment, summary(row(0)).goodput_rps) == (None, None)


def test_a_price_makes_a_cost_and_no_price_makes_none() -> None:
    assert summary(row(0)).cost_usd == 5.0
    assert summarise(record(row(0)), Slo(), None).cost_usd is None


def test_what_a_client_cannot_see_is_unknown() -> None:
    seen = summary(row(0))
    assert (seen.preemptions, seen.num_steps, seen.num_events) == (0, 3, 7)
    measured = summarise(RunRecord("real", [row(0)], Gaps(), 10 * SECOND), Slo(), None)
    assert (measured.preemptions, measured.num_steps, measured.num_events) == (None, None, None)


def test_a_summary_has_the_promised_keys() -> None:
    promised = """
        world requests completed failed rejected makespan_s throughput_rps output_tokens_per_s ttft_s tbt_s tpot_s e2e_s queue_s
        slo_attainment goodput_rps gpu_seconds cost_usd
        scale_ups scale_downs preemptions num_steps num_events wall_s latency_source
    """
    found = msgspec.to_builtins(summary(row(0, tokens=2)))
    assert set(promised.split()) <= set(found)
    assert set(found["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
