"""The run directory: what every simulated, emulated and real run leaves behind, in one shape.

    config.toml       the resolved configuration: `squall simulate` of it repeats the run
    requests.parquet  one row a request; instants in nanoseconds from the start of the run, null where they never came
    gaps.parquet      the gaps between tokens, run-length coded as in `core.metrics.Gaps`
    summary.json      the numbers of docs/metrics.md
    events.jsonl.zst  the event log, on demand (`squall serve` writes it too)
    decisions.parquet, transfers.parquet
                      what an elastic fleet decided and what was moved for it, by `squall.fleetlog`
    replicas.parquet, steps.parquet, series.parquet, links.parquet, operators.parquet, trace.json, vidur_metrics.parquet
                      of a simulation, where [run] asks for them
    report.html       on demand

A fleet that is served leaves its logs; `report.served` makes the rest out of them.

A directory is written beside its place and then renamed: it is there in full or not at all, and never replaces another.
Knows no metric's definition and draws nothing.
"""

from __future__ import annotations

import io
import tomllib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from squall import config as configuration
from squall.config import Config
from squall.core.metrics import UNSET, Gaps, Observed, RequestRow, RunRecord
from squall.core.types import SECOND
from squall.errors import ConfigError, SquallError
from squall.files import Content, replacing, write_and_sync, write_directory
from squall.fleetlog import DECISIONS, TRANSFERS, decisions_parquet, transfers_parquet
from squall.pools import alike, num_gpus, price_of
from squall.report.detail import Use, detail, usage
from squall.report.links import link_series
from squall.report.series import bins_of, series
from squall.report.steps import Stretches, write_steps
from squall.report.summary import Lives, PoolUse, Summary, summarise
from squall.report.trace import trace
from squall.report.vidur import lives_of, request_metrics

if TYPE_CHECKING:
    import polars

    from squall.perf.composed import Composed
    from squall.report.deployed import On

CONFIG, REQUESTS, GAPS, SUMMARY, REPORT = "config.toml", "requests.parquet", "gaps.parquet", "summary.json", "report.html"
EVENTS = "events.jsonl.zst"
OPERATORS = "operators.parquet"
REPLICAS, STEPS, SERIES, LINKS, TRACE, VIDUR = (
    "replicas.parquet",
    "steps.parquet",
    "series.parquet",
    "links.parquet",
    "trace.json",
    "vidur_metrics.parquet",
)
_INSTANTS = tuple(name for name in RequestRow.__struct_fields__ if name.endswith("_at"))


class StoredRun(msgspec.Struct, frozen=True):
    """A run directory that was read back. The big files are read when they are asked for."""

    path: Path
    summary: Summary
    config: str  # the text of config.toml
    notes: tuple[str, ...] = ()  # for whoever reads the numbers: what they leave out

    def lives(self) -> Lives:
        """What became of each request, in the order of the file."""
        frame = _read_parquet(self.path / REQUESTS, Lives.__struct_fields__)
        names = [name for name in Lives.__struct_fields__ if name != "outcome"]
        columns = {name: frame[name].fill_null(UNSET).to_numpy() for name in names}
        return Lives(**columns, outcome=frame["outcome"].to_numpy().astype(str))

    def gaps(self) -> Gaps:
        frame = _read_parquet(self.path / GAPS, Gaps.__struct_fields__)
        return Gaps(**{name: array("q", frame[name].to_list()) for name in Gaps.__struct_fields__})

    def series(self) -> polars.DataFrame | None:
        """The run over time; None where it was not asked for."""
        return self._table(SERIES)

    def links(self) -> polars.DataFrame | None:
        """What was on the network over time; None as above."""
        return self._table(LINKS)

    def decisions(self) -> polars.DataFrame | None:
        """How many replicas were wanted, and why; None of a fleet that does not change."""
        return self._table(DECISIONS)

    def transfers(self) -> polars.DataFrame | None:
        """Weights and KV that were moved; None where nothing was."""
        return self._table(TRANSFERS)

    def _table(self, name: str) -> polars.DataFrame | None:
        path = self.path / name
        return _read_parquet(path) if path.is_file() else None


def place_for(command: str, out: str | None) -> Path:
    """Where a run will be written: `out`, or a new `runs/COMMAND-DATE-TIME`. Asked before the work begins.

    Raises:
        ConfigError: there is something at `out` already.
    """
    if out is not None:
        path = Path(out)
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another run directory (--out) or remove it")
        return path
    first = Path("runs") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def write_run(
    path: Path,
    record: RunRecord,
    config: Config,
    usd_per_gpu_hour: float | None,
    events: bytes | None = None,
    on: On | None = None,
    operators: Sequence[Composed] = (),
    part_of: Path | None = None,
) -> Summary:
    """Write the run directory at `path`, which must not exist, and return its summary.

    Args:
        events: a whole event log.
        on: what it ran on, for utilisation and energy; of use where the run was observed.
        operators: tell those of an observed run apart, where they are wanted; see `report.operators.explainers`.
        part_of: the directory that was asked for, where this is one of several in it: what goes wrong is said of that.

    Raises:
        SquallError: `path` exists, or the disk is full or not writable; nothing is left behind then.
    """
    observed, seen = {}, None
    energy_j = None
    if record.observed is not None:
        use = usage(record, record.observed, on)
        seen = detail(record, record.observed, use, on)
        energy_j = float(use.joules.sum()) if on is not None and all(is_known(on)) else None
        observed = _observed_files(record, record.observed, use, config)
        if operators:
            from squall.report.operators import operators as table

            observed[OPERATORS] = _parquet(table(record.observed, config, operators))
    summary = summarise(record, config.slo, usd_per_gpu_hour, seen, energy_j, pools_of(config, record))
    files: dict[str, Content] = {
        CONFIG: configuration.dumps(config).encode(),
        REQUESTS: requests_parquet(record.requests),
        GAPS: gaps_parquet(record.gaps),
        SUMMARY: summary_json(summary),
        **observed,
    }
    files |= _moves(record, config)
    if config.run.series_s is not None:
        parts = alike(config)
        gpus: float = config.replica.tp * config.replica.pp
        if len(parts) > 1:  # all of them are there all the time
            gpus = sum(map(num_gpus, parts)) / config.fleet.num_initial
        files[SERIES] = _parquet(series(record, config.slo, config.run.series_s, gpus, usd_per_gpu_hour))
        if record.links:
            files[LINKS] = _parquet(link_series(record.links, bins_of(record, config.run.series_s)))
    if events is not None:
        files[EVENTS] = events
    with blaming(part_of or path):
        write_directory(path, files)
    return summary


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """What the disk does not take is said of the run directory at `path`. Raises SquallError."""
    try:
        yield
    except OSError as error:
        raise SquallError(f"cannot write the run directory {path}: {error.strerror or error}") from None


def is_known(on: On) -> Iterator[bool]:
    """Whether the power of each GPU is known."""
    return (bool(each.gpu.power_w) for each in (on.values() if isinstance(on, Mapping) else (on,)))


def pools_of(config: Config, record: RunRecord) -> tuple[PoolUse, ...]:
    """What each of `[[fleet.pools]]` held: all its GPUs, as long as the others. Nothing where there are no pools."""
    if not config.fleet.pools:
        return ()
    parts = alike(config)
    total = sum(map(num_gpus, parts))
    used = []
    for part in parts:
        gpu_seconds, price = record.gpu_nanos * num_gpus(part) / total / SECOND, price_of(part)
        cost_usd = None if price is None else gpu_seconds / 3600 * price
        used.append(PoolUse(part.cluster.gpu, part.fleet.num_initial, num_gpus(part), gpu_seconds, cost_usd))
    return tuple(used)


def _moves(record: RunRecord, config: Config) -> dict[str, bytes]:
    """What an elastic fleet decided, and what was moved in any: hand-offs, of which there are many, where rows are asked for."""
    asked = config.run.steps or config.run.series_s is not None
    moved = [*record.weights, *(record.observed.handoffs if asked and record.observed is not None else ())]
    files = {} if record.fleet is None else {DECISIONS: decisions_parquet(record.decisions)}
    return files | ({TRANSFERS: transfers_parquet(moved)} if moved else {})


def _observed_files(record: RunRecord, observed: Observed, use: Use, config: Config) -> dict[str, Content]:
    """What is kept of the engines: as much as was asked for."""
    import polars as pl

    files: dict[str, Content] = {REPLICAS: _parquet(pl.DataFrame({name: getattr(use, name) for name in Use.__struct_fields__}))}
    if config.run.steps:
        files[STEPS] = lambda path: write_steps(Stretches(observed), path)
    if config.run.trace:
        files[TRACE] = trace(record, observed, config.run.trace_from_s)
    if config.run.compat == "vidur":
        ids, lives = lives_of(record.requests, observed)
        frame = pl.DataFrame({"Request Id": ids, **request_metrics(lives)})
        files[VIDUR] = _parquet(frame.with_columns(pl.selectors.float().fill_nan(None)))
    return files


def runs_in(path: Path) -> list[Path]:
    """Those of several models in the run directory `path`; none where it is one model's."""
    return [] if (path / SUMMARY).is_file() else sorted(each.parent for each in path.glob(f"*/{SUMMARY}"))


def side_by_side(paths: Sequence[Path]) -> list[tuple[str, list[Path]]]:
    """The runs to compare in turn: where all are of several models, those of each by its name; else what was given, by none.

    Raises ConfigError: one of them has not the same models as the first.
    """
    inside = [[run.name for run in runs_in(path)] for path in paths]
    if not all(inside):
        return [("", list(paths))]
    for path, names in zip(paths, inside, strict=True):
        if names != inside[0]:
            here, there = ", ".join(names), ", ".join(inside[0])
            raise ConfigError(f"{path} holds runs of {here}, and {paths[0]} of {there}; name the runs of one model in each")
    return [(name, [path / name for path in paths]) for name in inside[0]]


def read_run(path: Path) -> StoredRun:
    """The run at `path`.

    Raises:
        ConfigError: `path` is no run directory, or its summary is not one of ours.
    """
    if not (path / SUMMARY).is_file():
        if inside := runs_in(path):
            raise ConfigError(f"{path} holds several runs; name one: {', '.join(map(str, inside))}")
        served = f"; where a fleet was served, `squall report {path}` makes one" if (path / CONFIG).is_file() else ""
        raise ConfigError(f"{path} is no run directory: it has no {SUMMARY}{served}")
    try:
        summary = msgspec.json.decode((path / SUMMARY).read_bytes(), type=Summary)
        text = (path / CONFIG).read_text(encoding="utf-8")
        tomllib.loads(text)
        return StoredRun(path, summary, text)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a run directory: {error}") from None


def write_file(path: Path, content: bytes) -> None:
    """Replace one file of a run directory, at once or not at all.

    Raises:
        SquallError: the disk is full or not writable.
    """
    try:
        with replacing(path) as beside:
            write_and_sync(beside, content)
    except OSError as error:
        raise SquallError(f"cannot write {path}: {error.strerror or error}") from None


def summary_json(summary: Summary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def requests_parquet(rows: list[RequestRow]) -> bytes:
    import polars as pl  # a third of a second: only where it is needed

    columns = {name: [getattr(row, name) for row in rows] for name in RequestRow.__struct_fields__ if name != "outcome"}
    strings = {"error": pl.String}
    schema = {name: strings.get(name, pl.Int64()) for name in columns}
    frame = pl.DataFrame(columns, schema=schema).with_columns(pl.col(*_INSTANTS, "replica").replace(UNSET, None))
    return _parquet(frame.with_columns(outcome=pl.Series([row.outcome.value for row in rows], dtype=pl.String)))


def gaps_parquet(gaps: Gaps) -> bytes:
    import numpy as np
    import polars as pl

    return _parquet(pl.DataFrame({name: np.array(getattr(gaps, name), dtype=np.int64) for name in Gaps.__struct_fields__}))


def _parquet(frame: polars.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def _read_parquet(path: Path, columns: Sequence[str] | None = None) -> polars.DataFrame:
    """Of a table these columns, in their order; all that there are when None. Raises ConfigError where one cannot be had."""
    import polars as pl

    try:
        return pl.read_parquet(path, columns=None if columns is None else list(columns))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
