"""What the simulated driver owes its machines, told with machines that say what they are to say."""

from collections.abc import Mapping, Sequence

from squall.core.actions import AnyAction, Send, StartReplica, StopReplica
from squall.core.events import AnyEvent, DrainWanted, ReplicaStarted, ReplicaStopped, RoleChanged, Woke
from squall.core.types import CONTROLLER, ROUTER, MachineId, Nanos, ReplicaId, Role
from squall.sim.driver import Driver
from squall.sim.linear import Linear
from squall.sim.loading import Loader
from squall.sim.world import World


class Scripted:
    """Answers an event of a kind with the actions it was given for it."""

    num_queued = 1  # as of a router: the simulation is not over

    def __init__(self, answers: Mapping[type, Sequence[AnyAction]], wake_at: Nanos | None = None) -> None:
        self.wake_at = wake_at
        self.heard: list[AnyEvent] = []
        self._answers = answers

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        self.wake_at = None
        self.heard.append(event)
        return list(self._answers.get(type(event), ()))


def test_who_begins_anew_hears_nothing_that_was_on_its_way_to_the_one_before_it() -> None:
    """A replica is stopped and started within one instant, between what was sent to it and what it hears."""
    to_the_first, to_the_second = RoleChanged(0, Role.PREFILL), RoleChanged(0, Role.DECODE)
    router = Scripted({DrainWanted: [Send(CONTROLLER, DrainWanted()), Send(0, to_the_first), Send(ROUTER, Woke())]})
    controller = Scripted(
        {
            Woke: [StartReplica(0)],
            DrainWanted: [StopReplica(0)],
            ReplicaStopped: [StartReplica(0)],
            ReplicaStarted: [Send(0, to_the_second)],
        },
        wake_at=0,
    )
    first, second = Scripted({}), Scripted({})
    machines: dict[MachineId, Scripted] = {ROUTER: router, CONTROLLER: controller, 0: first}

    def make(_replica: ReplicaId, _now: Nanos) -> Scripted:
        return second

    driver = Driver(machines, World([], Linear(fixed=16)), Loader({0: (8, 4)}), make=make)
    driver.run([(1000, DrainWanted())])
    assert controller.heard == [Woke(), ReplicaStarted(0), DrainWanted(), ReplicaStopped(0), ReplicaStarted(0)]
    assert first.heard == [to_the_second]  # when it had begun
    assert second.heard == [to_the_second]
    assert router.heard == [DrainWanted(), Woke()]
