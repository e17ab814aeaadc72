"""From several configurations to one run of them all: simulated, on the cluster that they share, or replayed.

Knows which part makes what. Reads what the configurations name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.config import Config
from squall.core.metrics import RunRecord
from squall.eventlog import EventLog
from squall.report.cluster import ClusterSummary, FleetRun, write_cluster, write_runs
from squall.report.deployed import deployed
from squall.report.operators import explainers
from squall.report.summary import Summary
from squall.sharing import check_names, name_of, said_of, shares, with_faults_dealt_out
from squall.sim import together
from squall.sim.run import Body
from squall.twin.drive import drive_together
from squall.twin.rehearse import ends_at, parts_of, usd_per_gpu_hour

if TYPE_CHECKING:
    from squall.live.replay import ReplayRecord
    from squall.report.progress import SimulationProgress
    from squall.sim.observe import Watcher


def rehearse_together(
    configs: Sequence[Config],
    files: Sequence[str],
    watchers: Sequence[Sequence[Watcher]] = (),
    progress: SimulationProgress | None = None,
) -> list[RunRecord]:
    """Simulate the fleets of `configs` together, each under its workload; a record of each.

    Args:
        files: what errors call the configurations.
        watchers: who looks on at each of them.

    Raises:
        ConfigError: as `rehearse`, or they cannot share a cluster.
    """
    if progress is not None:
        progress.phase("reading the workloads")
    found = shares(configs, files)
    looking = watchers or [()] * len(configs)
    shown = [] if progress is None else [progress]
    parts = []
    for config, file, share, own in zip(configs, files, found, looking, strict=True):
        with said_of(file):
            parts.append(parts_of(config, [*own, *shown], share))
    if progress is not None:
        progress.phase("simulating", sum(len(part.requests) for part in parts))
    began = time.perf_counter()
    wires = parts[0].ground.wires(record=any(config.run.series_s is not None for config in configs))
    bodies = [
        Body(
            config, part.requests, part.latency, part.num_blocks, ground=part.ground, wires=wires, log=part.log,
            cut_off=None if part.observer is None else part.observer.cut_off, created=part.created,
        )
        for config, part in zip(with_faults_dealt_out(configs), parts, strict=True)
    ]  # fmt: skip
    together.join(bodies)
    together.run(bodies, ends_at(configs[0]))
    records = []
    for body, part in zip(bodies, parts, strict=True):
        record = body.record()
        record.wall_s = time.perf_counter() - began
        record.observed = None if part.observer is None else part.observer.observed
        records.append(record)
    return records


def simulate_together(
    configs: Sequence[Config],
    files: Sequence[str],
    place: Path,
    *,
    events: bool = False,
    progress: SimulationProgress | None = None,
) -> tuple[ClusterSummary, list[Summary]]:
    """As `rehearse_together`, written to a run directory at `place`; with `events` the log of each fleet, too.

    A log can be replayed by itself: it tells what the others did, as far as the fleet knew.
    """
    written = [BytesIO() for _ in configs] if events else []
    logs = [EventLog(file) for file in written]
    records = rehearse_together(configs, files, [[log] for log in logs], progress)
    for log in logs:
        log.flush()
    if progress is not None:
        progress.phase("writing")
    texts: list[bytes | None] = [file.getvalue() for file in written] if events else [None] * len(configs)
    return write_cluster(place, [_run(*each) for each in zip(configs, records, texts, strict=True)])


def replay_together(
    configs: Sequence[Config], files: Sequence[str], place: Path, url: str | None, **options: Any
) -> list[tuple[Path, ReplayRecord, Summary]]:
    """As `drive_together`, written to a run directory at `place`: of each model its folder there, and what it holds."""
    check_names(configs, files)
    records = drive_together(configs, url, **options)
    runs = [
        FleetRun(name_of(config), record, config, None if url else usd_per_gpu_hour(config))
        for config, record in zip(configs, records, strict=True)
    ]
    written = write_runs(place, runs)
    return [(place / run.name, record, summary) for run, record, summary in zip(runs, records, written, strict=True)]


def _run(config: Config, record: RunRecord, events: bytes | None) -> FleetRun:
    told_apart = explainers(config) if config.run.operators else ()
    on = None if record.observed is None else deployed(config)
    return FleetRun(name_of(config), record, config, usd_per_gpu_hour(config), events, on, told_apart)
