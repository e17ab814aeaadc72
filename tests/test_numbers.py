"""Every number of the configuration has a range: what is absurd is refused by name, when the file is read and not hours later."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec.inspect as types
import pytest

from squall.config import Config, from_tree
from squall.errors import ConfigError

LENGTH = {"kind": "fixed", "tokens": 100}
NEEDED: dict[str, Any] = {
    "arrivals": {"kind": "poisson", "rate_rps": 2.0}, "prompt": LENGTH, "output": LENGTH, "turns": LENGTH, "path": "trace.csv",
    "rate_rps": 2.0, "burst_rps": 5.0, "burst_s": 1.0, "period_s": 4.0, "rates_rps": [1.0, 2.0], "mean_stay_s": [1.0, 1.0],
    "concurrency": 2, "tokens": 100, "low": 1, "high": 50, "median": 20.0, "sigma": 0.5, "at": [0.0, 1.0], "at_s": 1.0,
    "which": 0, "kind": "node", "min": 1, "max": 2,
    "steps": [{"at_s": 1.0, "replicas": 2}], "hostname": "a", "name": "bwb-4k", "load_s": 1.0,
    "column": "a",
}  # fmt: skip
"""What keys without a default may be."""

ALSO: dict[str, dict[str, Any]] = {
    "synthetic": {"num_requests": 6}, "sessions": {"num_sessions": 3}, "rate_series": {"rates_rps": [1.0]},
    "quantiles": {"tokens": [1, 2]},
}  # fmt: skip
"""What tables of a kind need besides, or instead."""

Place = tuple[tuple[types.StructType, str], ...]


def numbers(kind: types.Type, place: Place = ()) -> Iterator[tuple[Place, bool]]:
    """Tables and keys that lead to a number, for each; and whether it is a whole one."""
    match kind:
        case types.StructType(fields=fields):
            for field in fields:
                yield from numbers(field.type, (*place, (kind, field.encode_name)))
        case types.UnionType(types=choices):
            for choice in choices:
                yield from numbers(choice, place)
        case types.VarTupleType(item_type=item):
            yield from numbers(item, place)
        case types.IntType() | types.FloatType():
            yield place, isinstance(kind, types.IntType)


def table(kind: types.StructType) -> dict[str, Any]:
    """One that is right, with what it needs and nothing more."""
    tag = {} if kind.tag is None else {"kind": kind.tag}
    needed = {field.encode_name: NEEDED[field.encode_name] for field in kind.fields if field.required}
    return deepcopy({**needed, **tag, **ALSO.get(str(kind.tag), {})})


def tree_of(place: Place, value: float) -> dict[str, Any]:
    (kind, key), *rest = place
    made = table(kind)
    inner = tree_of(tuple(rest), value) if rest else value
    field = next(field.type for field in kind.fields if field.encode_name == key)
    choices = field.types if isinstance(field, types.UnionType) else (field,)
    made[key] = [inner] if any(isinstance(choice, types.VarTupleType) for choice in choices) else inner
    return made


def name_of(place: Place) -> str:
    kinds = [str(kind.tag) for kind, _ in place if kind.tag]
    return ".".join(key for _, key in place) + (f" ({', '.join(kinds)})" if kinds else "")


ALL = {name_of(place): (place, whole) for place, whole in numbers(types.type_info(Config))}


def test_the_walk_comes_to_numbers_of_all_depths() -> None:
    assert len(ALL) > 300
    deep = "fleet.pools.batching.max_num_seqs (vllm)", "workload.arrivals.rates_rps (synthetic, mmpp)", "fleet.replicas.max"
    assert all(name in ALL for name in ("replica.num_blocks", "workload.num_requests (synthetic)", *deep))


@pytest.mark.parametrize("name", ALL)
def test_what_is_absurd_is_refused_with_the_name_of_the_key(name: str) -> None:
    place, whole = ALL[name]
    key = place[-1][1]
    absurd = [-1, (1 << 62) + 1] if whole else [-1.0, 1e300]
    for value in absurd:
        if key == "seed" and value > 0:  # any 64 bits will do
            continue
        with pytest.raises(ConfigError, match=rf"\b{key}\b") as caught:
            from_tree("file", tree_of(place, value))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, (_, whole) in ALL.items() if not whole])
def test_what_is_no_number_is_refused_with_the_name_of_the_key(name: str) -> None:
    place, _ = ALL[name]
    for value in (float("nan"), float("inf"), 1e-300):
        with pytest.raises(ConfigError, match=rf"\b{place[-1][1]}\b"):
            from_tree("file", tree_of(place, value))
