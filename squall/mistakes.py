"""What is wrong with a tree of tables, in the words of whoever wrote it: the dotted key, the mistake and what would be right.

Knows how types of Structs describe a tree. Does not know which tables there are.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct


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
    hints = [get_type_hints(t, include_extras=True).get(names[-1]) for t in table if names]
    return ", ".join(str(choice) for hint in hints if get_origin(hint) is Literal for choice in get_args(hint))


def _value_at(tree: Any, names: Sequence[str]) -> Any:
    """What stands at a dotted key, one of a list among them (`pools[0]`); None where nothing does."""
    for name in names:
        plain, _, index = name.partition("[")
        tree = tree.get(plain) if isinstance(tree, dict) else None
        if index:
            at = int(index.rstrip("]")) if index.rstrip("]").isdigit() else -1
            tree = tree[at] if isinstance(tree, list) and 0 <= at < len(tree) else None
    return tree
