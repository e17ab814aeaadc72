"""What is wrong with a tree of tables, in the words of whoever wrote it: the dotted key, the mistake and what would be right.

Knows how types of Structs describe a tree, and what the end of a key says of its number. Does not know which tables there are.
"""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

MOST_SECONDS: Final = 9_000_000_000
"""Instants are nanoseconds in 64 bits; what is later than that cannot be told."""

MOST: Final = 1_000_000_000_000_000
LEAST: Final = 1e-9
"""Nobody counts farther, nor halves so often: what is computed of larger and smaller numbers overflows in the end."""


def kind_of(table: Any) -> Any:
    """What a table chooses by its key `kind`; None where it does not."""
    return table.get("kind") if isinstance(table, dict) else None


def explain(message: str, tree: dict[str, Any], root: type) -> str:
    """msgspec's complaint about a tree that should be a `root`: the dotted key, what is wrong, what would be right."""
    what, _, at = message.partition(" - at `$")
    names = [name for name in at.rstrip("`").split(".") if name]
    table = _types_at(root, tree, names)
    key = ".".join(names)
    if unknown := re.match(r"Object contains unknown field `(.*)`", what):
        known = sorted(name for struct in table for name in struct.__struct_fields__)
        close = difflib.get_close_matches(unknown[1], known, n=1)
        place = f"[{key}] has no key" if key else "there is no table"
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        return f"{place} {unknown[1]!r}; {hint}"
    if missing := re.match(r"Object missing required field `(.*)`", what):
        return f"[{key}] needs the key {missing[1]!r}"
    value = _value_at(tree, names)
    what = shown(what, str).replace("Invalid value ", "unknown value ").replace("Invalid enum value ", "unknown value ")
    what = what.replace("`int | object`", "`int` or a table {min, max}")
    choices = _choices(table, names)
    return f"{key} = {shown(value)}: {what[0].lower()}{what[1:]}" + (f"; one of {choices}" if choices else "")


def strange(tree: Any) -> str | None:
    """What TOML can say and no key can mean; None where all is well."""
    return _first(tree, _strange)


def extreme(tree: Any) -> str | None:
    """Numbers that a key without a tighter range takes, and what is computed of them does not."""
    return _first(tree, _extreme)


def _first(value: Any, judge: Callable[[str, Any], str | None], key: str = "") -> str | None:
    if isinstance(value, dict):
        found = (_first(inner, judge, f"{key}.{name}" if key else name) for name, inner in value.items())
    elif isinstance(value, list):
        found = (_first(inner, judge, key) for inner in value)
    else:
        return judge(key, value)
    return next((mistake for mistake in found if mistake is not None), None)


def _strange(key: str, value: Any) -> str | None:
    match value:
        case float() if not math.isfinite(value):
            return f"{key} = {value}: expected a finite number"
        case int() | float() if _counts_seconds(key) and abs(value) > MOST_SECONDS:
            return f"{key} = {value}: expected at most {MOST_SECONDS} seconds, about 285 years"
        case int() if abs(value) >= 1 << 63:
            return f"{key} is larger than any number of 64 bits"
        case str() if "\0" in value:
            return f"{key} = {shown(value)}: contains a null character"
        case _:
            return None


def _extreme(key: str, value: Any) -> str | None:
    if not isinstance(value, int | float) or key.endswith("seed"):
        return None
    if abs(value) > MOST:
        return f"{key} = {value}: expected at most {MOST}"
    return f"{key} = {value}: expected 0, or at least {LEAST:.9f}" if 0 < abs(value) < LEAST else None


def _counts_seconds(key: str) -> bool:
    return key.endswith("_s") and not key.endswith("_per_s")


def shown(value: Any, spell: Callable[[Any], str] = repr) -> str:
    """As much of a value as fits into a message of one line."""
    text = spell(value).replace("\n", " ")
    return text if len(text) <= 120 else f"{text[:100]}...{text[-10:]}"


def _types_at(struct: type, tree: dict[str, Any], names: Sequence[str]) -> list[Any]:
    """The Struct types that may stand at a dotted key (several where a `kind` chooses and none was given)."""
    structs: list[Any] = [struct]
    for depth, name in enumerate(names):
        kind = kind_of(_value_at(tree, names[: depth + 1]))
        plain = name.partition("[")[0]
        found = [t for s in structs for t in _structs_in(get_type_hints(s, include_extras=True).get(plain))]
        if not found:
            return structs
        structs = [t for t in found if t.__struct_config__.tag == kind] or found
    return structs


def _structs_in(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType, tuple):
        return [t for part in get_args(annotation) for t in _structs_in(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, Struct) else []


def _choices(table: Sequence[Any], names: Sequence[str]) -> str:
    """What an enumerated key or a `kind` may be; empty where that is not the question."""
    if names and names[-1] == "kind" and all(t.__struct_config__.tag for t in table):
        return ", ".join(str(t.__struct_config__.tag) for t in table)
    hints = [get_type_hints(t, include_extras=True).get(names[-1].partition("[")[0]) for t in table if names]
    return ", ".join(str(choice) for hint in hints for choice in _literals(hint))


def _literals(annotation: Any) -> Sequence[Any]:
    """What a value, or one of several, may be by name."""
    if get_origin(annotation) in (Union, UnionType, tuple):
        return [choice for part in get_args(annotation) for choice in _literals(part)]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _value_at(tree: Any, names: Sequence[str]) -> Any:
    """What stands at a dotted key, one of a list among them (`pools[0]`); None where nothing does."""
    for name in names:
        plain, _, index = name.partition("[")
        tree = tree.get(plain) if isinstance(tree, dict) else None
        if index:
            at = int(index.rstrip("]")) if index.rstrip("]").isdigit() else -1
            tree = tree[at] if isinstance(tree, list) and 0 <= at < len(tree) else None
    return tree
