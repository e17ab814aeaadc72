"""A run over time: one row every so many seconds, of what arrived, ended, waited, ran and was used.

Requests alone tell the first columns; those about engines need an observed run, and are null without. Knows no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from squall.config import Slo
from squall.core.lifecycle import Phase
from squall.core.metrics import UNSET, Observed, Outcome, RunRecord
from squall.core.types import SECOND, Nanos, Role
from squall.errors import ConfigError
from squall.report.detail import NOT_HELD
from squall.report.sample import Int64s
from squall.report.steps import Columns, Stretches
from squall.report.summary import Lives

if TYPE_CHECKING:
    import polars

MOST_ROWS = 1_000_000
PHASES = tuple(phase.value for phase in Phase if phase is not Phase.OFF)

Floats = NDArray[np.float64]


def bins_of(record: RunRecord, every_s: float) -> Int64s:
    """The edges of bins of `every_s` seconds; the last one may be cut off by the end of the run.

    Raises ConfigError where that would be more rows than a person can want.
    """
    bins = num_bins(record.ended_at, every_s)
    return np.minimum(np.arange(bins + 1, dtype=np.int64) * _width(every_s), max(record.ended_at, 1))


def num_bins(span: Nanos, every_s: float) -> int:
    """Rows of a run that lasts so long; whoever knows that it will last so long asks before it. Raises as `bins_of`."""
    bins = max(1, -(-span // _width(every_s)))
    if bins > MOST_ROWS:
        least = span / SECOND / MOST_ROWS
        raise ConfigError(f"run.series_s is {every_s}, too fine for {bins:,} rows; use {least:.2g} or more")
    return bins


def _width(every_s: float) -> Nanos:
    return max(1, round(every_s * SECOND))


def series(
    record: RunRecord, slo: Slo, every_s: float, gpus_per_replica: float, usd_per_gpu_hour: float | None = None
) -> polars.DataFrame:
    """The series of a run in the bins of `bins_of`.

    Counts and sums are of the bin, levels (waiting, running, KV blocks, replicas) its mean over time; see docs/metrics.md.
    """
    import polars as pl

    edges = bins_of(record, every_s)
    lives = Lives.of(record.requests)
    columns = {"at_s": edges[:-1] / SECOND, **_requests(lives, slo, edges)}
    if record.observed is not None:
        columns |= _engines(record.observed, edges) | _fleet(record.observed, edges, gpus_per_replica)
        if usd_per_gpu_hour is not None:
            columns["cost_usd"] = np.asarray(columns["gpu_seconds"], dtype=np.float64) / 3600 * usd_per_gpu_hour
    return pl.DataFrame(columns)


def _requests(lives: Lives, slo: Slo, edges: Int64s) -> dict[str, NDArray[np.generic]]:
    ended, begun = lives.finished_at != UNSET, lives.scheduled_at != UNSET
    waits = begun | ended | (lives.outcome == Outcome.UNFINISHED.value)
    left = np.where(begun, lives.scheduled_at, lives.finished_at)
    end = int(edges[-1])
    columns: dict[str, NDArray[np.generic]] = {
        "arrivals": _count(lives.arrived_at, edges),
        "completions": _count(lives.finished_at[lives.completed], edges),
        "rejections": _count(lives.finished_at[lives.outcome == Outcome.REJECTED.value], edges),
        "first_tokens": _count(lives.first_token_at[lives.first_token_at != UNSET], edges),
        "waiting": _level(lives.arrived_at[waits], np.where(begun | ended, left, end)[waits], edges),
        "running": _level(lives.scheduled_at[begun], np.where(ended, lives.finished_at, end)[begun], edges),
    }
    if slo.promises_requests:
        # a request that never ended has broken its promise by the end of the run
        at = np.where(ended, lives.finished_at, end)
        columns["slo_violations"] = _count(at[~lives.within(slo)], edges)
    return columns


def _engines(observed: Observed, edges: Int64s) -> dict[str, NDArray[np.generic]]:
    """What steps did. A step that lies in several bins gives each its share by time."""
    size = len(edges) - 1
    busy, prefill, decode, blocks = (np.zeros(size) for _ in range(4))
    steps = np.zeros(size, dtype=np.int64)
    for piece in Stretches(observed).steps():
        began, took = piece["started_at"], piece["duration"]
        busy += _spread(began, took, took / SECOND, edges)
        first = piece["stage"] == 0
        part: Columns = {name: column[first] for name, column in piece.items()}
        began, took = part["started_at"], part["duration"]
        prefill += _spread(began, took, part["num_prefill_tokens"], edges)
        decode += _spread(began, took, part["num_decodes"], edges)
        blocks += _spread(began, took, part["kv_blocks"] * (took / SECOND), edges)
        steps += _count(began, edges)
    width = np.diff(edges) / SECOND
    total = sum(observed.pools.values())
    return {
        "steps": steps,
        "prefill_tokens_per_s": prefill / width,
        "decode_tokens_per_s": decode / width,
        "kv_blocks": blocks / width,
        "kv_share": blocks / width / max(1, total),
        "busy_share": busy / width / max(1, sum(observed.stages.get(id, observed.num_stages) for id in observed.pools)),
    }


def _fleet(observed: Observed, edges: Int64s, gpus_per_replica: float) -> dict[str, NDArray[np.generic]]:
    """Mean numbers of replicas in each phase, and the accelerator time that they hold."""
    spans: dict[str, list[tuple[Nanos, Nanos]]] = {phase: [] for phase in PHASES}
    since: dict[int, tuple[Nanos, str, str]] = {}
    ends = [(int(edges[-1]), replica, "", "") for replica in {replica for _, replica, *_ in observed.phases}]
    for at, replica, phase, role in (*observed.phases, *ends):
        if replica in since:
            began, before, served = since[replica]
            spans.setdefault(before, []).append((began, at))
            if served != Role.BOTH.value:
                spans.setdefault(f"{before}_{served}", []).append((began, at))
        since[replica] = at, phase, role
    levels = {}
    for name, during in spans.items():
        table = np.array(during, dtype=np.int64).reshape(-1, 2)
        levels[name] = _level(table[:, 0], table[:, 1], edges)
    held = sum((levels[phase] for phase in PHASES if phase not in NOT_HELD), np.zeros(len(edges) - 1))
    columns: dict[str, NDArray[np.generic]] = {f"replicas_{phase}": level for phase, level in levels.items()}
    columns["gpu_seconds"] = held * np.diff(edges) / SECOND * gpus_per_replica
    return columns


def _count(instants: Int64s, edges: Int64s) -> Int64s:
    """How many fall into each bin; the last one includes the end of the run."""
    return np.histogram(instants, edges)[0].astype(np.int64)


def _level(began: Int64s, ended: Int64s, edges: Int64s) -> Floats:
    """The mean number of spans that are open, in each bin: what has begun minus what has ended, integrated."""
    area = _integral(began, edges) - _integral(ended, edges)
    return (np.diff(area) / np.diff(edges)).astype(np.float64)


def _integral(instants: Int64s, at: Int64s) -> NDArray[np.longdouble]:
    """Of the number of instants that have come, from the beginning to each of `at`."""
    ordered = np.sort(instants)
    passed = np.searchsorted(ordered, at, side="right")
    before = np.concatenate(([0], np.cumsum(ordered, dtype=np.longdouble)))  # of a million instants of a day: 67 bits
    return np.asarray(passed * at.astype(np.longdouble) - before[passed], dtype=np.longdouble)


def _spread(began: Int64s, took: Int64s, amount: NDArray[np.generic], edges: Int64s) -> Floats:
    """Amounts over bins, each by the share of its time that lies in them: differences of a sum of ramps."""
    rate = np.asarray(amount, dtype=np.float64) / took
    corners = np.concatenate((began, began + took))
    order = np.argsort(corners, kind="stable")
    corners, slopes = corners[order], np.cumsum(np.concatenate((rate, -rate))[order])
    if not len(corners):
        return np.zeros(len(edges) - 1)
    heights = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(corners))))
    shares: Floats = np.diff(np.interp(edges, corners, heights))
    return shares
