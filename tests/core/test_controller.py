"""The controller: a fleet that comes up, stays up and goes down, as lists of actions."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from squall.core.actions import AnyAction, Decided, LoadWeights, Send, StartReplica, StopReplica, WarmReplica
from squall.core.controller import Controller
from squall.core.events import (
    AnyEvent,
    Arrived,
    DrainWanted,
    Emptied,
    LayerArrived,
    LoadFailed,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import Bounds, FleetPlan, Patience, Slots
from squall.core.fleet_view import Place, ScaleView, Transfer, Wanted
from squall.core.lifecycle import Phase
from squall.core.types import ROUTER, SECOND, Nanos, ReplicaId, Request, Role
from squall.errors import IllegalTransition
from squall.policies.scale import Fixed

AT_ONCE = Patience(up_interval=0, down_window=0, idle_ttl=0)


def controller(num_replicas: int = 1) -> Controller:
    made = Controller(FleetPlan.fixed(num_replicas), Fixed())
    assert made.wake_at == 0
    made.handle(Woke(), 0)
    return made


def bring_up(c: Controller, replica: ReplicaId = 0, now: Nanos = 0) -> list[AnyAction]:
    """From STARTING to READY."""
    events: list[AnyEvent] = [ReplicaStarted(replica), WeightsLoaded(replica, 100, 16), Warmed(replica)]
    return [action for event in events for action in c.handle(event, now)]


def phases(c: Controller) -> list[Phase]:
    return [member.life.phase for member in c.fleet.values()]


def test_the_fleet_comes_up_step_by_step_and_the_router_is_told_of_each_replica() -> None:
    """field issue 43: each on its own; none waits until all are healthy."""
    c = Controller(FleetPlan.fixed(2), Fixed())
    assert c.handle(Woke(), 0) == [StartReplica(0), StartReplica(1)]
    assert c.wake_at is None
    assert c.handle(ReplicaStarted(1), 1) == [LoadWeights(1, Transfer("", Place("ssd", 0), (1,), "disk"))]
    assert c.handle(LayerArrived(1, 0), 2) == []
    assert c.handle(LayerArrived(1, 1), 3) == []
    assert c.fleet[1].layers_ready == 2
    assert c.handle(WeightsLoaded(1, 100, 16), 4) == [WarmReplica(1)]
    assert c.handle(Warmed(1), 5) == [Send(ROUTER, ReplicaUp(1, 100, 16))]
    assert phases(c) == [Phase.STARTING, Phase.READY]
    assert (c.num_ready, c.states[Role.BOTH].target) == (1, 2)


def test_a_lost_replica_is_reported_at_once_and_comes_back_after_a_second() -> None:
    """field issue 45: the fleet converges again by itself."""
    c = controller()
    bring_up(c)
    assert c.handle(ReplicaLost(0, "killed"), 3 * SECOND) == [Send(ROUTER, ReplicaDown(0, lost=True))]
    assert (phases(c), c.wake_at) == ([Phase.FAILED], 4 * SECOND)
    assert c.handle(Woke(), 4 * SECOND - 1) == []
    assert c.wake_at == 4 * SECOND
    assert c.handle(Woke(), 4 * SECOND) == [StartReplica(0)]
    assert bring_up(c)[-1] == Send(ROUTER, ReplicaUp(0, 100, 16))


def test_a_replica_that_was_never_up_is_lost_without_a_word_to_the_router() -> None:
    c = controller()
    assert c.handle(ReplicaLost(0, "killed"), 0) == []


def test_repeated_failures_back_off_to_a_minute() -> None:
    c = controller()
    now, waits = 0, []
    for _ in range(9):
        c.handle(ReplicaLost(0, "crash loop"), now)
        assert c.wake_at is not None
        waits.append((c.wake_at - now) // SECOND)
        now = c.wake_at
        assert c.handle(Woke(), now) == [StartReplica(0)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(("served", "wait"), [(59 * SECOND, 4 * SECOND), (60 * SECOND, SECOND)])
def test_a_replica_that_has_served_a_minute_starts_from_the_first_wait_again(served: Nanos, wait: Nanos) -> None:
    c = controller()
    now = 0
    for _ in range(2):
        c.handle(ReplicaLost(0, "early"), now)
        assert c.wake_at is not None
        now = c.wake_at
        c.handle(Woke(), now)
    bring_up(c, now=now)
    c.handle(ReplicaLost(0, "late"), now + served)
    assert c.wake_at == now + served + wait


def test_weights_that_cannot_be_loaded_end_the_process_before_the_next_try() -> None:
    c = controller()
    c.handle(ReplicaStarted(0), 0)
    assert c.handle(LoadFailed(0, "no such file"), 0) == [StopReplica(0)]
    assert c.handle(Woke(), SECOND) == []  # it still runs
    assert c.handle(ReplicaStopped(0), 2 * SECOND) == [StartReplica(0)]


def test_a_process_that_dies_while_it_is_stopped_is_started_again_only_when_it_has_stopped() -> None:
    c = controller()
    c.handle(ReplicaStarted(0), 0)
    c.handle(LoadFailed(0, "no such file"), 0)
    assert c.handle(ReplicaLost(0, "killed"), 0) == []
    assert c.handle(Woke(), SECOND) == []
    assert c.handle(ReplicaStopped(0), SECOND + 1) == [StartReplica(0)]


def test_a_process_that_ends_unasked_is_a_loss() -> None:
    c = controller()
    bring_up(c)
    assert c.handle(ReplicaStopped(0), 0) == [Send(ROUTER, ReplicaDown(0, lost=True))]
    assert c.handle(Woke(), SECOND) == [StartReplica(0)]


def test_one_replica_in_trouble_does_not_hold_up_the_others() -> None:
    c = controller(3)
    bring_up(c, 2)
    c.handle(ReplicaLost(0, "crash"), 0)
    c.handle(ReplicaLost(1, "crash"), SECOND // 2)
    assert c.wake_at == SECOND
    assert c.handle(Woke(), SECOND) == [StartReplica(0)]
    assert c.wake_at == 3 * SECOND // 2
    assert bring_up(c, 0)[-1] == Send(ROUTER, ReplicaUp(0, 100, 16))


# -- shutting down


def test_a_shutdown_drains_the_ready_and_stops_the_others_at_once() -> None:
    c = controller(4)
    bring_up(c, 0)
    c.handle(ReplicaStarted(1), 0)
    c.handle(ReplicaLost(2, "crash"), 0)
    assert c.handle(DrainWanted(), 1) == [
        Send(ROUTER, DrainWanted()),
        Send(ROUTER, ReplicaDown(0, lost=False)),
        StopReplica(1),
        StopReplica(3),
    ]
    assert (phases(c)[2], c.wake_at) == (Phase.OFF, None)  # it stays down
    assert c.handle(DrainWanted(), 2) == []
    assert c.handle(ReplicaStarted(3), 3) == []  # crossed with the stop
    assert c.handle(ReplicaStopped(3), 4) == []
    assert c.handle(WeightsLoaded(1, 100, 16), 4) == []
    assert c.handle(ReplicaStopped(1), 4) == []
    assert c.handle(Emptied(0), 5) == [StopReplica(0)]
    assert c.handle(ReplicaStopped(0), 6) == [Send(ROUTER, ReplicaDown(0, lost=True))]
    assert phases(c) == [Phase.OFF] * 4


def test_a_replica_that_dies_while_it_drains_is_reported_and_stays_down() -> None:
    c = controller()
    bring_up(c)
    c.handle(DrainWanted(), 1)
    assert c.handle(ReplicaLost(0, "killed"), 2) == [Send(ROUTER, ReplicaDown(0, lost=True))]
    assert c.handle(Emptied(0), 2) == []  # crossed with the loss
    assert (phases(c), c.wake_at) == ([Phase.OFF], None)


def test_the_routers_word_that_a_replica_is_empty_may_cross_with_its_loss() -> None:
    c, dial = dialled(1, 1)
    c.handle(Woke(), 0)
    bring_up(c)
    dial.wanted = 0
    c.handle(Woke(), 1)
    dial.wanted = 1
    assert c.handle(ReplicaLost(0, "killed"), 2) == [Send(ROUTER, ReplicaDown(0, lost=True)), decided(0, 1)]
    assert c.handle(Emptied(0), 2) == []
    assert (phases(c), c.wake_at) == ([Phase.FAILED], SECOND + 2)


# -- desired and observed are apart


class Dial(Struct):
    """A scale policy that a test turns by hand."""

    wanted: int

    def __call__(self, _view: ScaleView) -> Wanted:
        return Wanted({Role.BOTH: self.wanted}, "so it is turned")


def dialled(wanted: int, maximum: int, patience: Patience = AT_ONCE) -> tuple[Controller, Dial]:
    """A fleet that follows a dial."""
    dial = Dial(wanted)
    plan = FleetPlan({Role.BOTH: Bounds(0, maximum, wanted)}, Slots(maximum, maximum), patience=patience)
    return Controller(plan, dial), dial


def decided(before: int, after: int) -> Decided:
    return Decided(Role.BOTH, before, after, "so it is turned")


def test_a_policy_that_wants_fewer_gets_fewer_and_a_replica_that_still_drains_is_revived() -> None:
    c, dial = dialled(2, 2)
    c.handle(Woke(), 0)
    bring_up(c, 0)
    bring_up(c, 1)
    dial.wanted = 1
    assert c.handle(Woke(), 1) == [decided(2, 1), Send(ROUTER, ReplicaDown(1, lost=False))]
    dial.wanted = 2
    assert c.handle(Woke(), 2) == [decided(1, 2), Send(ROUTER, ReplicaUp(1, 100, 16))]
    assert c.handle(Emptied(1), 2) == []  # crossed with the revival
    assert phases(c) == [Phase.READY, Phase.READY]


def test_a_replica_that_is_wanted_again_while_it_stops_is_started_when_it_has_stopped() -> None:
    c, dial = dialled(1, 1)
    c.handle(Woke(), 0)
    dial.wanted = 0
    assert c.handle(Woke(), 1) == [decided(1, 0), StopReplica(0)]
    dial.wanted = 1
    assert c.handle(Woke(), 2) == [decided(0, 1)]
    assert c.handle(ReplicaStopped(0), 3) == [StartReplica(0)]


# -- what cannot happen


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Warmed(0), "replica 0 got Warmed while starting: 0.000s Launched starting"),
        (ReplicaStarted(7), "replica 7 is not of this fleet, which has 1"),
        (Arrived(Request(1, 0, 1, 1)), "the controller got Arrived, which is not for it"),
    ],
)
def test_what_cannot_happen_is_refused_and_changes_nothing(event: AnyEvent, message: str) -> None:
    c = controller()
    with pytest.raises(IllegalTransition, match=message):
        c.handle(event, 1)
    assert phases(c) == [Phase.STARTING]
    assert len(bring_up(c)) == 3


# -- whatever happens


class World:
    """Performs the controller's actions, some of them badly, in any order that the contract allows."""

    def __init__(self, num_replicas: int) -> None:
        self.controller = Controller(FleetPlan.fixed(num_replicas), Fixed())
        self.pending: dict[ReplicaId, AnyAction] = {}
        self.processes: set[ReplicaId] = set()
        self.known: set[ReplicaId] = set()  # up, to the router
        self.draining: set[ReplicaId] = set()
        self.emptied: set[ReplicaId] = set()
        self.now = 0

    def tell(self, event: AnyEvent) -> None:
        for action in self.controller.handle(event, self.now):
            match action:
                case Send(_, ReplicaUp(replica)):
                    assert replica in self.processes
                    assert replica not in self.known
                    self.known.add(replica)
                case Send(_, ReplicaDown(replica, lost)):
                    assert replica in self.known | self.draining | (self.emptied if lost else set())
                    for kept in (self.known, self.draining, self.emptied):
                        kept.discard(replica)
                    if not lost:
                        self.draining.add(replica)
                case StartReplica(replica):
                    assert replica not in self.processes
                    self.processes.add(replica)
                    self.pending[replica] = action
                case LoadWeights(replica) | WarmReplica(replica) | StopReplica(replica):
                    assert replica in self.processes
                    self.pending[replica] = action

    def play(self, replica: ReplicaId, well: bool) -> None:
        """The next thing that can happen to `replica` happens, well or badly."""
        action = self.pending.pop(replica, None)
        if replica not in self.processes:
            return
        match action:
            case StopReplica():
                self.processes.remove(replica)
                self.draining.discard(replica)
                if not well:
                    self.tell(ReplicaLost(replica, "bad luck"))
                self.tell(ReplicaStopped(replica))
            case LoadWeights() if not well:
                self.tell(LoadFailed(replica, "bad luck"))
            case _ if not well:
                self.processes.remove(replica)
                self.tell(ReplicaLost(replica, "bad luck"))
            case StartReplica():
                self.tell(ReplicaStarted(replica))
            case LoadWeights():
                self.tell(WeightsLoaded(replica, 100, 16))
            case WarmReplica():
                self.tell(Warmed(replica))
            case None if replica in self.draining:
                self.draining.remove(replica)
                self.emptied.add(replica)
                self.tell(Emptied(replica))

    def sleep(self) -> None:
        if self.controller.wake_at is not None:
            assert self.controller.wake_at >= self.now
            self.now = max(self.now, self.controller.wake_at)
            self.tell(Woke())
        self.now += SECOND // 3


@settings(max_examples=200, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), drain=st.booleans())
@example(
    moves=[(0, False), (3, False), (0, False), (1, False), (3, False), (2, False)], drain=False
)  # due while another event came
def test_the_fleet_converges_whatever_happens_on_the_way(moves: list[tuple[int, bool]], drain: bool) -> None:
    world = World(3)
    world.sleep()
    for replica, well in moves:
        if replica == 3:
            world.sleep()
        else:
            world.play(replica, well)
    if drain:
        world.tell(DrainWanted())
    for _ in range(12):
        for replica in range(3):
            world.play(replica, well=True)
        world.sleep()
    assert world.known == (set() if drain else {0, 1, 2})
    assert world.processes == world.known
    assert set(phases(world.controller)) == {Phase.OFF if drain else Phase.READY}
