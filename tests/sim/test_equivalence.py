"""A run of k steps is k single steps: same rows, same gaps, same batches, same messages in the same order."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from squall.config import Config, ReplicaSpec
from squall.core.actions import AnyAction, Forget, Preempt, RunSteps
from squall.core.events import AnyEvent, StepsDone, Woke
from squall.core.metrics import Gaps, Outcome, RequestRow, RunRecord
from squall.core.types import FOREVER, MILLISECOND, MachineId, Nanos, ReplicaId, RequestId
from squall.fleet_tables import Fleet, Handoff
from squall.perf.latency import LatencyModel
from squall.policies.batching import Batching, BlitzBatching, FasterTransformer, LightLlm, Orca, Sarathi, Vllm, VllmV0
from squall.policies.route import LeastLoaded, Pull, RoundRobin, Route
from squall.sim.linear import Linear
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

ONE_MS = 16 * MILLISECOND
TIES = Linear(fixed=ONE_MS)
"""Every step lasts one millisecond: ends, arrivals and other ends coincide all the time."""
UNEVEN = Linear(fixed=16 * 731_003, token=16 * 1_117 + 5, context=333, work=7)
ROUTES: list[Route] = [LeastLoaded(), RoundRobin(), Pull(2), Pull(5)]


class Case(Struct, frozen=True):
    """One run to be made twice."""

    requests: tuple[OfferedRequest, ...]
    num_blocks: int
    block_size: int
    batching: Batching
    route: Route = LeastLoaded()
    replicas: int = 1
    latency: Linear = UNEVEN
    cancellations: tuple[tuple[Nanos, RequestId], ...] = ()
    decodes: int = 0  # replicas that only decode; the others only prefill then
    handoff: Handoff = Handoff()


class Step(Struct, frozen=True):
    """What one step worked on."""

    ended_at: Nanos
    num_decodes: int
    decode_context: int
    chunks: tuple[tuple[RequestId, int, int, int, bool], ...]


class Observer:
    """An event log that expands runs into steps, and keeps all else that is said, in order."""

    def __init__(self, latency: LatencyModel) -> None:
        self.steps: dict[ReplicaId, list[Step]] = defaultdict(list)
        self.said: list[tuple[Nanos, MachineId, AnyEvent | AnyAction]] = []
        self.num_runs = 0
        self._latency = latency
        self._runs: dict[ReplicaId, tuple[Nanos, RunSteps]] = {}

    def __call__(self, now: Nanos, id: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        if isinstance(event, StepsDone):
            self._expand(id, event, now)
        elif not isinstance(event, Woke):
            self.said.append((now, id, event))
        for action in actions:
            if isinstance(action, RunSteps):
                self._runs[id] = (now, action)
                self.num_runs += 1
            elif isinstance(action, Preempt | Forget):
                self.said.append((now, id, action))

    def _expand(self, id: ReplicaId, event: StepsDone, now: Nanos) -> None:
        started_at, run = self._runs.pop(id)
        assert event.run == run.run
        assert 1 <= event.steps <= run.steps
        at = started_at
        prices = [(p.first + j * p.increment) >> 4 for p in self._latency.run(run, event.steps) for j in range(p.count)]
        for j, price in enumerate(prices):
            at += price
            context = run.decode_context + j * run.num_decodes
            chunks = tuple((c.request, c.offset + j * c.num_tokens, c.num_tokens, c.num_cached, c.last) for c in run.chunks)
            self.steps[id].append(Step(at, run.num_decodes, context, chunks))
        assert at == now
        if event.steps > 1:
            assert len(run.chunks) <= 1
            assert not any(chunk.last for chunk in run.chunks)


def expand(gaps: Gaps) -> Counter[Nanos]:
    """How often each gap was seen."""
    seen: Counter[Nanos] = Counter()
    for weight, count, first, increment in zip(gaps.weight, gaps.count, gaps.first, gaps.increment, strict=True):
        for j in range(count):
            seen[(first + j * increment) >> 4] += weight
    return seen


def play(case: Case, max_steps: int) -> tuple[RunRecord, Observer]:
    config = Config(
        batching=case.batching,
        route=case.route,
        fleet=Fleet("disaggregated", prefill=case.replicas, decode=case.decodes)
        if case.decodes
        else Fleet(replicas=case.replicas),
        handoff=case.handoff,
        replica=ReplicaSpec(block_size=case.block_size),
    )
    observer = Observer(case.latency)
    record = simulate(
        config,
        case.requests,
        case.latency,
        case.num_blocks,
        cancellations=case.cancellations,
        max_steps=max_steps,
        log=observer,
    )
    return record, observer


def check(case: Case) -> tuple[RunRecord, Observer]:
    """Play `case` with long runs and with single steps, and compare all that can be seen."""
    record, observer = play(case, FOREVER)
    oracle, single = play(case, 1)
    assert record.requests == oracle.requests
    assert expand(record.gaps) == expand(oracle.gaps)
    assert observer.steps == single.steps
    assert observer.said == single.said
    assert (record.ended_at, record.num_steps, record.gpu_nanos) == (oracle.ended_at, oracle.num_steps, oracle.gpu_nanos)
    assert single.num_runs == oracle.num_steps
    check_conservation(case, record)
    return record, observer


def check_conservation(case: Case, record: RunRecord) -> None:
    """Every token of every request is accounted for, and nobody is forgotten."""
    cancelled = {request for _, request in case.cancellations}
    gaps = 0
    for offered, row in zip(case.requests, record.requests, strict=True):
        if offered.id in cancelled:
            assert row.outcome in (Outcome.COMPLETED, Outcome.CANCELLED)
        else:
            assert row.outcome is Outcome.COMPLETED
        if row.outcome is Outcome.COMPLETED:
            assert row.num_output_tokens == offered.num_output_tokens
            check_instants(row)
        gaps += max(0, row.num_output_tokens - 1)
    assert sum(w * c for w, c in zip(record.gaps.weight, record.gaps.count, strict=True)) == gaps


def check_instants(row: RequestRow) -> None:
    assert row.arrived_at <= row.scheduled_at < row.first_token_at <= row.finished_at
    if row.num_output_tokens == 1:
        assert row.first_token_at == row.finished_at


def chain(family: int, shared: int, own: int, count: int) -> tuple[int, ...]:
    """Hashes of `count` blocks: the first `shared` as all of the family have them, the others its own."""
    return tuple(family * 1_000 + i + 1 if i < shared else (own + 1) * 1_000_000 + i for i in range(count))


@st.composite
def policies(draw: st.DrawFn) -> Batching:
    seqs, tokens = draw(st.integers(1, 12)), draw(st.integers(1, 80))
    watermark, cache = draw(st.sampled_from([0.0, 0.1])), draw(st.booleans())
    quirks = draw(st.sampled_from(["none", "vidur"]))
    kinds: list[Batching] = [
        Vllm(seqs, max(seqs, tokens), prefix_cache=cache),
        VllmV0(seqs, tokens, watermark, cache, quirks),  # type: ignore[arg-type]
        Sarathi(seqs, tokens, watermark, cache, quirks),  # type: ignore[arg-type]
        Orca(seqs, draw(st.sampled_from([0, 40, 500]))),
        FasterTransformer(seqs),
        LightLlm(seqs, tokens, draw(st.integers(1, 10))),
        BlitzBatching(tokens, 2 * tokens, seqs),
    ]
    return draw(st.sampled_from(kinds))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from([4, 16]))
    longest = draw(st.integers(8, 160))
    quantum = draw(st.sampled_from([10 * MILLISECOND, MILLISECOND, 1]))
    horizon = draw(st.integers(0, 300 * MILLISECOND // quantum))
    arrivals = sorted(draw(st.lists(st.integers(0, horizon), min_size=1, max_size=40)))
    requests = []
    for id, at in enumerate(arrivals):
        prompt = draw(st.integers(1, longest))
        hashes = chain(draw(st.integers(1, 3)), draw(st.integers(0, 12)), id, prompt // size)
        requests.append(OfferedRequest(id, at * quantum, prompt, draw(st.integers(1, 60)), block_hashes=hashes))
    least = max(-(-(r.num_prompt_tokens + r.num_output_tokens) // size) for r in requests)
    gone = draw(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(requests)), max_size=6))
    return Case(
        requests=tuple(requests),
        num_blocks=least + draw(st.sampled_from([0, 1, 3, 10, 60])),
        block_size=size,
        batching=draw(policies()),
        route=draw(st.sampled_from(ROUTES)),
        replicas=draw(st.integers(1, 3)),
        latency=draw(st.sampled_from([TIES, UNEVEN])),
        cancellations=tuple((r.arrived_at + after * MILLISECOND, r.id) for after, r in gone),
    )


@st.composite
def crowds(draw: st.DrawFn) -> Case:
    """Few different prompts, many requests, hardly any room: hits, evictions and preemptions at every turn."""
    lengths = st.integers(4, 40)
    requests = []
    at = 0
    for id in range(draw(st.integers(3, 30))):
        at += draw(st.sampled_from([0, 0, 1, 5])) * MILLISECOND
        prompt = draw(lengths)
        hashes = chain(draw(st.integers(1, 2)), 100, id, prompt // 4)
        requests.append(OfferedRequest(id, at, prompt, draw(st.integers(1, 30)), block_hashes=hashes))
    least = max(-(-(r.num_prompt_tokens + r.num_output_tokens) // 4) for r in requests)
    return Case(
        requests=tuple(requests),
        num_blocks=least + draw(st.integers(0, 6)),
        block_size=4,
        batching=draw(policies()),
        latency=draw(st.sampled_from([TIES, UNEVEN])),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_run_equals_single_steps(case: Case) -> None:
    check(case)


HANDOFFS = st.builds(
    Handoff,
    delay_s=st.sampled_from([0.0, 0.001, 0.003, 0.0077, 0.05]),
    max_share=st.sampled_from([1.0, 1.5, 4.0]),
    max_ratio=st.sampled_from([1.0, 2.0]),
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(cases(), crowds()), st.integers(1, 3), HANDOFFS)
def test_any_run_of_a_disaggregated_fleet_equals_single_steps(case: Case, decodes: int, handoff: Handoff) -> None:
    check(replace(case, decodes=decodes, handoff=handoff))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(crowds())
def test_a_prefix_cache_in_a_crowd_equals_single_steps(case: Case) -> None:
    check(case)


def offered(id: RequestId, at_ms: int, prompt: int, output: int, *hashes: int) -> OfferedRequest:
    return OfferedRequest(id, at_ms * MILLISECOND, prompt, output, block_hashes=hashes)


def test_a_refused_head_is_asked_again_when_a_block_that_it_would_have_hit_is_evicted() -> None:
    """Request 3 then needs fewer blocks for its (budgeted) first chunk than with the hit, and gets in."""
    requests = (
        offered(0, 1, 4, 4, 21),
        offered(1, 1, 6, 29, 11),
        offered(2, 1, 21, 29, 21, 32, 33, 34, 35),
        offered(3, 1, 16, 6, 11, 12, 13, 44),
    )
    check(Case(requests, num_blocks=13, block_size=4, batching=Vllm(6, 12), latency=TIES))


def test_a_prompt_that_is_computed_in_pieces_shares_a_block_or_not_by_when_the_other_copy_was_evicted() -> None:
    requests = (
        offered(0, 1, 27, 15, 11, 31, 32, 33, 34, 35),
        offered(1, 3, 18, 1, 11, 12, 13, 43),
        offered(2, 3, 4, 1, 21),
        offered(3, 3, 24, 11, 21, 22, 23, 63, 64, 65),
    )
    check(Case(requests, num_blocks=16, block_size=4, batching=Vllm(4, 4), latency=TIES))


def crowd(num_requests: int, gap_ms: float, quantum_ms: int, *, seed: int, shared: bool = False) -> tuple[OfferedRequest, ...]:
    dice = Random(seed)
    at = 0.0
    requests = []
    for id in range(num_requests):
        at += dice.expovariate(1 / gap_ms)
        prompt = dice.randint(1, 200)
        hashes = chain(dice.randint(1, 5), dice.randint(0, 12), id, prompt // 16) if shared else ()
        arrived_at = int(at) // quantum_ms * quantum_ms * MILLISECOND
        requests.append(OfferedRequest(id, arrived_at, prompt, dice.randint(1, 120), block_hashes=hashes))
    return tuple(requests)


@pytest.mark.parametrize("shared", [False, True])
def test_thousands_of_preemptions_fall_on_the_same_requests_at_the_same_instants(shared: bool) -> None:
    requests = crowd(1_500, gap_ms=2, quantum_ms=1, seed=5, shared=shared)
    record, _ = check(Case(requests, num_blocks=22, block_size=16, batching=Vllm(24, 48), replicas=2))
    assert sum(row.preemptions for row in record.requests) > 2_000


def test_late_binding_over_many_replicas_gives_every_request_to_the_same_one() -> None:
    requests = crowd(600, gap_ms=5, quantum_ms=10, seed=8)
    case = Case(requests, num_blocks=200, block_size=16, batching=Vllm(16, 256), route=Pull(6), replicas=5, latency=TIES)
    record, observer = check(case)
    assert {row.replica for row in record.requests} == {0, 1, 2, 3, 4}
    assert observer.num_runs * 3 < record.num_steps
