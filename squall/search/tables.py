"""Results as lines for a terminal, and as Parquet for everything else. Knows no file, and numbers only as numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from squall.report.compare import written
from squall.search.answers import Finalist, WhatIf, frontier, nearest_misses, usd_per_thousand
from squall.search.result import Result
from squall.search.space import shown
from squall.search.spec import Search

UNITS = {"qps_per_usd": "req/s per USD/h", "usd": "USD", "gpu_hours": "GPU h", "energy_kwh": "kWh", "latency": "s"}


def value(result: Result, search: Search) -> float | None:
    """The objective in its own unit: costs and latencies are not below zero."""
    if result.score is None:
        return None
    return result.score if search.objective == "qps_per_usd" else -result.score


def best_lines(finalists: Sequence[Finalist], search: Search) -> Iterator[str]:
    """The finalists, one a row."""
    head = ["", "number", UNITS[search.objective], "req/s", "95 %", "GPUs", "USD/h", "TTFT p90", "TBT p99", "limit beyond", ""]
    rows = [head]
    for place, one in enumerate(finalists, 1):
        result = one.result
        interval = one.interval()
        score = one.score_at(one.capacity) if one.capacities else value(result, search)
        rate = one.capacity if one.capacities else result.capacity_rps
        rows.append([
            f"{place}.", str(result.number), written(score), written(rate), _span(interval), f"{result.num_gpus:g} {result.gpu}",
            f"{result.usd_per_hour:.2f}", _at(result, "ttft", 0.9), _at(result, "tbt", 0.99), result.binding,
            shown(result.choice),
        ])  # fmt: skip
    yield from aligned(rows)


def _span(interval: tuple[float, float] | None) -> str:
    return f"{interval[0]:.3g}-{interval[1]:.3g}" if interval else "-"


def frontier_lines(results: Sequence[Result], search: Search) -> Iterator[str]:
    """The Pareto frontier."""
    unit = "USD/1000 req" if search.steady else "USD"
    rows = [["number", unit, "TTFT p90 s", "TBT p99 s", ""]]
    rows += [
        [str(result.number), *(f"{part:.4g}" for part in point), shown(result.choice)]
        for result, point in frontier(results, search)
    ]
    yield from aligned(rows)


def miss_lines(results: Sequence[Result]) -> Iterator[str]:
    """The nearest misses, and how much of each limit they use with next to no load (or with the workload as it is)."""
    rows = [["number", "worst limit", "used", ""]]
    for result in nearest_misses(results):
        name, used = max(result.usage.items(), key=lambda pair: pair[1])
        rows.append([str(result.number), name, f"{used:.2f} x", shown(result.choice)])
    yield from aligned(rows)


def what_if_lines(answer: WhatIf, search: Search) -> Iterator[str]:
    """The answer, and what it leaves open."""
    if answer.best is None:
        yield "no measured configuration keeps the limits; what is left would have to run"
    else:
        known = "the best" if not answer.open else "the best of which we are certain"
        unit = UNITS[search.objective]
        score = answer.score if search.objective == "qps_per_usd" else -(answer.score or 0.0)
        yield f"{known}: number {answer.best.number}, {written(score)} {unit}: {shown(answer.best.choice)}"
    if answer.open:
        yield f"{len(answer.open):,} configurations might be better and would have to run, such as"
        yield from (f"  number {result.number}: {shown(result.choice)}" for result in answer.open[:5])


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns to the right, the last one to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[-1]}".rstrip()


def parquet(results: Sequence[Result], search: Search) -> bytes:
    """One row a configuration: its keys, how it ended, and its numbers."""
    import polars as pl

    keys = list(dict.fromkeys(key for result in results for key in result.choice))
    columns: dict[str, list[Any]] = {"number": [result.number for result in results]}
    for key in keys:
        cells = [result.choice.get(key) for result in results]
        alike = len({type(cell) for cell in cells if cell is not None}) < 2 and not any(isinstance(cell, dict) for cell in cells)
        columns[key] = cells if alike else [None if cell is None else str(cell) for cell in cells]
    for name in _FACTS:
        columns[name] = [getattr(result, name) for result in results]
    columns["value"] = [value(result, search) for result in results]
    columns["usd_per_hour"] = [result.usd_per_hour for result in results]
    columns["usd_per_thousand_requests"] = [usd_per_thousand(result) for result in results]
    for metric in ("ttft", "tbt", "tpot", "e2e", "queue"):
        for percent in (50, 90, 99):
            columns[f"{metric}_p{percent}_s"] = [_quantile(result, metric, percent / 100) for result in results]
    buffer = io.BytesIO()
    pl.DataFrame(columns, infer_schema_length=None, strict=False).write_parquet(buffer)
    return buffer.getvalue()


_FACTS = (
    "status", "reason", "gpu", "num_gpus", "capacity_rps", "at_most_rps", "binding", "cost_usd", "gpu_hours", "energy_kwh",
    "latency_source", "probes", "token_steps",
)  # fmt: skip


def _quantile(result: Result, metric: str, quantile: float) -> float | None:
    return None if result.curves is None else result.curves.at(metric, quantile)


def _at(result: Result, metric: str, quantile: float) -> str:
    return written(_quantile(result, metric, quantile))
