"""A run in some thirty numbers: what `summary.json` holds. The definitions are written out in docs/metrics.md.

Knows no files and no configuration beyond the objectives and the price of an accelerator hour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from operator import attrgetter

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.config import Slo
from squall.core.fleet_view import Capacity
from squall.core.metrics import UNSET, FleetUse, Gaps, Outcome, RequestRow, RoleUse, RunRecord
from squall.core.types import SECOND, Nanos
from squall.report.detail import Detail
from squall.report.sample import Distribution, Int64s, Sample, sample_of_gaps


class Quantile(Struct, frozen=True):
    """What became of a promise such as `ttft_p90_s`.

    Attributes:
        name: its key in `[slo]`.
        promised_s, reached_s: the latter is None where so many requests never had such a time.
        met: at least that share of all requests (of gaps) is within what was promised.
    """

    name: str
    promised_s: float
    reached_s: float | None
    met: bool


class PoolUse(Struct, frozen=True):
    """What one pool of a fleet whose replicas are not alike held; the cost is None where the price is not known."""

    gpu: str
    replicas: int
    num_gpus: int
    gpu_seconds: float
    cost_usd: float | None


class Summary(Struct, frozen=True):
    """What a run came to. Seconds everywhere; None where there is nothing to measure or no objective to measure it by."""

    world: str
    requests: int
    completed: int
    failed: int
    rejected: int
    cancelled: int
    unfinished: int
    num_prompt_tokens: int
    num_output_tokens: int
    makespan_s: float
    throughput_rps: float
    output_tokens_per_s: float
    ttft_s: Distribution | None
    tbt_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    queue_s: Distribution | None
    slo_attainment: float | None
    goodput_rps: float | None
    gpu_seconds: float
    cost_usd: float | None
    scale_ups: int
    scale_downs: int
    preemptions: int | None
    num_steps: int | None
    num_events: int | None
    wall_s: float
    latency_source: str
    slo_met: bool | None = None
    slo_quantiles: tuple[Quantile, ...] = ()
    energy_j: float | None = None
    detail: Detail | None = None
    absent: int = 0
    refused: dict[str, int] = {}  # how many of a simulation's rejected and failed for which reason
    pools: tuple[PoolUse, ...] = ()
    replicas: dict[str, RoleUse] = {}  # of an elastic fleet that was simulated, by role
    time_to_ready_s: Distribution | None = None
    startup_s: dict[str, float] = {}  # of these replicas, the mean of each phase of coming up
    capacity: Capacity | None = None  # of one replica, as its scale policy was told


class Lives(Struct, frozen=True):
    """The rows of all requests, column by column: one element a request. Instants in nanoseconds, `UNSET` if they never came."""

    arrived_at: Int64s
    scheduled_at: Int64s
    first_token_at: Int64s
    finished_at: Int64s
    num_prompt_tokens: Int64s
    num_output_tokens: Int64s
    preemptions: Int64s
    outcome: NDArray[np.str_]  # the value of an `Outcome`

    @classmethod
    def of(cls, rows: Iterable[RequestRow]) -> Lives:
        rows = list(rows)
        names = [name for name in cls.__struct_fields__ if name != "outcome"]
        table = np.array(list(map(attrgetter(*names), rows)), dtype=np.int64).reshape(len(rows), len(names))
        outcome = np.array([row.outcome.value for row in rows], dtype=np.str_)
        return cls(**{name: table[:, i] for i, name in enumerate(names)}, outcome=outcome)

    @property
    def completed(self) -> NDArray[np.bool_]:
        completed: NDArray[np.bool_] = self.outcome == Outcome.COMPLETED.value
        return completed

    def ttft(self) -> Int64s:
        """Of the requests that got a first token."""
        waited: Int64s = (self.first_token_at - self.arrived_at)[self.first_token_at != UNSET]
        return waited

    def queued(self) -> Int64s:
        """Of the requests that any step worked on: how long they waited for it."""
        waited: Int64s = (self.scheduled_at - self.arrived_at)[self.scheduled_at != UNSET]
        return waited

    def e2e(self) -> Int64s:
        """Of the completed requests."""
        spent: Int64s = (self.finished_at - self.arrived_at)[self.completed]
        return spent

    def tpot(self) -> Int64s:
        """Of the completed requests of two tokens and more."""
        several = self.completed & (self.num_output_tokens > 1)
        spent = self.finished_at[several] - self.first_token_at[several]
        return np.rint(spent / (self.num_output_tokens[several] - 1)).astype(np.int64)

    def within(self, slo: Slo) -> NDArray[np.bool_]:
        """Which requests completed within every objective given. One of a single token has no TPOT that could be too long."""
        good = self.completed
        if slo.ttft_s is not None:
            good &= self.first_token_at - self.arrived_at <= round(slo.ttft_s * SECOND)
        if slo.tbt_s is not None:
            good &= self.finished_at - self.first_token_at <= round(slo.tbt_s * SECOND) * (self.num_output_tokens - 1)
        if slo.e2e_s is not None:
            good &= self.finished_at - self.arrived_at <= round(slo.e2e_s * SECOND)
        return good


def quantiles(lives: Lives, gaps: Gaps, slo: Slo) -> tuple[Quantile, ...]:
    """How the promised quantiles came out. A request that never had such a time is beyond any promise; gaps are those there are.

    One of a single token keeps every TPOT, so it counts as 0.
    """
    found = []
    for metric, share, promised_s in slo.quantiles():
        sample, total = _asked(metric, lives, gaps)
        needed = max(1, ceil(share * total - 1e-9))
        reached = sample.nth(needed) if total else None
        met = reached is not None and reached <= round(promised_s * SECOND)
        reached_s = None if reached is None else reached / SECOND
        found.append(Quantile(f"{metric}_p{100 * share:.0f}_s", promised_s, reached_s, met or not total))
    return tuple(found)


def _asked(metric: str, lives: Lives, gaps: Gaps) -> tuple[Sample, int]:
    """The times that a metric has, and how many there should be."""
    total = len(lives.outcome)
    if metric == "tbt":
        sample = sample_of_gaps(gaps)
        return sample, int(sample.weights.sum())
    if metric == "tpot":
        single = int((lives.completed & (lives.num_output_tokens <= 1)).sum())
        return Sample.of(np.concatenate((np.zeros(single, dtype=np.int64), lives.tpot()))), total
    return Sample.of({"ttft": lives.ttft, "e2e": lives.e2e, "queue": lives.queued}[metric]()), total


def summarise(
    record: RunRecord,
    slo: Slo,
    usd_per_gpu_hour: float | None,
    seen: Detail | None = None,
    energy_j: float | None = None,
    pools: tuple[PoolUse, ...] = (),
    *,
    inside: bool = False,
) -> Summary:
    """The summary of a run. The price may be unknown, as that of this machine's CPU; then there is no cost.

    `seen` and `energy_j` are those of an observed run, `pools` those of a fleet whose replicas are not alike.
    `inside`: the record knows of steps and refusals, though it is not of a simulation.
    """
    lives = Lives.of(record.requests)
    outcomes = [row.outcome for row in record.requests]
    completed = outcomes.count(Outcome.COMPLETED)
    num_output_tokens = int(lives.num_output_tokens.sum())
    makespan_s = record.ended_at / SECOND
    gpu_seconds = record.gpu_nanos / SECOND
    unseen = record.world != "simulated" and not record.gpu_nanos  # a client does not know what an elastic fleet holds
    seen_inside = inside or record.world == "simulated"  # a client knows of no steps
    good = int(lives.within(slo).sum()) if slo.promises_requests else None
    promised = quantiles(lives, record.gaps, slo)
    return Summary(
        world=record.world,
        requests=len(outcomes),
        completed=completed,
        failed=outcomes.count(Outcome.FAILED),
        rejected=outcomes.count(Outcome.REJECTED),
        cancelled=outcomes.count(Outcome.CANCELLED),
        unfinished=outcomes.count(Outcome.UNFINISHED),
        num_prompt_tokens=int(lives.num_prompt_tokens.sum()),
        num_output_tokens=num_output_tokens,
        makespan_s=makespan_s,
        throughput_rps=_rate(completed, makespan_s),
        output_tokens_per_s=_rate(num_output_tokens, makespan_s),
        ttft_s=Sample.of(lives.ttft()).distribution(),
        tbt_s=sample_of_gaps(record.gaps).distribution(),
        tpot_s=Sample.of(lives.tpot()).distribution(),
        e2e_s=Sample.of(lives.e2e()).distribution(),
        queue_s=Sample.of(lives.queued()).distribution(),
        slo_attainment=None if good is None or not outcomes else good / len(outcomes),
        goodput_rps=None if good is None else _rate(good, makespan_s),
        gpu_seconds=gpu_seconds,
        cost_usd=None if usd_per_gpu_hour is None or unseen else gpu_seconds / 3600 * usd_per_gpu_hour,
        scale_ups=record.scale_ups,
        scale_downs=record.scale_downs,
        preemptions=int(lives.preemptions.sum()) if seen_inside else None,
        num_steps=record.num_steps if seen_inside else None,
        num_events=record.num_events if seen_inside else None,
        wall_s=record.wall_s,
        latency_source=record.latency_source,
        slo_met=_met(good, len(outcomes), slo, promised),
        slo_quantiles=promised,
        energy_j=energy_j,
        detail=seen,
        absent=record.num_absent,
        refused=_reasons(record) if seen_inside else {},
        pools=pools,
        replicas={} if record.fleet is None else {use.role: use for use in record.fleet.roles},
        time_to_ready_s=None if record.fleet is None else _seconds(record.fleet.ready_after),
        startup_s={} if record.fleet is None else _startup(record.fleet),
        capacity=None if record.fleet is None else record.fleet.capacity,
    )


def _startup(fleet: FleetUse) -> dict[str, float]:
    return {phase: time / SECOND / len(fleet.ready_after) for phase, time in fleet.phases.items()}


def _seconds(times: Sequence[Nanos]) -> Distribution | None:
    return Sample.of(np.array(times, dtype=np.int64)).distribution()


def _met(good: int | None, total: int, slo: Slo, promised: Sequence[Quantile]) -> bool | None:
    """Whether the service kept all that it promised; None where it promised nothing, or nobody came."""
    if not total or (good is None and not promised):
        return None
    return (good is None or good >= ceil(slo.attainment * total - 1e-9)) and all(quantile.met for quantile in promised)


GIVEN_UP = (Outcome.REJECTED, Outcome.FAILED)


def _reasons(record: RunRecord) -> dict[str, int]:
    return dict(sorted(Counter(row.error for row in record.requests if row.outcome in GIVEN_UP).items()))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
