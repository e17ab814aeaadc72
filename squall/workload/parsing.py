"""Times and token counts as trace files write them: text, or numbers from JSON and Parquet. Knows no file and no column."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from squall.core.types import MICROSECOND, MILLISECOND, SECOND, Nanos
from squall.workload.limits import MOST_TOKENS

UNITS: dict[str, Nanos] = {"s": SECOND, "ms": MILLISECOND, "us": MICROSECOND, "ns": 1}
"""What `workload.time_unit` may say."""

EPOCH: Nanos = 1_000_000_000 * SECOND
"""A time from here on counts from 1970 (it is in 2001 or later); one before it counts from the start of a recording."""

LATEST: Nanos = 1 << 62
"""Later times overflow sums."""

_EXACT = 1 << 53  # whole numbers up to here are exact as floats

ParseColumn = Callable[[Sequence[Any]], list[int]]
"""All values of a column at once: nanoseconds or tokens. Raises ValueError or TypeError."""


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


_SECONDS_AND_ZONE = re.compile(r":[0-5]\d(?:\.(\d+))?(Z|[+-](?:[01]\d|2[0-3])(?::?[0-5]\d)?)?")


@cache
def _minute(text: str) -> int:
    """Seconds from 1970 to the minute "2023-11-16 18:15"."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


@cache
def _ahead(zone: str) -> int:
    """Seconds by which a zone such as "+02:00", "+0200" or "+02" is ahead of UTC."""
    if zone in ("", "Z"):
        return 0
    ahead = int(zone[1:3]) * 3600 + int(zone[3:].lstrip(":") or "0") * 60
    return -ahead if zone[0] == "-" else ahead


def clock(unit: Nanos, whole: bool = False) -> ParseColumn:
    """Reads numbers of `unit`, 0 or more; only whole ones where `whole`."""
    parse_one = partial(_parse_time, unit, whole)

    def parse(values: Sequence[Any]) -> list[Nanos]:
        if not whole and set(map(type, values)) == {str}:
            with suppress(ValueError):
                numbers = list(map(float, values))
                if min(numbers) >= 0 and max(numbers) * unit < _EXACT and not math.isnan(sum(numbers)):
                    return [round(number * unit) for number in numbers]
        return list(map(parse_one, values))

    return parse


def calendar(values: Sequence[Any]) -> list[Nanos]:
    """`parse_calendar` of all values, blanks around them aside; Parquet has dates that are none of text."""
    return [parse_calendar(str(value).strip()) for value in values]


def _parse_time(unit: Nanos, whole: bool, value: Any) -> Nanos:
    number = parse_number(value)
    if not 0 <= number < LATEST // unit or (whole and number != int(number)):
        raise ValueError(value)
    whole_units = int(number)  # apart, since times since 1970 leave a float no room for nanoseconds
    return whole_units * unit + round((number - whole_units) * unit)


def parse_number(value: Any) -> int | float:
    """A number, or the text of one. Raises ValueError or TypeError (truth values, lists, nothing)."""
    if type(value) is int or type(value) is float:
        return value
    if type(value) is not str:
        raise TypeError(value)
    return int(value) if value.isdecimal() else float(value)


def parse_tokens(value: Any, at_least: int) -> int:
    """A whole number of tokens; "7564.0" is one. Raises ValueError or TypeError."""
    number = parse_number(value)
    if not at_least <= number <= MOST_TOKENS or number != int(number):
        raise ValueError(value)
    return int(number)


def tokens_wanted(at_least: int) -> str:
    """What `parse_tokens` takes, for whoever gave it something else."""
    return f"a whole number of at least {at_least} and at most {MOST_TOKENS:,}"


def lengths(at_least: int) -> ParseColumn:
    """`parse_tokens` of every value, faster."""

    def parse(values: Sequence[Any]) -> list[int]:
        if set(map(type, values)) <= {int, str}:
            with suppress(ValueError):
                parsed = list(map(int, values))
                if at_least <= min(parsed) and max(parsed) <= MOST_TOKENS:
                    return parsed
        return [parse_tokens(value, at_least) for value in values]

    return parse
