"""What commands say in the same words: what was written, and what to run next. Knows no command."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer


def say(line: str) -> None:
    """To whoever may still listen: a server does not end because its terminal has gone or its log's disk is full."""
    with contextlib.suppress(OSError):
        typer.echo(line)


def say_wrote(place: Path, *commands: str) -> None:
    """The last words of a command that leaves something at `place`, and the commands that one may go on with."""
    typer.echo(f"wrote {place}")
    say_next(*commands)


def say_next(*commands: str) -> None:
    if commands:
        typer.echo("next: " + "\n      ".join(commands))
