"""Whether the blocks of an answer are found by the next turn: by default not, with `prefix_cache_outputs` all that are full."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.config import Config, ReplicaSpec
from squall.core.metrics import RunRecord
from squall.core.types import FOREVER, MILLISECOND
from squall.errors import ConfigError
from squall.live.serve import serve
from squall.policies.batching import Sarathi, Vllm, VllmV0
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.twin.rehearse import rehearse
from squall.workload.build import build
from squall.workload.spec import FixedArrivals, FixedLength, OfferedRequest, SessionsWorkload, UniformLength

A_MS_A_STEP = Linear(fixed=16 * MILLISECOND)
TEXT = (101, 102, 103, 104, 105, 106)  # of blocks of 4: 10 tokens asked, 9 answered, 5 asked


def turns(answered: int = 9) -> list[OfferedRequest]:
    """Turn 1 asks 10 tokens; turn 2 repeats these and the answer, and asks 5 more when it has come."""
    prompt = 10 + answered + 5
    first = OfferedRequest(0, 0, 10, answered, block_hashes=TEXT[:2], session=1, output_hashes=TEXT[2 : (10 + answered) // 4])
    return [first, OfferedRequest(1, 0, prompt, 2, block_hashes=TEXT[: prompt // 4], session=1, after=0)]


def play(batching: Vllm | VllmV0 | Sarathi, requests: list[OfferedRequest], **more: int) -> RunRecord:
    config = Config(batching=batching, replica=ReplicaSpec(block_size=4))
    return simulate(config, requests, A_MS_A_STEP, more.pop("num_blocks", 50), **more)  # type: ignore[arg-type]


def test_by_default_the_next_turn_finds_the_prompt_alone() -> None:
    """Ten tokens are two full blocks of four."""
    assert play(Vllm(8, 64), turns()).requests[1].num_cached_tokens == 8


@pytest.mark.parametrize(
    "batching",
    [
        Vllm(8, 64, prefix_cache_outputs=True),
        VllmV0(8, 64, prefix_cache=True, prefix_cache_outputs=True),
        Sarathi(8, 64, prefix_cache=True, prefix_cache_outputs=True),
    ],
)
def test_with_the_key_it_finds_the_answer_too(batching: Vllm | VllmV0 | Sarathi) -> None:
    """Of 10 + 9 tokens the last one has no KV: 18 are four full blocks, two of which begin with the prompt's rest."""
    assert play(batching, turns()).requests[1].num_cached_tokens == 16


@pytest.mark.parametrize(("answered", "found"), [(1, 8), (2, 8), (3, 12), (6, 12), (7, 16), (10, 16), (11, 20)])
def test_only_full_blocks_are_found_and_the_last_token_has_none(answered: int, found: int) -> None:
    """KV of 10 + answered - 1 tokens."""
    assert play(Vllm(8, 64, prefix_cache_outputs=True), turns(answered)).requests[1].num_cached_tokens == found


def test_without_a_prefix_cache_the_key_does_nothing() -> None:
    assert play(Vllm(8, 64, prefix_cache=False, prefix_cache_outputs=True), turns()).requests[1].num_cached_tokens == 0


def test_a_preempted_request_finds_its_own_answer_again() -> None:
    """Both hold 4 blocks of 8 when each needs a fifth (at 5 ms): what request 1 had generated is still there when it returns."""
    requests = [
        OfferedRequest(i, 0, 12, 7, block_hashes=tuple(range(10 * i + 1, 10 * i + 4)), output_hashes=(10 * i + 4,))
        for i in (1, 2)
    ]
    record = play(Vllm(8, 64, prefix_cache_outputs=True), requests, num_blocks=8)
    assert [row.preemptions for row in record.requests] == [0, 1]
    assert all(row.num_output_tokens == 7 for row in record.requests)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(40, 160), st.integers(0, 3), st.sampled_from([Vllm, VllmV0, Sarathi]))
def test_a_run_of_many_steps_is_single_ones(
    users: int, num_blocks: int, seed: int, kind: type[Vllm] | type[VllmV0] | type[Sarathi]
) -> None:
    workload = SessionsWorkload(
        FixedArrivals(50.0 * users), UniformLength(1, 4), UniformLength(3, 40), UniformLength(1, 30), num_sessions=6,
        think_s=0.005, max_context=150,
    )  # fmt: skip
    requests = build(workload, seed, Path(), 4, honours_after=True)
    batching = kind(4, 32, prefix_cache=True, prefix_cache_outputs=True)
    many, single = (play(batching, requests, num_blocks=num_blocks, max_steps=most) for most in (FOREVER, 1))
    assert many.requests == single.requests
    assert (many.num_steps, many.ended_at) == (single.num_steps, single.ended_at)


def test_conversations_of_a_configuration_hit_more_with_the_key() -> None:
    workload = SessionsWorkload(
        FixedArrivals(2.0), FixedLength(3), FixedLength(64), FixedLength(160), num_sessions=5, think_s=1.0, max_context=4096
    )
    config = Config(workload=workload, replica=ReplicaSpec(num_blocks=10_000))
    without = [row.num_cached_tokens for row in rehearse(config).requests]
    outputs = Config(workload=workload, replica=config.replica, batching=Vllm(prefix_cache_outputs=True))
    filed = [row.num_cached_tokens for row in rehearse(outputs).requests]
    assert sorted(set(without)) == [0, 64, 288]
    assert sorted(set(filed)) == [0, 208, 432]


def test_a_live_fleet_refuses_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batching.prefix_cache_outputs is for simulations"):
        serve(Config(batching=Vllm(prefix_cache_outputs=True)), tmp_path / "run", print)
