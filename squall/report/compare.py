"""Runs side by side: how each number of one relates to that of another, and whether they did the same work.

Knows no file format and how nothing is measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from squall.core.fleet_view import Capacity
from squall.core.types import MILLISECOND, SECOND
from squall.report.sample import Distribution
from squall.report.summary import Lives, Summary

if TYPE_CHECKING:
    from rich.table import Table

    from squall.report.run import StoredRun

LENGTHS_MAY_DIFFER = 0.01  # a chat template adds a token, a stop string takes one away
ARRIVALS_MAY_DIFFER = 100 * MILLISECOND  # a client sends a little late

Metric = tuple[str, str, str]
"""What is compared: its name for a person, its unit, its key in the summary."""

METRICS: tuple[Metric, ...] = (
    ("requests", "", "requests"),
    ("completed", "", "completed"),
    ("failed", "", "failed"),
    ("rejected", "", "rejected"),
    ("makespan", "s", "makespan_s"),
    ("throughput", "req/s", "throughput_rps"),
    ("output tokens", "tok/s", "output_tokens_per_s"),
    ("TTFT", "s", "ttft_s"),
    ("TBT", "s", "tbt_s"),
    ("TPOT", "s", "tpot_s"),
    ("E2E", "s", "e2e_s"),
    ("queue", "s", "queue_s"),
    ("SLO attainment", "", "slo_attainment"),
    ("goodput", "req/s", "goodput_rps"),
    ("GPU time", "s", "gpu_seconds"),
    ("cost", "USD", "cost_usd"),
    ("replicas added", "", "scale_ups"),
    ("replicas removed", "", "scale_downs"),
    ("time to ready", "s", "time_to_ready_s"),
    ("preemptions", "", "preemptions"),
    ("steps", "", "num_steps"),
)

OF_ELASTIC_FLEETS = ("scale_ups", "scale_downs")
"""Not worth a line where all are 0."""

ENDINGS = ("completed", "failed", "rejected", "cancelled", "unfinished")

STATISTICS = ("mean", "p50", "p90", "p99", "max")


class Line(Struct, frozen=True):
    """One metric of all runs. `values` in `unit`; None where a run does not have it."""

    name: str
    unit: str
    values: tuple[float | None, ...]

    def change(self, i: int) -> str:
        """How run `i` relates to the first: percent up to a factor of two, a factor beyond; empty where there is no ratio."""
        base, value = self.values[0], self.values[i]
        if base is None or value is None or base == 0:
            return ""
        if value == 0:
            return "-100 %"
        ratio = value / base
        return f"{100 * (ratio - 1):+.1f} %" if 0.5 < ratio < 2 else f"x {ratio:.3g}"


def lines(summaries: Sequence[Summary], metrics: Sequence[Metric] = METRICS) -> list[Line]:
    """The metrics, in their order; those that no run has are left out."""
    found = []
    for name, unit, key in metrics:
        values = [getattr(summary, key) for summary in summaries]
        if any(isinstance(value, Distribution) for value in values):
            found += [
                Line(f"{name} {statistic}", unit, tuple(getattr(value, statistic, None) for value in values))
                for statistic in STATISTICS
            ]
        elif any(values if key in OF_ELASTIC_FLEETS else (value is not None for value in values)):
            found.append(Line(name, unit, tuple(values)))
    return found + replica_lines(summaries)


def replica_lines(summaries: Sequence[Summary]) -> list[Line]:
    """Of elastic fleets: how many there were, role by role."""
    roles = dict.fromkeys(role for summary in summaries for role in summary.replicas)
    uses = {role: [summary.replicas.get(role) for summary in summaries] for role in roles}
    return [
        Line(f"{role} replicas {statistic}".removeprefix("both "), "", tuple(getattr(use, statistic, None) for use in of_all))
        for role, of_all in uses.items()
        for statistic in ("min", "mean", "max")
    ]


def differences(one: Lives, other: Lives) -> list[str]:
    """In what the work of two runs differs, beyond what sending and chat templates explain; empty where it is the same."""
    if len(one.arrived_at) != len(other.arrived_at):
        return [f"{len(one.arrived_at)} requests against {len(other.arrived_at)}"]
    if not len(one.arrived_at):
        return []
    found = []
    for name in ("prompt", "output"):
        mine, theirs = (int(getattr(lives, f"num_{name}_tokens").sum()) for lives in (one, other))
        if abs(mine - theirs) > LENGTHS_MAY_DIFFER * max(mine, theirs):
            found.append(f"{mine} {name} tokens against {theirs}")
    apart = int(np.abs(np.sort(one.arrived_at) - np.sort(other.arrived_at)).max())
    if apart > ARRIVALS_MAY_DIFFER:
        found.append(f"arrivals up to {apart / SECOND:.3g} s apart")
    return found


def warnings(runs: Sequence[StoredRun]) -> list[str]:
    """One line for each run whose workload is not the first one's."""
    first = runs[0].lives()
    compared = [(run, differences(first, run.lives())) for run in runs[1:]]
    return [f"different workloads: {runs[0].path} and {run.path}: {'; '.join(found)}" for run, found in compared if found]


def table(names: Sequence[str], summaries: Sequence[Summary], metrics: Sequence[Metric] = METRICS) -> Table:
    """The comparison for a terminal; every run after the first has a column that says how it relates to the first."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("")
    for i, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        heading = re.sub(r"-(?=\d{8}-\d{6})", "\n", name)  # the date has a line of its own: two runs fit into 80 columns
        grid.add_column(f"{heading}\n({summary.world})", justify="right", overflow="fold")
        if i:
            grid.add_column("", justify="right", style="dim")
    for line in lines(summaries, metrics):
        cells = [f"{line.name} ({line.unit})" if line.unit else line.name]
        for i, value in enumerate(line.values):
            cells += [written(value)] + ([line.change(i)] if i else [])
        grid.add_row(*cells)
    return grid


def headline(summary: Summary) -> list[str]:
    """What a run came to, in a few lines of text."""
    ended = [f"{getattr(summary, name)} {name}" for name in ENDINGS if getattr(summary, name)]
    text = [
        f"{summary.world}: {summary.requests} requests ({', '.join(ended) or 'none'}) in {written(summary.makespan_s)} s, "
        f"which took {summary.wall_s:.3g} s; times: {summary.latency_source or 'unknown'}",
        f"  throughput  {written(summary.throughput_rps)} req/s, {written(summary.output_tokens_per_s)} output tok/s",
    ]
    for name, key in (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("E2E", "e2e_s")):
        if (one := getattr(summary, key)) is not None:
            text.append(f"  {name:<10}  p50 {written(one.p50)} s, p90 {written(one.p90)} s, p99 {written(one.p99)} s")
    if summary.slo_attainment is not None:
        text.append(f"  SLO         met by {100 * summary.slo_attainment:.1f} %, goodput {written(summary.goodput_rps)} req/s")
    if summary.replicas:
        text += _fleet(summary)
    if summary.cost_usd is not None:
        hours = f" ({written(summary.gpu_seconds / 3600)} GPU hours)" if summary.replicas else ""
        text.append(f"  cost        {summary.cost_usd:.4g} USD for {written(summary.gpu_seconds)} GPU seconds{hours}")
    if summary.refused:
        reasons = (f"{count} {reason.replace('_', ' ')}" for reason, count in summary.refused.items())
        text.append(f"  refused     {', '.join(reasons)}")
    if summary.absent:
        text.append(f"  not counted {summary.absent} requests of the workload, which had not arrived when the run ended")
    return text


def _fleet(summary: Summary) -> list[str]:
    """How large an elastic fleet was, how often it changed, and how long that took."""
    roles = summary.replicas.items()
    sizes = (f"{'' if role == 'both' else f'{role} '}{use.min} to {use.max}, {use.mean:.3g} on average" for role, use in roles)
    ready = summary.time_to_ready_s
    took = "" if ready is None else f"; new ones ready after p50 {written(ready.p50)} s, max {written(ready.max)} s"
    text = [f"  replicas    {'; '.join(sizes)}; {summary.scale_ups} added, {summary.scale_downs} removed{took}"]
    if any(seconds for phase, seconds in summary.startup_s.items() if phase != "weights"):
        text.append(f"  coming up   {', '.join(f'{phase} {written(s)} s' for phase, s in summary.startup_s.items())}, on average")
    return text if summary.capacity is None else [*text, f"  each        {_told(summary.capacity)}"]


def _told(capacity: Capacity) -> str:
    """What a scale policy was told that one replica can do, and which of that was given."""
    shown = (
        ("prefill_tokens_per_s", "prompt tok/s"), ("transfer_tokens_per_s", "tok/s of KV to others"), ("num_blocks", "KV blocks"),
        ("load_s", "s to load"),
    )  # fmt: skip
    parts = (f"{written(getattr(capacity, key))} {unit}{'' if key in capacity.derived else ' (given)'}" for key, unit in shown)
    return ", ".join(parts)


def written(value: float | None) -> str:
    """A number as a person reads it: whole ones in full, others with four significant digits."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
