"""Reading a JSON object field by field, so that every mistake names its field. Knows no particular request.

`null` means the same as absence. Booleans are not numbers, and strings are never turned into anything else.
"""

from __future__ import annotations

from typing import Any

from squall.errors import RequestError

INT64 = 1 << 63


def wrong(param: str, expected: str, value: object) -> RequestError:
    """`temperature: expected a number between 0 and 2, got 'hot'`."""
    return RequestError(f"{param}: expected {expected}, got {shown(value)}", param=param)


def shown(value: object) -> str:
    """`value` as an error message may show it: short, whatever a client sent."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > 128:
            return "a number of more than 38 digits"
        case dict():
            return "an object" if value else "an empty object"
        case list():
            return f"an array of {len(value)}" if value else "an empty array"
    text = repr(value)
    return text if len(text) <= 60 else text[:50] + "..." + text[-1]


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Fields:
    """A request body being read; remembers which of its fields somebody asked for.

    Args:
        body: the decoded JSON object.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The raw value; None where it is absent or null."""
        self._read.add(name)
        return self._body.get(name)

    def ignore(self, *names: str) -> None:
        """These are known, and mean nothing here."""
        self._read.update(names)

    @property
    def num_unknown(self) -> int:
        """How many fields nobody asked for."""
        return len(self._body) - sum(name in self._body for name in self._read)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, "true or false", value)
        return value

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, "a string", value)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`, both included."""
        value = self.get(name)
        if value is None:
            return default
        if not (is_integer(value) or isinstance(value, float)) or not low <= value <= high:
            raise wrong(name, f"a number between {low:g} and {high:g}", value)
        return float(value)

    def integer(self, name: str, low: int, high: int = INT64 - 1) -> int | None:
        """An integer from `low` to `high`, both included; None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            too_low = high == INT64 - 1 and not (is_integer(value) and value > high)
            raise wrong(name, f"an integer of at least {low}" if too_low else f"an integer between {low} and {high}", value)
        return int(value)
