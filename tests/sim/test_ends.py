"""A simulation that is ended before all is done: what counts by then, and that nobody is dropped in silence."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.config import Config, ReplicaSpec, Run, Slo
from squall.core.metrics import Observed, Outcome, RunRecord
from squall.core.types import FOREVER, MILLISECOND, RequestId
from squall.fleet_tables import Fleet
from squall.policies.batching import Vllm
from squall.policies.route import Pull, RoundRobin, Route
from squall.report.steps import Stretches
from squall.report.summary import summarise
from squall.sim.linear import Linear
from squall.sim.observe import Observer, watched
from squall.sim.run import simulate
from squall.twin.rehearse import rehearse
from squall.workload.spec import FixedArrivals, FixedLength, OfferedRequest, SyntheticWorkload

MS = MILLISECOND
A_MS_A_STEP = Linear(fixed=16 * MS)
UNEVEN = Linear(fixed=16 * 731_003, token=16 * 1_117 + 5, context=333, work=7)


def offered(id: RequestId, at_ms: float, prompt: int, output: int, after: int = -1) -> OfferedRequest:
    return OfferedRequest(id, round(at_ms * MS), prompt, output, after=after, think=0)


def play(
    requests: Sequence[OfferedRequest],
    until_ms: float,
    *,
    latency: Linear = A_MS_A_STEP,
    max_steps: int = FOREVER,
    stages: int = 1,
    route: Route = RoundRobin(),  # noqa: B008 - frozen
    num_blocks: int = 100,
) -> tuple[RunRecord, Observed]:
    config = Config(batching=Vllm(8, 64), route=route, fleet=Fleet(replicas=1), replica=ReplicaSpec(block_size=4, pp=stages))
    observer = Observer(latency, 4)
    log, created = watched([observer])
    record = simulate(
        config, requests, latency, num_blocks, until=round(until_ms * MS), max_steps=max_steps, log=log,
        cut_off=observer.cut_off, created=created,
    )  # fmt: skip
    return record, observer.observed


def test_steps_that_are_done_count_and_the_rest_of_a_long_run_does_not() -> None:
    """One prefill and nine decodes of a millisecond each; the run of nine is cut off after three and a half of them."""
    record, observed = play([offered(0, 0, 10, 10)], until_ms=4.5)
    [row] = record.requests
    assert (row.outcome, row.first_token_at, row.num_output_tokens) == (Outcome.UNFINISHED, 1 * MS, 4)
    assert (record.ended_at, record.num_steps, record.num_absent) == (round(4.5 * MS), 4, 0)
    assert sum(record.gaps.count) == 3
    [steps] = Stretches(observed).steps()
    assert list(steps["started_at"] // MS) == [0, 1, 2, 3]


def test_what_ends_at_that_very_instant_has_ended_and_what_arrives_does_not_come() -> None:
    record, _ = play([offered(0, 0, 10, 4), offered(1, 4, 10, 4)], until_ms=4)
    [row] = record.requests
    assert (row.outcome, row.finished_at) == (Outcome.COMPLETED, 4 * MS)
    assert record.num_absent == 1


def test_the_queued_are_unfinished_and_break_their_promise() -> None:
    record, _ = play([offered(0, 0, 10, 9), offered(1, 1, 10, 9), offered(2, 2, 10, 9)], until_ms=10, route=Pull(1))
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED, Outcome.UNFINISHED, Outcome.UNFINISHED]
    assert [row.num_output_tokens for row in record.requests] == [9, 1, 0]
    summary = summarise(record, Slo(e2e_s=1.0), None)
    assert (summary.requests, summary.completed, summary.unfinished, summary.absent) == (3, 1, 2, 0)
    assert summary.slo_attainment == 1 / 3


def test_a_preempted_request_keeps_the_tokens_that_it_had() -> None:
    """Both hold 4 blocks of 8; at 5 ms each needs a fifth and request 1 gives way: it has five tokens and no KV."""
    record, _ = play([offered(0, 0, 12, 7), offered(1, 0, 12, 7)], until_ms=5.5, num_blocks=8)
    assert [row.num_output_tokens for row in record.requests] == [5, 5]
    assert record.requests[1].preemptions == 1
    assert sum(w * c for w, c in zip(record.gaps.weight, record.gaps.count, strict=True)) == sum(
        row.num_output_tokens - 1 for row in record.requests
    )


def test_turns_whose_turn_before_has_not_ended_are_absent() -> None:
    requests = [offered(0, 0, 10, 9), offered(1, 0, 20, 2, after=0), offered(2, 0, 30, 2, after=1)]
    record, _ = play(requests, until_ms=5)
    assert [row.id for row in record.requests] == [0]
    assert record.num_absent == 2
    record, _ = play(requests, until_ms=10.5)
    assert [(row.id, row.outcome) for row in record.requests] == [(0, Outcome.COMPLETED), (1, Outcome.UNFINISHED)]
    assert record.num_absent == 1


def test_a_run_that_is_done_before_ends_as_it_would_have() -> None:
    requests = [offered(0, 0, 10, 4), offered(1, 2, 10, 4)]
    ended, _ = play(requests, until_ms=1000)
    whole, _ = play(requests, until_ms=FOREVER // MS)
    assert (ended.requests, ended.ended_at, ended.gpu_nanos) == (whole.requests, whole.ended_at, whole.gpu_nanos)


def test_a_pipeline_leaves_what_is_on_its_way() -> None:
    record, _ = play([offered(0, 0, 10, 4)], until_ms=2.5, stages=2, latency=Linear(fixed=16 * MS, shares=(1, 1)))
    [row] = record.requests
    assert (row.outcome, row.num_output_tokens, record.num_steps) == (Outcome.UNFINISHED, 2, 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=12),
    st.floats(0.1, 150),
    st.integers(30, 80),
)
def test_a_run_of_many_steps_ends_as_single_ones_do(rows: list[tuple[int, int, int]], until_ms: float, num_blocks: int) -> None:
    requests = [offered(i, at, prompt, output) for i, (at, prompt, output) in enumerate(sorted(rows))]
    many, seen = play(requests, until_ms, latency=UNEVEN, num_blocks=num_blocks + 8)
    single, oracle = play(requests, until_ms, latency=UNEVEN, num_blocks=num_blocks + 8, max_steps=1)
    assert many.requests == single.requests
    assert (many.num_steps, many.ended_at, many.num_absent) == (single.num_steps, single.ended_at, single.num_absent)
    assert len(many.requests) + many.num_absent == len(requests)
    for name in ("started_at", "duration", "num_decodes", "decode_context", "kv_blocks"):
        columns = [np.concatenate([s[name] for s in Stretches(o).steps()] or [np.zeros(0, np.int64)]) for o in (seen, oracle)]
        assert np.array_equal(columns[0], columns[1])


def test_the_configuration_says_when() -> None:
    workload = SyntheticWorkload(FixedArrivals(10), FixedLength(8), FixedLength(200), num_requests=50)
    config = Config(workload=workload, run=Run(duration_s=2.0), replica=ReplicaSpec(num_blocks=10_000))
    record = rehearse(config)
    assert (record.ended_at, len(record.requests), record.num_absent) == (2_000_000_000, 20, 30)
