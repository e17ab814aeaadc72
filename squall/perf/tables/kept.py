"""Checked tables kept on disk, so that only the first command that needs them reads and checks what they are made of.

Knows no format of others: one Parquet file an operator, with the columns of `operations`, in a folder whose name is a hash of
the files' names, sizes and times of change. A table is read when it is first asked for. Where nothing can be written, or what
was written cannot be read, everything works as without.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import polars as pl

from squall.perf.tables.operations import OPERATIONS
from squall.perf.tables.profile import VERSION, Header, OperatorProfile
from squall.perf.tables.source import TableSource
from squall.perf.tables.table import OperatorTable

_LAYOUT = 2
"""Of the folder, and of what the checks do; another number makes all anew."""

_HEADER = "header.json"


def folder_of(files: Sequence[Path], *words: str) -> Path:
    """Where the tables made of these files, as they are now, are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    digest = hashlib.sha256(repr((_LAYOUT, VERSION, words)).encode())
    for file in files:
        now = file.stat()
        digest.update(repr((str(file), now.st_size, now.st_mtime_ns)).encode())
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "squall" / "tables" / digest.hexdigest()[:24]


def kept_source(folder: Path, make: Callable[[], OperatorProfile]) -> TableSource:
    """The source of what `make` makes, from `folder` where it lies there; it is left there otherwise. Raises as `make`."""
    try:
        header = msgspec.json.decode((folder / _HEADER).read_bytes(), type=Header)
        names = sorted(path.stem for path in folder.glob("*.parquet") if path.stem in OPERATIONS)
    except (OSError, msgspec.MsgspecError):
        profile = make()
        _keep(profile, folder)
        return profile.source()
    return TableSource(f"measured ({header.gpu}, {header.engine})", _Tables(folder, names, make), header.step_s)


class _Tables(Mapping[str, OperatorTable]):
    """Tables that are read when they are first asked for."""

    def __init__(self, folder: Path, names: Sequence[str], make: Callable[[], OperatorProfile]) -> None:
        self._folder = folder
        self._tables: dict[str, OperatorTable | None] = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> OperatorTable:
        table = self._tables[name]
        if table is None:
            table = self._tables[name] = OperatorTable(OPERATIONS[name], self._rows(name))
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def _rows(self, name: str) -> pl.DataFrame:
        try:
            return pl.read_parquet(self._folder / f"{name}.parquet").select(*OPERATIONS[name].columns, "seconds")
        except (OSError, pl.exceptions.PolarsError):
            return self._make().rows[name]


def _keep(profile: OperatorProfile, folder: Path) -> None:
    """Whole or not at all; whoever comes second leaves what the first one wrote."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    except OSError:
        return
    try:
        for name, rows in profile.rows.items():
            rows.select(*OPERATIONS[name].columns, "seconds").write_parquet(beside / f"{name}.parquet")
        (beside / _HEADER).write_bytes(msgspec.json.encode(profile.header))
        beside.rename(folder)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
