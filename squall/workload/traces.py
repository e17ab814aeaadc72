"""Recorded traces: from a CSV file to arrival times and lengths. Knows no window, no rate and no requests.

Columns tell the format:

- azure (the Azure LLM inference traces of 2023 and 2024): TIMESTAMP (a date and time, UTC unless it says otherwise),
  ContextTokens, GeneratedTokens;
- csv: arrived_at_s or arrived_at (seconds from 0; may be absent), num_prompt_tokens or num_prefill_tokens, num_output_tokens or
  num_decode_tokens.

Lines that begin with "#" are comments; other columns are ignored. Rows may come unsorted and are then sorted (stably). A row of 0
output tokens, as failed requests leave them, counts as 1: whoever is served gets a first token. Both are told in `Trace.notes`.
Anything else that is not a request is an error that names file and line: a negative or absent time, an empty prompt, a number
that is none.
"""

import csv
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from squall.core.types import SECOND, Nanos
from squall.errors import TraceError

_MOST_TOKENS = 1 << 40


class Trace(Struct, frozen=True):
    """The rows of a trace in order of arrival; all lists are equally long.

    Attributes:
        arrived_at: nanoseconds from 0 (calendar dates: from the earliest); None where the file holds lengths alone.
        notes: what had to be put right, a sentence each.
    """

    arrived_at: list[Nanos] | None
    num_prompt_tokens: list[int]
    num_output_tokens: list[int]
    notes: tuple[str, ...]


class Format(Struct, frozen=True):
    """The names that a format's columns go by, and how it tells the time."""

    name: str
    arrival: tuple[str, ...]
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    clock: Callable[[str], Nanos]
    calendar: bool


def parse_calendar(text: str) -> Nanos:
    """Nanoseconds since 1970 of "2023-11-16 18:15:46.6805900" or "2024-05-10 00:00:00.009930+00:00" (UTC without an offset).

    Raises ValueError.
    """
    seconds = _minute(text[:16]) + int(text[17:19])
    digits = text[20:]
    if digits.isdecimal() and text[16] == ":" and text[17] < "6" and text[19] == ".":
        return seconds * SECOND + int(digits[:9].ljust(9, "0"))
    rest = _SECONDS_AND_ZONE.fullmatch(text, 16)
    if rest is None:
        raise ValueError(text)
    fraction, zone = rest.groups("")
    return (seconds - _ahead(zone)) * SECOND + int(fraction[:9].ljust(9, "0"))


_SECONDS_AND_ZONE = re.compile(r":[0-5]\d(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")


@cache
def _minute(text: str) -> int:
    """Seconds from 1970 to the minute "2023-11-16 18:15"."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


@cache
def _ahead(zone: str) -> int:
    """Seconds by which a zone such as "+02:00" is ahead of UTC."""
    if zone in ("", "Z"):
        return 0
    ahead = int(zone[1:3]) * 3600 + int(zone[4:6]) * 60
    return -ahead if zone[0] == "-" else ahead


def parse_seconds(text: str) -> Nanos:
    """Nanoseconds in a number of seconds from 0. Raises ValueError, also for what can only be a calendar date as a number."""
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return round(value * SECOND)


AZURE = Format("azure", ("TIMESTAMP",), ("ContextTokens",), ("GeneratedTokens",), parse_calendar, calendar=True)
CSV = Format(
    "csv",
    ("arrived_at_s", "arrived_at"),
    ("num_prompt_tokens", "num_prefill_tokens"),
    ("num_output_tokens", "num_decode_tokens"),
    parse_seconds,
    calendar=False,
)


def read_trace(path: Path, format_name: str = "auto") -> Trace:
    """Reads a trace ("auto" tells the format from the header). Raises TraceError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _Reader(path, file, format_name).read()
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file; workload.path is relative to the configuration file") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is not text in UTF-8; unpack it first") from None
    except (OSError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None


class _Reader:
    """One file being read; `_fail` knows where it is."""

    def __init__(self, path: Path, file: Iterable[str], format_name: str) -> None:
        self._path = path
        self._rows = csv.reader(file)
        self._format_name = format_name

    def read(self) -> Trace:
        header = self._header()
        form, arrival, prompt, output = self._columns(header)
        clock = form.clock
        times: list[Nanos] = []
        prompts: list[int] = []
        outputs: list[int] = []
        for row in self._rows:
            if not row or row[0][:1] == "#":
                continue
            try:
                if arrival >= 0:
                    times.append(clock(row[arrival]))
                prompts.append(parse_tokens(row[prompt], 1))
                outputs.append(parse_tokens(row[output], 0))
            except (ValueError, IndexError):
                raise self._bad_row(form, header, row, arrival, prompt, output) from None
        if not prompts:
            raise self._fail("has a header but no rows")
        return self._in_order(form, times if arrival >= 0 else None, prompts, outputs)

    def _fail(self, what: str, at_line: bool = False) -> TraceError:
        line = f" line {self._rows.line_num}" if at_line else ""
        return TraceError(f"{self._path}{line}: {what}")

    def _header(self) -> list[str]:
        for row in self._rows:
            if row and row[0][:1] != "#":
                break
        else:
            raise self._fail("is empty; a trace begins with a header line")
        if row[0].startswith("version https://git-lfs"):
            raise self._fail("is a git-lfs pointer, not the trace itself; run `git lfs pull` in its folder")
        if row[0].startswith("{"):
            raise self._fail("holds JSON lines; supported are CSV files with a header line")
        return [name.strip() for name in row]

    def _columns(self, header: list[str]) -> tuple[Format, int, int, int]:
        """The format, and where its columns for arrival (-1: nowhere), prompt and output are."""
        known = {form.name: form for form in (AZURE, CSV)}
        looks_like = AZURE if set(AZURE.arrival + AZURE.prompt) & set(header) else CSV
        form = known.get(self._format_name, looks_like)
        wanted = (form.arrival, form.prompt, form.output)
        places = [next((header.index(name) for name in names if name in header), -1) for names in wanted]
        optional = () if form.calendar else (form.arrival,)
        absent = [" or ".join(names) for names, place in zip(wanted, places, strict=True) if place < 0 and names not in optional]
        if absent:
            there = ", ".join(header)
            raise self._fail(f"no column {' and no '.join(absent)} ({form.name} format); the columns are {there}", at_line=True)
        return form, places[0], places[1], places[2]

    def _bad_row(self, form: Format, header: list[str], row: list[str], arrival: int, prompt: int, output: int) -> TraceError:
        """Why a row is no request."""
        if len(row) < len(header):
            return self._fail(f"has {len(row)} of {len(header)} columns; the file may be cut off", at_line=True)
        right = "a date and time such as 2024-05-10 00:00:00.009930" if form.calendar else "seconds from the start, 0 or more"
        checks: list[tuple[int, Callable[[str], int], str]] = [
            (prompt, lambda text: parse_tokens(text, 1), "a whole number of at least 1"),
            (output, lambda text: parse_tokens(text, 0), "a whole number of at least 0"),
        ]
        if arrival >= 0:
            checks.insert(0, (arrival, form.clock, right))
        column, right = next((column, right) for column, parse, right in checks if not _is_good(parse, row[column]))
        return self._fail(f"{header[column]} is {row[column]!r}; it must be {right}", at_line=True)

    def _in_order(self, form: Format, times: list[Nanos] | None, prompts: list[int], outputs: list[int]) -> Trace:
        """Sorts by arrival, rows of one instant as they were, counts calendar dates from the earliest, and notes what it did."""
        notes = []
        empty = outputs.count(0)
        if empty:
            outputs = [max(1, tokens) for tokens in outputs]
            notes.append(f"{self._path}: {empty} rows of 0 output tokens count as 1")
        if times is None:
            return Trace(None, prompts, outputs, tuple(notes))
        backward = sum(later < earlier for earlier, later in pairwise(times))
        if backward:
            order = sorted(range(len(times)), key=times.__getitem__)
            times, prompts, outputs = ([column[row] for row in order] for column in (times, prompts, outputs))
            notes.append(f"{self._path}: {backward} rows came before the row above them; sorted by arrival")
        start = times[0] if form.calendar else 0
        return Trace([time - start for time in times], prompts, outputs, tuple(notes))


def parse_tokens(text: str, at_least: int) -> int:
    """A whole number of tokens; "7564.0" is one. Raises ValueError."""
    try:
        value = int(text)
    except ValueError:
        exact = float(text)
        if not exact.is_integer():
            raise
        value = int(exact)
    if not at_least <= value <= _MOST_TOKENS:
        raise ValueError(text)
    return value


def _is_good(parse: Callable[[str], int], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True
