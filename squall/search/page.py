"""The search as one HTML page that needs no network: what costs how much and is how fast, the best, and how sure that is.

Knows the shapes of plotly's traces; plotly.js itself comes out of plotly's wheel.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from squall.report.offline import Chart, Trace, chart, offline_page
from squall.search.answers import Finalist, frontier, summary_line, usd_per_thousand
from squall.search.curves import FRACTIONS, NEVER
from squall.search.result import Result
from squall.search.space import shown
from squall.search.spec import Search
from squall.search.strategy import ranked
from squall.search.tables import UNITS, best_lines, miss_lines, value

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b1f24")  # told apart by colour-blind readers too
BARS = 25
"""Of the best configurations."""


def page(
    name: str,
    search: Search,
    results: Sequence[Result],
    finalists: Sequence[Finalist],
    notes: Sequence[str],
    losses: Mapping[str, Mapping[str, float | None]],
) -> str:
    """The page, complete."""
    unit = UNITS[search.objective]
    charts = [
        _chart("The best configurations", "", unit, bars(results, search)),
        _chart("Cost against time to first token (P90); the line joins what nothing beats", "TTFT P90, s", _cost(search),
               against(results, search, "ttft", 0.9)),
        _chart("Cost against time between tokens (P99)", "TBT P99, s", _cost(search), against(results, search, "tbt", 0.99)),
        _chart("Time to first token of the best, at capacity: share of requests within x seconds", "seconds", "share",
               distributions(finalists)),
    ]  # fmt: skip
    lines = (
        best_lines(finalists, search) if finalists else ("nothing keeps the limits; the nearest misses:", *miss_lines(results))
    )
    best = html.escape("\n".join(lines))
    listed = "\n".join(f"<li>{html.escape(note)}</li>" for note in notes)
    counts = html.escape(f"{len(results):,} configurations: {summary_line(results)}")
    answers = f"<p>{counts}</p>\n<pre>{best}</pre>\n<ul>{listed}</ul>\n{_loss_table(losses)}"
    return offline_page(f"squall search: {name}", answers, charts)


def bars(results: Sequence[Result], search: Search) -> list[Trace]:
    """The objective of the best, by GPU."""
    best = ranked(results)[:BARS]
    return [
        {
            "type": "bar",
            "name": gpu,
            "x": [f"#{result.number}" for result in best if result.gpu == gpu],
            "y": [value(result, search) for result in best if result.gpu == gpu],
            "text": [shown(result.choice) for result in best if result.gpu == gpu],
            "hovertemplate": "%{y:.4g}<br>%{text}",
            "textposition": "none",
            "marker": {"color": COLOURS[place % len(COLOURS)]},
        }
        for place, gpu in enumerate(_gpus(results))
    ]


def against(results: Sequence[Result], search: Search, metric: str, quantile: float) -> list[Trace]:
    """Every measured configuration, by GPU, and the frontier."""
    traces = []
    for place, gpu in enumerate(_gpus(results)):
        mine = [
            (latency, cost, f"#{result.number} {shown(result.choice)}")
            for result in results
            if result.gpu == gpu and result.status == "done" and result.curves is not None
            for latency, cost in ((result.curves.at(metric, quantile), _cost_of(result, search)),)
            if latency is not None and cost is not None and latency < float("inf")
        ]
        traces.append(_points(gpu, COLOURS[place % len(COLOURS)], mine))
    front = [(point[1 if metric == "ttft" else 2], point[0]) for _, point in frontier(results, search)]
    lowest = _staircase(sorted(front))
    traces.append(
        {"type": "scatter", "mode": "lines", "name": "frontier", "x": [x for x, _ in lowest], "y": [y for _, y in lowest],
         "line": {"color": "#6a737d", "width": 1, "shape": "hv"}, "hoverinfo": "skip"}
    )  # fmt: skip
    return traces


def distributions(finalists: Sequence[Finalist]) -> list[Trace]:
    """Cumulative distributions of the best."""
    traces = []
    for place, one in enumerate(finalists):
        curve = one.result.curves.ttft if one.result.curves is not None else ()
        pairs = [(seconds, share) for seconds, share in zip(curve, FRACTIONS, strict=False) if seconds != NEVER]
        traces.append(
            {"type": "scatter", "mode": "lines", "name": f"#{one.result.number}", "x": [x for x, _ in pairs],
             "y": [y for _, y in pairs], "line": {"color": COLOURS[place % len(COLOURS)], "width": 1.5}}
        )  # fmt: skip
    return traces


def _staircase(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points in order of x, those lower than all before."""
    kept: list[tuple[float, float]] = []
    for x, y in points:
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def _points(name: str, colour: str, points: Sequence[tuple[float, float, str]]) -> Trace:
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [x for x, _, _ in points], "y": [y for _, y, _ in points],
        "text": [text for _, _, text in points], "hovertemplate": "%{x:.4g} s, %{y:.4g}<br>%{text}",
        "marker": {"color": colour, "size": 7, "opacity": 0.8},
    }  # fmt: skip


def _gpus(results: Sequence[Result]) -> list[str]:
    return sorted({result.gpu for result in results if result.gpu})


def _cost(search: Search) -> str:
    return "USD for 1,000 requests" if search.steady else "USD"


def _cost_of(result: Result, search: Search) -> float | None:
    return usd_per_thousand(result) if search.steady else result.cost_usd


def _chart(title: str, x: str, y: str, traces: list[Trace]) -> Chart:
    return chart(title, x, y, traces, height=360, hover="closest")


def _loss_table(losses: Mapping[str, Mapping[str, float | None]]) -> str:
    """What the best for one workload costs under another."""
    if not losses:
        return ""
    names = list(losses)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "\n".join(
        f"<tr><td>{html.escape(row)}</td>"
        + "".join(
            f"<td>{'breaks a limit' if (times := losses[row][column]) is None else f'{times:.2f} x'}</td>" for column in names
        )
        + "</tr>"
        for row in names
    )
    caption = "Cost of serving one workload (column) with the best configuration for another (row)"
    return f"<table><caption>{caption}</caption><tr><th></th>{head}</tr>\n{rows}</table>"
