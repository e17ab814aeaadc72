"""Pipeline stages, worked out by hand: each stage takes one batch after the other, and batches overtake none."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from squall.config import Config, ReplicaSpec
from squall.core.actions import AnyAction, RunSteps
from squall.core.events import AnyEvent, Cancelled, StepsDone, Submitted, Woke
from squall.core.metrics import Outcome, RunRecord
from squall.core.pipeline import PipelinedReplica
from squall.core.types import MILLISECOND, MachineId, Nanos, Request, RequestId
from squall.errors import ConfigError
from squall.eventlog import describe
from squall.policies.batching import Batching, BlitzBatching, FasterTransformer, LightLlm, Orca, Sarathi, Vllm, VllmV0
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.twin.observe import rebuild
from squall.workload.spec import OfferedRequest

MS = MILLISECOND
TWO_AND_THREE = Linear(fixed=16 * 5 * MS, shares=(2, 3))
"""Every batch is 2 ms at the first stage and 3 ms at the second."""


def offered(id: RequestId, at_ms: int, prompt: int, output: int) -> OfferedRequest:
    return OfferedRequest(id, at_ms * MS, prompt, output)


def play(
    *requests: OfferedRequest,
    latency: Linear = TWO_AND_THREE,
    batching: Batching = Vllm(8, 64),  # noqa: B008 - frozen
    num_blocks: int = 100,
    cancellations: Sequence[tuple[Nanos, RequestId]] = (),
) -> tuple[RunRecord, list[RunSteps]]:
    runs: list[RunSteps] = []

    def log(now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        runs.extend(action for action in actions if isinstance(action, RunSteps))

    config = Config(batching=batching, replica=ReplicaSpec(block_size=4, pp=latency.num_stages))
    return simulate(config, requests, latency, num_blocks, cancellations=cancellations, log=log), runs


def test_one_request_passes_all_stages_before_its_next_token_begins() -> None:
    record, _ = play(offered(0, 1, prompt=10, output=3))
    [row] = record.requests
    assert (row.scheduled_at, row.first_token_at, row.finished_at) == (1 * MS, 6 * MS, 16 * MS)
    assert record.num_steps == 3


def test_a_second_batch_enters_while_the_first_one_is_at_a_later_stage_and_waits_for_it_there() -> None:
    """Request 1 is at stage 0 from 2 to 4, waits for stage 1 until 5 and is out at 8; then each takes its turn at stage 1."""
    record, runs = play(offered(0, 0, 10, 3), offered(1, 1, 10, 2))
    first, second = record.requests
    assert (first.first_token_at, second.scheduled_at, second.first_token_at) == (5 * MS, 2 * MS, 8 * MS)
    assert (first.finished_at, second.finished_at) == (17 * MS, 14 * MS)
    stages = [(run.group, run.num_decodes, len(run.chunks)) for run in runs]
    assert stages == [(0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 0)]


def test_what_arrives_while_all_stages_are_taken_joins_the_next_batch() -> None:
    record, _ = play(offered(0, 0, 10, 3), offered(1, 1, 10, 3), offered(2, 3, 10, 1))
    assert record.requests[2].scheduled_at == 5 * MS  # beside request 0, whose batch is back
    assert record.requests[2].first_token_at == 11 * MS


def test_the_gap_of_a_token_is_from_batch_to_batch() -> None:
    record, _ = play(offered(0, 0, 10, 3), offered(1, 1, 10, 2))
    gaps = record.gaps
    seen = [(weight, first // (16 * MS)) for weight, first in zip(gaps.weight, gaps.first, strict=True)]
    assert sorted(seen) == [(1, 6), (1, 6), (1, 6)]


def test_requests_of_one_batch_stay_together_and_those_of_two_come_together_when_both_are_idle() -> None:
    record, runs = play(offered(0, 0, 4, 4), offered(1, 0, 4, 4), offered(2, 1, 4, 4))
    assert [run.num_decodes for run in runs] == [0, 0, 2, 1, 2, 1, 2, 1]
    assert record.requests[0].finished_at == record.requests[1].finished_at


def test_a_batch_holds_its_share_of_the_seats() -> None:
    requests = [offered(id, 0, 4, 6) for id in range(6)]
    _, runs = play(*requests, batching=Sarathi(max_num_seqs=4, chunk_size=64, watermark=0.0))
    assert all(run.num_decodes + len(run.chunks) <= 2 for run in runs)


def test_a_latency_model_of_other_stages_is_refused() -> None:
    config = Config(replica=ReplicaSpec(pp=3))
    with pytest.raises(ConfigError, match=r"replica.pp is 3, but the times of steps \(linear\) are of 2 pipeline stages"):
        simulate(config, [], TWO_AND_THREE, 100)


def test_nobody_in_a_run_is_cancelled_before_its_end() -> None:
    machine = PipelinedReplica(0, Vllm(8, 64), num_blocks=100, block_size=4, num_stages=2)
    machine.handle(Submitted(Request(0, 0, 4, 9)), 0)
    machine.handle(Woke(), 0)
    machine.handle(Submitted(Request(1, 1, 4, 9)), 1)
    machine.handle(Woke(), 1)
    assert machine.handle(Cancelled(1), 2) == []
    machine.handle(StepsDone(1, 1), 3)
    assert machine.num_running == 2
    machine.handle(StepsDone(2, 1), 4)
    assert machine.num_running == 1


def test_a_replica_of_several_stages_is_made_again_from_its_description() -> None:
    machine = PipelinedReplica(3, Sarathi(8, 64), num_blocks=100, block_size=4, num_stages=2)
    again = rebuild(describe(machine))
    assert isinstance(again, PipelinedReplica)
    assert (again.id, again.policy, again.num_blocks, again.num_stages) == (3, Sarathi(8, 64), 100, 2)


def test_two_requests_of_which_only_one_fits_do_not_preempt_each_other_for_ever() -> None:
    """The earlier one waits while the later one is in a run, and that one gives way at its end."""
    requests = [offered(0, 0, 12, 20), offered(1, 1, 12, 20)]
    record, _ = play(*requests, batching=Vllm(8, 64, prefix_cache=False), num_blocks=8)
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED] * 2
    assert record.requests[0].preemptions == 0


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Batching, Linear, int, list[OfferedRequest], list[tuple[Nanos, RequestId]]]:
    requests = []
    at = 0
    for id in range(draw(st.integers(1, 20))):
        at += draw(st.sampled_from([0, 1, 7]))
        requests.append(offered(id, at, draw(st.integers(1, 40)), draw(st.integers(1, 20))))
    seqs, tokens = draw(st.integers(2, 9)), draw(st.integers(9, 60))
    kinds: list[Batching] = [
        Vllm(seqs, tokens), VllmV0(seqs, tokens), Sarathi(seqs, tokens), Orca(seqs), FasterTransformer(seqs),
        LightLlm(seqs, tokens, 3), BlitzBatching(tokens, 2 * tokens, seqs),
    ]  # fmt: skip
    batching = draw(st.sampled_from(kinds))
    least = max(-(-(r.num_prompt_tokens + r.num_output_tokens) // 4) for r in requests)
    shares = draw(st.sampled_from([(1, 1), (2, 3), (1, 4, 1), (1, 1, 1, 2)]))
    gone = draw(st.lists(st.tuples(st.integers(0, 100), st.sampled_from(requests)), max_size=3))
    return batching, Linear(16 * 5 * MS, token=1600, shares=shares), least + draw(st.sampled_from([0, 3, 40])), requests, [
        (request.arrived_at + after * MS, request.id) for after, request in gone
    ]  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(crowds())
def test_every_request_ends_once_and_every_token_has_its_gap(
    crowd: tuple[Batching, Linear, int, list[OfferedRequest], list[tuple[Nanos, RequestId]]],
) -> None:
    batching, latency, num_blocks, requests, gone = crowd
    record, runs = play(*requests, latency=latency, batching=batching, num_blocks=num_blocks, cancellations=gone)
    assert all(row.outcome in (Outcome.COMPLETED, Outcome.CANCELLED) for row in record.requests)
    assert all(row.outcome is Outcome.COMPLETED for row in record.requests if row.id not in {id for _, id in gone})
    assert sum(weight * count for weight, count in zip(record.gaps.weight, record.gaps.count, strict=True)) == sum(
        max(0, row.num_output_tokens - 1) for row in record.requests
    )
    assert all(run.steps == 1 for run in runs)
