"""What goes wrong by chance: how often, for how long, and independently of everything else."""

from __future__ import annotations

import itertools
from statistics import mean

import pytest

from squall.core.actions import StartReplica
from squall.core.fleet_plan import Slots
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.fleet_tables import Fault, Hazards
from squall.perf.topology import resolve_node
from squall.sim.fabric import Fabric
from squall.sim.faults import HOUR, Faults
from squall.sim.loading import Loader, Roads
from squall.sim.network import Network
from squall.sim.weights import WeightFlows

NODES = 4


class Cluster:
    """Cluster A with a replica a GPU and nothing but faults on it: who was slow when, and how fast links were."""

    def __init__(self, hazards: Hazards, seed: int = 0, faults: tuple[Fault, ...] = ()) -> None:
        fabric = Fabric(resolve_node("blitz-cluster-a"), NODES)
        self.network = Network(fabric.links)
        self.whole = {name: link.bandwidth for name, link in self.network.links.items()}
        flows = WeightFlows(self.network, fabric, lambda replica: (replica,), [1] * 4, 1, itertools.count())
        self.speeds: list[tuple[Nanos, ReplicaId, float]] = []
        self.links: list[tuple[Nanos, int, float]] = []
        self.faults = Faults(faults, hazards, Slots(8 * NODES, 8 * NODES, 8), seed, self._set_speed)
        self.loader = Loader(dict.fromkeys(range(8 * NODES), (100, 16)), roads=Roads(self.network, flows), breaker=self.faults)

    def _set_speed(self, replica: ReplicaId, factor: float, now: Nanos) -> None:
        self.speeds.append((now, replica, factor))

    def play(self, until: Nanos) -> Cluster:
        before = dict.fromkeys(range(NODES), 1.0)
        while (at := self.faults.next_at()) is not None and at <= until:
            self.faults.strike(self.loader, at)
            for node, share in before.items():
                shares = {
                    self.network.links[name].bandwidth / whole
                    for name, whole in self.whole.items()
                    if name.startswith(f"node{node}.")
                }
                now = min(shares)
                assert max(shares) - now < 1e-6  # all that the node has, and nobody else
                if now != share:
                    self.links.append((at, node, now))
                    before[node] = now
        return self


def episodes(changes: list[tuple[Nanos, int, float]]) -> list[float]:
    """How many seconds each one lasted: from a change to less until all is whole."""
    began: dict[int, Nanos] = {}
    found = []
    for at, which, factor in changes:
        if factor < 1:
            began.setdefault(which, at)
        elif which in began:
            found.append((at - began.pop(which)) / SECOND)
    return found


@pytest.mark.parametrize(
    ("hazards", "left"),
    [(Hazards(link_lost_per_hour=2, link_lost_s=20), 0.0), (Hazards(link_per_hour=2, link_s=20, link_factor=0.25), 0.25)],
)
def test_links_of_every_node_are_lost_or_slow_as_often_and_as_long_as_is_said(hazards: Hazards, left: float) -> None:
    found = Cluster(hazards).play(100 * HOUR)
    lasted = episodes(found.links)
    assert len(lasted) == pytest.approx(2 * NODES * 100, rel=0.1)
    assert mean(lasted) == pytest.approx(20, rel=0.1)
    assert {round(factor, 4) for _, _, factor in found.links if factor < 1} <= {left, left * left}
    assert {node for _, node, _ in found.links} == set(range(NODES))


def test_replicas_are_stragglers_as_often_and_as_long_as_is_said() -> None:
    found = Cluster(Hazards(slow_per_hour=1, slow_s=10, slow_factor=0.3)).play(50 * HOUR)
    lasted = episodes(found.speeds)
    assert len(lasted) == pytest.approx(8 * NODES * 50, rel=0.1)
    assert mean(lasted) == pytest.approx(10, rel=0.1)
    assert {round(factor, 2) for _, _, factor in found.speeds} <= {1.0, 0.3, 0.09}


def test_a_hazard_strikes_the_same_whatever_else_may_strike() -> None:
    slow, links = Hazards(slow_per_hour=2, slow_s=5), Hazards(link_per_hour=5, link_s=5)
    every = Hazards(replica_per_hour=9, node_per_hour=3, link_per_hour=5, link_s=5, slow_per_hour=2, slow_s=5)
    together, alone = Cluster(every).play(4 * HOUR), Cluster(slow).play(4 * HOUR)
    assert together.speeds == alone.speeds != []
    assert together.links == Cluster(links).play(4 * HOUR).links != []
    assert Cluster(slow, seed=1).play(4 * HOUR).speeds != alone.speeds


def test_a_place_that_is_slow_is_slow_for_whoever_begins_there() -> None:
    found = Cluster(Hazards(), faults=(Fault(1.0, "slow", 3, 10.0, factor=0.5),)).play(2 * SECOND)
    found.loader.perform(StartReplica(3), 5 * SECOND)
    found.loader.perform(StartReplica(4), 5 * SECOND)
    found.play(20 * SECOND)
    found.loader.perform(StartReplica(3), 30 * SECOND)
    assert found.speeds == [(SECOND, 3, 0.5), (5 * SECOND, 3, 0.5), (11 * SECOND, 3, 1.0), (30 * SECOND, 3, 1.0)]


def test_stragglers_that_come_together_never_stand_still() -> None:
    several = tuple(Fault(1.0, "slow", 0, 10.0, factor=0.01) for _ in range(4))
    found = Cluster(Hazards(), faults=several).play(HOUR)
    assert min(factor for *_, factor in found.speeds) == 1e-4
    assert found.speeds[-1] == (11 * SECOND, 0, 1.0)
