"""The run directory of a fleet that is, or was, served: its numbers, counted out of its event log whenever they are asked for.

What `squall serve` leaves is `live.folder`'s; to that come the tables and the summary of any other run. Knows no line of a log.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from squall import config as configuration
from squall.config import Config, Slo
from squall.errors import ConfigError
from squall.eventlog import Record, read, read_merged
from squall.live.folder import logs_of, parts_of
from squall.pools import price_of
from squall.quantities import counted
from squall.report.recount import Recounted, recount
from squall.report.run import (
    CONFIG,
    EVENTS,
    GAPS,
    REQUESTS,
    SUMMARY,
    StoredRun,
    gaps_parquet,
    read_run,
    requests_parquet,
    summary_json,
    write_file,
)
from squall.report.summary import Summary, summarise

LEFT_OUT = (
    "counted from the event log, where requests enter the router; left out, as it is not in there: single gaps between tokens "
    "(TBT), what was refused before the router (wrong keys, malformed requests), how busy engines were, how many replicas took "
    "requests when"
)


def is_served(path: Path) -> bool:
    """Whether `squall serve` made the directory `path`, or that of one of several models."""
    return (path / CONFIG).is_file() and logs_of(path).is_dir()


def served_in(path: Path) -> list[Path]:
    """The directories of several models that one head serves, in its run directory `path`."""
    return [] if (path / CONFIG).is_file() else sorted(each.parent for each in path.glob(f"*/{CONFIG}") if is_served(each.parent))


def count_served(path: Path) -> StoredRun:
    """Write the tables and the summary of the fleet that was served in `path`, over older ones, and read them.

    Raises:
        ConfigError: there is no event log, or it cannot be read.
        SquallError: the disk is full or not writable.
    """
    config = configuration.load(path / CONFIG)
    found = _recount(path, config)
    record = found.record
    record.gpu_nanos *= config.replica.tp * config.replica.pp
    write_file(path / REQUESTS, requests_parquet(record.requests))
    write_file(path / GAPS, gaps_parquet(record.gaps))
    write_file(path / SUMMARY, summary_json(_summary(found, config)))  # at last: with it this is the directory of a run
    return replace(read_run(path), notes=tuple(_notes(path, config, found)))


def _recount(path: Path, config: Config) -> Recounted:
    emulated = config.serve.engine == "emulated"
    dilation = config.serve.time_dilation if emulated else 1.0
    return recount(_records(path), "emulated" if emulated else "real", "measured by the fleet", dilation)


def _records(path: Path) -> Iterator[Record]:
    """Those of the merged log; of a head that still runs, or was killed, those of all its processes."""
    whole, parts = path / EVENTS, parts_of(logs_of(path))
    if not whole.is_file() and not parts:
        raise ConfigError(f"{path} has no event log to count from (serve.event_log); `squall replay` measures at the client")
    records = read(whole) if whole.is_file() else read_merged(parts)
    first = next(records, None)
    if first is None:
        raise ConfigError(f"{path} cannot be reported yet: nothing is in its event log so far")
    return chain((first,), records)


def _summary(found: Recounted, config: Config) -> Summary:
    """A promise about gaps is neither kept nor broken by what nobody has seen."""
    known = _known(config.slo)
    summary = summarise(found.record, known, price_of(config), inside=True)
    return summary if known == config.slo else replace(summary, slo_met=False if summary.slo_met is False else None)


def _known(slo: Slo) -> Slo:
    """Without the quantiles of gaps."""
    gaps = [f"tbt_p{100 * share:.0f}_s" for metric, share, _ in slo.quantiles() if metric == "tbt"]
    return replace(slo, **dict.fromkeys(gaps))


def _notes(path: Path, config: Config, found: Recounted) -> Iterator[str]:
    yield LEFT_OUT
    if not (path / EVENTS).is_file():
        yield "its head runs, or was killed: who had not ended by the last line of its logs counts as unfinished"
    if found.num_uncounted:
        yield (
            f"of {counted(found.num_uncounted, 'completed request')} the last step is in no log here (of a worker on another "
            "host, or one that was killed): there may be more output tokens"
        )
    if _known(config.slo) != config.slo:
        yield "slo.tbt_p50_s and its like are about single gaps, and not judged"
