from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ConfigError, TraceError
from squall.workload.generators import draw_arrivals, draw_lengths
from squall.workload.spec import (
    Arrivals,
    BurstArrivals,
    EmpiricalLength,
    FixedArrivals,
    FixedLength,
    GammaArrivals,
    Length,
    LogNormalLength,
    PoissonArrivals,
    UniformLength,
)

SECOND = 1_000_000_000
NOWHERE = Path("nowhere")
ARRIVALS: list[Arrivals] = [
    FixedArrivals(7.0),
    PoissonArrivals(7.0),
    GammaArrivals(7.0, cv=3.0),
    BurstArrivals(5.0, burst_rps=50.0, burst_s=2.0, period_s=10.0),
]
LENGTHS: list[Length] = [FixedLength(9), UniformLength(3, 900), LogNormalLength(200, 1.2, low=5, high=1000)]


def gaps_s(times: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff(np.array([0, *times])) / SECOND


def test_a_fixed_rate_is_exact_and_starts_at_once() -> None:
    assert draw_arrivals(FixedArrivals(3.0), 0, 4, None) == [0, 333_333_333, 666_666_667, SECOND]
    assert draw_arrivals(FixedArrivals(3.0), 0, 30_001, None)[-1] == 10_000 * SECOND


@pytest.mark.parametrize(
    ("arrivals", "cv"), [(PoissonArrivals(20.0), 1.0), (GammaArrivals(20.0, 0.5), 0.5), (GammaArrivals(20.0, 3.0), 3.0)]
)
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(arrivals: Arrivals, cv: float) -> None:
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


@given(
    arrivals=st.sampled_from(ARRIVALS),
    seed=st.integers(0, 1 << 40),
    few=st.integers(1, 50),
    more=st.integers(0, 5_000),
    limit=st.floats(0.1, 60),
)
def test_arrivals_ascend_and_do_not_depend_on_how_many_are_drawn(
    arrivals: Arrivals, seed: int, few: int, more: int, limit: float
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


def test_empirical_lengths_are_drawn_from_the_column(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("a,tokens\nx,5\ny,7.0\nz,9\n")
    drawn = draw_lengths(EmpiricalLength("lengths.csv", "tokens"), 0, "prompt", 300, tmp_path)
    assert set(drawn) == {5, 7, 9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"has no column 'tokens'; it has a, b"),
        ("", r"has no column 'tokens'; it has no header"),
        ("tokens\n", r"has a header but no rows"),
        ("a,tokens\n1,5\n2,many\n", r"line 3: tokens is 'many'; it must be a whole number of at least 1"),
        ("a,tokens\n1,5\n2,0\n", r"line 3: tokens is '0'"),
        ("a,tokens\n1,5\n2\n", r"line 3: tokens is None"),
        ("a,tokens\n1,inf\n", r"line 2: tokens is 'inf'"),
    ],
)
def test_a_bad_column_is_named_by_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(TraceError, match=rf"lengths.csv:? {message}"):
        draw_lengths(EmpiricalLength("lengths.csv", "tokens"), 0, "prompt", 3, tmp_path)


def test_a_missing_file_and_a_negative_seed_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none.csv: cannot be read"):
        draw_lengths(EmpiricalLength("none.csv", "tokens"), 0, "prompt", 3, tmp_path)
    with pytest.raises(ConfigError, match=r"run.seed is -1"):
        draw_arrivals(PoissonArrivals(1.0), -1, 3, None)
