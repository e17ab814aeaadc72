"""The rows of a CSV, JSON lines or Parquet file, each with its place in the file. Knows no format and no meaning of a column.

In CSV files blank lines and lines that begin with "#" are skipped, also before the header.
"""

import csv
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import msgspec

from squall.errors import TraceError


class Rows(Protocol):
    """A file being read, row by row.

    Attributes:
        columns: the names in its header, or in its first object.
        line: where the row that was yielded last is; `place` says it in words.
    """

    line: int
    columns: list[str]

    def place(self, line: int) -> str: ...
    def key(self, column: str) -> Any:
        """What to index a row with."""

    def optional(self, column: str) -> Callable[[Any], Any] | None:
        """How to get what a row may have; None where no row has it."""

    def __iter__(self) -> Iterator[Any]: ...


def open_rows(path: Path) -> Rows:
    """Opens a file of any of the three kinds, told from its content. Raises TraceError."""
    if first_bytes(path).startswith(b"PAR1"):
        return _parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is not text in UTF-8; unpack or convert it first") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "").lstrip()
    if first.startswith("["):
        raise TraceError(f"{path}: begins with a JSON array; write one object a line")
    return JsonRows(path, text) if first.startswith("{") else CsvRows(path, text)


def first_bytes(path: Path) -> bytes:
    """How a file begins, without its byte-order mark. Raises TraceError where it is none, or stands for what it should hold."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(f"{path}: is a pipe or a device, which gives its content once at most; write it to a file first")
    try:
        with path.open("rb") as file:
            first = file.read(64).removeprefix(BOM_UTF8).lstrip()
    except FileNotFoundError:
        where = "the configuration file, or with --set to the current directory"
        raise TraceError(f"{path}: no such file; paths in [workload] are relative to {where}") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: is a folder; give a file in it") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    if first.startswith(b"version https://git-lfs"):
        raise TraceError(f"{path}: is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")
    if first.lower().startswith((b"<!doctype", b"<html")):
        raise TraceError(f"{path}: is a web page, not a file of data; download the file itself")
    return first


class CsvRows:
    """Rows are lists of text."""

    def __init__(self, path: Path, text: str) -> None:
        self.line = 0
        self._path = path
        self._reader = csv.reader(text.split("\n"))
        self.columns = []
        self.columns = self._header()

    def _header(self) -> list[str]:
        for row in self:
            mark = next((mark for mark in (";", "\t") if mark in row[0]), None)
            if len(row) == 1 and mark:
                raise TraceError(f"{self.place(self.line)}: has {mark!r} between its columns; separate them by commas")
            return [name.replace("\ufeff", "").strip() for name in row]  # a mark also where another file came before this one
        raise TraceError(f"{self._path}: is empty; it must begin with a header line")

    def place(self, line: int) -> str:
        return f"{self._path} line {line}"

    def key(self, column: str) -> int:
        if self.columns.count(column) > 1:
            raise TraceError(f"{self._path}: has several columns {column}; leave one of them")
        return self.columns.index(column)

    def optional(self, column: str) -> Callable[[Any], Any] | None:
        return itemgetter(self.key(column)) if column in self.columns else None

    def __iter__(self) -> Iterator[list[str]]:
        width = len(self.columns) or sys.maxsize  # no row is too long to be the header
        try:
            for row in self._reader:
                if row and row[0][:1] != "#":
                    self.line = self._reader.line_num
                    if len(row) > width and any(row[width:]):
                        said = f"has {len(row)} columns, and the header {width}; quote what has a comma in it"
                        raise TraceError(f"{self.place(self.line)}: {said}")
                    yield row
        except csv.Error as error:
            raise TraceError(f"{self.place(self._reader.line_num)}: cannot be read ({error})") from None


class JsonRows:
    """Rows are objects."""

    def __init__(self, path: Path, text: str) -> None:
        self.line = 0
        self._path = path
        self._lines = text.split("\n")
        self.columns = list(next(iter(self)))

    def place(self, line: int) -> str:
        return f"{self._path} line {line}"

    def key(self, column: str) -> str:
        return column

    def optional(self, column: str) -> Callable[[Any], Any] | None:
        return lambda row: row.get(column)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        for line, text in enumerate(self._lines, 1):
            if text and not text.isspace() and not text.startswith("#"):
                self.line = line
                try:
                    yield decode(text)
                except msgspec.MsgspecError as error:
                    yield self._odd(text, error)

    def _odd(self, text: str, error: msgspec.MsgspecError) -> dict[str, Any]:
        """Python's own reader knows NaN, which the reader of the column will complain about by name."""
        try:
            row = json.loads(text)
        except ValueError:
            rest = "; the file may be cut off" if not any(self._lines[self.line :]) else ""
            raise TraceError(f"{self.place(self.line)}: is not JSON ({error}){rest}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{self.place(self.line)}: is not an object; write one object a line")
        return row


class TableRows:
    """Rows of a Parquet file, as tuples."""

    def __init__(self, path: Path, columns: list[str], rows: Iterator[tuple[Any, ...]]) -> None:
        self.line = 0
        self.columns = columns
        self._path = path
        self._rows = rows

    def place(self, line: int) -> str:
        return f"{self._path} row {line}"

    def key(self, column: str) -> int:
        return self.columns.index(column)

    def optional(self, column: str) -> Callable[[Any], Any] | None:
        return itemgetter(self.key(column)) if column in self.columns else None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for line, row in enumerate(self._rows, 1):
            self.line = line
            yield row


def _parquet(path: Path) -> TableRows:
    import polars  # here, because it takes a fifth of a second and most traces are text

    try:
        table = polars.read_parquet(path)
    except Exception as error:  # polars raises what its readers raise
        raise TraceError(f"{path}: is not a readable Parquet file ({str(error).splitlines()[0]})") from None
    return TableRows(path, table.columns, table.iter_rows())
