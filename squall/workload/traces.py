"""Recorded traces: from a file to arrival times, lengths and what is known of the prompts. Knows no window, rate or request.

`workload.formats` lists the formats. Rows may come unsorted and are then sorted (stably). A row of 0 output tokens, as failed
requests leave them, counts as 1: whoever is served gets a first token. Whatever was put right is told in `Trace.notes`. Anything
else that is not a request is an error that names file, line and column: a negative or absent time, a length that is none, two
clocks in one file, block names that do not fit the prompt.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from squall.core.types import SECOND, Nanos
from squall.errors import TraceError
from squall.workload.formats import CHARS_PER_TOKEN, Format, by_name, recognise
from squall.workload.parsing import EPOCH, LATEST, UNITS, ParseColumn, calendar, clock, lengths, parse_tokens, tokens_wanted
from squall.workload.rows import Rows, open_rows
from squall.workload.turns import Turns, find_turns


class Trace(Struct, frozen=True):
    """The rows of a trace in order of arrival; all lists are equally long, those of unknown things empty.

    Attributes:
        arrived_at: nanoseconds from 0 (dates and times since 1970: from the earliest); None where the file holds lengths alone.
        notes: what had to be put right, a sentence each.
        blocks, block_size: names of each prompt's blocks of so many tokens, the last one perhaps partial; the same name after the
            same names is the same content. Empty for a row of which nothing is known.
        turns: which rows are turns of one conversation.
    """

    arrived_at: list[Nanos] | None
    num_prompt_tokens: list[int]
    num_output_tokens: list[int]
    notes: tuple[str, ...] = ()
    blocks: list[list[int]] = []
    block_size: int = 0
    turns: Turns = Turns()


def read_trace(path: Path, format_name: str = "auto", *, time_unit: str = "auto", block_size: int | None = None) -> Trace:
    """Reads a trace.

    Args:
        path: CSV, JSON lines or Parquet.
        format_name: a `Format.name`, or "auto" to tell it from the columns.
        time_unit: one of `UNITS`: what arrivals count in, where it is not what the format says.
        block_size: tokens in a block of the trace, likewise.

    Raises:
        TraceError
    """
    rows = open_rows(path)
    form = recognise(rows.columns) if format_name == "auto" else by_name(format_name)
    return _Reader(path, rows, form, UNITS.get(time_unit, form.unit), block_size).read()


class _Reader:
    """One file being read."""

    def __init__(self, path: Path, rows: Rows, form: Format, unit: Nanos, block_size: int | None) -> None:
        self._path = path
        self._rows = rows
        self._form = form
        self._unit = unit
        self._block_size = block_size
        self._notes: list[str] = []

    def read(self) -> Trace:
        form = self._form
        times, prompts, outputs, lines, extras = self._read_rows()
        self._check_clock(times, lines)
        self._question_name(len(lines))
        if form.chars:
            self._note(f"lengths are estimated at {CHARS_PER_TOKEN} characters a token")
            prompts, outputs = ([-(-chars // CHARS_PER_TOKEN) for chars in column] for column in (prompts, outputs))
        prompts, outputs = self._at_least_one(prompts, "prompt"), self._at_least_one(outputs, "output")
        block_size = self._block_size or form.block_size or self._own_block_size(extras)
        blocks = self._blocks(extras.get(form.blocks, []), block_size, prompts, lines)
        order = self._order(times)
        if order:
            times, prompts, outputs, blocks = (_picked(column, order) for column in (times, prompts, outputs, blocks))
            extras = {name: _picked(values, order) for name, values in extras.items()}
        turns = find_turns(form, extras, self._note)
        return Trace(self._from_zero(times), prompts, outputs, tuple(self._notes), blocks, block_size, turns)

    def _note(self, what: str) -> None:
        self._notes.append(f"{self._path}: {what}")

    # -- rows

    def _names(self) -> list[str]:
        """The columns of arrival (left out where there is none), prompt and output."""
        form, columns = self._form, self._rows.columns
        absent = form.absent(columns)
        if absent:
            where = self._rows.place(self._rows.line)
            there = ", ".join(columns)
            raise TraceError(f"{where}: no column {' and no '.join(absent)} ({form.name} format); the columns are {there}")
        found = [next((name for name in names if name in columns), "") for names in (form.arrival, form.prompt, form.output)]
        return [name for name in found if name]

    def _read_rows(self) -> tuple[list[Nanos], list[int], list[int], list[int], dict[str, list[Any]]]:
        """Times (none where the file has none), prompts, outputs, lines, and the optional columns that are there."""
        names, rows = self._names(), self._rows
        keys = [rows.key(name) for name in names]
        getters = {name: get for name in self._form.optional if (get := rows.optional(name)) is not None}
        raw: list[tuple[Any, ...]] = []
        extras: dict[str, list[Any]] = {name: [] for name in getters}
        more = [(extras[name], get) for name, get in getters.items()]
        lines: list[int] = []
        for row in rows:
            try:
                raw.append(tuple([row[key] for key in keys]))
                for values, get in more:
                    values.append(get(row))
            except LookupError:
                raise self._short_row(row, names) from None
            lines.append(rows.line)
        if not raw:
            raise TraceError(f"{self._path}: has a header but no rows")
        columns = list(zip(*raw, strict=True))
        least = self._form.least_prompt
        times = self._parse(self._clock(), names[0], columns[0], lines, self._right_time()) if len(names) == 3 else []
        prompts = self._parse(lengths(least), names[-2], columns[-2], lines, tokens_wanted(least))
        outputs = self._parse(lengths(0), names[-1], columns[-1], lines, tokens_wanted(0))
        if self._form.shared in extras:
            shared = extras[self._form.shared]
            extras[self._form.shared] = self._parse(lengths(0), self._form.shared, shared, lines, tokens_wanted(0))
        return times, prompts, outputs, lines, extras

    def _short_row(self, row: Any, names: list[str]) -> TraceError:
        where = self._rows.place(self._rows.line)
        if isinstance(row, dict):
            return TraceError(f"{where}: has no {next(name for name in names if name not in row)}")
        return TraceError(f"{where}: has {len(row)} of {len(self._rows.columns)} columns; the file may be cut off")

    def _parse(self, parse: ParseColumn, name: str, column: Sequence[Any], lines: list[int], right: str) -> list[int]:
        """All values of a column. Where one is bad, says which."""
        try:
            return parse(column)
        except (ValueError, TypeError):
            pass
        line, value = next((line, value) for line, value in zip(lines, column, strict=True) if not _is_good(parse, [value]))
        raise TraceError(f"{self._rows.place(line)}: {name} is {value!r}; it must be {right}")

    def _clock(self) -> ParseColumn:
        if not self._unit:
            return calendar
        return clock(self._unit, self._form.whole_times and self._unit == self._form.unit)

    def _right_time(self) -> str:
        if not self._unit:
            return "a date and time such as 2024-05-10 00:00:00.009930"
        unit = next(name for name, nanos in UNITS.items() if nanos == self._unit)
        bounds = f"0 or more and at most {LATEST // self._unit:,}"
        if self._form.whole_times and self._unit == self._form.unit:
            return (
                f'a whole number of {unit}, {bounds}; where the file counts in another unit set workload.time_unit, such as "s"'
            )
        return f"{_WORDS[unit]} from the start, {bounds}"

    # -- what the rows say together

    def _check_clock(self, times: list[Nanos], lines: list[int]) -> None:
        """Times since 1970 and times from the start, which as dates are in 1970, cannot be of one clock."""
        if not times or not min(times) < EPOCH <= max(times):
            return
        first = times[0] >= EPOCH
        odd = next(line for time, line in zip(times, lines, strict=True) if (time >= EPOCH) != first)
        since = "counts from the start, those above from 1970" if first else "counts from 1970, those above from the start"
        raise TraceError(f"{self._rows.place(odd)}: arrival time {since}; a trace has one clock")

    def _at_least_one(self, lengths: list[int], what: str) -> list[int]:
        empty = lengths.count(0)
        if not empty:
            return lengths
        self._note(f"{empty} rows of 0 {what} tokens count as 1")
        return [max(1, tokens) for tokens in lengths]

    def _own_block_size(self, extras: dict[str, list[Any]]) -> int:
        """What the column `block_size` says; 0 where there is none."""
        sizes = {str(size) for size in extras.get("block_size", ()) if size not in (None, "")}
        if not sizes:
            return 0
        if len(sizes) > 1 or not _is_good(lambda size: parse_tokens(size, 1), next(iter(sizes))):
            told = ", ".join(sorted(sizes))
            raise TraceError(f"{self._path}: block_size is {told[:60]}; it must be one whole number of at least 1 in all rows")
        return parse_tokens(sizes.pop(), 1)

    def _blocks(self, column: list[Any], size: int, prompts: list[int], lines: list[int]) -> list[list[int]]:
        """The names of each prompt's blocks, checked against its length."""
        if not any(column):
            return []
        name = self._form.blocks
        if not size:
            raise TraceError(f"{self._path}: {name} needs a column block_size, or workload.trace_block_size: tokens in a block")
        blocks: list[list[int]] = []
        for value, tokens, line in zip(column, prompts, lines, strict=True):
            names = _whole_numbers(value) if isinstance(value, str) and _is_good(_whole_numbers, value) else value
            if not names:
                blocks.append([])
                continue
            if not isinstance(names, list) or not all(type(block) is int for block in names):
                raise TraceError(f"{self._rows.place(line)}: {name} is {str(value)[:40]!r}; it must be a list of whole numbers")
            if len(names) != -(-tokens // size):
                raise TraceError(
                    f"{self._rows.place(line)}: {name} names {len(names)} blocks; a prompt of {tokens} tokens has"
                    f" {-(-tokens // size)} of {size}; where blocks have another size set workload.trace_block_size"
                )
            blocks.append(names)
        return blocks

    def _question_name(self, num_rows: int) -> None:
        """A made-up file has been published under a real one's name."""
        if self._form.name == "burstgpt" and self._path.name.lower().startswith("burstgpt") and num_rows < 100_000:
            self._note(f"has {num_rows} rows; the published BurstGPT files have over a million, so this is at best a part of one")

    def _order(self, times: list[Nanos]) -> list[int]:
        """Rows in order of arrival; empty where they are."""
        backward = sum(later < earlier for earlier, later in pairwise(times))
        if not backward:
            return []
        self._note(f"{backward} rows came before the row above them; sorted by arrival")
        return sorted(range(len(times)), key=times.__getitem__)

    def _from_zero(self, times: list[Nanos]) -> list[Nanos] | None:
        """Dates and times since 1970 count from the earliest. Notes what looks like another unit."""
        if not times:
            return None
        start = times[0] if not self._unit or times[0] >= EPOCH else 0
        span = times[-1] - times[0]
        if len(times) >= 10 and (span > len(times) * _SELDOM or 0 < span < len(times) * _OFTEN):
            self._note(f"{len(times)} requests within {span / SECOND:g} s; if that is wrong, set workload.time_unit")
        return [time - start for time in times] if start else times


_SELDOM: Nanos = 1000 * SECOND
_OFTEN: Nanos = SECOND // 1000
"""Mean gaps outside of these suggest that times are in another unit."""

_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split()]


def _picked(column: list[Any], order: list[int]) -> list[Any]:
    return [column[row] for row in order] if column else column


def _is_good(parse: Callable[[Any], object], value: Any) -> bool:
    try:
        parse(value)
    except (ValueError, TypeError):
        return False
    return True
