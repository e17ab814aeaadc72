"""Flows on shared links: fair shares by hand and by their definition, chains against a chunk by chunk count, and no byte lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.core.types import MILLISECOND, SECOND, Nanos
from squall.sim.network import Arrived, Network
from squall.sim.shares import NANO

G = 10**9


def run(network: Network) -> list[Arrived]:
    """Until nothing happens any more."""
    arrived: list[Arrived] = []
    while (due := network.next_end()) is not None:
        arrived += network.advance(due)
    return arrived


def ends(network: Network) -> dict[int, Nanos]:
    return {event.flow: event.at for event in run(network) if event.ended}


# -- shares


def test_a_flow_alone_takes_the_narrowest_link_of_its_path() -> None:
    network = Network({"wide": 10 * G, "narrow": 4 * G})
    network.start(1, ["wide", "narrow"], 8 * G, 0)
    assert network.rate(1) == 4 * G
    assert run(network) == [Arrived(2 * SECOND, 1, 8 * G, True)]


def test_two_flows_share_a_link_and_the_second_speeds_up_when_the_first_ends() -> None:
    network = Network({"a": 10 * G})
    network.start(1, ["a"], 10 * G, 0)
    network.start(2, ["a"], 20 * G, 0)
    assert network.rate(1) == network.rate(2) == 5 * G
    assert ends(network) == {1: 2 * SECOND, 2: 3 * SECOND}


def test_what_one_cannot_use_the_others_get() -> None:
    # the textbook's example: three links in a row, one flow over all of them, one on each of two, two on the third
    network = Network({"a": 12 * G, "b": 30 * G, "c": 6 * G})
    network.start(0, ["a", "b", "c"], 100 * G, 0)
    network.start(1, ["a"], 100 * G, 0)
    network.start(2, ["b"], 100 * G, 0)
    network.start(3, ["c"], 100 * G, 0)
    network.start(4, ["c"], 100 * G, 0)
    assert [network.rate(flow) for flow in range(5)] == [2 * G, 10 * G, 28 * G, 2 * G, 2 * G]
    network.cancel(3, 0)
    assert [network.rate(flow) for flow in range(5)] == [3 * G, 9 * G, 27 * G, 0, 3 * G]


def test_flows_that_share_no_narrow_link_are_left_alone() -> None:
    network = Network({"spine": 100 * G, **{f"nic{nic}": 10 * G for nic in range(8)}})
    for nic in range(8):
        network.start(nic, [f"nic{nic}", "spine"], 10 * G, nic)
    before = {flow.id: flow.due for _, _, flow in network._heap}
    network.start(8, ["nic0", "spine"], 10 * G, 8)
    after = {flow.id: flow.due for _, _, flow in network._heap}
    assert {flow for flow in before if before[flow] != after[flow]} == {0}
    assert [network.rate(flow) for flow in range(9)] == [5 * G] + [10 * G] * 7 + [5 * G]


def test_a_path_without_links_takes_no_time() -> None:
    network = Network({})
    network.start(1, [], 10**12, 7)
    assert run(network) == [Arrived(8, 1, 10**12, True)]


# -- time


def test_marks_are_reported_as_they_come_without_an_event_a_chunk() -> None:
    network = Network({"a": 10 * G})
    network.start(1, ["a"], 10 * G, 0, marks=(1 * G, 4 * G, 10 * G))
    assert network.advance(250 * MILLISECOND) == [Arrived(100 * MILLISECOND, 1, 1 * G, False)]
    assert network.arrived(1) == 5 * G // 2
    assert network.expected_at(1, 4 * G) == 400 * MILLISECOND
    network.start(2, ["a"], 100 * G, 300 * MILLISECOND)
    assert network.expected_at(1, 4 * G) == 500 * MILLISECOND
    got = network.advance(SECOND) + network.advance(2 * SECOND)
    assert got == [
        Arrived(500 * MILLISECOND, 1, 4 * G, False),
        Arrived(1700 * MILLISECOND, 1, 10 * G, False),
        Arrived(1700 * MILLISECOND, 1, 10 * G, True),
    ]


def test_ends_are_whole_nanoseconds_rounded_up_and_nothing_is_moved_twice() -> None:
    network = Network({"a": 3 * G}, record=True)
    network.start(1, ["a"], 10, 0)  # 3 bytes a nanosecond
    assert run(network) == [Arrived(4, 1, 10, True)]
    assert network.moved("a") == 10 * NANO


def test_time_does_not_go_back() -> None:
    network = Network({"a": G})
    network.advance(10)
    with pytest.raises(ValueError, match="time goes back from 10 to 9"):
        network.advance(9)


# -- what goes wrong


def test_a_broken_link_stops_what_crosses_it_until_it_recovers() -> None:
    network = Network({"a": 10 * G, "b": 10 * G})
    network.start(1, ["a", "b"], 10 * G, 0)
    network.start(2, ["a"], 10 * G, 0)
    network.set_bandwidth("b", 0, SECOND)
    assert (network.rate(1), network.rate(2)) == (0, 10 * G)
    assert network.next_end() == SECOND + 500 * MILLISECOND
    network.advance(10 * SECOND)
    assert network.next_end() is None
    network.set_bandwidth("b", 1 * G, 10 * SECOND)
    assert ends(network) == {1: 15 * SECOND}


def test_a_slow_link_slows_its_flows_and_frees_the_others() -> None:
    network = Network({"a": 10 * G, "b": 10 * G})
    network.start(1, ["a", "b"], 100 * G, 0)
    network.start(2, ["a"], 100 * G, 0)
    network.set_bandwidth("b", 2 * G, 0)
    assert (network.rate(1), network.rate(2)) == (2 * G, 8 * G)
    network.set_bandwidth("b", 10 * G, 0)
    assert (network.rate(1), network.rate(2)) == (5 * G, 5 * G)


def test_a_cancelled_flow_takes_its_followers_along_and_leaves_its_share() -> None:
    network = Network({"a": 10 * G, "b": 10 * G, "c": 10 * G})
    network.start(1, ["a"], 10 * G, 0)
    network.start(2, ["b"], 10 * G, 0, after=1, chunk=1 * G)
    network.start(3, ["c"], 10 * G, 0, after=2, chunk=1 * G)
    network.start(4, ["b"], 10 * G, 0)
    network.advance(300 * MILLISECOND)
    assert network.cancel(1, 300 * MILLISECOND) == {1: 3 * G, 2: 1 * G, 3: 0}
    assert network.rate(4) == 10 * G
    assert network.cancel(1, 300 * MILLISECOND) == {}
    assert ends(network) == {4: 1_100 * MILLISECOND}


@pytest.mark.parametrize(
    ("bandwidth", "num_bytes", "marks", "message"),
    [(-1, 1, (), "bandwidth must be at least 0"), (1, 0, (), "num_bytes must be at least 1"), (1, 5, (6,), "marks ascend")],
)
def test_impossible_flows_are_refused(bandwidth: float, num_bytes: int, marks: Sequence[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network({"a": bandwidth}).start(1, ["a"], num_bytes, 0, marks=marks)


def test_a_number_is_given_once() -> None:
    network = Network({"a": G})
    network.start(1, ["a"], 5, 0)
    with pytest.raises(ValueError, match="there is a flow 1 already"):
        network.start(1, ["a"], 5, 0)


# -- chains


def chain(network: Network, hops: Sequence[Sequence[str]], num_bytes: int, chunk: int, now: Nanos = 0) -> None:
    for hop, path in enumerate(hops):
        network.start(hop, path, num_bytes, now, after=hop - 1 if hop else None, chunk=chunk)


@pytest.mark.parametrize("receivers", [1, 3, 7, 15])
def test_a_chain_takes_a_single_transfer_and_a_chunk_a_hop(receivers: int) -> None:
    size, bandwidth, chunk = 16 * G, 25 * G // 2, 16 << 20
    network = Network({f"{nic}.{way}": bandwidth for nic in range(receivers + 1) for way in ("in", "out")})
    chain(network, [(f"{hop}.out", f"{hop + 1}.in") for hop in range(receivers)], size, chunk)
    single, hop = size / bandwidth, chunk / bandwidth
    took = max(ends(network).values()) / SECOND
    assert took == pytest.approx(single + (receivers - 1) * hop, rel=1e-6)
    assert took < 1.05 * single


def _store_and_forward(num_chunks: int, chunk: int, bandwidths: Sequence[int]) -> list[float]:
    """When each hop has sent its last chunk, in seconds: a chunk goes out when it is whole and the one before it is out."""
    arrived = [0.0] * num_chunks
    last = []
    for bandwidth in bandwidths:
        free = 0.0
        for number in range(num_chunks):
            free = max(free, arrived[number]) + chunk / bandwidth
            arrived[number] = free
        last.append(free)
    return last


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 50))
def test_a_chain_of_unequal_links_is_as_fast_as_chunk_by_chunk(speeds: list[int], num_chunks: int) -> None:
    chunk = 1 << 20
    bandwidths = [speed * 1_000_000_000 for speed in speeds]
    network = Network({str(hop): bandwidth for hop, bandwidth in enumerate(bandwidths)})
    chain(network, [[str(hop)] for hop in range(len(speeds))], num_chunks * chunk, chunk)
    exact, fluid = _store_and_forward(num_chunks, chunk, bandwidths), ends(network)
    for hop in range(len(bandwidths)):
        slowest = chunk / min(
            bandwidths[: hop + 1]
        )  # a fluid does not wait for the end of a chunk, and flows as fast as it comes
        assert abs(fluid[hop] / SECOND - exact[hop]) <= hop * slowest + 1e-8


def test_a_hop_that_falls_behind_catches_up_faster_than_its_source() -> None:
    network = Network({"a": 10 * G, "b": 20 * G})
    chain(network, [["a"], ["b"]], 100 * G, 1 * G)
    network.set_bandwidth("b", 2 * G, SECOND)  # 10 G at the first, 9 G at the second
    network.advance(2 * SECOND)
    assert (network.arrived(0), network.arrived(1)) == (20 * G, 11 * G)
    network.set_bandwidth("b", 20 * G, 2 * SECOND)
    assert network.rate(1) == 20 * G
    network.advance(3 * SECOND)
    assert network.rate(1) == 10 * G  # caught up: 8 G behind, 10 G/s faster
    assert network.arrived(1) == 29 * G
    assert ends(network) == {0: 10 * SECOND, 1: 10 * SECOND + 50 * MILLISECOND}


def test_a_follower_of_a_flow_that_stands_still_stands_still() -> None:
    network = Network({"a": 10 * G, "b": 10 * G})
    chain(network, [["a"], ["b"]], 10 * G, 1 * G)
    network.set_bandwidth("a", 0, 500 * MILLISECOND)
    assert network.rate(1) == 0
    assert network.arrived(1) == 4 * G
    network.set_bandwidth("a", 10 * G, SECOND)
    assert ends(network) == {0: 1500 * MILLISECOND, 1: 1600 * MILLISECOND}


def test_one_who_joins_late_hurries_until_it_has_caught_up() -> None:
    network = Network({"a": 5 * G, "b": 10 * G})
    network.start(0, ["a"], 10 * G, 0)
    network.start(1, ["b"], 10 * G, SECOND, after=0, chunk=1 * G)
    network.advance(SECOND)
    assert network.rate(1) == 10 * G
    assert network.next_end() == 1800 * MILLISECOND  # 5 G were there, one of which is the chunk that it stays behind
    network.advance(1800 * MILLISECOND)
    assert network.rate(1) == 5 * G
    assert ends(network) == {0: 2 * SECOND, 1: 2100 * MILLISECOND}


def test_who_begins_where_its_source_began_earlier_need_not_wait_for_it() -> None:
    network = Network({"a": 5 * G, "b": 10 * G})
    network.start(0, ["a"], 4 * G, 0)  # the last 4 G of 10
    network.start(1, ["b"], 10 * G, 0, after=0, chunk=1 * G - 6 * G)
    network.advance(0)
    assert network.rate(1) == 10 * G
    assert ends(network) == {0: 800 * MILLISECOND, 1: SECOND}


def test_one_source_feeds_several_and_ties_end_with_it() -> None:
    network = Network({"a": 10 * G, "b": 40 * G, "c": 40 * G})
    network.start(0, ["a"], 10 * G, 0)
    network.start(1, ["b"], 10 * G, 0, after=0, chunk=1 * G)
    network.start(2, ["c"], 10 * G, 0, after=0, chunk=2 * G)
    network.advance(300 * MILLISECOND)
    assert (network.rate(1), network.rate(2)) == (10 * G, 10 * G)
    assert ends(network) == {0: SECOND, 1: 1025 * MILLISECOND, 2: 1050 * MILLISECOND}


def test_followers_of_one_that_ends_are_free_before_the_next_begins() -> None:
    network = Network({"a": 2 * G, "b": 4 * G})
    network.start(0, ["a"], 2 * G, 0)
    network.start(1, ["b"], 2 * G, 0, after=0, chunk=9 * G)  # begins when the first has ended: there is less than a chunk of it
    network.start(2, ["b"], 2 * G, 0, after=0, chunk=1 * G)  # as fast as the first, until then
    network.advance(SECOND)
    assert (network.rate(0), network.rate(1), network.rate(2)) == (0, 2 * G, 2 * G)
    assert ends(network) == {1: 1750 * MILLISECOND, 2: 1500 * MILLISECOND}


def test_who_has_caught_up_with_one_that_waits_stands_still_and_moves_nothing_for_it() -> None:
    """The last of a chain goes on with 2 GB that the middle one had before it lost its own source, and waits for that again."""
    network = Network({"a": G, "b": G, "c": 4 * G}, record=True)
    network.start(1, ["a"], 10 * G, 0)
    network.start(2, ["b"], 10 * G, 0, after=1, chunk=5 * G)
    network.start(3, ["c"], 12 * G, 0, after=2, chunk=-2 * G)
    network.advance(SECOND)
    assert [network.rate(flow) for flow in (1, 2, 3)] == [G, 0, 0]
    assert (network.arrived(2), network.arrived(3)) == (0, 2 * G)
    assert ends(network) == {1: 10 * SECOND, 2: 15 * SECOND, 3: 15 * SECOND}
    assert network.links["b"].series == [(5 * SECOND, G, 1), (15 * SECOND, 0, 0)]


# -- over time


def test_how_a_link_was_used_is_recorded_where_asked() -> None:
    network = Network({"a": 10 * G, "b": 4 * G}, record=True)
    network.start(1, ["a"], 10 * G, 0)
    network.start(2, ["a", "b"], 4 * G, 500 * MILLISECOND)
    run(network)
    assert network.links["a"].series == [
        (0, 10 * G, 1), (500 * MILLISECOND, 10 * G, 2), (1333333334, 4 * G, 1), (1500000000, 0, 0),
    ]  # fmt: skip
    assert network.links["b"].series[0] == (500 * MILLISECOND, 4 * G, 1)
    assert not Network({"a": G}).links["a"].series


# -- by definition

LINKS = ("a", "b", "c", "d", "e")
Step = tuple[int, int, int, int]


def _check(network: Network) -> None:
    """No link is overfull, and who could be faster without slowing down somebody slower is."""
    flows = [flow for flow in network._flows.values() if flow.started]
    assert not any(flow.rate or flow.moved for flow in network._flows.values() if not flow.started)
    for link in network.links.values():
        assert link.rate == sum(flow.rate for flow in flows if link in flow.path)
        assert link.rate <= link.bandwidth
    for flow in flows:
        upstream = flow.upstream
        if upstream is not None:
            ahead = upstream.moved + upstream.rate * (network._now - upstream.at)
            own = flow.moved + flow.rate * (network._now - flow.at)
            assert ahead - own >= flow.lag - 100 * G  # a part of a nanosecond: less than a hundred bytes
            if flow.tied and flow.rate == upstream.rate:
                continue
            assert not flow.tied
        held = flow.rate == flow.narrowest or any(
            link.bandwidth - link.rate < len(link.flows) and flow.rate + 1 >= max(other.rate for other in link.flows)
            for link in flow.path
        )
        assert held, f"flow {flow.id} at {flow.rate}"


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 30), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**6), st.integers(1, 10**7), st.integers(0, 300_000)), max_size=40),
)
def test_shares_are_max_min_fair_and_no_byte_is_lost_whatever_happens(speeds: list[int], steps: list[Step]) -> None:
    network = Network({name: speed * G for name, speed in zip(LINKS, speeds, strict=True)}, record=True)
    now, next_id = 0, 0
    paths: dict[int, tuple[str, ...]] = {}
    carried: dict[int, int] = {}
    for what, dice, size, wait in steps:
        now += wait
        for event in network.advance(now):
            if event.ended:
                carried[event.flow] = event.num_bytes * NANO
        alive = sorted(network._flows)
        if what <= 3:
            path = tuple(name for bit, name in enumerate(LINKS) if dice >> bit & 1) or ("a",)
            after = alive[dice % len(alive)] if what >= 2 and alive else None
            network.start(next_id, path, size, now, after=after, chunk=1 + dice % 150_000 - 50_000)  # or the upstream is ahead
            paths[next_id] = path
            next_id += 1
        elif what == 4 and alive:
            chosen = network._flows[alive[dice % len(alive)]]
            gone = [chosen]
            for flow in gone:
                gone += flow.followers
                carried[flow.id] = flow.moved + flow.rate * (now - flow.at)
            network.cancel(chosen.id, now)
        else:
            network.set_bandwidth(LINKS[dice % 5], dice % 7 * G, now)
        network.advance(now)
        _check(network)
    for name in LINKS:
        if not network.links[name].bandwidth:
            network.set_bandwidth(name, G, now)
    for event in run(network):
        if event.ended:
            carried[event.flow] = event.num_bytes * NANO
    assert sorted(carried) == list(range(next_id))  # everything ends, or was cancelled
    for name, link in network.links.items():
        assert link.rate == 0
        assert not link.flows
        assert link.demand == 0
        assert network.moved(name) == sum(amount for flow, amount in carried.items() if name in paths[flow])
