"""`squall demo`: serves the embedded model, drives it with a bursty minute, simulates the same minute, shows both side by side.

Knows the order of things. What it starts ends with it, however it ends.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from squall import config as configuration
from squall.config import Config
from squall.errors import SquallError
from squall.live.models import pull
from squall.perf.profile import save
from squall.report.compare import METRICS, table
from squall.report.progress import progress
from squall.report.run import place_for, write_run
from squall.report.summary import Summary, summarise
from squall.twin.drive import drive
from squall.twin.profile import busy, num_sharing, profile
from squall.twin.rehearse import rehearse

Say = Callable[[str], None]

SETTINGS = (
    'model.name="smollm2-135m-instruct"',
    'model.served_as=["smollm2"]',
    "fleet.replicas=2",
    "replica.max_model_len=2048",
    # short chunks: on a CPU a long one would stall every other answer
    "batching.max_num_seqs=16",
    "batching.max_num_batched_tokens=256",
    "workload.kind=synthetic",
    'workload.prompt={kind="lognormal", median=80, sigma=0.6, low=16, high=512}',
    'workload.output={kind="lognormal", median=32, sigma=0.6, low=4, high=128}',
    "slo.ttft_s=2.0",
    "slo.tbt_s=0.25",
)
ALIKE = 1.25
"""Times between tokens of both runs are within this factor of each other, unless the machine had other work in one of them."""

LOADS = (2.0, 1.5, 1.0, 0.75, 0.5, 0.35, 0.25)
"""How bursty minutes differ: times the rate of `bursts`."""

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
SHOWN = ("requests", "completed", "throughput", "output tokens", "TTFT", "TBT", "E2E", "SLO attainment")


def demo(out: Path | None, port: int, say: Say, *, profile_s: float = 45.0, load_s: float = 60.0) -> None:
    """All of it, in a run directory that holds both runs. Takes some `profile_s + load_s` and half a minute.

    Raises:
        SquallError: a part of it failed; the message says which, and where it logged.
    """
    place = place_for("demo", None if out is None else str(out))
    say("1/5  the embedded model")
    pull("smollm2", lambda line: say(f"     {line}"))
    config = configuration.load(None, [*SETTINGS, f"serve.port={port}", *bursts(1.0, load_s)])
    place.mkdir(parents=True)

    engines = num_sharing(config)
    say(f"2/5  profiling {engines} engine(s) at once for {profile_s:.0f} s: the workers will share this machine's memory, too")
    with kept_unless_empty(place), progress("     measuring", profile_s) as show:
        measured = profile(config, engines, profile_s, show)
    save(measured, place / "profile.json")
    if (note := busy(measured)) is not None:
        say(f"     {note}")
    config = _as_busy_as_fits(place / "profile.json", port, load_s, say)
    (place / "demo.toml").write_text(configuration.dumps(config), encoding="utf-8")

    say(f"3/5  serving it with {config.fleet.num_initial} workers")
    with serving(place / "demo.toml", place / "serve") as served_at:
        say(f"4/5  {load_s:.0f} bursty seconds against http://{served_at[0]}:{served_at[1]}")
        record = drive(replace(config, serve=replace(config.serve, port=served_at[1])))
    live = write_run(place / "live", record, config, None)

    say("5/5  the same on a virtual clock")
    simulated = write_run(place / "simulated", rehearse(config), config, None)
    _show([live, simulated], place, say)


@contextmanager
def kept_unless_empty(place: Path) -> Iterator[None]:
    """Whoever breaks off before anything is in the directory has none."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            place.rmdir()
        raise


def bursts(load: float, seconds: float) -> list[str]:
    """Settings: `load` requests a second on the whole; a burst of five times the quiet rate ends every third of the time."""
    period, quiet = seconds / 3, 0.5 * load
    burst = f"rate_rps={quiet}, burst_rps={5 * quiet}, burst_s={period / 4}, period_s={period}"
    return [f"workload.duration_s={seconds}", f'workload.arrivals={{kind="bursts", {burst}}}']


def _as_busy_as_fits(measured: Path, port: int, seconds: float, say: Say) -> Config:
    """The highest load at which this machine should be busy and not drown: nine of ten first tokens come in time.

    The lowest of all where none is low enough.
    """
    latency = ["latency.kind=profile", f"latency.path={json.dumps(str(measured))}", f"serve.port={port}"]
    for load in LOADS:
        config = configuration.load(None, [*SETTINGS, *latency, *bursts(load, seconds)])
        expected = summarise(rehearse(config), config.slo, None)
        if expected.ttft_s is not None and config.slo.ttft_s is not None and expected.ttft_s.p90 <= config.slo.ttft_s:
            verdict = "this machine can take"
            break
    else:
        verdict = "this machine is too busy or too slow to answer in time even"
    say(f"     simulated: {verdict} {expected.requests} requests in {seconds:.0f} s, {2.5 * load:g} a second in bursts")
    return config


@contextmanager
def serving(config: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """A `squall serve` of `config` in a process of its own while the block runs: its host and port.

    Raises:
        SquallError: it did not come up.
    """
    log = directory.with_suffix(".log")
    command = [sys.executable, "-m", "squall", "serve", str(config), "--out", str(directory), "--with-parent"]
    with log.open("wb") as output, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output) as process:
        try:
            yield _address(process, log)
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()  # its workers end when it does


def _address(process: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    """Where it listens, once it is ready."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        listening = re.search(r"listening on http://(\S+):(\d+)", text)
        if listening and re.search(r"^ready after", text, re.MULTILINE):
            return listening[1], int(listening[2])
        time.sleep(0.1)
    said = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
    raise SquallError(f"the server did not come up; it last said {said[-1]!r}, the rest is in {log}")


def other_work(live: Summary, simulated: Summary) -> str | None:
    """What to make of two runs that are far apart; None where they are not."""
    if live.tbt_s is None or simulated.tbt_s is None or not min(live.tbt_s.p50, simulated.tbt_s.p50):
        return None
    times = simulated.tbt_s.p50 / live.tbt_s.p50
    if 1 / ALIKE <= times <= ALIKE:
        return None
    when, factor = ("profiled", times) if times > 1 else ("served", 1 / times)
    return f"this machine was {factor:.1f} times as slow while it was {when}: it has other work to do; try again when it has none"


def _show(live_and_simulated: list[Summary], place: Path, say: Say) -> None:
    from rich.console import Console

    metrics = [metric for metric in METRICS if metric[0] in SHOWN]
    say("")
    Console().print(table(["measured", "simulated"], live_and_simulated, metrics))
    say("")
    if (note := other_work(*live_and_simulated)) is not None:
        say(note)
        say("")
    say(f"wrote {place}: live/ and simulated/ (run directories), profile.json, serve/ (event log), demo.toml")
    say(f"next: squall report {place / 'live'}")
    say(f"      squall simulate {place / 'demo.toml'} --set fleet.replicas=4      what would more workers bring?")
    say(f"      squall serve {place / 'demo.toml'} --port 8000                    ask it something yourself")
