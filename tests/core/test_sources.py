"""From where weights are loaded when loads do not come: others, for a while, and in the end the store."""

import pytest
from msgspec import Struct

from squall.core.actions import AnyAction, LoadWeights, StartReplica, StopReplica
from squall.core.controller import Controller
from squall.core.events import (
    AnyEvent,
    LoadFailed,
    NodeDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ScaleWanted,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import Bounds, FleetPlan, Patience, Slots, Weights
from squall.core.fleet_view import STORE, LoadView, Place, Transfer
from squall.core.types import SECOND, Nanos, ReplicaId, Role
from squall.policies.load import Auto
from tests.core.test_roles import AsItIs

TIMEOUT = 100


class Nearest(Struct):
    """From a replica, else from a copy in memory, else from the store."""

    def __call__(self, view: LoadView) -> list[Transfer]:
        places = [Place("gpu", source.replica) for source in view.sources] + [Place("host", node) for node in view.host_copies]
        source = (*places, STORE)[0]
        return [Transfer("", source, (target.replica,), "p2p" if view.sources else "disk") for target in view.targets]


class Subject:
    """Replica 0 is ready, and left a copy in the memory of its node; a slot a node."""

    def __init__(self) -> None:
        plan = FleetPlan({Role.BOTH: Bounds(1, 8, 1)}, Slots(8, 1), Weights(), Patience(start_timeout=TIMEOUT * SECOND))
        self.now: Nanos = 0
        self.controller = Controller(plan, AsItIs(), Nearest())
        self.tell(Woke(), ReplicaStarted(0), WeightsLoaded(0, 100, 16), Warmed(0))

    def tell(self, *events: AnyEvent) -> list[AnyAction]:
        return [action for event in events for action in self.controller.handle(event, self.now)]

    def sleep(self, seconds: int) -> list[AnyAction]:
        self.now += seconds * SECOND
        return self.tell(Woke())

    def want(self, count: int) -> ReplicaId:
        """So many, which is one more than before: who is started."""
        (started,) = (action.replica for action in self.tell(ScaleWanted(Role.BOTH, count)) if isinstance(action, StartReplica))
        return started

    def loads_from(self, replica: ReplicaId) -> Place:
        """Its process is up: from where its weights are asked for."""
        loads = [action.transfer.source for action in self.tell(ReplicaStarted(replica)) if isinstance(action, LoadWeights)]
        assert len(loads) == 1
        return loads[0]

    def goes_on(self, actions: list[AnyAction]) -> ReplicaId:
        """One is given up, and another one started in its place."""
        (stopped,) = (action.replica for action in actions if isinstance(action, StopReplica))
        (started,) = (action.replica for action in actions if isinstance(action, StartReplica))
        self.tell(ReplicaStopped(stopped))
        return started


def test_who_was_waited_for_in_vain_is_not_named_for_as_long() -> None:
    subject = Subject()
    assert subject.loads_from(subject.want(2)) == Place("gpu", 0)
    assert subject.loads_from(subject.goes_on(subject.sleep(TIMEOUT))) == Place("host", 0)
    subject.now += TIMEOUT * SECOND - 1
    assert subject.loads_from(subject.want(3)) == Place("host", 0)  # 0 is still shunned
    subject.now += 1
    third = subject.goes_on(subject.tell(Woke()))  # the second one did not come either, and the time of 0 is over
    assert subject.loads_from(third) == Place("gpu", 0)


def test_a_load_that_comes_clears_its_source_and_a_failed_one_shuns_it_for_a_minute_and_then_for_two() -> None:
    subject = Subject()

    def fail() -> Place:
        replica = subject.want(2)
        source = subject.loads_from(replica)
        subject.tell(ScaleWanted(Role.BOTH, 1), LoadFailed(replica, "cut off"), ReplicaStopped(replica))
        return source

    assert [fail(), fail(), fail()] == [Place("gpu", 0), Place("host", 0), STORE]
    subject.now += 60 * SECOND
    assert [fail(), fail(), fail()] == [Place("gpu", 0), Place("host", 0), STORE]
    subject.now += 60 * SECOND
    assert fail() == STORE
    subject.now += 60 * SECOND
    replica = subject.want(2)
    assert subject.loads_from(replica) == Place("gpu", 0)
    subject.tell(WeightsLoaded(replica, 100, 16), Warmed(replica))
    assert subject.loads_from(subject.want(3)) == Place("gpu", 0)


@pytest.mark.parametrize(("pinned", "then"), [(True, Place("host", 1)), (False, Place("ssd", 2))])
def test_where_the_last_host_copy_is_lost_the_node_of_another_replica_makes_one(pinned: bool, then: Place) -> None:
    weights = Weights("m", 80, 4, host_bytes_per_s=40.0, ssd_bytes_per_s=1.0)
    plan = FleetPlan({Role.BOTH: Bounds(1, 8, 1)}, Slots(8, 1, nic_bytes_per_s=40.0), weights)
    controller = Controller(plan, AsItIs(), Auto(pinned=pinned))

    def load(*events: AnyEvent) -> list[Place]:
        actions = [action for event in events for action in controller.handle(event, 0)]
        return [action.transfer.source for action in actions if isinstance(action, LoadWeights)]

    assert load(Woke(), ReplicaStarted(0)) == [Place("ssd", 0)]
    load(WeightsLoaded(0, 100, 16), Warmed(0), ScaleWanted(Role.BOTH, 2))
    assert load(ReplicaStarted(1)) == [Place("gpu", 0)]  # it passes no memory of node 1
    load(WeightsLoaded(1, 100, 16), Warmed(1))
    load(NodeDown(0, 0), ReplicaLost(0, "its node"), ReplicaLost(1, "a fault"))
    assert load(ReplicaStarted(2)) == [then]
