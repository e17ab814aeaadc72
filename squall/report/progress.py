"""How far long work has come: a bar on a terminal, a line now and then elsewhere (logs, CI). Knows nothing of the work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
