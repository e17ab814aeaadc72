"""A run as one HTML page that needs no network: distributions, load over time, the summary and the configuration.

Knows the shapes of plotly's traces; plotly.js itself comes out of plotly's wheel.
"""

from __future__ import annotations

import html
import tomllib
from math import log10
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from squall.core.metrics import UNSET, Outcome
from squall.core.types import SECOND
from squall.report.changes import charts_of_changes, tables_of_changes
from squall.report.compare import METRICS, OF_ELASTIC_FLEETS, STATISTICS, replica_lines, written
from squall.report.offline import COLOURS, INK, Chart, Trace, chart, offline_page
from squall.report.run import REPORT, StoredRun, write_file
from squall.report.sample import Distribution, Int64s, Sample, sample_of_gaps
from squall.report.summary import Lives, Summary

POINTS = 400  # of a curve: more than a screen shows
BLUE, ORANGE, GREEN = COLOURS[:3]


def write_report(run: StoredRun) -> Path:
    """Write `report.html` into the run directory, over an older one, and return its path.

    Raises:
        SquallError: the run's files cannot be read or the page cannot be written.
    """
    path = run.path / REPORT
    write_file(path, page(run).encode())
    return path


def page(run: StoredRun) -> str:
    """The page, complete."""
    lives = run.lives()
    charts = [
        chart(
            "Latency: share of requests (TBT: of gaps) within x seconds",
            "seconds",
            "share",
            latencies(run, lives),
            log_x=True,
            hover="x",
        ),
        chart("Requests per second", "seconds since the start", "requests/s", rates(lives)),
        chart(
            "Output tokens per second, each request's spread evenly from its first to its last",
            "seconds since the start",
            "tokens/s",
            tokens(lives),
        ),
        chart(
            "Requests waiting for their first step (as a client sees it: token), and at work",
            "seconds since the start",
            "requests",
            levels(lives),
        ),
    ]
    charts += [*over_time(run), *charts_of_changes(run)]
    world, source = html.escape(run.summary.world.capitalize()), html.escape(run.summary.latency_source or "unknown")
    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in run.notes)
    numbers = f"""<p>{world} run; times: {source}.</p>
{notes}<div class="tables">
<table class="plain">{_numbers(run)}</table>
<table>{_distributions(run.summary)}</table>
</div>"""
    configuration = f"<details><summary>Configuration</summary><pre>{html.escape(run.config)}</pre></details>"
    return offline_page(f"squall: {run.path.resolve().name}", numbers, charts, tables_of_changes(run) + configuration)


def over_time(run: StoredRun) -> list[Chart]:
    """Charts of the engines over time, where the run was asked for a series of them."""
    frame = run.series()
    if frame is None:
        return []
    x = frame["at_s"].to_numpy()
    charts = []
    for title, y, columns in _SERIES:
        traces = [
            _line(name, colour, x, frame[column].to_numpy(), steps=True)
            for (column, name), colour in zip(columns, COLOURS, strict=False)
            if column in frame.columns and frame[column].max()
        ]
        if traces:
            charts.append(chart(title, "seconds since the start", y, traces))
    return charts


_SERIES = (
    (
        "Tokens per second computed, of prompts and of answers", "tokens/s",
        (("prefill_tokens_per_s", "prefill"), ("decode_tokens_per_s", "decode")),
    ),
    ("Share of the time that stages are busy, and of the KV blocks held", "share", (("busy_share", "busy"), ("kv_share", "KV"))),
    (
        "Replicas by phase", "replicas",
        (
            ("replicas_ready", "ready"), ("replicas_loading", "loading"), ("replicas_draining", "draining"),
            ("replicas_failed", "failed"), ("replicas_starting", "starting"), ("replicas_warming", "warming"),
            ("replicas_idle", "idle"),
        ),
    ),
    ("Requests that broke their promise, per bin", "requests", (("slo_violations", "violations"),)),
)  # fmt: skip
"""Title, unit and columns of each chart of a series."""


def latencies(run: StoredRun, lives: Lives) -> list[Trace]:
    """Cumulative distributions, those that there are."""
    samples = (
        ("TTFT", BLUE, Sample.of(lives.ttft())),
        ("TBT", ORANGE, sample_of_gaps(run.gaps())),
        ("E2E", GREEN, Sample.of(lives.e2e())),
    )
    share = np.linspace(0, 1, POINTS)
    return [_line(name, colour, sample.at(share) / SECOND, share) for name, colour, sample in samples if len(sample.values)]


def rates(lives: Lives) -> list[Trace]:
    """Arrivals and completions, binned."""
    edges = _edges(lives)
    pairs = (("arrived", INK, lives.arrived_at), ("completed", BLUE, lives.finished_at[lives.completed]))
    return [
        _line(name, colour, edges[:-1], np.histogram(at / SECOND, edges)[0] / np.diff(edges), steps=True)
        for name, colour, at in pairs
    ]


def tokens(lives: Lives) -> list[Trace]:
    """Output tokens, binned: each request adds a ramp to the cumulated count, so the bins are its differences."""
    edges = _edges(lives)
    made = (lives.first_token_at != UNSET) & (lives.finished_at != UNSET)
    first, last, number = (column[made] for column in (lives.first_token_at, lives.finished_at, lives.num_output_tokens))
    cumulated = _ramps(edges * SECOND, first, np.maximum(last, first + 1), number)
    return [_line("output tokens", ORANGE, edges[:-1], np.diff(cumulated) / np.diff(edges), steps=True)]


def levels(lives: Lives) -> list[Trace]:
    """Requests that wait and that are at work, as they stand at evenly spaced instants. A client sees work begin with a token."""
    at = np.linspace(0, _end_s(lives), POINTS)
    begun_at = np.where(lives.scheduled_at != UNSET, lives.scheduled_at, lives.first_token_at)
    begun, ended = begun_at != UNSET, lives.finished_at != UNSET
    waits = begun | ended | (lives.outcome == Outcome.UNFINISHED.value)  # a rejected request does not wait
    left = np.where(begun, begun_at, lives.finished_at)
    waiting = _passed(lives.arrived_at[waits], at) - _passed(left[begun | ended], at)
    working = _passed(begun_at[begun], at) - _passed(lives.finished_at[begun & ended], at)
    return [_line("waiting", ORANGE, at, waiting, steps=True), _line("at work", BLUE, at, working, steps=True)]


def _passed(instants: Int64s, at_s: NDArray[np.float64]) -> Int64s:
    """How many of the instants have come at each time."""
    return np.searchsorted(np.sort(instants), (at_s * SECOND).astype(np.int64), side="right").astype(np.int64)


def _ramps(at: NDArray[np.float64], first: Int64s, last: Int64s, height: Int64s) -> NDArray[np.float64]:
    """The sum of ramps, each from 0 at `first` to `height` at `last`. Its slope changes at 2n instants and nowhere else."""
    slope = height / (last - first)
    corners = np.concatenate((first, last))
    order = np.argsort(corners, kind="stable")
    corners = corners[order]
    slopes = np.cumsum(np.concatenate((slope, -slope))[order])
    heights = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(corners)))) if len(corners) else corners
    return np.interp(at, corners, heights, left=0.0) if len(corners) else np.zeros_like(at)


def _end_s(lives: Lives) -> float:
    """The last instant of which a row knows."""
    return (
        float(max((column.max(initial=0) for column in (lives.arrived_at, lives.first_token_at, lives.finished_at)), default=0))
        / SECOND
    )


def _edges(lives: Lives) -> NDArray[np.float64]:
    """Bins of 1, 2 or 5 times a power of ten seconds, about a hundred of them."""
    rough = max(_end_s(lives), 1e-3) / 100
    decade = 10.0 ** np.floor(log10(rough))
    width = decade * next(step for step in (1, 2, 5, 10) if step * decade >= rough * 0.999)
    edges: NDArray[np.float64] = np.arange(int(_end_s(lives) / width) + 2) * width
    return edges


def _line(name: str, colour: str, x: NDArray[Any], y: NDArray[Any], *, steps: bool = False) -> Trace:
    shape = {"shape": "hv"} if steps else {}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x.tolist(),
        "y": y.tolist(),
        "line": {"color": colour, "width": 1.5, **shape},
    }


def _numbers(run: StoredRun) -> str:
    units = {"SLO attainment": html.escape(_objectives(run.config))}
    plain = [(name, key, units.get(name, unit), getattr(run.summary, key)) for name, unit, key in METRICS]
    shown = [
        (name, unit, value)
        for name, key, unit, value in plain
        if value is not None and not isinstance(value, Distribution) and (value or key not in OF_ELASTIC_FLEETS)
    ]
    shown += [(line.name, line.unit, line.values[0]) for line in replica_lines([run.summary])]
    shown += _detail(run.summary)
    return "\n".join(f"<tr><td>{name}</td><td>{written(value)}</td><td>{unit}</td></tr>" for name, unit, value in shown)


def _detail(summary: Summary) -> list[tuple[str, str, float]]:
    """Of an observed run: what its engines came to."""
    rows: list[tuple[str, str, float | None]] = [("energy", "J", summary.energy_j)]
    if (seen := summary.detail) is not None:
        rows += [("busy", "of the time held", seen.busy.mean), ("KV blocks held", "of the pool, mean", seen.kv.mean)]
        rows += [("KV blocks held", "of the pool, most", seen.kv.max)]
        if seen.batch_size is not None:
            rows.append(("requests a step", "mean", seen.batch_size.mean))
        if seen.mfu is not None:
            rows.append(("MFU", "of the time held", seen.mfu.mean))
    rows += [
        (f"{quantile.name}", f"≤ {quantile.promised_s:g} s promised", quantile.reached_s) for quantile in summary.slo_quantiles
    ]
    return [(name, unit, value) for name, unit, value in rows if value is not None]


def _objectives(config: str) -> str:
    """What a run's configuration promises, in a few words."""
    slo = tomllib.loads(config).get("slo", {})
    promised = (("TTFT", "ttft_s"), ("TPOT", "tbt_s"), ("E2E", "e2e_s"))
    return ", ".join(f"{name} ≤ {slo[key]:g} s" for name, key in promised if key in slo)


def _distributions(summary: Summary) -> str:
    rows = [(name, getattr(summary, key)) for name, _, key in METRICS if isinstance(getattr(summary, key), Distribution)]
    head = "".join(f"<th>{statistic}</th>" for statistic in ("seconds", *STATISTICS))
    body = "\n".join(
        f"<tr><td>{name}</td>" + "".join(f"<td>{written(getattr(value, statistic))}</td>" for statistic in STATISTICS) + "</tr>"
        for name, value in rows
    )
    return f"<tr>{head}</tr>\n{body}"
