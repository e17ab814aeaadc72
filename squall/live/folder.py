"""The run directory of a fleet that is served: made before anything starts, with what workers read; the logs of all processes.

Knows files, and nothing of what runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from squall import config as configuration
from squall.config import Config
from squall.errors import ConfigError, SquallError
from squall.eventlog import EventLog, open_log, write_merged

Say = Callable[[str], None]
"""Tells a person what happens, one line each."""


def make_folder(directory: Path, config: Config) -> Path:
    """The run directory, with what workers need to start. Returns the folder of their logs; leaves nothing where it cannot."""
    logs = directory / "logs"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {directory}: {error.strerror}") from None
    try:
        logs.mkdir()
        (directory / "config.toml").write_text(configuration.dumps(config), encoding="utf-8")
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise ConfigError(f"cannot write into the run directory {directory}: {error.strerror}") from None
    return logs


def merge_logs(logs: Path, target: Path, say: Say) -> None:
    """The logs of head and workers become one; their parts are not needed any more then."""
    parts = sorted(logs.glob("events-*.jsonl.zst"))
    try:
        write_merged(parts, target)
    except (OSError, SquallError) as error:
        say(f"the event logs stay in {logs}, as they cannot be merged: {error}")
        return
    for part in parts:
        part.unlink()


def open_head_log(config: Config, folder: Path, say: Say) -> EventLog | None:
    if not config.serve.event_log:
        return None
    return open_log(folder / "events-head.jsonl.zst", given_up=lambda error: say(f"the event log ends here: {error.strerror}"))
