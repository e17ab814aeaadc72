"""Whose a price is, and whose a number that can be had: a GPU by any name that the configuration or the catalogue has for it.

A name that is nobody's is a mistake, found before anything is simulated. Knows no price itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from squall.errors import ConfigError
from squall.perf.hardware import resolve_gpu
from squall.search.space import value_at
from squall.search.spec import Search

_T = TypeVar("_T")

GPU = "cluster.gpu"


def named(table: Mapping[str, _T], name: str, catalogued: str) -> _T | None:
    """What a table says of a GPU: by the name that the configuration uses, the catalogue's, or another of the catalogue's."""
    for key in (name, catalogued):
        if key in table:
            return table[key]
    return next((value for key, value in table.items() if _catalogued(key) == catalogued), None)


def price_of(word: str) -> tuple[str, float]:
    """`h100-sxm=2.5`, as the command line has it. Raises ConfigError."""
    name, equals, number = word.partition("=")
    try:
        usd = float(number)
    except ValueError:
        usd = math.nan
    if not (name.strip() and equals and math.isfinite(usd) and usd >= 0):
        raise ConfigError(f"--price {word}: expected GPU=USD, with USD an hour, 0 or more")
    return name.strip(), usd


def refuse_strangers(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """A GPU that neither the catalogue knows nor the search itself, whose GPUs are `known`. Raises ConfigError."""
    own = set(known)
    for name in names:
        if name in own:
            continue
        try:
            resolve_gpu(name)
        except ConfigError as error:
            raise ConfigError(f"{where.format(name)}: {str(error).removeprefix('cluster.gpu ')}") from None


def tried(search: Search, tree: Mapping[str, Any], usual: str) -> list[str]:
    """The GPUs that a search tries, by the names that it uses and those of the catalogue; `usual` where it names none."""
    names = list(_tried(search, tree)) or [usual]
    for name in tuple(names):
        try:
            names.append(resolve_gpu(name).name if name.lower() != "cpu" else name)
        except ConfigError:  # a configuration that cannot be run: said as its result
            continue
    return names


def refuse_unused(word: str, name: str, gpus: Iterable[str], place: str) -> None:
    """The price of a GPU on which nothing runs changes nothing, and is a mistake. Raises ConfigError."""
    on = sorted(set(gpus))
    if name not in on and _catalogued(name) not in on:
        refuse_strangers("--price {}", [name], on)
        raise ConfigError(f"--price {word}: no configuration of {place} runs on it; they run on {', '.join(on)}")


def _catalogued(name: str) -> str | None:
    """The catalogue's name; None where it has none. A machine is not measured for it."""
    if name.lower() == "cpu" or name.endswith(".toml"):
        return None
    try:
        return resolve_gpu(name).name
    except ConfigError:
        return None


def _tried(search: Search, tree: Mapping[str, Any]) -> Iterator[str]:
    """Names in the space and in the configuration."""
    clusters = search.space.get("cluster", ())
    if isinstance(clusters, Mapping):
        clusters = clusters.get("values", [clusters])
    found = [search.space.get(GPU, ()), value_at(tree, GPU), *(one.get("gpu") for one in clusters if isinstance(one, Mapping))]
    for names in found:
        if isinstance(names, Mapping):
            names = names.get("values", ())
        yield from (name for name in (names if isinstance(names, list | tuple) else [names]) if isinstance(name, str))
