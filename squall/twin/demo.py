"""`squall demo`: serves the embedded model, drives it with a bursty minute, simulates the same minute, shows both side by side.

Knows the order of things. What it starts ends with it, however it ends.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from squall import config as configuration
from squall.config import Latency
from squall.errors import SquallError
from squall.live.models import pull
from squall.perf.profile import save
from squall.report.compare import METRICS, table
from squall.report.progress import progress
from squall.report.run import place_for, write_run
from squall.report.summary import Summary
from squall.twin.drive import drive
from squall.twin.profile import num_sharing, profile
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
    "workload.duration_s=60",
    'workload.arrivals={kind="bursts", rate_rps=0.5, burst_rps=2.5, burst_s=5, period_s=20}',
    'workload.prompt={kind="lognormal", median=80, sigma=0.6, low=16, high=512}',
    'workload.output={kind="lognormal", median=32, sigma=0.6, low=4, high=128}',
    "slo.ttft_s=2.0",
    "slo.tbt_s=0.25",
)
"""A minute that keeps two cores busy and does not drown them."""

PROFILE_S = 45.0
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
SHOWN = ("requests", "completed", "throughput", "output tokens", "TTFT", "TBT", "E2E", "SLO attainment")


def demo(out: Path | None, port: int, say: Say) -> None:
    """All of it, in a run directory that holds both runs. Takes a little over two minutes.

    Raises:
        SquallError: a part of it failed; the message says which and where it logged.
    """
    place = place_for("demo", None if out is None else str(out))
    say("1/5  the embedded model")
    pull("smollm2", lambda line: say(f"     {line}"))
    config = configuration.load(None, [*SETTINGS, f"serve.port={port}"])
    place.mkdir(parents=True)

    engines = num_sharing(config)
    say(f"2/5  profiling {engines} engine(s) at once for {PROFILE_S:.0f} s: the workers will share this machine's memory, too")
    with progress("     measuring", PROFILE_S) as show:
        measured = profile(config, engines, PROFILE_S, show)
    save(measured, place / "profile.json")
    rehearsed = replace(config, latency=Latency(kind="profile", path=str((place / "profile.json").resolve())))
    (place / "demo.toml").write_text(configuration.dumps(rehearsed), encoding="utf-8")

    say(f"3/5  serving it with {config.fleet.replicas} workers")
    with serving(place / "demo.toml", place / "serve") as served_at:
        say(f"4/5  a bursty minute against {served_at[0]}:{served_at[1]}")
        record = drive(replace(config, serve=replace(config.serve, port=served_at[1])))
    live = write_run(place / "live", record, config, None)

    say("5/5  the same minute on a virtual clock")
    simulated = write_run(place / "simulated", rehearse(rehearsed), rehearsed, None)
    _show([live, simulated], place, say)


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


def _show(live_and_simulated: list[Summary], place: Path, say: Say) -> None:
    from rich.console import Console

    metrics = [metric for metric in METRICS if metric[0] in SHOWN]
    say("")
    Console().print(table(["measured", "simulated"], live_and_simulated, metrics))
    say("")
    say(f"wrote {place}: live/ and simulated/ (run directories), profile.json, serve/ (event log), demo.toml")
    say(f"next: squall report {place / 'live'}")
    say(f"      squall simulate {place / 'demo.toml'} --set fleet.replicas=4      what would more workers bring?")
    say(f"      squall serve {place / 'demo.toml'} --port 8000                    and ask it something yourself")
