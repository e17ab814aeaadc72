"""The run directory of several models that shared a cluster: one folder a model, and what they had of the GPUs.

    CHAT/, CODE/, ...  the run directory of each model, named after it (report.run)
    cluster.json       who had how many GPUs, waited how long for others', and paid what
    gpus.parquet       one row for every change: from `at` (nanoseconds) on, a model had `held` GPUs and waited for `awaited` more
    report.html        on demand

Knows no metric of requests.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from squall.config import Config
from squall.core.metrics import GpuLevel, RunRecord
from squall.core.types import SECOND, Nanos
from squall.errors import ConfigError
from squall.files import making, write_and_sync
from squall.report.compare import written
from squall.report.offline import COLOURS, INK, Trace, chart, offline_page
from squall.report.run import REPORT, blaming, write_file, write_run
from squall.report.summary import Summary

if TYPE_CHECKING:
    import polars

    from squall.perf.composed import Composed
    from squall.report.deployed import On

CLUSTER, GPUS = "cluster.json", "gpus.parquet"  # with REPORT, `sharing.FILES`


class FleetShare(Struct, frozen=True):
    """What one model had of the cluster.

    Attributes:
        model: its name, and that of its folder.
        gpus_mean, gpus_max: that its fleet held, over the run.
        gpu_seconds: of all of these; `cost_usd` is None where the price is not known.
        waited_s: for so long it wanted GPUs that others had; `awaited_gpu_seconds`: that time, times how many.
        slo_attainment, completed, requests: as in the model's own summary.
    """

    model: str
    requests: int
    completed: int
    slo_attainment: float | None
    gpus_mean: float
    gpus_max: int
    gpu_seconds: float
    cost_usd: float | None
    waited_s: float
    awaited_gpu_seconds: float


class ClusterSummary(Struct, frozen=True):
    """A run of several models. `used`: the share of all GPU time that some fleet held; the cost is of what was held."""

    gpu: str
    num_gpus: int
    makespan_s: float
    gpu_seconds: float
    used: float
    cost_usd: float | None
    fleets: tuple[FleetShare, ...]


class FleetRun(Struct, frozen=True):
    """One model's run, as `report.run.write_run` takes it."""

    name: str
    record: RunRecord
    config: Config
    usd_per_gpu_hour: float | None
    events: bytes | None = None
    on: On | None = None
    operators: Sequence[Composed] = ()


def write_cluster(path: Path, runs: Sequence[FleetRun]) -> tuple[ClusterSummary, list[Summary]]:
    """Write the run directory at `path`, which must not exist: in full or not at all.

    Returns its summary, and that of each model. Raises SquallError as `write_run`.
    """
    with blaming(path), making(path) as beside:
        summaries = _write_runs(path, beside, runs)
        found = _summarise(runs, [_share(run, summary) for run, summary in zip(runs, summaries, strict=True)])
        write_and_sync(beside / CLUSTER, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        write_and_sync(beside / GPUS, _parquet(runs))
    return found, summaries


def write_runs(path: Path, runs: Sequence[FleetRun]) -> list[Summary]:
    """As `write_cluster`, where nobody knows who had which GPUs: the folders of the models alone. Returns the summary of each."""
    with blaming(path), making(path) as beside:
        return _write_runs(path, beside, runs)


def _write_runs(path: Path, beside: Path, runs: Sequence[FleetRun]) -> list[Summary]:
    return [
        write_run(
            beside / run.name, run.record, run.config, run.usd_per_gpu_hour, run.events, run.on, run.operators, part_of=path
        )
        for run in runs
    ]


def _share(run: FleetRun, summary: Summary) -> FleetShare:
    levels, end = _levels(run.record), run.record.ended_at
    return FleetShare(
        model=run.name,
        requests=summary.requests,
        completed=summary.completed,
        slo_attainment=summary.slo_attainment,
        gpus_mean=_area(levels, "held", end) / end if end else 0.0,
        gpus_max=max((level.held for level in levels), default=0),
        gpu_seconds=summary.gpu_seconds,
        cost_usd=summary.cost_usd,
        waited_s=sum(until - level.at for level, until in _until(levels, end) if level.awaited) / SECOND,
        awaited_gpu_seconds=_area(levels, "awaited", end) / SECOND,
    )


def _summarise(runs: Sequence[FleetRun], shares: Sequence[FleetShare]) -> ClusterSummary:
    cluster = runs[0].config.cluster
    num_gpus, makespan_s = cluster.nodes * cluster.gpus_per_node, max(run.record.ended_at for run in runs) / SECOND
    costs = [share.cost_usd for share in shares if share.cost_usd is not None]
    gpu_seconds = sum(share.gpu_seconds for share in shares)
    return ClusterSummary(
        gpu=cluster.gpu,
        num_gpus=num_gpus,
        makespan_s=makespan_s,
        gpu_seconds=gpu_seconds,
        used=gpu_seconds / (num_gpus * makespan_s) if makespan_s else 0.0,
        cost_usd=sum(costs) if len(costs) == len(shares) else None,
        fleets=tuple(shares),
    )


def _levels(record: RunRecord) -> Sequence[GpuLevel]:
    return () if record.fleet is None else record.fleet.gpus


def _until(levels: Sequence[GpuLevel], end: Nanos) -> list[tuple[GpuLevel, Nanos]]:
    """Each level, and when the next one took its place."""
    ends = [*(level.at for level in levels[1:]), end]
    return list(zip(levels, ends, strict=False))


def _area(levels: Sequence[GpuLevel], of: str, end: Nanos) -> int:
    return sum(getattr(level, of) * (until - level.at) for level, until in _until(levels, end))


def _parquet(runs: Sequence[FleetRun]) -> bytes:
    import polars as pl

    rows = [(level.at, run.name, level.held, level.awaited) for run in runs for level in _levels(run.record)]
    frame = pl.DataFrame(rows, schema={"at": pl.Int64, "model": pl.String, "held": pl.Int64, "awaited": pl.Int64}, orient="row")
    buffer = io.BytesIO()
    frame.sort("at", maintain_order=True).write_parquet(buffer)
    return buffer.getvalue()


# -- for people


def is_cluster(path: Path) -> bool:
    """Whether it is the run directory of several models."""
    return (path / CLUSTER).is_file()


def read_cluster(path: Path) -> ClusterSummary:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode((path / CLUSTER).read_bytes(), type=ClusterSummary)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read as the run of several models: {error}") from None


def lines_of(summary: ClusterSummary) -> list[str]:
    """Who had what, for a terminal."""
    found = []
    for fleet in summary.fleets:
        cost = "" if fleet.cost_usd is None else f", ${fleet.cost_usd:.4g}"
        waited = "" if not fleet.waited_s else f"; waited {fleet.waited_s:.1f} s for GPUs that others had"
        gpus = f"{fleet.gpus_mean:.2f} GPUs on average, {fleet.gpus_max} at most"
        found.append(f"{fleet.model}: {gpus}; {fleet.gpu_seconds:.1f} GPU s{cost}{waited}")
    cost = "" if summary.cost_usd is None else f", ${summary.cost_usd:.4g}"
    found.append(f"cluster: {summary.num_gpus} x {summary.gpu}, {100 * summary.used:.0f} % of the time held by a fleet{cost}")
    return found


def write_cluster_report(path: Path) -> Path:
    """Write `report.html` into the run directory, over an older one, and return its path. Raises SquallError."""
    import polars as pl

    summary = read_cluster(path)
    try:
        frame = pl.read_parquet(path / GPUS)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError(f"{path / GPUS} cannot be read: {str(error).splitlines()[0]}") from None
    held = chart(
        "GPUs that each model has", "seconds since the start", "GPUs",
        [_steps(fleet.model, colour, frame, "held", summary, stacked=True) for fleet, colour in _coloured(summary)],
    )  # fmt: skip
    awaited = chart(
        "GPUs that each model waits for, because others have them", "seconds since the start", "GPUs",
        [_steps(fleet.model, colour, frame, "awaited", summary) for fleet, colour in _coloured(summary)],
    )  # fmt: skip
    page = offline_page(f"squall: {path.resolve().name}", _table(summary), [held, awaited])
    write_file(path / REPORT, page.encode())
    return path / REPORT


def _coloured(summary: ClusterSummary) -> list[tuple[FleetShare, str]]:
    colours = (*COLOURS, *[INK] * len(summary.fleets))
    return list(zip(summary.fleets, colours, strict=False))


def _steps(
    model: str, colour: str, frame: polars.DataFrame, column: str, summary: ClusterSummary, *, stacked: bool = False
) -> Trace:
    """All models at the instants of all: what is stacked needs values at the same ones."""
    instants = sorted({*frame["at"].to_list(), round(summary.makespan_s * SECOND)})
    own = dict(frame.filter(frame["model"] == model).select("at", column).iter_rows())
    values, value = [], 0
    for at in instants:
        value = own.get(at, value)
        values.append(value)
    line: dict[str, Any] = {"color": colour, "width": 1.5, "shape": "hv"}
    trace: Trace = {
        "type": "scatter", "mode": "lines", "name": model, "x": [at / SECOND for at in instants], "y": values, "line": line,
    }  # fmt: skip
    return {**trace, "stackgroup": "all"} if stacked else trace


def _table(summary: ClusterSummary) -> str:
    heads = (
        "model",
        "requests",
        "completed",
        "SLO attainment",
        "GPUs, mean",
        "GPUs, most",
        "GPU time, s",
        "cost, USD",
        "waited, s",
    )
    rows = [
        (
            f'<a href="{html.escape(fleet.model)}/">{html.escape(fleet.model)}</a>',
            *(
                "" if value is None else written(value)
                for value in (
                    fleet.requests, fleet.completed, fleet.slo_attainment, fleet.gpus_mean, fleet.gpus_max, fleet.gpu_seconds,
                    fleet.cost_usd, fleet.waited_s,
                )
            ),
        )
        for fleet in summary.fleets
    ]  # fmt: skip
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    total = html.escape(lines_of(summary)[-1])
    return f"<p>Several models on one cluster; {total}.</p>\n<table><tr>{head}</tr>\n{body}</table>"
