"""How far long work has come: a bar on a terminal, a line now and then elsewhere (logs, CI). Knows nothing of the work.

A simulation has a line of its own, and only on a terminal and where it takes long: it counts what the event log tells.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from squall.core.actions import AnyAction, Reply
from squall.core.events import AnyEvent, Arrived, Progressed
from squall.core.machine import Machine
from squall.core.types import ROUTER, SECOND, MachineId, Nanos

EVERY_S = 10.0
"""How often there is a line where there is no terminal."""

Show = Callable[[float, str], None]
"""Told how much is done, in the unit of `total`, and what there is to say about it."""


@contextmanager
def progress(what: str, total: float) -> Iterator[Show]:
    """Shows the progress of `what` on stderr while the block runs."""
    yield from _bar(what, total) if sys.stderr.isatty() else _lines(what, total)


def _bar(what: str, total: float) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda done, note: bar.update(task, completed=min(done, total), note=note)


def _lines(what: str, total: float) -> Iterator[Show]:
    due = time.monotonic() + EVERY_S

    def show(done: float, note: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + EVERY_S
            sys.stderr.write(f"{what}: {100 * min(1.0, done / total) if total else 100:.0f} %, {note}\n")
            sys.stderr.flush()

    yield show


# -- a simulation

SHOWN_AFTER_S = 2.0
"""Shorter runs show nothing."""

SHOWN_EVERY_S = 0.5


class SimulationProgress:
    """Watches a simulation, and shows what it saw while it is entered, from a thread of its own: the simulation only counts.

    Args:
        stream: a terminal.
        after_s, every_s: when the line is there first, and how often it is new.

    Attributes:
        now: the simulated instant.
        num_requests: expected; 0 while that is not known.
        num_done: requests that have ended.
        num_machines: made so far.
    """

    def __init__(self, stream: TextIO, after_s: float = SHOWN_AFTER_S, every_s: float = SHOWN_EVERY_S) -> None:
        self.now: Nanos = 0
        self.num_requests = 0
        self.num_done = 0
        self.num_machines = 0
        self._phase = "starting"
        self._stream = stream
        self._after_s = after_s
        self._every_s = every_s
        self._began = self._phase_began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def phase(self, what: str, num_requests: int = 0) -> None:
        """What begins now: before the first event there may be much to read and to make."""
        self._phase = what
        self._phase_began = time.monotonic()
        self.num_requests = num_requests or self.num_requests

    def created(self, now: Nanos, machine: MachineId, made: Machine) -> None:  # noqa: ARG002 - all that a watcher is told
        self.num_machines += 1

    def record(self, now: Nanos, machine: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        self.now = now
        if machine != ROUTER:
            return
        if type(event) is Progressed:
            self.num_done += len(event.finished)
        elif type(event) is Arrived:
            for action in actions:
                if type(action) is Reply:
                    self.num_done += 1

    def line(self) -> str:
        """How far it has come."""
        spent = time.monotonic() - self._phase_began
        if not self.now and not self.num_done:
            made = f", {self.num_machines:,} machines made" if self.num_machines else ""
            return f"{self._phase}{made}, {time.monotonic() - self._began:.0f} s"
        rate = self.num_done / spent if spent else 0.0
        speed = self.now / SECOND / spent if spent else 0.0
        share = f" ({100 * self.num_done / self.num_requests:.0f} %)" if self.num_requests else ""
        return (
            f"{self._phase}: {self.num_done:,} of {self.num_requests:,} requests{share}, {self.now / SECOND:,.0f} s simulated, "
            f"{rate:,.0f} requests/s, {speed:,.0f} x real time"
        )

    def __enter__(self) -> SimulationProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _show(self) -> None:
        shown = False
        wait = self._after_s
        while not self._over.wait(wait):
            self._stream.write(f"\r\x1b[K{self.line()}")
            self._stream.flush()
            shown = True
            wait = self._every_s
        if shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def simulation_progress() -> Iterator[SimulationProgress | None]:
    """Shows a simulation's progress while the block runs; None, and nothing, where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with SimulationProgress(sys.stderr) as shown:
        yield shown
