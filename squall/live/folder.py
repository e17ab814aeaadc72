"""The run directory of a fleet that is served: made before anything starts, with what workers read; the logs of all processes.

Knows files, and nothing of what runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from squall import config as configuration
from squall.config import Config
from squall.core.metrics import Decision, Delivery
from squall.errors import ConfigError, SquallError
from squall.eventlog import EventLog, open_log, write_merged
from squall.files import replacing
from squall.fleetlog import DECISIONS, TRANSFERS, decisions_parquet, transfers_parquet

Say = Callable[[str], None]
"""Tells a person what happens, one line each."""


def logs_of(directory: Path) -> Path:
    """The folder of workers' logs, in the run directory or a model's part of it."""
    return directory / "logs"


@contextmanager
def new_folder(directory: Path) -> Iterator[None]:
    """The run directory, for what the block puts into it: where the block fails, nothing is left.

    Raises ConfigError: it is there already, or cannot be made.
    """
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {directory}: {error.strerror}") from None
    try:
        yield
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def fill_folder(directory: Path, config: Config) -> None:
    """What workers need to start, in the run directory or a model's part of it."""
    try:
        logs_of(directory).mkdir(parents=True)
        (directory / "config.toml").write_text(configuration.dumps(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write into the run directory {directory}: {error.strerror}") from None


def parts_of(logs: Path) -> list[Path]:
    """The logs of head and workers in `logs`, until they are merged."""
    return sorted(logs.glob("events-*.jsonl.zst"))


def merge_logs(logs: Path, target: Path, say: Say) -> None:
    """The logs of head and workers become one; their parts are not needed any more then."""
    parts = parts_of(logs)
    try:
        write_merged(parts, target)
    except (OSError, SquallError) as error:
        say(f"the event logs stay in {logs}, as they cannot be merged: {error}")
        return
    for part in parts:
        part.unlink()


def write_changes(directory: Path, decisions: Sequence[Decision], weights: Sequence[Delivery], say: Say) -> None:
    """What was decided about a fleet and loaded for it, in the tables of a simulated run; those that are empty are left out."""
    files = {DECISIONS: decisions_parquet(decisions)} if decisions else {}
    if weights:
        files[TRANSFERS] = transfers_parquet(weights)
    try:
        for name, content in files.items():
            with replacing(directory / name) as beside:
                beside.write_bytes(content)
    except OSError as error:
        say(f"what was decided and loaded cannot be written into {directory}: {error.strerror}")


def open_head_log(config: Config, folder: Path, say: Say) -> EventLog | None:
    if not config.serve.event_log:
        return None
    return open_log(folder / "events-head.jsonl.zst", given_up=lambda error: say(f"the event log ends here: {error.strerror}"))
