"""Weights on their way: who gets which layer when, along chains, in stripes, and after a loss."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.core.fleet_view import Place, Transfer
from squall.core.types import MILLISECOND, SECOND, Nanos
from squall.perf.topology import resolve_node
from squall.sim.fabric import Fabric
from squall.sim.network import Network
from squall.sim.weights import LayerIn, WeightFlows

G = 10**9
LAYERS = 8


class Cluster:
    """Cluster A of BlitzScale's paper with replicas of `tp` GPUs each: 8 layers of 1.5 GB a GPU, and 0.5 GB after them."""

    def __init__(self, tp: int = 1, num_nodes: int = 4, chunk: int = 16 << 20, record: bool = False) -> None:
        self.fabric = Fabric(resolve_node("blitz-cluster-a"), num_nodes=num_nodes)
        self.network = Network(self.fabric.links, record)
        layer_bytes = [3 * G // 2] * LAYERS
        self.flows = WeightFlows(
            self.network, self.fabric, lambda replica: range(replica * tp, replica * tp + tp), layer_bytes, G // 2,
            itertools.count(), chunk,
        )  # fmt: skip

    def until(self, stop: Nanos | None = None) -> list[LayerIn]:
        found = []
        while (due := self.network.next_end()) is not None and (stop is None or due <= stop):
            found += self.flows.on(self.network.advance(due), due)
        if stop is not None:
            self.network.advance(stop)
        return found


def whole(found: list[LayerIn]) -> dict[int, float]:
    return {event.replica: event.at / SECOND for event in found if event.layer is None}


def layers(found: list[LayerIn], replica: int) -> list[int | None]:
    return [event.layer for event in found if event.replica == replica]


ALL = [*range(LAYERS), None]
SINGLE = 12.5 / 12.5  # 12.5 GB at 100 Gbps


def chain(*path: int, source: Place | None = None) -> Transfer:
    return Transfer("m", source or Place("gpu", 0), path, "chain" if len(path) > 1 else "p2p")


def test_layers_come_in_order_and_the_rest_after_them() -> None:
    cluster = Cluster()
    cluster.flows.load(8, chain(8), 0)
    found = cluster.until()
    assert layers(found, 8) == ALL
    assert [event.at for event in found] == [120 * MILLISECOND * (layer + 1) for layer in range(LAYERS)] + [SECOND]
    [moved] = cluster.flows.ended
    assert (moved.num_bytes, moved.began_at, moved.ended_at) == (25 * G // 2, 0, SECOND)


def test_without_layers_only_the_whole_is_told() -> None:
    cluster = Cluster()
    cluster.flows.load(8, chain(8), 0, layers=False)
    assert cluster.until() == [LayerIn(SECOND, 8, None)]


@pytest.mark.parametrize("source", [Place("ssd", 1), Place("host", 1), Place("host", 0), Place("store")])
def test_storage_is_read_by_every_gpu_of_the_replica(source: Place) -> None:
    cluster = Cluster(tp=2)
    cluster.flows.load(4, Transfer("m", source, (4,), "disk"), 0)  # GPUs 8 and 9, on node 1
    seconds = {"ssd": 10.0, "host": 25 / 32 if source.id == 1 else 1.0, "store": 25 / 3}[source.kind]
    assert whole(cluster.until())[4] == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("receivers", [1, 3, 7, 15])
def test_a_chain_is_as_long_as_one_transfer(receivers: int) -> None:
    cluster = Cluster(tp=4, num_nodes=16)
    path = tuple(2 * (hop + 1) if hop < 7 else 2 * (hop - 7) + 17 for hop in range(receivers))
    for replica in path:
        cluster.flows.load(replica, chain(*path), 0)
    times = whole(cluster.until())
    hop = (16 << 20) / 12.5e9
    assert max(times.values()) <= 1.05 * SINGLE + (receivers - 1) * hop
    assert times[path[0]] == pytest.approx(SINGLE)


def test_who_is_asked_late_gets_what_is_there_and_who_is_asked_early_waits() -> None:
    cluster = Cluster()
    path = chain(8, 16)
    cluster.flows.load(16, path, 0)  # nobody to get it from yet
    assert cluster.network.next_end() is None
    cluster.until(500 * MILLISECOND)
    cluster.flows.load(8, path, 500 * MILLISECOND)
    assert whole(cluster.until()) == pytest.approx({8: 1.5, 16: 1.5 + (16 << 20) / 12.5e9})
    late = Cluster()
    late.flows.load(8, path, 0)
    late.until(2 * SECOND)
    late.flows.load(16, path, 2 * SECOND)  # the one before it is whole
    assert whole(late.until()) == {16: 3.0}


def test_stripes_from_four_sources_take_a_fourth_of_the_time_and_an_exchange() -> None:
    cluster = Cluster()
    others = (Place("gpu", 1), Place("gpu", 2), Place("gpu", 3))
    striped = Transfer("m", Place("gpu", 0), (8, 9, 10, 11, 16, 17, 18, 19), "striped", more_sources=others)
    for replica in striped.path:
        cluster.flows.load(replica, striped, 0)
    found = cluster.until()
    times = whole(found)
    chunk = (16 << 20) / 12.5e9
    assert max(times.values()) == pytest.approx(SINGLE / 4 + 2 * chunk, rel=0.02)
    assert {replica: layers(found, replica) for replica in striped.path} == dict.fromkeys(striped.path, ALL)


def test_a_domain_of_fewer_or_more_replicas_than_stripes_gets_them_too() -> None:
    cluster = Cluster()
    others = (Place("gpu", 1),)
    striped = Transfer("m", Place("gpu", 0), (8, 9, 10, 16), "striped", more_sources=others)
    for replica in striped.path:
        cluster.flows.load(replica, striped, 0)
    times = whole(cluster.until())
    assert max(times[replica] for replica in (8, 9, 10)) == pytest.approx(SINGLE / 2, rel=0.03)
    assert times[16] == pytest.approx(SINGLE, rel=0.03)  # both stripes through one card


def test_a_striped_transfer_begins_when_all_are_there() -> None:
    cluster = Cluster()
    striped = Transfer("m", Place("gpu", 0), (8, 9), "striped", more_sources=(Place("gpu", 1),))
    cluster.flows.load(8, striped, 0)
    assert cluster.network.next_end() is None
    cluster.flows.load(9, striped, SECOND)
    assert max(whole(cluster.until()).values()) == pytest.approx(1.5, rel=0.02)


# -- losses


def test_the_loss_of_a_source_strands_who_drew_from_it_and_layers_stay() -> None:
    cluster = Cluster()
    cluster.flows.load(8, chain(8, 16), 0)
    cluster.flows.load(16, chain(8, 16), 0)
    found = cluster.until(500 * MILLISECOND)
    assert layers(found, 8) == layers(found, 16) == [0, 1, 2, 3]
    assert cluster.flows.lose(Place("gpu", 0), 500 * MILLISECOND) == [8]
    cluster.until(2 * SECOND)
    assert cluster.network.next_end() is None
    cluster.flows.load(8, chain(8, source=Place("gpu", 24)), 2 * SECOND)
    found = cluster.until()
    assert layers(found, 8) == layers(found, 16) == ALL[4:]  # the second of the chain went on by itself
    assert whole(found)[8] == pytest.approx(2 + 6.5 / 12.5)


def test_layers_stay_though_nobody_was_told_of_them() -> None:
    cluster = Cluster(tp=2)
    for replica in (4, 8):
        cluster.flows.load(replica, chain(4, 8), 0, layers=False)
    assert cluster.until(500 * MILLISECOND) == []
    assert cluster.flows.lose(Place("gpu", 0), 500 * MILLISECOND) == [4]
    cluster.flows.load(4, chain(4, source=Place("gpu", 12)), 2 * SECOND, layers=False)
    found = cluster.until()
    assert [(event.replica, event.layer) for event in found] == [(4, None), (8, None)]
    assert whole(found)[4] == pytest.approx(2 + 6.5 / 12.5)  # four of eight layers were there
    assert [moved.num_bytes for moved in cluster.flows.ended] == [2 * 6_500_000_000] * 2


def test_layers_stay_of_a_striped_transfer_too_as_far_as_all_stripes_had_come() -> None:
    cluster = Cluster()
    striped = Transfer("m", Place("gpu", 0), (8, 9, 16, 17), "striped", more_sources=(Place("gpu", 1),))
    for replica in striped.path:
        cluster.flows.load(replica, striped, 0, layers=False)
    cluster.until(250 * MILLISECOND)  # of the half second that two stripes take
    assert cluster.flows.lose(Place("gpu", 9), 250 * MILLISECOND) == [8, 16, 17]
    for replica in (8, 16):
        cluster.flows.load(replica, chain(8, 16), SECOND, layers=False)
    times = whole(cluster.until())
    assert times[8] == pytest.approx(1 + (12.5 - 4 * 1.5) / 12.5)
    assert times[16] == pytest.approx(times[8], rel=0.01)


def test_the_loss_of_the_middle_of_a_chain_strands_the_next_one_only() -> None:
    cluster = Cluster()
    for replica in (8, 16, 24):
        cluster.flows.load(replica, chain(8, 16, 24), 0)
    cluster.until(500 * MILLISECOND)
    assert cluster.flows.lose(Place("gpu", 16), 500 * MILLISECOND) == [24]
    assert set(cluster.flows.loading) == {8}
    cluster.flows.load(24, chain(24, source=Place("ssd", 3)), 600 * MILLISECOND)
    times = whole(cluster.until())
    assert times[8] == 1.0
    assert times[24] > 5


def test_the_loss_of_one_of_a_striped_transfer_strands_all_of_it() -> None:
    cluster = Cluster()
    striped = Transfer("m", Place("gpu", 0), (8, 9, 16, 17), "striped", more_sources=(Place("gpu", 1),))
    for replica in striped.path:
        cluster.flows.load(replica, striped, 0)
    cluster.until(100 * MILLISECOND)
    assert cluster.flows.lose(Place("gpu", 9), 100 * MILLISECOND) == [8, 16, 17]
    assert not cluster.flows.loading
    assert cluster.network.next_end() is None
    assert not any(link.flows for link in cluster.network.links.values())


def test_who_is_redirected_to_somebody_who_has_less_gets_everything_once() -> None:
    cluster = Cluster()
    cluster.flows.load(8, chain(8), 0)
    cluster.until(500 * MILLISECOND)  # four layers
    cluster.flows.load(16, chain(16, source=Place("gpu", 24)), 500 * MILLISECOND)
    cluster.flows.load(8, Transfer("m", Place("gpu", 24), (16, 8), "chain"), 500 * MILLISECOND)
    found = cluster.until()
    assert layers(found, 16) == ALL
    assert layers(found, 8) == ALL[4:]
    assert whole(found)[8] == pytest.approx(1.5 + (16 << 20) / 12.5e9)


def test_what_cannot_be_moved_is_refused() -> None:
    cluster = Cluster()
    with pytest.raises(ValueError, match="replica 1: nothing to move"):
        cluster.flows.load(1, Transfer("m", Place("store"), (1,), "mock", seconds=1.0), 0)
    with pytest.raises(ValueError, match="replica 1: nothing to move"):
        cluster.flows.load(1, chain(8), 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 31), st.integers(0, 10**6), st.integers(0, 400)), max_size=25))
def test_whatever_is_lost_every_layer_comes_once_and_in_order(steps: list[tuple[int, int, int, int]]) -> None:
    cluster = Cluster()
    got: dict[int, list[int | None]] = {}
    now = 0

    def note(found: list[LayerIn]) -> None:
        for event in found:
            got.setdefault(event.replica, []).append(event.layer)

    def ask(replica: int, transfer: Transfer) -> None:
        if (layers_of := got.get(replica)) and layers_of[-1] is None:
            got[replica] = []  # it has them all, and is loaded anew
        cluster.flows.load(replica, transfer, now)

    for what, replica, dice, wait in steps:
        now += wait * MILLISECOND
        note(cluster.until(now))
        others = tuple(dict.fromkeys((replica, 1 + dice % 31, 1 + dice // 31 % 31)))
        idle = [other for other in others if other not in cluster.flows.loading and None not in got.get(other, [])]
        if what <= 1 and idle:
            path = tuple(idle)
            transfer = chain(*path)
            if what and len(path) > 1:
                transfer = Transfer("m", Place("ssd", 0), path, "striped", more_sources=(Place("host", 1),))
            for other in path:
                ask(other, transfer)
        elif what >= 2:
            for stranded in cluster.flows.lose(Place("gpu", replica), now):
                ask(stranded, Transfer("m", Place("host", dice % 4), (stranded,), "host"))
            got.pop(replica, None)
    waiting: Callable[[], list[int]] = lambda: [r for r, load in cluster.flows.loading.items() if not load.flows]  # noqa: E731
    note(cluster.until())
    while stuck := waiting():  # behind somebody who was lost before it was asked
        ask(stuck[0], Transfer("m", Place("store"), (stuck[0],), "disk"))
        note(cluster.until())
    assert not cluster.flows.loading
    assert all(layers_of == ALL for layers_of in got.values() if layers_of), got
    assert all(link.rate == 0 and not link.flows for link in cluster.network.links.values())


# -- for the record


@pytest.mark.parametrize("layers", [True, False])
def test_where_it_is_recorded_each_layer_has_its_instant_told_or_not(layers: bool) -> None:
    """Layers of 1.5 GB at 100 Gbps, 120 ms each; from 300 ms on the link is shared, and from 0.7 s on slow."""
    cluster = Cluster(tp=2, record=True)
    cluster.flows.load(4, chain(4), 0, layers)
    told = cluster.until(300 * MILLISECOND)
    cluster.network.start(-1, cluster.fabric.gpu_to_gpu(0, 8), 2 * G, 300 * MILLISECOND)
    told += cluster.until(700 * MILLISECOND)
    cluster.network.set_bandwidth(cluster.fabric.nic_of(9) + ".in", 4 * G, 700 * MILLISECOND)
    told += cluster.until()
    [moved] = cluster.flows.ended
    assert moved.layers_at[:2] == (120 * MILLISECOND, 240 * MILLISECOND)
    assert len(moved.layers_at) == LAYERS
    assert sorted(moved.layers_at) == list(moved.layers_at)
    assert moved.layers_at[-1] < moved.ended_at
    assert moved.links == (*cluster.fabric.gpu_to_gpu(0, 8), *cluster.fabric.gpu_to_gpu(1, 9))
    if layers:
        assert [event.at for event in told] == [*moved.layers_at, moved.ended_at]


def test_layers_along_a_chain_and_in_stripes_are_recorded_as_they_are_told() -> None:
    stripes = Transfer("m", Place("gpu", 0), (8, 9), "striped", more_sources=(Place("gpu", 1),))
    for transfer in (chain(8, 16, 24), stripes):
        cluster = Cluster(record=True)
        for replica in transfer.path:
            cluster.flows.load(replica, transfer, 0)
        told = cluster.until()
        assert len(cluster.flows.ended) == len(transfer.path)
        for moved in cluster.flows.ended:
            assert [event.at for event in told if event.replica == moved.replica] == [*moved.layers_at, moved.ended_at]


def test_layers_that_were_there_before_have_no_instant_and_nothing_is_kept_unasked() -> None:
    cluster = Cluster(record=True)
    cluster.flows.load(8, chain(8), 0)
    cluster.until(250 * MILLISECOND)
    cluster.flows.load(8, chain(8, source=Place("gpu", 1)), 250 * MILLISECOND)
    cluster.until()
    [moved] = cluster.flows.ended
    assert moved.layers_at == (-1, -1, *(250 * MILLISECOND + 120 * MILLISECOND * layer for layer in range(1, 7)))
    plain = Cluster()
    plain.flows.load(8, chain(8), 0)
    plain.until()
    assert plain.flows.ended[0].layers_at == ()
