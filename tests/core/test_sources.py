"""From where weights are loaded when loads do not come: others, for a while, and in the end the store."""

from msgspec import Struct

from squall.core.actions import AnyAction, LoadWeights, StartReplica, StopReplica
from squall.core.controller import Controller
from squall.core.events import AnyEvent, LoadFailed, ReplicaStarted, ReplicaStopped, ScaleWanted, Warmed, WeightsLoaded, Woke
from squall.core.fleet_plan import Bounds, FleetPlan, Patience, Slots, Weights
from squall.core.fleet_view import STORE, LoadView, Place, Transfer
from squall.core.types import SECOND, Nanos, ReplicaId, Role
from tests.core.test_roles import AsItIs

TIMEOUT = 100


class Nearest(Struct):
    """From a replica, else from a copy in memory, else from the store."""

    def __call__(self, view: LoadView) -> list[Transfer]:
        places = [Place("gpu", source.replica) for source in view.sources] + [Place("host", node) for node in view.host_copies]
        return [Transfer("", (*places, STORE)[0], (target.replica,), "p2p") for target in view.targets]


class Subject:
    """Replica 0 is ready; node 9, which has no slot, has a copy in its memory; a slot a node."""

    def __init__(self) -> None:
        plan = FleetPlan(
            {Role.BOTH: Bounds(1, 8, 1)}, Slots(8, 1), Weights(on_hosts=(9,)), Patience(start_timeout=TIMEOUT * SECOND)
        )
        self.now: Nanos = 0
        self.controller = Controller(plan, AsItIs(), Nearest())
        self.tell(Woke(), ReplicaStarted(0), WeightsLoaded(0, 100, 16), Warmed(0))

    def tell(self, *events: AnyEvent) -> list[AnyAction]:
        return [action for event in events for action in self.controller.handle(event, self.now)]

    def sleep(self, seconds: int) -> list[AnyAction]:
        self.now += seconds * SECOND
        return self.tell(Woke())

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


def test_who_was_waited_for_in_vain_is_not_named_for_as_long_then_others_and_then_the_store() -> None:
    subject = Subject()
    subject.tell(ScaleWanted(Role.BOTH, 2))
    assert subject.loads_from(1) == Place("gpu", 0)
    assert subject.loads_from(subject.goes_on(subject.sleep(TIMEOUT))) == Place("host", 9)
    subject.sleep(TIMEOUT - 1)
    subject.tell(ScaleWanted(Role.BOTH, 3))  # 0 is still shunned, 9 not yet
    assert subject.loads_from(3) == Place("host", 9)
    subject.tell(ScaleWanted(Role.BOTH, 4))
    subject.now += SECOND - 1
    assert subject.loads_from(4) == Place("host", 9)
    subject.now += 1
    assert subject.loads_from(subject.goes_on(subject.tell(Woke()))) == Place("gpu", 0)  # its time is over


def test_a_load_that_comes_clears_its_source_and_a_failed_one_shuns_it_for_a_minute_and_then_for_two() -> None:
    subject = Subject()

    def fail() -> Place:
        subject.tell(ScaleWanted(Role.BOTH, 2))
        replica = next(iter(subject.controller.states[Role.BOTH].coming))
        source = subject.loads_from(replica)
        subject.tell(ScaleWanted(Role.BOTH, 1), LoadFailed(replica, "cut off"), ReplicaStopped(replica))
        return source

    assert [fail(), fail(), fail()] == [Place("gpu", 0), Place("host", 9), STORE]
    subject.now += 60 * SECOND
    assert [fail(), fail(), fail()] == [Place("gpu", 0), Place("host", 9), STORE]
    subject.now += 60 * SECOND
    assert fail() == STORE
    subject.now += 60 * SECOND
    subject.tell(ScaleWanted(Role.BOTH, 2))
    replica = next(iter(subject.controller.states[Role.BOTH].coming))
    assert subject.loads_from(replica) == Place("gpu", 0)
    subject.tell(WeightsLoaded(replica, 100, 16), Warmed(replica))
    subject.tell(ScaleWanted(Role.BOTH, 3))
    assert subject.loads_from(next(iter(subject.controller.states[Role.BOTH].coming))) == Place("gpu", 0)
