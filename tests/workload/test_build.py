import logging
from pathlib import Path

import pytest

from squall.errors import ConfigError, TraceError
from squall.workload.build import build
from squall.workload.spec import (
    AllAtOnce,
    ClosedLoop,
    FixedArrivals,
    FixedLength,
    OfferedRequest,
    PoissonArrivals,
    SessionsWorkload,
    SyntheticWorkload,
    TraceArrivals,
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


def test_a_trace_is_not_stretched_beyond_all_clocks(folder: Path) -> None:
    (folder / "long.csv").write_text("arrived_at_s,num_prompt_tokens,num_output_tokens\n0,5,5\n20,5,5\n")
    with pytest.raises(TraceError, match=r"with workload.rate_scale = 1e-09 the last arrives after 285 years; raise it"):
        build(TraceWorkload("long.csv", rate_scale=1e-9), 0, folder)


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


MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": %s}\n'
SESSIONS = "arrived_at_s,num_prompt_tokens,num_output_tokens,session\n0,40,24,a\n1,16,8,\n2,100,10,a\n2.5,40,8,b\n9,150,10,a\n"


def test_blocks_of_a_trace_become_hashes_of_the_replicas_blocks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "m.jsonl").write_text(MOONCAKE % (0, 1024, [0, 1]) + MOONCAKE % (1, 600, [0, 2]) + MOONCAKE % (2, 9, []))
    same = build(TraceWorkload("m.jsonl"), 0, folder, 512)
    assert [len(request.block_hashes) for request in same] == [2, 1, 0]
    assert same[0].block_hashes[0] == same[1].block_hashes[0]
    assert not caplog.records
    smaller = build(TraceWorkload("m.jsonl"), 0, folder, 16)
    assert [len(request.block_hashes) for request in smaller] == [64, 37, 0]
    assert smaller[0].block_hashes[:32] == smaller[1].block_hashes[:32]
    assert caplog.messages == [f"{folder / 'm.jsonl'}: blocks of 512 tokens are hashed as blocks of 16"]


def test_windows_scaling_and_other_arrivals_lose_no_prefix(folder: Path) -> None:
    (folder / "m.jsonl").write_text("".join(MOONCAKE % (n * 1000, 1024, [0, n]) for n in range(1, 9)))
    for workload in (
        TraceWorkload("m.jsonl", start_s=3.0, rate_scale=2.0, max_requests=4),
        TraceWorkload("m.jsonl", arrivals=PoissonArrivals(1.0)),
        TraceWorkload("m.jsonl", arrivals=AllAtOnce()),
    ):
        requests = build(workload, 0, folder, 512)
        assert len({request.block_hashes[0] for request in requests}) == 1
        assert len({request.block_hashes[1] for request in requests}) == len(requests)


def test_recorded_turns_share_their_history_answers_included(folder: Path) -> None:
    (folder / "s.csv").write_text(SESSIONS)
    first, alone, second, other, third = build(TraceWorkload("s.csv"), 0, folder, 16)
    assert [request.session for request in (first, alone, second, other, third)] == [1, 0, 1, 2, 1]
    assert first.block_hashes + first.output_hashes == second.block_hashes[:4]
    assert (len(first.block_hashes), len(first.output_hashes)) == (2, 2)
    assert second.block_hashes == third.block_hashes[:6]
    assert alone.block_hashes == ()
    assert not set(other.block_hashes) & set(third.block_hashes)
    assert all(request.after == -1 for request in (first, second, third))


def test_turns_that_wait_follow_the_answer_by_the_recorded_gap_less_its_time(folder: Path) -> None:
    (folder / "s.csv").write_text(SESSIONS)
    workload = TraceWorkload("s.csv", turns="wait", recorded_tbt_s=0.05)
    requests = build(workload, 0, folder, honours_after=True)
    assert [(request.session, request.after) for request in requests] == [(1, -1), (1, 0), (0, -1), (2, -1), (1, 1)]
    assert [request.think / SECOND for request in requests] == [0, 0.8, 0, 0, 6.5]
    assert seconds(requests) == [0, 0.8, 1, 2.5, 7.3]
    with pytest.raises(
        ConfigError, match=r'turns is "wait" \(use "recorded"\), but no replay can play requests that wait .* yet'
    ):
        build(workload, 0, folder)
    with pytest.raises(TraceError, match=r"trace.csv: has no conversations"):
        build(TraceWorkload("trace.csv", turns="wait"), 0, folder, honours_after=True)


def test_a_turn_whose_turn_before_is_outside_of_the_window_is_a_first_turn(folder: Path) -> None:
    (folder / "s.csv").write_text(SESSIONS)
    requests = build(TraceWorkload("s.csv", turns="wait", start_s=2.0), 0, folder, honours_after=True)
    assert [(request.num_prompt_tokens, request.after) for request in requests] == [(100, -1), (40, -1), (150, 0)]


def test_in_a_closed_loop_every_client_waits_for_its_answer(folder: Path) -> None:
    for workload in (
        TraceWorkload("trace.csv", arrivals=ClosedLoop(3, think_s=0.5)),
        SyntheticWorkload(ClosedLoop(3, think_s=0.5), UniformLength(1, 9), FixedLength(5), num_requests=10),
    ):
        requests = build(workload, 0, folder, honours_after=True)
        assert [request.after for request in requests] == [-1, -1, -1, 0, 1, 2, 3, 4, 5, 6]
        assert [request.think / SECOND for request in requests] == [0, 0, 0, *[0.5] * 7]
        assert seconds(requests) == [0, 0, 0, 0.5, 0.5, 0.5, 1, 1, 1, 1.5]
        with pytest.raises(ConfigError, match=r'arrivals.kind is "closed_loop" \(use another one\)'):
            build(workload, 0, folder)


def test_what_a_closed_loop_cannot_heed_is_refused(folder: Path) -> None:
    loop, five = ClosedLoop(2), FixedLength(5)
    for workload, key in (
        (TraceWorkload("trace.csv", arrivals=loop, rate_scale=2.0), "rate_scale"),
        (SyntheticWorkload(loop, five, five, num_requests=4, duration_s=9.0), "duration_s"),
        (SessionsWorkload(loop, five, five, five, num_sessions=4, duration_s=9.0), "duration_s"),
    ):
        with pytest.raises(ConfigError, match=f"workload.{key} means nothing in a closed loop"):
            build(workload, 0, folder, honours_after=True)


def test_arrivals_that_end_early_leave_the_rest_of_a_trace_out(folder: Path) -> None:
    requests = build(TraceWorkload("trace.csv", arrivals=TraceArrivals("few.csv")), 0, two_arrivals(folder))
    assert (seconds(requests), prompts(requests)) == ([1.5, 2.5], [1, 2])


def two_arrivals(folder: Path) -> Path:
    (folder / "few.csv").write_text("arrived_at_s,num_prompt_tokens,num_output_tokens\n1.5,9,9\n2.5,9,9\n")
    return folder


def test_prompts_give_way_where_a_total_is_set() -> None:
    requests = build(
        SyntheticWorkload(AllAtOnce(), UniformLength(1, 200), UniformLength(1, 150), num_requests=500, max_total_tokens=100),
        0,
        Path(),
    )
    free = build(SyntheticWorkload(AllAtOnce(), UniformLength(1, 200), UniformLength(1, 150), num_requests=500), 0, Path())
    assert max(request.num_prompt_tokens + request.num_output_tokens for request in requests) == 100
    for cut, whole in zip(requests, free, strict=True):
        assert cut.num_output_tokens == min(whole.num_output_tokens, 99)
        assert cut.num_prompt_tokens == min(whole.num_prompt_tokens, 100 - cut.num_output_tokens)


@pytest.mark.shared
def test_a_real_trace_of_agents_shares_most_of_its_blocks(shared: Path) -> None:
    requests = build(TraceWorkload("lmcache_agent_sessions_lengths.csv"), 0, shared / "data" / "traces")
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += len(seen.intersection(request.block_hashes))
        seen.update(request.block_hashes)
    assert 0.65 < hits / sum(len(request.block_hashes) for request in requests) < 0.8
    assert len({request.session for request in requests}) == 69


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
