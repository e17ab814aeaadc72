from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ConfigError, TraceError
from squall.workload import generators
from squall.workload.generators import draw_arrivals, draw_lengths
from squall.workload.spec import (
    AllAtOnce,
    BurstArrivals,
    EmpiricalLength,
    FixedArrivals,
    FixedLength,
    GammaArrivals,
    Length,
    LogNormalLength,
    MarkovArrivals,
    OpenArrivals,
    PoissonArrivals,
    QuantileLength,
    RateSeries,
    TraceArrivals,
    UniformLength,
    ZipfLength,
)

SECOND = 1_000_000_000
NOWHERE = Path("nowhere")
ARRIVALS: list[OpenArrivals] = [
    FixedArrivals(7.0),
    PoissonArrivals(7.0),
    GammaArrivals(7.0, cv=3.0),
    BurstArrivals(5.0, burst_rps=50.0, burst_s=2.0, period_s=10.0),
    MarkovArrivals((2.0, 0.0, 60.0), (5.0, 1.0, 0.5)),
    RateSeries(tuple(float(n % 7) for n in range(20_000)), step_s=2.0),
    AllAtOnce(),
]
LENGTHS: list[Length] = [
    FixedLength(9),
    UniformLength(3, 900),
    LogNormalLength(200, 1.2, low=5, high=1000),
    ZipfLength(1, 2000),
    QuantileLength((0.0, 0.5, 1.0), (1, 100, 5000)),
]


def gaps_s(times: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff(np.array([0, *times])) / SECOND


def test_a_fixed_rate_is_exact_and_starts_at_once() -> None:
    assert draw_arrivals(FixedArrivals(3.0), 0, 4, None) == [0, 333_333_333, 666_666_667, SECOND]
    assert draw_arrivals(FixedArrivals(3.0), 0, 30_001, None)[-1] == 10_000 * SECOND


@pytest.mark.parametrize(
    "arrivals", [FixedArrivals(1e-300), FixedArrivals(5e-324), PoissonArrivals(1e-300), PoissonArrivals(5e-324),
                 BurstArrivals(0.0, 1e-12, 1.0, 2.0), RateSeries((1e-9, 1e-9, 1e-9), step_s=9e9)]
)  # fmt: skip
def test_arrivals_that_no_clock_can_tell_are_refused(arrivals: OpenArrivals) -> None:
    with pytest.raises(TraceError, match="more than 9000000000 seconds"):
        draw_arrivals(arrivals, 0, 20, None)


def test_late_arrivals_that_nobody_asked_for_are_no_mistake() -> None:
    assert draw_arrivals(FixedArrivals(2.0**-29), 0, 3, None) == [
        0,
        SECOND << 29,
        SECOND << 30,
    ]  # ten thousand more would be too many
    assert draw_arrivals(FixedArrivals(1e-300), 0, None, 60.0) == [0]
    assert draw_arrivals(FixedArrivals(1e-9), 0, 0, None) == []


@pytest.mark.parametrize(
    ("arrivals", "cv"), [(PoissonArrivals(20.0), 1.0), (GammaArrivals(20.0, 0.5), 0.5), (GammaArrivals(20.0, 3.0), 3.0)]
)
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(arrivals: OpenArrivals, cv: float) -> None:
    gaps = gaps_s(draw_arrivals(arrivals, 1, 40_000, None))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_bursts_come_at_the_end_of_every_period_at_their_own_rate() -> None:
    times = np.array(draw_arrivals(BurstArrivals(5.0, burst_rps=100.0, burst_s=2.0, period_s=10.0), 2, None, 1000.0)) / SECOND
    within = times % 10
    assert (within < 8).sum() / 800 == pytest.approx(5, rel=0.1)
    assert (within >= 8).sum() / 200 == pytest.approx(100, rel=0.05)


def test_nothing_arrives_between_bursts_when_the_rate_is_zero() -> None:
    times = np.array(draw_arrivals(BurstArrivals(0.0, burst_rps=50.0, burst_s=1.0, period_s=10.0), 2, 2_000, None)) / SECOND
    assert ((times % 10) >= 9).all()
    assert times[-1] == pytest.approx(400, rel=0.1)


def test_an_endless_burst_is_a_poisson_process() -> None:
    gaps = gaps_s(draw_arrivals(BurstArrivals(0.0, burst_rps=20.0, burst_s=10.0, period_s=10.0), 2, 20_000, None))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)


def test_hidden_states_last_as_long_and_are_as_busy_as_was_asked_for() -> None:
    times = np.array(draw_arrivals(MarkovArrivals((1.0, 50.0), (8.0, 2.0)), 3, None, 60_000.0)) / SECOND
    assert len(times) / 60_000 == pytest.approx((1 * 8 + 50 * 2) / 10, rel=0.05)
    counts = np.bincount((times * 10).astype(int), minlength=600_000)
    assert (counts > 1).mean() == pytest.approx(0.2 * 0.96, rel=0.1)  # 5 expected in a tenth of a busy second, 0.1 in a quiet one


def test_a_state_of_rate_zero_is_silent() -> None:
    gaps = gaps_s(draw_arrivals(MarkovArrivals((100.0, 0.0), (1.0, 1.0)), 3, 20_000, None))
    assert gaps.sum() == pytest.approx(400, rel=0.2)
    assert (gaps > 0.3).sum() > 100


@pytest.mark.parametrize(
    ("arrivals", "count", "duration_s"),
    [
        (MarkovArrivals((1e-9, 0.0), (1.0, 1.0)), 10, None),
        (MarkovArrivals((1e-300, 0.0), (1e9, 1.0)), 1, None),
        (MarkovArrivals((5.0, 1.0), (1e-12, 1e-12)), None, 1000.0),
        (MarkovArrivals((5.0, 1.0), (5e-324, 5e-324)), 10, None),
    ],
)
def test_hidden_states_that_would_change_for_ever_are_refused(
    arrivals: OpenArrivals, count: int | None, duration_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators, "MOST_CHANGES", 100_000)
    with pytest.raises(TraceError, match="100,000 changes of state would not bring all requests; raise rates_rps or mean_stay_s"):
        draw_arrivals(arrivals, 1, count, duration_s)


def test_hidden_states_are_followed_no_longer_than_they_are_needed() -> None:
    assert draw_arrivals(MarkovArrivals((1e-12, 0.0), (1.0, 1.0)), 1, None, 1000.0) == []
    slow = draw_arrivals(MarkovArrivals((1.0, 0.5), (0.001, 0.001)), 1, 10, None)  # 4096 of them take millions of changes
    assert slow[-1] / SECOND == pytest.approx(10 / 0.75, rel=1)


@pytest.mark.parametrize("arrivals", [PoissonArrivals(1e9), FixedArrivals(1e9), GammaArrivals(1e8, cv=30.0)])
def test_more_requests_than_anybody_means_are_refused(arrivals: OpenArrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "MOST_REQUESTS", 1_000_000)
    with pytest.raises(TraceError, match="more than 1,000,000 come; lower the rate, or the duration"):
        draw_arrivals(arrivals, 1, None, 1.0)


def test_a_rate_series_has_its_rates_its_pauses_and_its_end() -> None:
    series = RateSeries((20.0, 0.0, 80.0), step_s=100.0, rate_scale=0.5)
    counts = np.bincount((np.array(draw_arrivals(series, 1, None, None)) / SECOND // 100).astype(int))
    assert counts.tolist() == [pytest.approx(1000, rel=0.1), 0, pytest.approx(4000, rel=0.05)]
    assert draw_arrivals(series, 1, 10, None) == draw_arrivals(series, 1, None, None)[:10]
    assert draw_arrivals(RateSeries((0.001,), step_s=0.001), 1, None, None) == []


def test_the_gaps_of_a_rate_series_vary_as_was_asked_for() -> None:
    for cv in (0.5, 3.0):
        gaps = gaps_s(draw_arrivals(RateSeries((20.0,) * 100, step_s=20.0, cv=cv), 1, None, None))
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_rate_series_comes_from_a_column(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("# per ten minutes\nt_s,total_rate_rps\n0,5\n600,0\n# a remark\n1200,2.5\n")
    series = RateSeries(path="rates.csv", column="total_rate_rps", step_s=600.0)
    assert draw_arrivals(series, 1, None, None, tmp_path) == draw_arrivals(RateSeries((5, 0, 2.5), step_s=600.0), 1, None, None)
    (tmp_path / "rates.csv").write_text("t_s,total_rate_rps\n0,5\n600,-1\n")
    with pytest.raises(TraceError, match=r"rates.csv line 3: total_rate_rps is '-1'; it must be a number of 0 or more"):
        draw_arrivals(series, 1, None, None, tmp_path)


def test_a_trace_lends_its_arrival_times(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrived_at_s,num_prompt_tokens,num_output_tokens\n1,5,5\n4,5,5\n")
    assert draw_arrivals(TraceArrivals("trace.csv", rate_scale=2.0), 0, None, None, tmp_path) == [SECOND // 2, 2 * SECOND]
    (tmp_path / "trace.csv").write_text("num_prompt_tokens,num_output_tokens\n5,5\n")
    with pytest.raises(TraceError, match=r"trace.csv: has no arrival times"):
        draw_arrivals(TraceArrivals("trace.csv"), 0, None, None, tmp_path)


def test_all_at_once_is_at_zero() -> None:
    assert draw_arrivals(AllAtOnce(), 0, 10_000, None) == [0] * 10_000


@given(
    arrivals=st.sampled_from(ARRIVALS),
    seed=st.integers(0, 1 << 40),
    few=st.integers(1, 50),
    more=st.integers(0, 5_000),
    limit=st.floats(0.1, 60),
)
def test_arrivals_ascend_and_do_not_depend_on_how_many_are_drawn(
    arrivals: OpenArrivals, seed: int, few: int, more: int, limit: float
) -> None:
    many = draw_arrivals(arrivals, seed, few + more, None)
    assert len(many) == few + more
    assert many == sorted(many)
    assert draw_arrivals(arrivals, seed, few, None) == many[:few]
    assert draw_arrivals(arrivals, seed, few, limit) == [time for time in many[:few] if time < round(limit * SECOND)]


@given(length=st.sampled_from(LENGTHS), seed=st.integers(0, 1 << 40), few=st.integers(1, 50), more=st.integers(0, 2_000))
def test_lengths_do_not_depend_on_how_many_are_drawn(length: Length, seed: int, few: int, more: int) -> None:
    many = draw_lengths(length, seed, "prompt", few + more, NOWHERE)
    assert draw_lengths(length, seed, "prompt", few, NOWHERE) == many[:few]
    assert min(many) >= 1


def test_purposes_and_seeds_have_streams_of_their_own() -> None:
    lengths = [
        draw_lengths(UniformLength(1, 1_000_000), seed, purpose, 20, NOWHERE)
        for seed in (0, 1)
        for purpose in ("prompt", "output")
    ]
    assert all(a != b for i, a in enumerate(lengths) for b in lengths[:i])


def test_lengths_have_the_shape_that_was_asked_for() -> None:
    uniform = draw_lengths(UniformLength(3, 5), 0, "prompt", 3_000, NOWHERE)
    assert {length: uniform.count(length) for length in (3, 4, 5)} == pytest.approx({3: 1000, 4: 1000, 5: 1000}, rel=0.1)
    lognormal = np.array(draw_lengths(LogNormalLength(200, 0.8), 0, "prompt", 20_000, NOWHERE))
    assert np.median(lognormal) == pytest.approx(200, rel=0.03)
    assert np.log(lognormal).std() == pytest.approx(0.8, rel=0.03)
    clipped = draw_lengths(LogNormalLength(200, 3.0, low=50, high=300), 0, "prompt", 1_000, NOWHERE)
    assert (min(clipped), max(clipped)) == (50, 300)


@pytest.mark.parametrize("theta", [0.0, 0.6, 1.0, 2.0])
def test_zipf_lengths_are_as_likely_as_their_rank_says(theta: float) -> None:
    drawn = np.array(draw_lengths(ZipfLength(11, 15, theta), 0, "prompt", 20_000, NOWHERE))
    weights = np.arange(1.0, 6.0) ** -theta
    assert np.bincount(drawn - 11) / 20_000 == pytest.approx(weights / weights.sum(), abs=0.012)


def test_quantiles_come_out_and_so_does_the_mean_between_them() -> None:
    drawn = np.array(draw_lengths(QuantileLength((0, 0.5, 0.9, 1), (10, 100, 1000, 4000)), 0, "prompt", 40_000, NOWHERE))
    assert np.quantile(drawn, [0, 0.5, 0.9, 1]) == pytest.approx([10, 100, 1000, 4000], rel=0.05)
    mean = 0.5 * 90 / np.log(10) + 0.4 * 900 / np.log(10) + 0.1 * 3000 / np.log(4)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)


def test_empirical_lengths_are_drawn_from_the_column(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("a,tokens\nx,5\ny,7.0\nz,9\n")
    drawn = draw_lengths(EmpiricalLength("lengths.csv", "tokens"), 0, "prompt", 300, tmp_path)
    assert set(drawn) == {5, 7, 9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"has no column 'tokens'; it has a, b"),
        ("", r"is empty; it must begin with a header line"),
        ("version https://git-lfs.github.com/spec/v1\n", r"is a git-lfs pointer"),
        ("tokens,a,tokens\n1,2,3\n", r"has several columns tokens"),
        ("tokens\n", r"has a header but no rows"),
        ("a,tokens\n1,5\n2,many\n", r"line 3: tokens is 'many'; it must be a whole number of at least 1 and at most"),
        ("a,tokens\n1,5\n2,0\n", r"line 3: tokens is '0'"),
        ("a,tokens\n1,5\n2\n", r"line 3: tokens is None"),
        ("a,tokens\n1,inf\n", r"line 2: tokens is 'inf'"),
    ],
)
def test_a_bad_column_is_named_by_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(TraceError, match=rf"lengths.csv:? {message}"):
        draw_lengths(EmpiricalLength("lengths.csv", "tokens"), 0, "prompt", 3, tmp_path)


def test_a_column_may_be_of_any_kind_of_file_that_a_trace_may_be(tmp_path: Path) -> None:
    (tmp_path / "lengths.jsonl").write_text('{"tokens": 5}\n{"tokens": 7.0}\n')
    polars.DataFrame({"tokens": [5, 7]}).write_parquet(tmp_path / "lengths.parquet")
    for name in ("lengths.jsonl", "lengths.parquet"):
        assert set(draw_lengths(EmpiricalLength(name, "tokens"), 0, "prompt", 30, tmp_path)) == {5, 7}
    (tmp_path / "lengths.jsonl").write_text('{"tokens": 5}\n{"a": 5}\n')
    with pytest.raises(TraceError, match=r"lengths.jsonl line 2: tokens is None; it must be"):
        draw_lengths(EmpiricalLength("lengths.jsonl", "tokens"), 0, "prompt", 3, tmp_path)


def test_a_missing_file_and_a_negative_seed_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none.csv: no such file; paths in \[workload\] are relative to"):
        draw_lengths(EmpiricalLength("none.csv", "tokens"), 0, "prompt", 3, tmp_path)
    with pytest.raises(ConfigError, match=r"run.seed is -1"):
        draw_arrivals(PoissonArrivals(1.0), -1, 3, None)
