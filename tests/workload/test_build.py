import logging
from pathlib import Path

import pytest

from squall.errors import ConfigError, TraceError
from squall.workload.build import build
from squall.workload.spec import (
    FixedArrivals,
    FixedLength,
    OfferedRequest,
    PoissonArrivals,
    SyntheticWorkload,
    TraceWorkload,
    UniformLength,
)

SECOND = 1_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten requests, one a second; the prompt of the n-th is n + 1 tokens."""
    rows = "".join(f"{n}.0,{n + 1},{10 * (n + 1)}\n" for n in range(10))
    (tmp_path / "trace.csv").write_text("arrived_at_s,num_prompt_tokens,num_output_tokens\n" + rows)
    (tmp_path / "lengths.csv").write_text("num_prompt_tokens,num_output_tokens\n5,1\n6,2\n7,3\n")
    return tmp_path


def prompts(requests: list[OfferedRequest]) -> list[int]:
    return [request.num_prompt_tokens for request in requests]


def seconds(requests: list[OfferedRequest]) -> list[float]:
    return [request.arrived_at / SECOND for request in requests]


def test_a_trace_becomes_requests_numbered_in_order_of_arrival(folder: Path) -> None:
    requests = build(TraceWorkload("trace.csv"), 0, folder)
    assert [request.id for request in requests] == list(range(10))
    assert requests[3] == OfferedRequest(3, 3 * SECOND, 4, 40)


def test_a_window_starts_at_zero_and_keeps_what_arrives_within_it(folder: Path) -> None:
    requests = build(TraceWorkload("trace.csv", start_s=2.5, duration_s=3.5), 0, folder)
    assert seconds(requests) == [0.5, 1.5, 2.5]
    assert prompts(requests) == [4, 5, 6]
    assert [request.id for request in requests] == [0, 1, 2]


def test_the_window_is_in_the_trace_s_own_time_and_scaling_comes_last(folder: Path) -> None:
    requests = build(TraceWorkload("trace.csv", start_s=2.0, duration_s=4.0, rate_scale=2.0, max_requests=3), 0, folder)
    assert seconds(requests) == [0.0, 0.5, 1.0]
    assert prompts(requests) == [3, 4, 5]


def test_other_arrivals_keep_the_trace_s_lengths_in_order(folder: Path) -> None:
    requests = build(TraceWorkload("trace.csv", arrivals=FixedArrivals(4.0), start_s=5.0), 0, folder)
    assert seconds(requests) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert prompts(requests) == [6, 7, 8, 9, 10]


def test_lengths_alone_need_arrivals_and_cannot_be_windowed(folder: Path) -> None:
    assert prompts(build(TraceWorkload("lengths.csv", arrivals=PoissonArrivals(1.0), max_requests=2), 0, folder)) == [5, 6]
    with pytest.raises(TraceError, match=r"lengths.csv: has no arrival times; give them with \[workload.arrivals\]"):
        build(TraceWorkload("lengths.csv"), 0, folder)
    with pytest.raises(TraceError, match=r"lengths.csv: has no arrival times for workload.start_s"):
        build(TraceWorkload("lengths.csv", arrivals=PoissonArrivals(1.0), start_s=3.0), 0, folder)


def test_an_empty_window_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no request of .*trace.csv arrives in the window; change workload.start_s"):
        build(TraceWorkload("trace.csv", start_s=100.0), 0, folder)


def test_what_was_put_right_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "odd.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n2,5,5\n1,6,0\n")
    with caplog.at_level(logging.WARNING):
        build(TraceWorkload("odd.csv"), 0, folder)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "1 rows of 0 output tokens count as 1",
        "1 rows came before the row above them; sorted by arrival",
    ]


def synthetic(rate: float, **changes: float) -> SyntheticWorkload:
    return SyntheticWorkload(PoissonArrivals(rate), UniformLength(1, 500), UniformLength(1, 50), **changes)  # type: ignore[arg-type]


def test_another_rate_moves_the_arrivals_and_leaves_the_lengths() -> None:
    slow, fast = (build(synthetic(rate, num_requests=500), 3, Path()) for rate in (2.0, 4.0))
    assert prompts(slow) == prompts(fast)
    assert [request.num_output_tokens for request in slow] == [request.num_output_tokens for request in fast]
    assert seconds(fast) == pytest.approx([time / 2 for time in seconds(slow)], abs=1e-8)


def test_the_same_seed_makes_the_same_requests_and_another_one_others() -> None:
    one, again, other = (build(synthetic(5.0, num_requests=200), seed, Path()) for seed in (3, 3, 4))
    assert one == again
    assert prompts(one) != prompts(other)


def test_number_and_duration_both_end_a_synthetic_workload() -> None:
    by_time = build(synthetic(5.0, duration_s=20.0), 3, Path())
    assert by_time[-1].arrived_at < 20 * SECOND
    assert 60 < len(by_time) < 140
    assert build(synthetic(5.0, duration_s=20.0, num_requests=30), 3, Path()) == by_time[:30]
    assert build(synthetic(5.0, duration_s=20.0, num_requests=10_000), 3, Path()) == by_time


def test_a_duration_too_short_for_any_request_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no request arrives within duration_s = 0.0001"):
        build(SyntheticWorkload(PoissonArrivals(0.1), FixedLength(1), FixedLength(1), duration_s=0.0001), 0, Path())
