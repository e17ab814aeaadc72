"""The space of configurations: what each dotted key may be, and every combination of that.

    "replica.tp" = [1, 2, 4]                                          one of these
    "batching.max_num_seqs" = { from = 64, to = 512, factor = 2 }     a range; or with `step`
    "batching.chunk_size" = { values = [256, 512], when = { "batching.kind" = "sarathi" } }
    "batching" = [{ kind = "vllm" }, { kind = "sarathi", chunk_size = 512 }]       whole tables

A key whose condition does not hold is not set at all. Conditions ask for other keys of the space, or of the configuration.
Knows no meaning of any key: what a combination stands for is `config.from_tree`'s to say.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from squall.config import Config
from squall.errors import ConfigError
from squall.search.spec import Search
from squall.trees import merge

Choice = dict[str, Any]
"""Dotted keys and their values."""

MOST = 200_000
"""Combinations that are written out; a larger space is for the sampler, which writes out none."""


class Dimension(Struct, frozen=True):
    """One key, what it may be, and of which other keys that depends: each of `when` must have one of its values."""

    key: str
    values: tuple[Any, ...]
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def applies(self, choice: Choice, tree: Mapping[str, Any]) -> bool:
        return all(chosen(choice, tree, key) in wanted for key, wanted in self.when)


def dimensions(table: Mapping[str, Any]) -> list[Dimension]:
    """The space that `[search.space]` describes, keys before those whose conditions ask for them.

    Raises:
        ConfigError: it is empty, a value is no list and no range, or conditions go round in a circle.
    """
    found = [_dimension(key, value) for key, value in _flat(table)]
    if not found:
        raise ConfigError('search.space is empty: name keys and what they may be, such as "replica.tp" = [1, 2, 4]')
    ordered: list[Dimension] = []
    while found:
        later = {dimension.key for dimension in found}
        ready = [dimension for dimension in found if not any(_is_in(key, later) for key, _ in dimension.when)]
        if not ready:
            raise ConfigError(f"search.space: the conditions of {', '.join(sorted(later))} wait for each other")
        ordered += ready
        found = [dimension for dimension in found if dimension not in ready]
    return ordered


def choices(space: Sequence[Dimension], search: Search, tree: Mapping[str, Any]) -> Iterator[Choice]:
    """Every combination, in the order of the space; excluded ones are left out. Raises ConfigError where there are too many."""
    found: list[Choice] = [{}]
    for dimension in space:
        found = [
            {**choice, dimension.key: value} if applies else choice
            for choice in found
            for applies in (dimension.applies(choice, tree),)
            for value in (dimension.values if applies else (None,))
        ]
        if len(found) > MOST:
            raise ConfigError(
                f'search.space has more than {MOST:,} combinations; narrow it down, or set search.strategy = "sampler"'
            )
    for key in {key for rule in search.exclude for key, _ in _flat(rule)}:
        if value_at(tree, key) is None and not _is_in(key, {dimension.key for dimension in space}):
            raise ConfigError(f"search.exclude: {key} is neither varied in search.space nor set in the configuration")
    return (choice for choice in found if not excluded(choice, search, tree))


def excluded(choice: Choice, search: Search, tree: Mapping[str, Any]) -> bool:
    """Whether a rule of `exclude` names this combination."""
    return any(
        bool(rule) and all(chosen(choice, tree, key) in _listed(wanted) for key, wanted in _flat(rule)) for rule in search.exclude
    )


def with_choice(tree: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The configuration's tables with these keys."""
    patch: dict[str, Any] = {}
    for key, value in sorted(choice.items(), key=lambda pair: pair[0].count(".")):
        table = patch
        *path, name = key.split(".")
        for part in path:
            table = table.setdefault(part, {})
        table[name] = deepcopy(value)
    result = deepcopy(dict(tree))
    merge(result, patch)
    return result


def chosen(choice: Choice, tree: Mapping[str, Any], key: str) -> Any:
    """What a combination, or else the configuration, has at a dotted key; also where the combination has a whole table there."""
    for above, rest in _cut(key):
        if above in choice:
            return value_at(choice[above], rest) if rest else choice[above]
    return value_at(tree, key)


def _is_in(key: str, keys: Collection[str]) -> bool:
    """Whether the key, or a table that it is in, is one of these."""
    return any(above in keys for above, _ in _cut(key))


def _cut(key: str) -> Iterator[tuple[str, str]]:
    """The key, the table that it is in, and so on, each with what is left."""
    parts = key.split(".")
    return ((".".join(parts[:count]), ".".join(parts[count:])) for count in range(len(parts), 0, -1))


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def shown(choice: Choice) -> str:
    """A combination in a few words: the last part of each key, and its value."""
    return " ".join(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in choice.items()) or "(as it is)"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "/".join(str(part) for part in value.values())
    return str(value)


# -- how a space is written


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Tables within tables are dotted keys, too, unless they describe a range."""
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and not value.keys() & {"values", "from"}:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _dimension(key: str, value: Any) -> Dimension:
    if not isinstance(value, Mapping):
        return Dimension(key, _unlike(key, _listed(value)))
    known = {"values", "when"} if "values" in value else {"from", "to", "step", "factor", "when"}
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ConfigError(f"search.space: {key} has no key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    values = _listed(value["values"]) if "values" in value else _range(key, value)
    when = tuple((name, _listed(wanted)) for name, wanted in _flat(value.get("when", {})))
    return Dimension(key, _unlike(key, values), when)


def _unlike(key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each value once."""
    once = tuple(value for place, value in enumerate(values) if value not in values[:place])
    if not once:
        raise ConfigError(f"search.space: {key} has no values; leave it out, or say what it may be")
    return once


def _range(key: str, value: Mapping[str, Any]) -> tuple[Any, ...]:
    first, last, step, factor = (value.get(name) for name in ("from", "to", "step", "factor"))
    numbers = [number for number in (first, last, step, factor) if number is not None]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise ConfigError(f"search.space: {key}: from, to, step and factor are numbers")
    if first is None or last is None or (step is None) == (factor is None):
        raise ConfigError(f"search.space: {key} is a range of from, to, and either step or factor")
    if first > last or (step is not None and step <= 0) or (factor is not None and (factor <= 1 or first <= 0)):
        raise ConfigError(f"search.space: {key} never gets from {first} to {last}; step is above 0 and factor above 1")
    if step is not None:
        count = math.floor((last - first) / step + 1e-9) + 1
    else:
        count = math.floor(math.log(last / first) / math.log(factor or 2) + 1e-9) + 1
    if count > MOST:
        raise ConfigError(f"search.space: {key} has {count:,} values; at most {MOST:,} are tried")
    whole = all(isinstance(number, int) for number in numbers)
    found = [first + place * step if step is not None else first * (factor or 2) ** place for place in range(count)]
    return tuple(round(number) if whole else number for number in found)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


# -- a space where none is given

_USUAL: dict[str, list[int]] = {
    "max_num_seqs": [64, 128, 256, 512],
    "max_num_batched_tokens": [512, 2048, 8192],
    "chunk_size": [256, 512, 1024, 2048],
}


def usual_space(search: Search, gpus: Sequence[str], tree: Mapping[str, Any]) -> dict[str, Any]:
    """A sensible space for a model and a workload: GPU, shares, pipeline stages, and every batching policy with its bounds.

    Keys that the configuration sets itself are not varied.
    """
    most = search.max_gpus_per_replica or 8
    space: dict[str, Any] = {}
    if gpus:
        space["cluster.gpu"] = list(gpus)
    space["replica.tp"] = [size for size in (1, 2, 4, 8) if size <= most]
    space["replica.pp"] = [stages for stages in (1, 2, 4) if stages <= most]
    if not search.steady:
        limit = search.max_gpus or 16
        space["fleet.replicas"] = [count for count in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64) if count <= limit]
    space |= _batching_space()
    return {key: value for key, value in space.items() if value_at(tree, key) is None}


def _batching_space() -> dict[str, Any]:
    """Every policy that there is, and the usual bounds that it has."""
    hint = get_type_hints(Config)["batching"]
    policies = get_args(hint) or (hint,)
    kinds = {str(policy.__struct_config__.tag): policy for policy in policies}
    space: dict[str, Any] = {"batching.kind": list(kinds)}
    for name, values in _USUAL.items():
        having = [kind for kind, policy in kinds.items() if name in policy.__struct_fields__]
        if having:
            space[f"batching.{name}"] = {"values": values, "when": {"batching.kind": having}}
    return space


def size(space: Sequence[Dimension]) -> int:
    """How many combinations there are at most, conditions not looked at."""
    return math.prod(len(dimension.values) for dimension in space)


def alternatives(space: Sequence[Dimension], choice: Choice, tree: Mapping[str, Any]) -> Iterator[Choice]:
    """Combinations that differ from this one in a single key, and in what depends on it."""
    for dimension in space:
        for value in dimension.values if dimension.key in choice else ():
            if value != choice[dimension.key]:
                yield from _completed(space, {**choice, dimension.key: value}, tree)


def _completed(space: Sequence[Dimension], choice: Choice, tree: Mapping[str, Any]) -> Iterator[Choice]:
    """Conditions looked at anew: keys that do not apply any more are dropped, those that now do take every value."""
    kept: Choice = {}
    added: list[list[tuple[str, Any]]] = []
    for dimension in space:
        if dimension.applies({**choice, **kept}, tree):
            if dimension.key in choice:
                kept[dimension.key] = choice[dimension.key]
            else:
                added.append([(dimension.key, value) for value in dimension.values])
    for extra in product(*added):
        yield {**kept, **dict(extra)}
