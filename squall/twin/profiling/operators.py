"""`squall profile operators`: measures the operators of a model's shares within some seconds, and makes the profile.

Knows the order of things and how to spend the time: first what every curve cannot do without, then where the fit is least sure.
Each measured point is kept at once, so that a killed or too short run goes on where it was.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path

import polars as pl
from msgspec import Struct
from msgspec.structs import replace

import squall
from squall.errors import ProfileError
from squall.perf.tables.checks import ROW
from squall.perf.tables.operations import OPERATIONS
from squall.perf.tables.profile import VERSION, Header, OperatorProfile, gather
from squall.report.progress import Show
from squall.twin.profiling.journal import Journal, Row
from squall.twin.profiling.lines import Measurable, Place, Proposal

Measure = Callable[[str, Place], float]
"""Seconds of an operator at a row's columns."""

BETWEEN = 0.3
"""The share of the time that whole steps get, where they are measured between operators."""

_LONGEST = 0.003
"""Of the time there is, a single call may take so much: it is repeated, and there are hundreds of points."""


class Spent(Struct, frozen=True):
    """How measuring ended.

    Attributes:
        points: measured now; earlier: taken over from a run that was stopped.
        sure: nothing was left that another point would tell.
    """

    points: int
    earlier: int
    sure: bool


def measure(
    curves: Sequence[Measurable],
    seconds_of: Measure,
    journal: Journal,
    budget_s: float,
    show: Show,
    *,
    insist: bool = True,
    between: Callable[[], None] | None = None,
) -> Spent:
    """Measure points of the curves until the time is over or the fit is sure.

    Where the time is too short for every curve's first points, raises ProfileError: what was measured stays in the journal.
    Unless `insist`, these are measured whatever time it takes. `between` is called so often that it gets its share of the
    time: what is measured side by side meets the same machine, however busy that is with other things.
    """
    earlier = sum(_learn(curves, row.operator, row.at, row.seconds) for row in journal.rows)
    began, count, aside = time.monotonic(), 0, 0.0
    most_s = budget_s * _LONGEST
    proposed = {curve: list(curve.proposals(most_s)) for curve in curves}
    while True:
        spent = time.monotonic() - began
        if between is not None and aside <= BETWEEN * spent < BETWEEN * budget_s:
            between()
            aside += time.monotonic() - began - spent
            continue
        if not any(proposed.values()):
            return Spent(count, earlier, sure=True)
        if spent >= budget_s:
            missing = sum(proposal.needed for proposals in proposed.values() for proposal in proposals)
            if missing and insist:
                raise ProfileError(
                    f"{spent:.0f} s were too few: {missing} curves lack points; run the same again, which goes on from "
                    f"{journal.path}, or give it more (--budget)"
                )
            if not missing:
                return Spent(count, earlier, sure=False)
        curve, best = _best(proposed)
        count += _take(curve, best, seconds_of, journal)
        proposed[curve] = list(curve.proposals(most_s))
        show(spent, f"{count} points measured")


def _best(proposed: Mapping[Measurable, Sequence[Proposal]]) -> tuple[Measurable, Proposal]:
    """The point that is worth most: the least sure of the curve with the largest share of a step."""
    low, high = (sum(ends) or 1.0 for ends in zip(*(curve.ends() for curve in proposed), strict=True))
    best: tuple[float, Measurable, Proposal] | None = None
    for curve, proposals in proposed.items():
        first, last = curve.ends()
        share = max(first / low, last / high)
        for proposal in proposals:
            worth = inf if proposal.doubt == inf else proposal.doubt * share
            if best is None or worth > best[0]:
                best = worth, curve, proposal
    assert best is not None
    return best[1:]


def _take(curve: Measurable, proposal: Proposal, seconds_of: Measure, journal: Journal) -> int:
    """Measure a point; where it and a neighbour contradict each other both once more, of which the shorter time counts."""
    seconds = seconds_of(proposal.operator, proposal.at)
    journal.add(Row(proposal.operator, dict(proposal.at), seconds))
    line = curve.learn(proposal.at, seconds)
    assert line is not None
    again = line.amiss(int(proposal.at[line.axis]))
    for size in again:
        better = min(line.times[size], seconds_of(line.operator, line.place(size)))
        journal.add(Row(line.operator, dict(line.place(size)), better))
        line.times[size] = better
    return 1 + len(again)


def _learn(curves: Sequence[Measurable], operator: str, at: Place, seconds: float) -> bool:
    return any(curve.operator == operator and curve.learn(at, seconds) is not None for curve in curves)


# -- what becomes of it


def profile_of(rows: Iterable[Row], header: Header, place: str) -> OperatorProfile:
    """The profile of measured rows, of which the last of each point counts. Raises ProfileError where they make no sense."""
    last: dict[str, dict[tuple[int | str, ...], float]] = {}
    for row in rows:
        if row.operator in OPERATIONS:
            columns = OPERATIONS[row.operator].columns
            last.setdefault(row.operator, {})[tuple(row.at[column] for column in columns)] = row.seconds
    parts: dict[str, pl.DataFrame] = {}
    for operator, points in last.items():
        values = [(*at, seconds, number) for number, (at, seconds) in enumerate(points.items(), 1)]
        schema = [*OPERATIONS[operator].columns, "seconds", ROW]
        parts[operator] = pl.DataFrame(values, schema=schema, orient="row", infer_schema_length=None)
    return gather(header, parts, dict.fromkeys(parts, place))


def with_overhead(profile: OperatorProfile, step_s: float | None) -> OperatorProfile:
    """The same with what a step costs beside its operators."""
    return OperatorProfile(replace(profile.header, step_s=step_s), profile.rows)


def header(gpu: str, how: str, models: tuple[str, ...], tps: Sequence[int], block_size: int | None) -> Header:
    """Of a profile that is measured here."""
    source = f"measured on {machine()}"
    return Header(VERSION, gpu, f"squall {squall.__version__}, {how}", source, models, tuple(sorted(tps)), block_size)


def machine() -> str:
    """This machine's processors, in words."""
    return f"{_processor()} with {os.cpu_count()} cores"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def counted(profile: OperatorProfile) -> Mapping[str, int]:
    """Points of every operator."""
    return {name: len(rows) for name, rows in profile.rows.items()}
