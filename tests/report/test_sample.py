"""Percentiles agree with those of the sample written out in full."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.core.metrics import Gaps
from squall.report.sample import Distribution, Sample, sample_of_gaps

RUNS = st.lists(
    st.tuples(
        st.integers(0, 5),  # weight
        st.integers(1, 9),  # count
        st.integers(16, 10**12),  # first
        st.integers(0, 10**6) | st.just(0),  # increment
    ),
    max_size=30,
)


def gaps_of(runs: list[tuple[int, int, int, int]]) -> Gaps:
    gaps = Gaps()
    for run in runs:
        gaps.add_run(*run)
    return gaps


def written_out(runs: list[tuple[int, int, int, int]]) -> list[int]:
    return [
        (first + j * increment) // 16 for weight, count, first, increment in runs for j in range(count) for _ in range(weight)
    ]


@given(RUNS)
def test_percentiles_of_run_length_coded_gaps_are_those_of_all_gaps(runs: list[tuple[int, int, int, int]]) -> None:
    everything = written_out(runs)
    sample = sample_of_gaps(gaps_of(runs))
    if not everything:
        assert sample.distribution() is None
        return
    assert sample.weights.sum() == len(everything)
    fractions = [0.0, 0.25, 0.5, 0.9, 0.99, 1.0]
    assert sample.at(fractions) == pytest.approx(np.quantile(everything, fractions), rel=1e-12)


def test_a_distribution_is_in_seconds_and_interpolates_between_ranks() -> None:
    tenths = np.arange(1, 11, dtype=np.int64) * 100_000_000
    assert Sample.of(tenths).distribution() == Distribution(mean=0.55, p50=0.55, p90=0.91, p95=0.955, p99=0.991, max=1.0)


def test_a_single_value_is_all_of_its_percentiles() -> None:
    one = Sample.of(np.array([7_000_000_000])).distribution()
    assert one == Distribution(mean=7, p50=7, p90=7, p95=7, p99=7, max=7)


def test_two_million_gaps_are_counted_exactly() -> None:
    gaps = Gaps()
    for i in range(2_000):
        gaps.add_run(3, 1000, 16 * (1 + i), 16)  # gaps of 1 + i + j nanoseconds, each seen by three requests
    sample = sample_of_gaps(gaps)
    assert sample.weights.sum() == 6_000_000
    assert sample.at([0, 0.5, 1]).tolist() == [1, 1500.0, 2_999]  # symmetric about its middle
