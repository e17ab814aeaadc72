"""What has been measured so far, line by line in a file, so that a killed profile goes on where it was.

Knows no operator. A line is on the disk before the next point begins: at most the point in hand is lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from squall.errors import ProfileError


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """A measured point. `at` holds every column but the time."""

    operator: str
    at: dict[str, int | str]
    seconds: float


class Setup(Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured: rows of another setup must not be mixed in."""

    model: str
    num_params: int
    machine: str
    dtype: str
    kv_dtype: str
    block_size: int
    mode: str


class Journal:
    """Rows in the order in which they were measured; of several of one point the last counts.

    Args:
        path: JSON lines, the first a `Setup`. A last line that was cut short is cut off.

    Raises ProfileError where the file is of another setup, or damaged elsewhere.
    """

    def __init__(self, path: Path, setup: Setup) -> None:
        self.path = path
        self.rows: list[Row] = []
        whole = self._read(setup)
        self._file: IO[bytes] = path.open("r+b" if whole else "wb")
        self._file.seek(whole)
        self._file.truncate()
        if not whole:
            self._append(setup)

    def add(self, row: Row) -> None:
        """Keep a row, on the disk when this returns."""
        self.rows.append(row)
        self._append(row)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def remove(self) -> None:
        """It has served: what it held is in the profile."""
        self.path.unlink(missing_ok=True)

    def _append(self, what: Row | Setup) -> None:
        self._file.write(msgspec.json.encode(what) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, setup: Setup) -> int:
        """Bytes of the file that are whole lines."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        if not lines:
            return 0
        at = 1
        try:
            held = msgspec.json.decode(lines[0], type=Setup)
            for at, line in enumerate(lines[1:], 2):  # noqa: B007 - the message tells which
                self.rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.MsgspecError as error:
            raise ProfileError(f"{self.path}: line {at} is damaged ({error}); remove the file to begin again") from None
        _same(self.path, _fields(held), _fields(setup))
        return data.rfind(b"\n") + 1


def _fields(setup: Setup) -> Mapping[str, object]:
    return msgspec.structs.asdict(setup)


def _same(path: Path, held: Mapping[str, object], asked: Mapping[str, object]) -> None:
    for name, value in asked.items():
        if held[name] != value:
            raise ProfileError(
                f"{path}: was begun with {name} {held[name]!r}, not {value!r}; choose another --out, or remove it to begin again"
            )
