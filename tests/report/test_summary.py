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


def quantile(metric: str, slo: Slo, *rows: RequestRow, gaps: Gaps | None = None) -> tuple[float | None, bool]:
    [found] = summary(*rows, slo=slo, gaps=gaps).slo_quantiles
    assert found.name == metric
    return found.reached_s, found.met


def test_a_promised_quantile_is_kept_by_that_share_of_all_requests() -> None:
    ten = [row(i, ttft=(i + 1) * SECOND) for i in range(10)]
    assert quantile("ttft_p90_s", Slo(ttft_p90_s=9.0), *ten) == (9.0, True)
    assert quantile("ttft_p90_s", Slo(ttft_p90_s=8.99), *ten) == (9.0, False)
    assert quantile("ttft_p99_s", Slo(ttft_p99_s=9.99), *ten) == (10.0, False)
    assert quantile("queue_p50_s", Slo(queue_p50_s=1.25), *ten) == (1.25, True)
    assert quantile("e2e_p50_s", Slo(e2e_p50_s=5.0), *ten) == (5.0, True)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REJECTED, Outcome.UNFINISHED, Outcome.CANCELLED])
def test_who_never_got_there_is_beyond_any_quantile(outcome: Outcome) -> None:
    never = RequestRow(1, 0, num_prompt_tokens=10, outcome=outcome)
    assert quantile("ttft_p50_s", Slo(ttft_p50_s=1.0), row(0), never) == (1.0, True)
    assert quantile("ttft_p90_s", Slo(ttft_p90_s=100.0), row(0), never) == (None, False)
    assert quantile("e2e_p90_s", Slo(e2e_p90_s=100.0), row(0), row(1, outcome)) == (None, False)


def test_quantiles_of_gaps_pool_them_and_one_token_keeps_any_tpot() -> None:
    gaps = Gaps()
    gaps.add_run(weight=98, count=1, first=16 * MILLISECOND, increment=0)
    gaps.add(3 * MILLISECOND, weight=2)
    assert quantile("tbt_p90_s", Slo(tbt_p90_s=0.001), row(0, tokens=3), gaps=gaps) == (0.001, True)
    assert quantile("tbt_p99_s", Slo(tbt_p99_s=0.001), row(0, tokens=3), gaps=gaps) == (0.003, False)
    slow = row(1, tpot=SECOND, tokens=3)
    assert quantile("tpot_p50_s", Slo(tpot_p50_s=0.1), row(0), slow) == (0.0, True)
    assert quantile("tpot_p99_s", Slo(tpot_p99_s=0.1), row(0), slow) == (1.0, False)


def test_a_service_keeps_its_word_when_it_keeps_all_of_it() -> None:
    rows = [row(0), row(1), row(2, ttft=3 * SECOND)]
    assert summary(*rows).slo_met is None
    assert summary(*rows, slo=Slo(ttft_s=1.0, attainment=0.6)).slo_met is True
    assert summary(*rows, slo=Slo(ttft_s=1.0, attainment=0.7)).slo_met is False
    assert summary(*rows, slo=Slo(ttft_s=1.0, attainment=0.6, ttft_p99_s=2.0)).slo_met is False
    assert summary(slo=Slo(ttft_s=1.0)).slo_met is None


def test_goodput_needs_a_promise_to_a_request() -> None:
    only_quantiles = summary(row(0), slo=Slo(ttft_p90_s=2.0))
    assert (only_quantiles.slo_attainment, only_quantiles.goodput_rps, only_quantiles.slo_met) == (None, None, True)


def test_what_a_client_cannot_know_of_a_fleet_costs_nothing_that_could_be_told() -> None:
    seen = record(row(0))
    seen.world = "emulated"
    assert summarise(seen, Slo(), usd_per_gpu_hour=2.5).cost_usd == 5.0
    seen.gpu_nanos = 0
    assert summarise(seen, Slo(), usd_per_gpu_hour=2.5).cost_usd is None
