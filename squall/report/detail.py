"""What the engines of an observed simulation came to: batches, busy and idle time, utilisation, energy; per replica and in all.

The definitions are written out in docs/metrics.md. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from squall.core.lifecycle import Phase
from squall.core.metrics import Observed, RunRecord
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.report.sample import Distribution, Int64s, Sample, sample_of_progressions
from squall.report.steps import Columns, Stretches

if TYPE_CHECKING:
    from squall.report.deployed import Deployed, Floats, On

NOT_HELD = (Phase.OFF.value, Phase.FAILED.value)


class Utilisation(Struct, frozen=True):
    """A share of what there was (0 to 1), over time and over replicas: each replica's mean, weighted by how long it was held.

    `max` is the highest of any replica: at any instant for memory, of the replica's mean for the others.
    """

    mean: float
    min: float
    max: float


class Detail(Struct, frozen=True):
    """What the engines did. Distributions of counts are over steps; None where there is nothing to measure, or no datasheet.

    Attributes:
        batch_size: requests in a step; `batch_tokens` what it computes, of which `prefill_tokens` and `decode_tokens`.
        step_s: from a step's start to the end of its last stage.
        preempted_s: of the requests that lost their KV, how long they were without; `restarts`: how often, over all requests.
        busy_s, idle_s: stage time in steps, and held without one; over all replicas and stages.
        mfu: operations that the work needs as a share of the peak, while held; `mfu_busy` while in steps.
        kv: blocks that requests hold; `memory`: bytes of weights and of those blocks, of a GPU's memory.
        prefix_hits: prompt tokens found in the prefix cache, of all prompt tokens.
    """

    batch_size: Distribution | None
    batch_tokens: Distribution | None
    prefill_tokens: Distribution | None
    decode_tokens: Distribution | None
    step_s: Distribution | None
    preempted_s: Distribution | None
    restarts: Distribution | None
    busy_s: float
    idle_s: float
    busy: Utilisation
    kv: Utilisation
    mfu: Utilisation | None
    mfu_busy: float | None
    memory: Utilisation | None
    prefix_hits: float | None


class Use(Struct, frozen=True):
    """Row i of every array: what one stage of one replica did. Times in nanoseconds; `replicas.parquet` holds these."""

    replica: Int64s
    stage: Int64s
    held: Int64s
    busy: Int64s
    num_steps: Int64s
    num_prefill_tokens: Int64s
    num_decode_tokens: Int64s
    kv_mean: Floats
    kv_max: Floats
    mfu: Floats
    joules: Floats


def usage(record: RunRecord, observed: Observed, deployed: On | None) -> Use:
    """What each replica's stages did, ascending in replica and stage. Without a datasheet `mfu` and `joules` are not numbers."""
    stretches = Stretches(observed)
    columns, durations = stretches.columns, stretches.durations()
    replicas = np.array(sorted(observed.pools), dtype=np.int64)
    stages = np.array([observed.stages.get(int(replica), observed.num_stages) for replica in replicas], dtype=np.int64)
    first_row = np.cumsum(stages) - stages  # of each replica
    row = first_row[np.searchsorted(replicas, columns["replica"])] + columns["stage"]
    size = int(stages.sum())

    def summed(values: Int64s) -> Int64s:
        sums = np.zeros(size, dtype=np.int64)
        np.add.at(sums, row, values)
        return sums

    busy = summed(durations)
    held_of = held(observed, record.ended_at)
    held_each = np.array([held_of[int(replica)] for replica in replicas], dtype=np.int64)
    held_time = np.repeat(held_each, stages)
    kv_area, kv_most = _kv(stretches, replicas)
    pools = np.array([observed.pools[int(replica)] for replica in replicas], dtype=np.float64)
    mfu = joules = np.full(size, np.nan)
    if deployed is not None:
        mfu, joules = np.zeros(size), np.zeros(size)
        idle_s = np.maximum(held_time - busy, 0) / SECOND
        for on, its in alike(deployed, replicas):
            part = np.isin(columns["replica"], its)
            rows = np.isin(np.repeat(replicas, stages), its)
            own: Columns = {name: column[part] for name, column in columns.items()}
            flops = np.bincount(row[part], on.flops(own) / on.pp, size)[rows]
            mfu[rows] = flops / np.maximum(held_time[rows] / SECOND * on.peak_flops * on.tp, 1e-300)
            busy_joules = np.bincount(row[part], on.busy_joules(own, durations[part]), size)[rows]
            joules[rows] = busy_joules + idle_s[rows] * on.idle_watts * on.tp
    return Use(
        replica=np.repeat(replicas, stages),
        stage=np.arange(size) - np.repeat(first_row, stages),
        held=held_time,
        busy=busy,
        num_steps=summed(columns["count"]),
        num_prefill_tokens=summed(columns["count"] * columns["num_prefill_tokens"]),
        num_decode_tokens=summed(columns["count"] * columns["num_decodes"]),
        kv_mean=np.repeat(kv_area / np.maximum(held_each * pools, 1), stages),
        kv_max=np.repeat(kv_most / np.maximum(pools, 1), stages),
        mfu=mfu,
        joules=joules,
    )


def held(observed: Observed, ended_at: Nanos) -> dict[ReplicaId, Nanos]:
    """How long each replica had its GPUs: while it was neither off nor failed; all the time where no phase was seen."""
    times = dict.fromkeys(observed.pools, 0 if observed.phases else ended_at)
    since: dict[ReplicaId, Nanos] = {}
    for at, replica, phase, _ in observed.phases:
        if phase in NOT_HELD:
            times[replica] = times.get(replica, 0) + at - since.pop(replica, at)
        else:
            since.setdefault(replica, at)
    for replica, at in since.items():
        times[replica] = times.get(replica, 0) + ended_at - at
    return times


def _kv(stretches: Stretches, replicas: Int64s) -> tuple[Floats, Floats]:
    """Of each replica: blocks held times nanoseconds, and the most blocks. A replica without a step holds none."""
    area, most = np.zeros(len(replicas)), np.zeros(len(replicas))
    for piece in stretches.steps():
        first = piece["stage"] == 0
        row = np.searchsorted(replicas, piece["replica"][first])
        area += np.bincount(row, (piece["kv_blocks"] * piece["duration"])[first], len(replicas))
        np.maximum.at(most, row, piece["kv_blocks"][first])
    return area, most


def alike(deployed: On, replicas: Int64s) -> list[tuple[Deployed, Int64s]]:
    """Which replicas run on what."""
    if not isinstance(deployed, Mapping):
        return [(deployed, replicas)]
    of: dict[int, list[int]] = {}
    kinds: dict[int, Deployed] = {}
    for replica in map(int, replicas):
        kinds[id(deployed[replica])] = deployed[replica]
        of.setdefault(id(deployed[replica]), []).append(replica)
    return [(kinds[kind], np.array(its, dtype=np.int64)) for kind, its in of.items()]


def detail(record: RunRecord, observed: Observed, use: Use, deployed: On | None) -> Detail:
    """The summary of what the engines did."""
    columns = Stretches(observed).columns
    first = {name: column[columns["stage"] == 0] for name, column in columns.items()}

    def over_steps(values: Int64s) -> Distribution | None:
        return Sample.of(values, first["count"]).distribution(unit=1)

    restarts = np.array([row.preemptions for row in record.requests], dtype=np.int64)
    prompts = sum(row.num_prompt_tokens for row in record.requests)
    held_s, busy_s = int(use.held.sum()) / SECOND, int(use.busy.sum()) / SECOND
    mfu = None if deployed is None else _over(use.mfu, use)
    return Detail(
        batch_size=over_steps(first["num_decodes"] + first["num_prefills"]),
        batch_tokens=over_steps(first["num_decodes"] + first["num_prefill_tokens"]),
        prefill_tokens=over_steps(first["num_prefill_tokens"]),
        decode_tokens=over_steps(first["num_decodes"]),
        step_s=_step_times(columns),
        preempted_s=Sample.of(np.array(list(observed.preempted.values()), dtype=np.int64)).distribution(),
        restarts=Sample.of(restarts).distribution(unit=1),
        busy_s=busy_s,
        idle_s=max(0.0, held_s - busy_s),
        busy=_over(use.busy / np.maximum(use.held, 1), use),
        kv=Utilisation(*_mean_and_min(use.kv_mean, use), float(use.kv_max.max(initial=0))),
        mfu=mfu,
        mfu_busy=mfu.mean * held_s / busy_s if mfu is not None and busy_s else None,
        memory=None if deployed is None else _memory(use, observed, deployed),
        prefix_hits=sum(row.num_cached_tokens for row in record.requests) / prompts if prompts else None,
    )


def _step_times(columns: Columns) -> Distribution | None:
    """Through all stages, whose rows of one run follow each other: single steps, where there is more than one stage."""
    began = np.flatnonzero(columns["stage"] == 0)
    ended = np.append(began[1:], len(columns["stage"])) - 1
    took = columns["started_at"][ended] + (columns["first"][ended] >> 4) - columns["started_at"][began]
    first = np.where(began == ended, columns["first"][began], took << 4)
    ones = np.ones(len(began), dtype=np.int64)
    return sample_of_progressions(ones, columns["count"][began], first, columns["increment"][began]).distribution()


def _over(shares: Floats, use: Use) -> Utilisation:
    return Utilisation(*_mean_and_min(shares, use), float(shares.max(initial=0)))


def _mean_and_min(shares: Floats, use: Use) -> tuple[float, float]:
    ever = use.held > 0
    if not ever.any():
        return 0.0, 0.0
    return float(np.average(shares[ever], weights=use.held[ever])), float(shares[ever].min())


def _memory(use: Use, observed: Observed, deployed: On) -> Utilisation:
    """Weights are there all the time that a replica is held, blocks while requests hold them."""
    on = [deployed[int(replica)] if isinstance(deployed, Mapping) else deployed for replica in use.replica]
    total = np.array([each.gpu.memory_bytes for each in on], dtype=np.float64)
    weights = np.array([each.weight_bytes for each in on], dtype=np.float64)
    pools = np.array([observed.pools[int(r)] * each.block_bytes for r, each in zip(use.replica, on, strict=True)])
    mean = (weights + use.kv_mean * pools) / total
    most = (weights + use.kv_max * pools) / total
    return Utilisation(*_mean_and_min(mean, use), float(most.max(initial=0)))
