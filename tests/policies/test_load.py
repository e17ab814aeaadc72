"""Load policies plan transfers: hand-made topologies, and the plans that should come out, as lists."""

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from squall.core.fleet_view import STORE, Place, Transfer
from squall.core.types import SECOND, Nanos, ReplicaId, Role
from squall.policies.load import Auto, Chain, Disk, Host, Load, Mock, P2p, Striped

GBPS = 1e9 / 8


class Slot(Struct):
    """A replica as a policy sees it: target and source alike."""

    replica: ReplicaId
    node: int = 0
    domain: int = -1  # the node, unless said otherwise
    leaf: int = 0
    role: Role = Role.BOTH
    nic_bytes_per_s: float = 100 * GBPS
    link_bytes_per_s: float = 200e9
    sends_kv: bool = False
    num_sending: int = 0
    num_outstanding: int = 0

    def __post_init__(self) -> None:
        if self.domain < 0:
            self.domain = self.node


class View(Struct):
    targets: Sequence[Slot]
    sources: Sequence[Slot] = ()
    overloaded: Sequence[ReplicaId] = ()
    host_copies: dict[int, Nanos] = {}
    ssd_copies: frozenset[int] = frozenset()
    now: Nanos = 1000 * SECOND
    model: str = "m"
    weight_bytes: int = 16 * 10**9
    num_layers: int = 32
    host_bytes_per_s: float = 128 * GBPS
    ssd_bytes_per_s: float = 10 * GBPS
    store_bytes_per_s: float = 24 * GBPS


def gpu(replica: int) -> Place:
    return Place("gpu", replica)


def plan(policy: Any, view: View) -> list[Transfer]:
    transfers = list(policy(view))
    reached = [replica for transfer in transfers for replica in transfer.path]
    assert sorted(reached) == [target.replica for target in view.targets]  # each exactly once
    return transfers


# -- storage


def test_disk_reads_from_the_nodes_own_or_from_the_store() -> None:
    view = View([Slot(1, node=0), Slot(2, node=1)], ssd_copies=frozenset({1}))
    assert plan(Disk(), view) == [Transfer("m", STORE, (1,), "disk"), Transfer("m", Place("ssd", 1), (2,), "disk")]


@pytest.mark.parametrize(
    ("cache", "hits"),
    [("replace", {0, 2}), ("lru", {0, 1, 2}), ("all_hit", {0, 1, 2, 3}), ("all_miss", set())],
)
def test_host_copies_are_hits_by_the_caches_rule(cache: str, hits: set[int]) -> None:
    # on node 0 a replica has the weights; node 1 used its copy 31 s ago, node 2 29 s ago; node 3 has none
    view = View(
        [Slot(10 + node, node=node) for node in range(4)],
        sources=[Slot(1, node=0)],
        host_copies={0: 0, 1: 969 * SECOND, 2: 971 * SECOND},
        ssd_copies=frozenset(range(4)),
    )
    expected = [
        Transfer("m", Place("host", node), (10 + node,), "host")
        if node in hits
        else Transfer("m", Place("ssd", node), (10 + node,), "disk")
        for node in range(4)
    ]
    policy = msgspec.convert({"kind": "host", "cache": cache, "ttl_s": 30}, Load)
    assert plan(policy, view) == expected


def test_a_cache_says_how_long_copies_are_to_be_remembered() -> None:
    assert Host(ttl_s=30).host_ttl_s == 30
    assert Host(cache="lru").host_ttl_s is None


def test_a_mock_takes_its_time_whatever_there_is() -> None:
    assert plan(Mock(load_s=0.5), View([Slot(1)], [Slot(2)])) == [Transfer("m", STORE, (1,), "mock", seconds=0.5)]


# -- peers


def test_p2p_prefers_the_domain_then_who_is_free_then_the_leaf() -> None:
    view = View(
        targets=[Slot(10, node=1), Slot(11, node=5, leaf=1), Slot(12, node=6, leaf=1), Slot(13, node=7, leaf=1)],
        sources=[Slot(0, node=0), Slot(1, node=1), Slot(2, node=2, leaf=1, sends_kv=True)],
    )
    assert plan(P2p(), view) == [
        Transfer("m", gpu(1), (10,), "p2p"),
        Transfer("m", gpu(0), (11,), "p2p"),
        Transfer("m", gpu(0), (12,), "p2p"),
        Transfer("m", gpu(1), (13,), "p2p"),
    ]
    assert plan(P2p(avoid_kv=False), view)[1] == Transfer("m", gpu(2), (11,), "p2p")


def test_a_source_that_sends_kv_still_serves_its_own_domain_and_is_better_than_none() -> None:
    kv = Slot(0, node=0, sends_kv=True)
    assert plan(P2p(), View([Slot(9, node=0)], [kv, Slot(1, node=1)])) == [Transfer("m", gpu(0), (9,), "p2p")]
    assert plan(P2p(), View([Slot(9, node=3)], [kv])) == [Transfer("m", gpu(0), (9,), "p2p")]


def test_a_chain_runs_from_the_least_busy_source_through_all_targets_faster_ones_first() -> None:
    view = View(
        [Slot(10, node=2), Slot(11, node=3, nic_bytes_per_s=200 * GBPS), Slot(12, node=4)],
        [Slot(0, node=0, num_sending=1), Slot(1, node=1)],
    )
    assert plan(Chain(), view) == [Transfer("m", gpu(1), (11, 10, 12), "chain")]
    assert plan(Chain(), View([Slot(10)], [Slot(1)])) == [Transfer("m", gpu(1), (10,), "p2p")]


def test_stripes_are_as_many_as_sources_and_replicas_in_the_largest_domain() -> None:
    sources = [Slot(0, node=0), Slot(1, node=0), Slot(2, node=0)]
    targets = [Slot(10, node=1), Slot(11, node=1), Slot(12, node=2), Slot(13, node=2)]
    assert plan(Striped(), View(targets, sources)) == [Transfer("m", gpu(0), (10, 11, 12, 13), "striped", more_sources=(gpu(1),))]
    assert plan(Striped(), View(targets, sources[:1])) == [Transfer("m", gpu(0), (10, 11, 12, 13), "chain")]


@pytest.mark.parametrize("policy", [P2p(), Chain(), Striped(), Auto(live=False)], ids=lambda policy: type(policy).__name__)
def test_without_a_source_peers_fall_back_to_the_fastest_copy(policy: Any) -> None:
    disks = frozenset({0, 1})
    assert plan(policy, View([Slot(1, node=0)], ssd_copies=disks)) == [Transfer("m", Place("ssd", 0), (1,), "disk")]
    assert plan(policy, View([Slot(1, node=0)])) == [Transfer("m", STORE, (1,), "disk")]
    assert plan(policy, View([Slot(1, node=0)], host_copies={0: 0}))[0].source == Place("host", 0)
    assert plan(policy, View([Slot(1, node=0)], host_copies={1: 0}, ssd_copies=disks))[0].source == Place("host", 1)


# -- auto


def test_auto_spares_sources_that_send_kv_and_uses_the_domain_first() -> None:
    view = View(
        targets=[Slot(10, node=0), Slot(11, node=2), Slot(12, node=3)],
        sources=[Slot(0, node=0, role=Role.PREFILL, sends_kv=True), Slot(1, node=1, role=Role.DECODE)],
    )
    assert plan(Auto(live=False), view) == [
        Transfer("m", gpu(0), (10,), "p2p"),  # over NVLink, where no KV goes
        Transfer("m", gpu(1), (11, 12), "chain"),
    ]


def test_auto_prefers_a_host_copy_to_a_source_that_sends_kv() -> None:
    kv = [Slot(0, node=0, sends_kv=True)]
    targets = [Slot(10, node=2), Slot(11, node=3)]
    assert plan(Auto(live=False), View(targets, kv, host_copies={1: 0})) == [Transfer("m", Place("host", 1), (10, 11), "chain")]
    assert plan(Auto(live=False), View(targets, kv)) == [Transfer("m", gpu(0), (10, 11), "chain")]


def test_auto_begins_no_chain_at_a_host_copy_beside_a_source() -> None:
    """Both would leave by the same NICs, and neither would be as fast as a chain through all targets."""
    targets, sources = [Slot(10, node=2), Slot(11, node=3)], [Slot(0, node=0)]
    assert plan(Auto(live=False), View(targets, sources, host_copies={0: 0})) == [Transfer("m", gpu(0), (10, 11), "chain")]
    sources.append(Slot(1, node=1, sends_kv=True))
    assert plan(Auto(live=False), View(targets, sources, host_copies={0: 0, 1: 0})) == [
        Transfer("m", gpu(0), (10,), "p2p"),
        Transfer("m", Place("host", 1), (11,), "host"),
    ]


def test_auto_groups_by_domain_fastest_first_and_stays_under_the_leaf() -> None:
    view = View(
        targets=[
            Slot(10, node=2, leaf=0),
            Slot(11, node=6, leaf=1),
            Slot(12, node=6, leaf=1),
            Slot(13, node=7, leaf=1, nic_bytes_per_s=400 * GBPS),
            Slot(14, node=3, leaf=0),
        ],
        sources=[Slot(0, node=0, leaf=0), Slot(1, node=5, leaf=1)],
    )
    assert plan(Auto(live=False), view) == [
        Transfer("m", gpu(0), (10, 14), "chain"),
        Transfer("m", gpu(1), (13, 11, 12), "chain"),
    ]


def test_auto_crosses_to_another_leaf_once() -> None:
    view = View(
        targets=[Slot(10, node=4, leaf=1), Slot(11, node=5, leaf=1), Slot(12, node=6, leaf=1)],
        sources=[Slot(0, node=0, leaf=0), Slot(1, node=1, leaf=0)],
    )
    assert plan(Auto(live=False), view) == [Transfer("m", gpu(0), (10, 11, 12), "chain")]


def test_auto_shares_groups_among_equal_sources() -> None:
    view = View([Slot(10 + node, node=4 + node) for node in range(4)], [Slot(0, node=0), Slot(1, node=1)])
    assert plan(Auto(live=False), view) == [
        Transfer("m", gpu(0), (10, 12), "chain"),
        Transfer("m", gpu(1), (11, 13), "chain"),
    ]


def test_auto_stripes_from_one_domain_to_another() -> None:
    sources = [Slot(replica, node=0) for replica in range(4)]
    targets = [Slot(10 + at, node=1 + at // 4) for at in range(8)]
    striped = Transfer("m", gpu(0), tuple(range(10, 18)), "striped", more_sources=(gpu(1), gpu(2), gpu(3)))
    assert plan(Auto(live=False), View(targets, sources)) == [striped]
    apart = plan(Auto(live=False, stripe=False), View(targets, sources))
    assert apart == [Transfer("m", gpu(0), (10, 11, 12, 13), "chain"), Transfer("m", gpu(1), (14, 15, 16, 17), "chain")]


def test_auto_without_nvlink_makes_every_gpu_its_own_group() -> None:
    targets = [Slot(10 + at, node=1, domain=100 + at, link_bytes_per_s=0) for at in range(2)]
    sources = [Slot(0, node=0, domain=1, link_bytes_per_s=0), Slot(1, node=0, domain=2, link_bytes_per_s=0)]
    assert plan(Auto(live=False), View(targets, sources)) == [
        Transfer("m", gpu(0), (10,), "p2p"),
        Transfer("m", gpu(1), (11,), "p2p"),
    ]


# -- live


def test_nobody_works_while_it_loads_unless_asked_to() -> None:
    assert {kind.__name__: kind().live for kind in get_args(Load)} == {kind.__name__: False for kind in get_args(Load)}


def test_the_last_of_each_path_relieves_the_most_loaded_that_is_left() -> None:
    view = View([Slot(10 + at, node=4 + at) for at in range(4)], [Slot(0, node=0), Slot(1, node=1)], overloaded=(1, 0))
    assert [(transfer.path[-1], transfer.live_partner) for transfer in plan(Auto(live=True), view)] == [(12, 1), (13, 0)]
    assert [transfer.live_partner for transfer in plan(P2p(live=True), view)] == [1, 0, None, None]
    assert [transfer.live_partner for transfer in plan(P2p(), view)] == [None] * 4
    assert [transfer.live_partner for transfer in plan(Disk(live=True), view)] == [1, 0, None, None]
    assert [transfer.live_partner for transfer in plan(Mock(live=True), view)] == [1, 0, None, None]


def test_decode_replicas_forward_and_prefill_replicas_relieve() -> None:
    view = View(
        [Slot(10, node=4, role=Role.PREFILL), Slot(11, node=4, role=Role.DECODE)],
        [Slot(0, node=0, role=Role.DECODE), Slot(1, node=1, role=Role.PREFILL, sends_kv=True)],
        overloaded=(1,),
    )
    assert plan(Auto(live=True), view) == [Transfer("m", gpu(0), (11, 10), "chain", live_partner=1)]
    only_decode = View([Slot(11, node=4, role=Role.DECODE)], view.sources, overloaded=(1,))
    assert plan(Auto(live=True), only_decode) == [Transfer("m", gpu(0), (11,), "p2p")]


# -- whatever the topology

_slots = st.lists(
    st.builds(
        Slot,
        replica=st.just(0),
        node=st.integers(0, 5),
        leaf=st.integers(0, 1),
        role=st.sampled_from(Role),
        sends_kv=st.booleans(),
        num_sending=st.integers(0, 2),
        nic_bytes_per_s=st.sampled_from([1e9, 2e9]),
    ),
    max_size=8,
)
_policies = st.sampled_from(
    [
        Disk(),
        Host(),
        Host(cache="lru"),
        P2p(),
        P2p(live=True),
        Chain(live=True),
        Striped(),
        Striped(live=True),
        Auto(),
        Auto(live=True),
        Auto(stripe=False),
    ]
)


@given(_policies, _slots.filter(bool), _slots, st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_every_target_is_reached_once_from_where_weights_are(
    policy: Any, targets: list[Slot], sources: list[Slot], hosts: set[int], disks: set[int]
) -> None:
    for number, slot in enumerate((*sources, *targets)):
        slot.replica = number
    view = View(
        targets,
        sources,
        [slot.replica for slot in sources if slot.role is not Role.DECODE],
        dict.fromkeys(hosts, 0),
        frozenset(disks),
    )
    transfers = plan(policy, view)
    whole = {slot.replica for slot in sources}
    for transfer in transfers:
        for place in (transfer.source, *transfer.more_sources):
            match place.kind:
                case "gpu":
                    assert place.id in whole
                case "host":
                    assert place.id in hosts
                case "ssd":
                    assert place.id in disks
        assert (transfer.kind == "striped") == bool(transfer.more_sources)
    partners = [transfer.live_partner for transfer in transfers if transfer.live_partner is not None]
    assert len(set(partners)) == len(partners)
    assert set(partners) <= set(view.overloaded)


# -- configuration


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "host", "ttl_s": 0}, 'ttl_s must be above 0, not 0.*cache = "all_miss"'),
        ({"kind": "mock", "load_s": -1}, "load_s must be above 0, not -1"),
        ({"kind": "host", "cache": "fifo"}, "fifo"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(table, Load)
