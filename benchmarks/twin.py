"""How far a simulation is from the run that it rehearses. Claim: medians within 10 %, on a machine that has no other work.

    python benchmarks/twin.py [--smoke]

One profile for each number of workers, measured before anything is served and never touched again; then the embedded model under
loads of other rates, prompts and numbers of workers. `steps` adds up the prices of all steps that the workers ran, in the very
batches that they ran, over the time that these took: what queues make of an error does not count there. Between the two lie the
head, the load generator and what workers do between steps. The load average is that of the run's last minute; the fleet is a
part of it, one for each worker at most.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from squall import config as configuration
from squall.config import Config
from squall.core.actions import RunSteps
from squall.core.events import StepsDone
from squall.core.types import MachineId, Nanos
from squall.errors import ModelError
from squall.eventlog import read
from squall.live.models import find
from squall.perf import profile as stored
from squall.perf.latency import UNITS_PER_NANO, LatencyModel
from squall.perf.profile import ProfileModel, save
from squall.report.progress import progress
from squall.report.summary import Summary, summarise
from squall.twin.demo import SETTINGS, bursts, serving
from squall.twin.drive import drive
from squall.twin.profile import busy, num_sharing, profile
from squall.twin.rehearse import rehearse

GOAL = 0.1
PROFILE_S = 45.0
LONG = ('workload.prompt={kind="lognormal", median=300, sigma=0.5, low=64, high=1024}',)
SHORT = ('workload.output={kind="lognormal", median=24, sigma=0.5, low=4, high=96}',)
LOADS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("two workers", 1.0, ()),
    ("two workers, twice as many requests", 2.0, ()),
    ("two workers, long prompts", 0.8, LONG + SHORT),
    ("one worker", 1.0, ("fleet.replicas=1",)),
)
"""Name, requests a second on the whole, and what differs from `squall demo`."""

MEDIANS = ("ttft_s", "tbt_s", "e2e_s")


def priced(config: Config, path: Path) -> Config:
    return replace(config, latency=replace(config.latency, kind="profile", path=str(path)))


def measure(config: Config, seconds: float, path: Path) -> str:
    """Writes the profile of the fleet's workers; what to say of it."""
    with progress("measuring", seconds) as show:
        found = profile(config, num_sharing(config), seconds, show)
    save(found, path)
    off = f"{found.machine}: the curve is off by {100 * found.median_error:.1f} % (median), {100 * found.p95_error:.1f} % (p95)"
    return "; ".join(filter(None, (off, busy(found))))


def run(config: Config, directory: Path) -> Summary:
    """Served in processes of its own, and driven from here."""
    directory.mkdir()
    (directory / "config.toml").write_text(configuration.dumps(config))
    with serving(directory / "config.toml", directory / "serve") as (_, port):
        record = drive(replace(config, serve=replace(config.serve, port=port)))
    return summarise(record, config.slo, None)


def runs(log: Path) -> Iterator[tuple[RunSteps, int, Nanos]]:
    """What workers were asked to run, how many steps of it they did, and how long it took them."""
    asked: dict[MachineId, tuple[RunSteps, Nanos]] = {}
    for record in read(log):
        if isinstance(record.event, StepsDone) and record.machine in asked:
            action, since = asked.pop(record.machine)
            yield action, record.event.steps, record.now - since
        for begun in record.actions:
            if isinstance(begun, RunSteps):
                asked[record.machine] = begun, record.now


def steps_ratio(latency: LatencyModel, log: Path) -> float:
    """Prices over times, of all steps together."""
    prices = times = 0.0
    for action, steps, took in runs(log):
        for part in latency.run(action, steps):
            prices += part.count * (part.first + (part.count - 1) * part.increment / 2) / UNITS_PER_NANO
        times += took
    return prices / times


def medians(measured: Summary, simulated: Summary) -> list[float]:
    """Simulated over measured."""
    return [getattr(simulated, key).p50 / getattr(measured, key).p50 for key in MEDIANS]


def cells(measured: Summary, simulated: Summary) -> list[str]:
    ratios = [simulated.output_tokens_per_s / measured.output_tokens_per_s]
    for key in MEDIANS:
        ours, theirs = getattr(simulated, key), getattr(measured, key)
        ratios += [ours.p50 / theirs.p50, ours.p99 / theirs.p99]
    return [f"{100 * (ratio - 1):+.1f} %" for ratio in ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="just enough to see that it runs")
    smoke = parser.parse_args().smoke
    try:
        find("smollm2")
    except ModelError:
        print("nothing to serve: `squall model pull smollm2` fetches the embedded model")
        return
    profile_s, seconds = (5.0, 6.0) if smoke else (PROFILE_S, 45.0)
    table = Table(title="simulated against measured")
    for column in ("", "load avg", "steps", "tok/s", *(f"{key[:-2].upper()} {of}" for key in MEDIANS for of in ("p50", "p99"))):
        table.add_column(column, justify="right" if column else "left")
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for index, (name, load, others) in enumerate(LOADS[:1] if smoke else LOADS):
            config = configuration.load(None, [*SETTINGS, "serve.port=0", *bursts(load, seconds), *others])
            path = Path(scratch) / f"{config.fleet.num_initial}.json"
            if not path.exists():
                print(measure(config, profile_s, path))
            config = priced(config, path)
            directory = Path(scratch) / str(index)
            measured, simulated = run(config, directory), summarise(rehearse(config), config.slo, None)
            steps = steps_ratio(ProfileModel(stored.load(path)), directory / "serve" / "events.jsonl.zst")
            load_average = f"{os.getloadavg()[0]:.1f}"
            table.add_row(name, load_average, f"{100 * (steps - 1):+.1f} %", *cells(measured, simulated))
            worst = max(worst, *(abs(ratio - 1) for ratio in medians(measured, simulated)))
    Console(width=130).print(table)
    if not smoke:
        print(f"goal: medians within {100 * GOAL:g} %: {'met' if worst <= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
