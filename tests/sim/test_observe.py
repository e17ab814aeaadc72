"""What is seen of a simulation: whether runs of many steps or single ones, the same steps; and nothing changes by looking."""

from collections.abc import Sequence
from random import Random

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from squall.config import Config, ReplicaSpec
from squall.core.metrics import Observed, RunRecord
from squall.core.types import FOREVER, MILLISECOND, Nanos, RequestId
from squall.fleet_tables import Fault, Fleet
from squall.perf.latency import BatchShape, LatencyModel, Progression
from squall.policies.batching import Vllm
from squall.report.steps import COLUMNS, Stretches, total, write_steps
from squall.sim.linear import Linear
from squall.sim.observe import Observer, watched
from squall.sim.run import simulate
from squall.workload.spec import OfferedRequest

MS = MILLISECOND
A_MS_A_STEP = Linear(fixed=16 * MS)
UNEVEN = Linear(fixed=16 * 731_003, token=16 * 1_117 + 5, context=333, work=7)


def observe(
    requests: Sequence[OfferedRequest],
    *,
    latency: LatencyModel = A_MS_A_STEP,
    num_blocks: int = 100,
    batching: Vllm = Vllm(8, 64, prefix_cache=False),  # noqa: B008 - frozen
    replicas: int = 1,
    block_size: int = 4,
    max_steps: int = FOREVER,
    cancellations: Sequence[tuple[Nanos, RequestId]] = (),
) -> tuple[RunRecord, Observed]:
    config = Config(batching=batching, fleet=Fleet(replicas=replicas), replica=ReplicaSpec(block_size=block_size))
    observer = Observer(latency, block_size)
    log, created = watched([observer])
    record = simulate(
        config, requests, latency, num_blocks, cancellations=cancellations, max_steps=max_steps, log=log, created=created
    )
    return record, observer.observed


def table(observed: Observed, rows_at_once: int = 1 << 20) -> pl.DataFrame:
    """Every step, ordered as a person would; without the number of the run, which single steps count otherwise."""
    pieces = [pl.DataFrame(piece) for piece in Stretches(observed).steps(rows_at_once)]
    return pl.concat(pieces).drop("run").sort("replica", "started_at", "stage")


def offered(id: RequestId, at_ms: float, prompt: int, output: int) -> OfferedRequest:
    return OfferedRequest(id, round(at_ms * MS), prompt, output)


def test_every_step_of_a_request_is_a_row() -> None:
    _, observed = observe([offered(0, 5, prompt=10, output=5)], batching=Vllm(8, 8, prefix_cache=False))
    rows = table(observed)
    assert rows["started_at"].to_list() == [at * MS for at in (5, 6, 7, 8, 9, 10)]
    assert rows["duration"].to_list() == [MS] * 6
    assert rows["num_decodes"].to_list() == [0, 0, 1, 1, 1, 1]
    assert rows["decode_context"].to_list() == [0, 0, 11, 12, 13, 14]
    assert rows["num_prefill_tokens"].to_list() == [8, 2, 0, 0, 0, 0]
    assert rows["prefill_context"].to_list() == [0, 8, 0, 0, 0, 0]
    assert rows["kv_blocks"].to_list() == [0, 2, 3, 3, 3, 4]  # the 13th token takes the fourth block, at 8 ms
    assert observed.execution == {0: 6 * MS}


def test_who_decodes_is_at_work_in_every_step_and_who_waits_is_not() -> None:
    _, observed = observe([offered(0, 0, 10, 9), offered(1, 2.5, 10, 2)], batching=Vllm(1, 64, prefix_cache=False))
    assert observed.execution == {0: 9 * MS, 1: 2 * MS}


def test_a_preempted_request_is_away_until_a_step_works_on_it_again() -> None:
    """Both hold 4 blocks of 8; at 5 ms each needs a fifth and request 1 gives way, until request 0 is done at 7 ms."""
    record, observed = observe([offered(0, 0, 12, 7), offered(1, 0, 12, 7)], num_blocks=8)
    assert observed.preempted == {1: 2 * MS}
    assert observed.regenerated == {1: 5}
    assert observed.execution == {0: 7 * MS, 1: 7 * MS}
    away = record.requests[1].finished_at - record.requests[1].scheduled_at - observed.execution[1]
    assert away == observed.preempted[1]


def test_the_phases_of_the_fleet_are_seen() -> None:
    _, observed = observe([offered(0, 0, 10, 1)], replicas=2)
    phases = ("starting", "loading", "warming", "ready")
    assert observed.phases == [(0, replica, phase, "both") for phase in phases for replica in (0, 1)]
    assert observed.pools == {0: 100, 1: 100}


class TwoStretches:
    """A model whose price bends in the middle of a run."""

    source = "two stretches"
    num_stages = 1

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """A step of context c costs 1,000 ns, and from 30 tokens on 1 ns more for each further token."""
        flat = max(0, min(steps, 30 - shape.decode_context)) if shape.num_decodes == 1 else steps
        found = [Progression(flat, 16_000, 0)] if flat else []
        if steps > flat:
            found.append(Progression(steps - flat, 16 * (1_000 + max(0, shape.decode_context + flat - 30)), 16))
        return found

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        return (self.run(shape, 1)[0].first >> 4,)


def test_a_run_of_several_progressions_is_seen_step_by_step() -> None:
    _, observed = observe([offered(0, 0, 20, 25)], latency=TwoStretches(), block_size=4)
    assert len(Stretches(observed)) == 3
    rows = table(observed)
    assert rows["duration"].to_list() == [1_000] * 11 + list(range(1_001, 1_015))
    assert rows["decode_context"].to_list() == [0, *range(21, 45)]
    _, single = observe([offered(0, 0, 20, 25)], latency=TwoStretches(), block_size=4, max_steps=1)
    assert rows.equals(table(single))


@st.composite
def workloads(draw: st.DrawFn) -> tuple[OfferedRequest, ...]:
    dice = Random(draw(st.integers(0, 10_000)))
    gap = draw(st.sampled_from([0, 1, 7]))
    at = 0
    requests = []
    for id in range(draw(st.integers(1, 25))):
        at += dice.randint(0, 2 * gap) * MS
        prompt = dice.randint(1, 90)
        family = dice.randint(1, 2)
        hashes = tuple(family * 1_000 + i if i < 5 else id * 10_000 + i for i in range(1, prompt // 4 + 1))
        requests.append(OfferedRequest(id, at, prompt, dice.randint(1, 50), block_hashes=hashes))
    return tuple(requests)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.integers(36, 90), st.booleans(), st.integers(1, 2), st.sampled_from([A_MS_A_STEP, UNEVEN]))
def test_runs_of_many_steps_are_seen_as_single_steps_are(
    requests: tuple[OfferedRequest, ...], num_blocks: int, cache: bool, replicas: int, latency: Linear
) -> None:
    gone = [(requests[0].arrived_at + 3 * MS, requests[0].id)]

    def seen(max_steps: int) -> tuple[RunRecord, Observed]:
        return observe(
            requests, latency=latency, num_blocks=num_blocks, batching=Vllm(6, 24, prefix_cache=cache), replicas=replicas,
            max_steps=max_steps, cancellations=gone,
        )  # fmt: skip

    record, many = seen(FOREVER)
    _, single = seen(1)
    assert table(many, rows_at_once=7).equals(table(single))
    assert Stretches(many).num_steps == record.num_steps
    assert (many.execution, many.preempted, many.regenerated) == (single.execution, single.preempted, single.regenerated)
    away = {row.id: row.finished_at - row.scheduled_at - many.execution[row.id] for row in record.requests if row.id != 0}
    assert {id: time for id, time in away.items() if time} == {id: time for id, time in many.preempted.items() if id != 0}


@pytest.mark.parametrize("shares", [(1,)])
def test_a_straggler_is_seen_as_slow_as_it_is(shares: tuple[int, ...]) -> None:
    """From 20 to 50 ms every step takes four times as long; every stretch still ends where the simulation says."""
    latency = Linear(fixed=16 * 731_003, context=333, shares=shares)
    slow = [Fault(at_s=0.02, kind="slow", which=0, factor=0.25, duration_s=0.03)]
    config = Config(
        batching=Vllm(8, 64, prefix_cache=False),
        replica=ReplicaSpec(block_size=4, pp=len(shares)),
        faults=tuple(slow),
    )
    observer = Observer(latency, 4)
    log, created = watched([observer])
    record = simulate(config, [offered(i, 2 * i, 20, 40) for i in range(6)], latency, 400, log=log, created=created)
    rows = table(observer.observed)
    ends = rows["started_at"] + rows["duration"]
    assert ends.max() == max(row.finished_at for row in record.requests)
    slowest, first = rows["duration"].to_numpy().max(), rows["duration"].to_numpy()[: len(shares)].max()
    assert slowest > 4 * first
    for row in record.requests:
        assert observer.observed.execution[row.id] <= row.finished_at - row.scheduled_at


def test_looking_changes_nothing() -> None:
    requests = [offered(i, i * 3, 20 + i, 1 + i % 40) for i in range(60)]
    config = Config(batching=Vllm(8, 64), fleet=Fleet(replicas=2), replica=ReplicaSpec(block_size=4))
    unseen = simulate(config, requests, UNEVEN, 60)
    seen, _ = observe(requests, latency=UNEVEN, num_blocks=60, batching=Vllm(8, 64), replicas=2)
    assert replace(unseen, wall_s=0.0) == replace(seen, wall_s=0.0)


def test_several_watchers_see_the_same() -> None:
    one, other = Observer(A_MS_A_STEP, 16), Observer(A_MS_A_STEP, 16)
    log, created = watched([one, other])
    simulate(Config(), [offered(0, 0, 10, 5)], A_MS_A_STEP, 100, log=log, created=created)
    assert one.observed == other.observed
    assert Stretches(one.observed).num_steps == 5
    assert watched([]) == (None, None)


def test_the_file_holds_every_step(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    _, observed = observe([offered(i, i, 30, 40) for i in range(10)], latency=UNEVEN, replicas=2)
    stretches = Stretches(observed)
    path = tmp_path_factory.mktemp("steps") / "steps.parquet"
    write_steps(stretches, path)
    written = pl.read_parquet(path)
    assert written.columns == list(COLUMNS)
    [piece] = stretches.steps()
    for name in COLUMNS:
        assert (written[name].to_numpy() == piece[name]).all()
    assert int(stretches.durations().sum()) == written["duration"].sum()


@given(st.integers(1, 200), st.integers(16, 10_000), st.integers(0, 500))
def test_sums_of_arrays_are_those_of_single_steps(count: int, first: int, increment: int) -> None:
    exact = sum((first + j * increment) >> 4 for j in range(count))
    columns = (np.array([number], dtype=np.int64) for number in (count, first, increment))
    assert total(*columns).tolist() == [exact]
