"""Lists, ranges, conditions: which combinations a space has."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ConfigError
from squall.search.space import alternatives, choices, dimensions, shown, size, usual_space, with_choice
from squall.search.spec import Search, read_search


def combinations(space: dict[str, Any], tree: dict[str, Any] | None = None, search: Search | None = None) -> list[dict[str, Any]]:
    return list(choices(dimensions(space), search or Search(), tree or {}))


def test_a_space_is_the_product_of_its_keys() -> None:
    assert combinations({"replica.tp": [1, 2], "cluster.gpu": ["a", "b"]}) == [
        {"replica.tp": 1, "cluster.gpu": "a"}, {"replica.tp": 1, "cluster.gpu": "b"},
        {"replica.tp": 2, "cluster.gpu": "a"}, {"replica.tp": 2, "cluster.gpu": "b"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ({"from": 1, "to": 7, "step": 3}, [1, 4, 7]),
        ({"from": 64, "to": 600, "factor": 2}, [64, 128, 256, 512]),
        ({"from": 0.5, "to": 0.9, "step": 0.2}, [0.5, 0.7, 0.9]),
        (3, [3]),
        ([2, 2, 1], [2, 1]),
    ],
)
def test_ranges_and_lists(written: Any, values: list[float]) -> None:
    assert [choice["k.x"] for choice in combinations({"k.x": written})] == pytest.approx(values)


def test_a_key_whose_condition_does_not_hold_is_not_set() -> None:
    space = {
        "batching.chunk_size": {"values": [256, 512], "when": {"batching.kind": "sarathi"}},
        "batching.kind": ["vllm", "sarathi"],
    }
    assert combinations(space) == [
        {"batching.kind": "vllm"},
        {"batching.kind": "sarathi", "batching.chunk_size": 256},
        {"batching.kind": "sarathi", "batching.chunk_size": 512},
    ]


def test_conditions_look_at_the_configuration_too() -> None:
    space = {"replica.pp": {"values": [1, 2], "when": {"cluster.gpu": ["h100"]}}}
    assert combinations(space, {"cluster": {"gpu": "h100"}}) == [{"replica.pp": 1}, {"replica.pp": 2}]
    assert combinations(space, {"cluster": {"gpu": "a100"}}) == [{}]


def test_tables_within_tables_are_dotted_keys() -> None:
    assert combinations({"replica": {"tp": [1, 2]}}) == [{"replica.tp": 1}, {"replica.tp": 2}]


def test_excluded_combinations_are_left_out() -> None:
    search = read_search("f", {"exclude": [{"a.x": [1, 2], "b.y": 1}]})
    assert combinations({"a.x": [1, 2, 3], "b.y": [1, 2]}, search=search) == [
        {"a.x": 1, "b.y": 2}, {"a.x": 2, "b.y": 2}, {"a.x": 3, "b.y": 1}, {"a.x": 3, "b.y": 2},
    ]  # fmt: skip


def test_rules_and_conditions_know_tables_within_tables() -> None:
    """As TOML writes `exclude = [{ cluster.gpu = "a" }]`, and where a whole table is varied."""
    nested = read_search("f", {"exclude": [{"a": {"x": [1, 2]}, "b": {"y": 1}}]})
    assert combinations({"a.x": [1, 3], "b.y": [1]}, search=nested) == [{"a.x": 3, "b.y": 1}]
    one, two = {"kind": "one"}, {"kind": "two", "y": 1}
    within = read_search("f", {"exclude": [{"b.kind": "two", "a.x": 2}]})
    space = {"b": [one, two], "a.x": [1, 2], "c.z": {"values": [5], "when": {"b.kind": "one"}}}
    assert combinations(space, search=within) == [
        {"b": one, "a.x": 1, "c.z": 5}, {"b": one, "a.x": 2, "c.z": 5}, {"b": two, "a.x": 1},
    ]  # fmt: skip


def test_a_rule_about_nothing_is_a_mistake() -> None:
    search = read_search("f", {"exclude": [{"a.z": 1}]})
    with pytest.raises(ConfigError, match=r"search.exclude: a.z is neither varied"):
        combinations({"a.x": [1, 2]}, search=search)


def test_a_choice_is_merged_into_the_configuration() -> None:
    tree = {"batching": {"kind": "vllm", "max_num_seqs": 7}, "replica": {"tp": 1, "block_size": 32}}
    assert with_choice(tree, {"replica.tp": 2}) == {**tree, "replica": {"tp": 2, "block_size": 32}}
    assert with_choice(tree, {"batching.kind": "orca"})["batching"] == {"kind": "orca"}
    assert tree["replica"] == {"tp": 1, "block_size": 32}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "search.space is empty"),
        ({"a.x": []}, "a.x has no values"),
        ({"a.x": {"from": 1, "to": 2}}, "either step or factor"),
        ({"a.x": {"from": 2, "to": 1, "step": 1}}, "never gets from 2 to 1"),
        ({"a.x": {"from": 1, "to": 2, "factor": 1}}, "factor above 1"),
        ({"a.x": {"from": "one", "to": 2, "step": 1}}, "are numbers"),
        ({"a.x": {"values": [1], "wenn": {}}}, "no key 'wenn'"),
        ({"a.x": {"from": 0, "to": 1e9, "step": 1}}, "at most 200,000"),
        (
            {"a.x": {"values": [1], "when": {"b.y": 1}}, "b.y": {"values": [1], "when": {"a.x": 1}}},
            "a.x, b.y wait for each other",
        ),
    ],
)
def test_mistakes(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        dimensions(space)
    assert "\n" not in str(error.value)


def test_a_space_too_large_to_write_out_is_for_the_sampler() -> None:
    space = {f"a.{letter}": list(range(100)) for letter in "xyz"}
    assert size(dimensions(space)) == 1_000_000
    with pytest.raises(ConfigError, match='strategy = "sampler"'):
        combinations(space)


def test_alternatives_differ_in_one_key_and_what_hangs_on_it() -> None:
    space = dimensions({
        "k": ["a", "b"],
        "x": {"values": [1, 2], "when": {"k": "a"}},
        "y": {"values": [5, 6], "when": {"k": "b"}},
    })  # fmt: skip
    assert list(alternatives(space, {"k": "a", "x": 1}, {})) == [{"k": "b", "y": 5}, {"k": "b", "y": 6}, {"k": "a", "x": 2}]


def test_the_usual_space_leaves_alone_what_the_configuration_says() -> None:
    space = usual_space(Search(max_gpus_per_replica=4), ["h100"], {"replica": {"tp": 2}})
    assert "replica.tp" not in space
    assert space["cluster.gpu"] == ["h100"]
    assert "vllm" in space["batching.kind"]
    assert all(stages <= 4 for stages in space["replica.pp"])
    assert "fleet.replicas" in usual_space(Search(objective="usd"), [], {})


@given(st.dictionaries(st.sampled_from(["a.x", "a.y", "b.z"]), st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1))
def test_every_combination_comes_once(space: dict[str, list[int]]) -> None:
    found = combinations(dict(space))
    assert len({shown(choice) for choice in found}) == len(found)
    count = 1
    for values in space.values():
        count *= len(set(values))
    assert len(found) == count
