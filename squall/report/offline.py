"""A page of text, tables and interactive charts in one file that needs no network. Knows nothing of what it shows."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources
from math import floor, log10
from string import Template
from typing import Any, Literal

import msgspec

INK = "#1b1f24"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # told apart by colour-blind readers too

Trace = dict[str, Any]
"""A line, or bars or points, in plotly's words."""

Chart = dict[str, Any]


def chart(
    title: str,
    x: str,
    y: str,
    traces: list[Trace],
    *,
    log_x: bool = False,
    height: int = 340,
    hover: Literal["x", "x unified", "closest"] = "x unified",
) -> Chart:
    """One chart; `x` and `y` are the titles of its axes, `hover` what is told beside the pointer."""
    grid = {"gridcolor": "#e5e8eb", "zeroline": False}
    layout = {
        "title": {"text": title, "font": {"size": 14}, "x": 0, "xanchor": "left"},
        "xaxis": {"title": {"text": x}, **(_decades(traces) if log_x else {}), **grid},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero", "hoverformat": ".4~g", **grid},
        "height": height,
        "margin": {"l": 60, "r": 20, "t": 40, "b": 50},
        "legend": {"orientation": "h", "y": 1.0, "x": 1.0, "xanchor": "right", "yanchor": "bottom"},
        "showlegend": True,
        "hovermode": hover,
        "font": {"family": "system-ui, sans-serif", "color": INK},
    }
    return {"data": traces, "layout": layout}


def offline_page(title: str, before: str, charts: Sequence[Chart], after: str = "") -> str:
    """The page, complete. `before` and `after` the charts stands HTML; `title` is plain text."""
    return _PAGE.substitute(
        title=html.escape(title),
        before=before,
        charts="\n".join(f'<div class="chart" id="chart{i}"></div>' for i in range(len(charts))),
        after=after,
        # "</" would end the script element, wherever it stands
        data=msgspec.json.encode(charts).decode().replace("</", "<\\/"),
        plotly=(resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
    )


def _decades(traces: list[Trace]) -> dict[str, Any]:
    """A logarithmic axis whose ticks, 1, 2 and 5 of each decade, are written in full."""
    positive = [value for trace in traces for value in trace["x"] if value > 0] or [1.0]
    exponents = range(floor(log10(min(positive))), floor(log10(max(positive))) + 1)
    ticks = [step * 10.0**exponent for exponent in exponents for step in (1, 2, 5)]
    return {"type": "log", "hoverformat": ".4~g", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; }
.tables { display: flex; flex-wrap: wrap; gap: 2rem; align-items: start; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #6a737d; }
th, td { padding: .15rem 1.2rem .15rem 0; text-align: right; font-weight: normal; }
th { color: #6a737d; }
td:first-child, th:first-child, .plain td:last-child, .told td:last-child { text-align: left; }
.chart { margin: 1rem 0; min-height: 340px; }
pre { background: #f6f8fa; padding: 1rem; overflow-x: auto; }
</style>
</head>
<body>
<h1>$title</h1>
$before
$charts
$after
<script>$plotly</script>
<script>
const charts = $data;
charts.forEach((chart, i) => Plotly.newPlot("chart" + i, chart.data, chart.layout, {responsive: true, displayModeBar: false}));
</script>
</body>
</html>
""")
