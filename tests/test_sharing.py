"""Which configurations can share a cluster: what errors name, and what share each fleet has."""

from collections.abc import Sequence

import pytest

from squall import config as configuration
from squall.core.fleet_plan import Share
from squall.errors import ConfigError
from squall.fleet_tables import Fault
from squall.report.cluster import CLUSTER, GPUS
from squall.report.run import REPORT
from squall.sharing import FILES, first_places, name_of, shares, with_faults_dealt_out

BASE = ("model.name=llama-3-8b", "cluster.gpu=a100-80g", "cluster.gpus_per_node=4")


def loaded(*each: Sequence[str]) -> list[configuration.Config]:
    return [
        configuration.load(None, [*BASE, f"model.served_as=['m{number}']", *settings]) for number, settings in enumerate(each)
    ]


def test_each_fleet_has_its_number_and_its_minimum() -> None:
    found = shares(loaded(["fleet.replicas={min=1, max=4}"], ["fleet.replicas={min=1, max=2}", "replica.tp=2"]), ["a", "b"])
    assert found == [Share(0, (1, 2), 4, 4, 1), Share(1, (1, 2), 4, 4, 2)]


def test_a_fleet_of_two_roles_needs_the_least_of_both() -> None:
    roles = ["fleet.mode=disaggregated", "fleet.prefill={min=1, max=2}", "fleet.decode={min=1, max=2}"]
    assert shares(loaded(roles, []), ["a", "b"])[0].minima == (2, 1)


@pytest.mark.parametrize(
    ("chat", "code", "message"),
    [
        ([], ["cluster.nodes=2"], r"models on one cluster need the same cluster.nodes: it is 1 in a.toml, and 2 in b.toml"),
        (["cluster.nic_gbps=10"], [], r"the same cluster.nic_gbps: it is 10.0 in a.toml, and not set in b.toml"),
        ([], ["cluster.gpu=h100-sxm"], r"the same cluster.gpu: it is 'a100-80g' in a.toml, and 'h100-sxm' in b.toml"),
        (["run.duration_s=5"], [], r"the same run.duration_s: it is 5.0 in a.toml, and not set in b.toml"),
        ([], ["run.out='there'"], r"the same run.out: it is not set in a.toml, and 'there' in b.toml"),
        (["hazards.node_per_hour=1"], [], r"the same hazards.node_per_hour"),
        (["hazards.link_per_hour=1"], [], r"the same hazards.link_per_hour"),
        ([], ["hazards.link_lost_s=1"], r"the same hazards.link_lost_s: it is 60.0 in a.toml, and 1.0 in b.toml"),
        (
            [],
            ["model.served_as=['m0']"],
            r"a.toml and b.toml both serve 'm0'; give one .* with model.served_as",
        ),
        ([], ["model.served_as=['report.html']"], r"b.toml: a file beside its folder is called 'report.html'; give .*served_as"),
        (["fleet.pools=[{replicas=2}]"], [], r"a.toml: \[\[fleet.pools\]\] bring their own machines"),
        (["fleet.replicas=3"], ["fleet.replicas=2"], r"cannot begin together on 1 x 4 GPUs: m0 3 x 1, m1 2 x 1 .*all of m1"),
        (["fleet.replicas=3"], ["replica.tp=2"], r"cannot begin together on 1 x 4 GPUs: m0 3 x 1, m1 1 x 2 leave no place"),
    ],
)
def test_what_cannot_be_together_is_said_in_one_line(chat: list[str], code: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shares(loaded(chat, code), ["a.toml", "b.toml"])


def test_fleets_begin_where_they_have_something_and_leave_to_others_what_is_theirs() -> None:
    configs = loaded(["fleet.replicas={min=1, max=4}"], ["fleet.replicas={min=1, max=4}"])
    found = shares(configs, ["a", "b"])
    assert first_places(configs, found) == [[0], [1]]
    assert first_places(configs, found, [[2, 9], []]) == [[2], [0]]
    assert first_places(configs, found, [[], [1, 0]]) == [[2], [0]]
    assert first_places(configs, found, [[0, 3], [3]]) == [[0], [3]]


def test_what_a_fleet_has_may_lie_in_the_way_of_another() -> None:
    configs = loaded(["fleet.replicas={min=1, max=4, initial=2}"], ["fleet.replicas=1", "replica.tp=2"])
    found = shares(configs, ["a", "b"])
    assert first_places(configs, found, [[1], []]) == [[0, 1], [1]]
    with pytest.raises(ConfigError, match="leave no place for all of m1"):
        first_places(configs, found, [[3], []])


def test_on_a_cpu_places_are_counted_too() -> None:
    with pytest.raises(ConfigError, match=r"b: \[fleet\] may grow to 9 replicas, and 1 x 8 GPUs have place for 8"):
        shares(
            [
                configuration.load(None, ["model.served_as=['a']"]),
                configuration.load(None, ["model.served_as=['b']", "fleet.replicas={min=1, max=9}"]),
            ],
            ["a", "b"],
        )


def test_nodes_break_once_and_replicas_in_their_own_fleet() -> None:
    node, replica = "{at_s=1, kind='node', which=0}", "{at_s=2, kind='replica', which=0}"
    chat, code = with_faults_dealt_out(loaded([f"faults=[{node}]"], [f"faults=[{node}, {replica}]"]))
    assert chat.faults == (Fault(1, "node", 0),)
    assert code.faults == (Fault(2, "replica", 0),)


def test_names_are_fit_for_folders() -> None:
    name = "meta-llama/Llama-3.1-8B"
    assert name_of(configuration.load(None, [f"model.name={name}"])) == "Llama-3.1-8B"
    assert name_of(configuration.load(None, ["model.served_as=['a/b c', 'd']"])) == "a-b-c"
    assert name_of(configuration.load(None, [f"model.served_as=['{99 * 'a'}/{300 * 'b'}']"])) == 99 * "a"


def test_no_model_is_called_as_what_lies_beside_its_folder() -> None:
    assert set(FILES) == {CLUSTER, GPUS, REPORT}
