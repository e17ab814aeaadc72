"""Hand-offs over shared links: a few at a time at either end, first come, first sent, and nobody waits for ever."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.core.actions import SendActivations, SendKv
from squall.core.events import ActivationsSent, KvFailed, KvSent
from squall.core.types import MILLISECOND, Nanos, ReplicaId
from squall.perf.topology import resolve_node
from squall.sim.fabric import Fabric
from squall.sim.handoff import PATIENCE, KvMoves, KvShape, Lanes, Told
from squall.sim.network import Network

TEN_MS = 125_000_000
"""Bytes that take so long over a NIC of cluster A, alone."""


class Cluster:
    """Three nodes of eight replicas each; a token's KV takes ten milliseconds, and so does its residual."""

    def __init__(self, max_transfers: int) -> None:
        fabric = self.fabric = Fabric(resolve_node("blitz-cluster-a"), 3)
        self.network = Network(fabric.links)
        lanes = Lanes(self.network, fabric, lambda replica: (replica,), itertools.count())
        self.moves = KvMoves(KvShape(TEN_MS, 1, TEN_MS), lanes, max_transfers=max_transfers)

    def send(self, request: int, source: ReplicaId, to: ReplicaId, now: Nanos = 0, num_tokens: int = 1) -> None:
        self.moves.start(source, SendKv(request, to, 0, 0, num_tokens), now)

    def end(self, stop: Nanos | None = None) -> list[tuple[float, Told]]:
        """What is told, and after how many milliseconds."""
        found: list[tuple[float, Told]] = []
        while (due := self._next()) is not None and (stop is None or due <= stop):
            found += [(due / MILLISECOND, told) for told in self.moves.on(self.network.advance(due), due)]
        if stop is not None:
            self.network.advance(stop)
        return found

    def _next(self) -> Nanos | None:
        times = [at for at in (self.network.next_end(), self.moves.next_end()) if at is not None]
        return min(times, default=None)


def sent(found: list[tuple[float, Told]]) -> list[tuple[float, int]]:
    """Milliseconds and requests."""
    return [(at, event.request) for at, (_, event) in found if isinstance(event, KvSent)]


@pytest.mark.parametrize(("at_once", "ends"), [(1, [10, 20, 30, 40]), (2, [20, 20, 40, 40]), (4, [40, 40, 40, 40])])
def test_what_shares_a_nic_is_sent_a_few_at_a_time_and_the_last_is_no_later(at_once: int, ends: list[float]) -> None:
    cluster = Cluster(at_once)
    for request in range(4):
        cluster.send(request, source=8 + request, to=0)
    found = cluster.end()
    assert sent(found) == list(zip(ends, range(4), strict=True))
    assert {event.took for _, (_, event) in found if isinstance(event, KvSent)} == {
        10 * at_once * MILLISECOND
    }  # from its turn on


def test_a_sender_is_as_busy_as_a_receiver() -> None:
    cluster = Cluster(2)
    for request in range(4):
        cluster.send(request, source=0, to=8 + request)
    assert sent(cluster.end()) == [(20, 0), (20, 1), (40, 2), (40, 3)]


def test_who_must_wait_lets_others_pass() -> None:
    cluster = Cluster(1)
    cluster.send(0, source=8, to=0)
    cluster.send(1, source=9, to=0)  # waits for its receiver
    cluster.send(2, source=9, to=1)  # and this one finds both ends free
    assert sent(cluster.end()) == [(10, 0), (10, 2), (20, 1)]


def test_activations_do_not_wait() -> None:
    cluster = Cluster(1)
    cluster.send(0, source=8, to=0, num_tokens=4)
    cluster.send(1, source=8, to=0)
    cluster.moves.start(8, SendActivations(7, 0, 1), 0)
    (at, (replica, event)), *rest = cluster.end()
    assert (at, replica) == (20, 8)
    assert event == ActivationsSent(7)  # half of the NIC is its own at once
    assert sent(rest) == [(50, 0), (60, 1)]


def test_a_fixed_delay_knows_no_turns() -> None:
    moves = KvMoves(delay=5 * MILLISECOND, max_transfers=1)
    for request in range(3):
        moves.start(8, SendKv(request, 0, 0, 0, 1), 0)
    assert [event for _, event in moves.on((), 5 * MILLISECOND)] == [KvSent(n, 0, 1, 5 * MILLISECOND) for n in range(3)]


def test_the_loss_of_a_sender_is_the_turn_of_the_next_and_nothing_of_its_own_is_told() -> None:
    cluster = Cluster(1)
    for request, source in enumerate((8, 8, 9)):
        cluster.send(request, source, to=0)
    cluster.network.advance(5 * MILLISECOND)
    assert cluster.moves.lose(8, 5 * MILLISECOND) == []
    assert sent(cluster.end()) == [(15, 2)]


def test_the_loss_of_a_receiver_is_told_to_who_sends_and_who_waits() -> None:
    cluster = Cluster(1)
    for request, to in enumerate((0, 0, 1)):
        cluster.send(request, source=8, to=to)
    cluster.network.advance(5 * MILLISECOND)
    assert cluster.moves.lose(0, 5 * MILLISECOND) == [(8, KvFailed(0, 0, 0, 0)), (8, KvFailed(1, 0, 0, 0))]
    assert sent(cluster.end()) == [(15, 2)]


def test_who_waits_for_a_dead_link_is_given_up_and_who_does_not_goes_on() -> None:
    cluster = Cluster(1)
    [dead] = [link for link in cluster.fabric.gpu_to_gpu(8, 0) if link.startswith("node1.nic")]
    cluster.network.set_bandwidth(dead, 0, 0)
    cluster.send(0, source=8, to=0)
    cluster.send(1, source=8, to=0)
    cluster.send(2, source=9, to=1)
    found = cluster.end()
    assert sent(found) == [(10, 2)]
    assert found[1:] == [(PATIENCE / MILLISECOND, (8, KvFailed(request, 0, 0, 0))) for request in (0, 1)]


sends = st.tuples(st.integers(8, 11), st.integers(0, 3), st.integers(1, 3), st.integers(0, 40))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(sends, min_size=1, max_size=25), st.none() | st.tuples(st.integers(0, 11), st.integers(1, 99)))
def test_every_hand_off_ends_once_and_nobody_has_more_than_so_many(
    most: int, asked: list[tuple[int, int, int, int]], loss: tuple[int, int] | None
) -> None:
    """The sums of what is under way are read off the links: of a NIC that `most` use, each has a part."""
    cluster = Cluster(most)
    ended: Counter[int] = Counter()

    def look(found: list[tuple[float, Told]]) -> None:
        ended.update(event.request for _, (_, event) in found if isinstance(event, KvSent | KvFailed))
        for link in cluster.network.links.values():
            assert len(link.flows) <= most or "nic" not in link.name

    events: list[tuple[Nanos, int | None]] = [(at * MILLISECOND, request) for request, (*_, at) in enumerate(asked)]
    if loss is not None:
        events.append((loss[1] * MILLISECOND, None))
    silent: set[int] = set()
    begun: set[int] = set()
    for at, request in sorted(events, key=lambda event: event[0]):
        look(cluster.end(at))
        if request is not None:
            source, to, num_tokens, _ = asked[request]
            begun.add(request)
            cluster.send(request, source, to, at, num_tokens)
            look([])
        elif loss is not None:
            silent = {request for request in begun if asked[request][0] == loss[0] and not ended[request]}
            look([(0.0, told) for told in cluster.moves.lose(loss[0], at)])
    look(cluster.end())
    assert all(ended[request] == (request not in silent) for request in range(len(asked)))
    assert not any(link.flows for link in cluster.network.links.values())
