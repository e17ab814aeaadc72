"""How an elastic fleet changed, for the page of a run and for a terminal: what was decided and why, and what was moved for it.

Knows the columns of `squall.fleetlog` and of `report.links`, and the shapes of plotly's traces.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from squall.core.types import SECOND
from squall.report.compare import written
from squall.report.offline import COLOURS, Chart, Trace, chart

if TYPE_CHECKING:
    import polars

    from squall.report.run import StoredRun

MOST_ROWS = 200  # of decisions on a page, and of loads layer by layer: more than anybody reads; the files have all
LATEST = 5  # in a terminal
SINCE = "seconds since the start"


def charts_of_changes(run: StoredRun) -> list[Chart]:
    """As many as the run's files allow."""
    decisions, transfers, links, series = run.decisions(), run.transfers(), run.links(), run.series()
    charts = []
    if decisions is not None and len(decisions):
        traces = list(_wanted(decisions, run.summary.makespan_s)) + ([] if series is None else list(_ready(series)))
        charts.append(chart("Replicas wanted (a mark tells why), and those that take requests", SINCE, "replicas", traces))
    if transfers is not None and len(weights := transfers.filter(transfers["what"] == "weights")):
        title = "Weights on their way to each replica: the share that is there, layer by layer where a series was recorded"
        charts.append(chart(title, SINCE, "share", list(_loading(weights)), hover="closest"))
    if links is not None and len(links) and series is not None:
        at = series["at_s"].to_list()
        busy, most = _on_links(links, "utilisation", at), _on_links(links, "flows", at)
        charts.append(chart("Links of each kind: how busy the busiest is", SINCE, "share", list(busy)))
        charts.append(chart("Flows on the link of each kind that has the most", SINCE, "flows", list(most)))
    if series is not None:
        charts += _spent(series)
    return charts


def tables_of_changes(run: StoredRun) -> str:
    """What was moved, kind by kind, and every decision, as HTML; nothing where there was none."""
    decisions, transfers = run.decisions(), run.transfers()
    moved = "" if transfers is None else _moved(transfers)
    return moved + ("" if decisions is None or not len(decisions) else _decided(decisions))


def latest_decisions(run: StoredRun) -> list[str]:
    """The last few, for a terminal."""
    decisions = run.decisions()
    if decisions is None or not len(decisions):
        return []
    head = "decisions" if len(decisions) <= LATEST else f"the last {LATEST} of {len(decisions)} decisions"
    return [f"{head}:", *(f"  {at:>9}  {_told(row)}" for at, row in _rows(decisions.tail(LATEST)))]


def _rows(decisions: polars.DataFrame) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in decisions.iter_rows(named=True):
        yield f"{row['at'] / SECOND:.3f} s", row


def _told(row: dict[str, Any]) -> str:
    return f"{row['role']}: {row['before']} -> {row['after']} replicas: {row['why']}"


# -- charts


def _wanted(decisions: polars.DataFrame, end_s: float) -> Iterator[Trace]:
    """A line of steps for each role, with a mark at each decision."""
    for (role,), frame in decisions.group_by("role", maintain_order=True):
        rows = list(frame.iter_rows(named=True))
        name, colour = f"{role} wanted".removeprefix("both "), _of_role(str(role))
        x = [0.0, *(row["at"] / SECOND for row in rows), end_s]
        y = [rows[0]["before"], *(row["after"] for row in rows), rows[-1]["after"]]
        told = ["", *(html.escape(_told(row)) for row in rows), ""]
        sizes = [0, *[7] * len(rows), 0]
        yield _line(name, colour, x, y, steps=True) | {"mode": "lines+markers", "marker": {"size": sizes}, "text": told}


def _ready(series: polars.DataFrame) -> Iterator[Trace]:
    for column in ("replicas_ready_prefill", "replicas_ready_decode", "replicas_ready"):
        if column in series.columns and series[column].max():
            role = column.removeprefix("replicas_ready").removeprefix("_")
            line = _line(f"{role} ready".strip(), _of_role(role), series["at_s"].to_list(), series[column].to_list(), steps=True)
            yield line | {"line": {**line["line"], "dash": "dot"}}
            if column == "replicas_ready_decode":
                return  # what is ready is of one role or the other


def _of_role(role: str) -> str:
    return {"prefill": COLOURS[0], "decode": COLOURS[1]}.get(role, COLOURS[2])


def _loading(weights: polars.DataFrame) -> Iterator[Trace]:
    """All loads of a kind are one trace, with gaps between them; where there are many, single layers are left out."""
    few = len(weights) <= MOST_ROWS
    for ((kind,), frame), colour in zip(weights.group_by("kind", maintain_order=True), _colours(), strict=False):
        x: list[float | None] = []
        y: list[float | None] = []
        told: list[str | None] = []
        for row in frame.iter_rows(named=True):
            layers = (row["layers_at"] if few else None) or []
            had = sum(at is None for at in layers)
            began, ended = row["started_at"], row["started_at"] + row["duration"]
            x += [at / SECOND for at in (began, *layers[had:], ended)] + [None]
            y += [had / max(1, len(layers)), *((i + 1) / len(layers) for i in range(had, len(layers))), 1.0, None]
            told += [html.escape(_load(row))] * (len(layers) - had + 2) + [None]
        yield _line(str(kind), colour, x, y) | {"text": told, "hoverinfo": "text+x+y"}


def _load(row: dict[str, Any]) -> str:
    speed = "" if row["bytes_per_s"] is None else f", {row['num_bytes'] / 1e9:.4g} GB at {row['bytes_per_s'] / 1e9:.4g} GB/s"
    return f"replica {row['replica']} from {row['source']}{speed}, in {row['duration'] / SECOND:.4g} s"


def _on_links(links: polars.DataFrame, column: str, instants: Sequence[float]) -> Iterator[Trace]:
    """Links of a kind have names that differ in numbers only: gpu0.pcie.in, gpu1.pcie.in. Bins that are not told of are idle."""
    kinds = [re.sub(r"\d+", "", name) for name in links["link"].to_list()]
    most: dict[str, dict[float, float]] = {kind: {} for kind in sorted(set(kinds))}
    for kind, at, value in zip(kinds, links["at_s"].to_list(), links[column].to_list(), strict=True):
        most[kind][at] = max(value, most[kind].get(at, 0.0))
    for (kind, found), colour in zip(most.items(), _colours(), strict=False):
        yield _line(kind, colour, instants, [found.get(at, 0.0) for at in instants], steps=True)


def _spent(series: polars.DataFrame) -> list[Chart]:
    charts = []
    for column, title, unit in (("gpu_seconds", "GPU seconds so far", "s"), ("cost_usd", "Dollars so far", "USD")):
        if column in series.columns and series[column].max():
            line = _line(title.removesuffix(" so far"), COLOURS[0], series["at_s"].to_list(), series[column].cum_sum().to_list())
            charts.append(chart(title, SINCE, unit, [line]))
    return charts


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _line(name: str, colour: str, x: Sequence[float | None], y: Sequence[float | None], *, steps: bool = False) -> Trace:
    shape = {"shape": "hv"} if steps else {}
    line = {"color": colour, "width": 1.5, **shape}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": line}


# -- tables


def _moved(transfers: polars.DataFrame) -> str:
    rows = []
    for (what, kind), frame in transfers.group_by("what", "kind", maintain_order=True):
        took, gigabytes = (frame["duration"] / SECOND).to_numpy(), float(frame["num_bytes"].sum()) / 1e9
        speed = gigabytes / float(took.sum()) if took.any() else 0.0
        cells = (float(len(frame)), gigabytes, float(took.mean()), float(took.max()), speed)
        rows.append(f"<td>{what}, {kind}</td>" + "".join(f"<td>{written(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in ("transfers", "number", "GB", "s, mean", "s, max", "GB/s"))
    return _table([head, *rows])


def _decided(decisions: polars.DataFrame) -> str:
    rows = [
        f"<td>{at}</td><td>{row['role']}</td><td>{row['before']} → {row['after']}</td><td>{html.escape(row['why'])}</td>"
        for at, row in _rows(decisions.tail(MOST_ROWS))
    ]
    shown = f"the last {MOST_ROWS} of {len(decisions)}" if len(decisions) > MOST_ROWS else str(len(decisions))
    head = "".join(f"<th>{name}</th>" for name in ("at", "role", "replicas", "why"))
    return f"<details><summary>Decisions ({shown})</summary>{_table([head, *rows])}</details>"


def _table(rows: Sequence[str]) -> str:
    return '<table class="told">' + "\n".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
