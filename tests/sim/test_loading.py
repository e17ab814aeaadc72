"""Replicas that come up in a simulation: what the controller and they themselves hear of a load, and when."""

from __future__ import annotations

import itertools

from squall.core.actions import LoadWeights, StartReplica
from squall.core.events import AnyEvent, LayerArrived, WeightsLoaded
from squall.core.fleet_view import Place, Transfer
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.perf.topology import resolve_node
from squall.sim.fabric import Fabric
from squall.sim.loading import Loader, Roads
from squall.sim.network import Network
from squall.sim.weights import WeightFlows

G = 10**9
LAYERS = 4


class Body:
    """Cluster A with a replica a GPU: four layers of 2.5 GB, and 2.5 GB after them, 0.2 s each over a NIC."""

    def __init__(self) -> None:
        fabric = Fabric(resolve_node("blitz-cluster-a"), 4)
        network = Network(fabric.links)
        weights = WeightFlows(network, fabric, lambda replica: (replica,), [5 * G // 2] * LAYERS, 5 * G // 2, itertools.count())
        self.loader = Loader(dict.fromkeys(range(32), (100, 16)), roads=Roads(network, weights))
        self._asked: list[Nanos] = []
        self.loader.push = self._asked.append

    def load(self, transfer: Transfer, *replicas: ReplicaId, now: Nanos = 0) -> None:
        for replica in replicas:
            if replica not in self.loader.held:
                self.loader.perform(StartReplica(replica), now)
            self.loader.perform(LoadWeights(replica, transfer), now)

    def hear(self, until: Nanos | None = None) -> list[AnyEvent]:
        found: list[AnyEvent] = []
        while self._asked and (until is None or min(self._asked) <= until):
            now = min(self._asked)
            self._asked.remove(now)
            event = self.loader.end(now)
            if isinstance(event, LayerArrived | WeightsLoaded):
                found.append(event)
        return found


def layers(found: list[AnyEvent], replica: ReplicaId) -> list[int]:
    return [event.layer for event in found if isinstance(event, LayerArrived) and event.replica == replica]


def loaded(found: list[AnyEvent]) -> set[ReplicaId]:
    return {event.replica for event in found if isinstance(event, WeightsLoaded)}


def chain(*path: ReplicaId, partner: ReplicaId | None, source: ReplicaId = 0) -> Transfer:
    return Transfer("m", Place("gpu", source), path, "chain", live_partner=partner)


def test_of_a_chain_only_the_last_may_work_while_it_loads_and_only_its_layers_are_told() -> None:
    body = Body()
    body.load(chain(8, 16, partner=1), 8, 16)
    found = body.hear()
    assert layers(found, 8) == []
    assert layers(found, 16) == [0, 1, 2, 3]
    assert loaded(found) == {8, 16}


def test_without_a_partner_nobody_is_told_of_layers() -> None:
    body = Body()
    body.load(chain(8, 16, partner=None), 8, 16)
    found = body.hear()
    assert layers(found, 8) == layers(found, 16) == []
    assert loaded(found) == {8, 16}


def test_who_works_while_it_loads_hears_of_its_layers_from_another_source_too() -> None:
    body = Body()
    body.load(chain(16, partner=1), 16)
    assert layers(body.hear(until=SECOND // 2), 16) == [0, 1]
    body.load(chain(16, 24, partner=None, source=8), 16, 24, now=SECOND // 2)  # it is not the last of that path
    found = body.hear()
    assert layers(found, 16) == [2, 3]
    assert layers(found, 24) == []
    assert loaded(found) == {16, 24}


def test_a_new_life_begins_without_the_partner_of_the_last_one() -> None:
    body = Body()
    body.load(chain(16, partner=1), 16)
    body.hear(until=SECOND // 2)
    body.loader.kill(16, "test", SECOND // 2)
    body.load(chain(16, 24, partner=1), 16, 24, now=SECOND // 2)
    found = body.hear()
    assert layers(found, 16) == []
    assert layers(found, 24) == [0, 1, 2, 3]


def test_who_has_all_when_another_source_is_named_loads_nothing_more() -> None:
    body = Body()
    body.load(chain(8, partner=None), 8)
    body.load(chain(16, partner=1, source=1), 16)
    assert loaded(body.hear(until=SECOND - 1)) == set()  # both have all after a second: five times 0.2 s, from two sources
    assert body.loader.end(SECOND) == WeightsLoaded(8, 100, 16)
    body.load(chain(16, partner=1, source=8), 16, now=SECOND)  # its source is gone, as far as the controller knows
    assert body.hear() == [WeightsLoaded(16, 100, 16)]
