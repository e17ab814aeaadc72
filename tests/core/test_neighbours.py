"""Controllers of several fleets on one cluster: a GPU is one fleet's, minima stay free, and who waits is woken."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from squall.core.actions import AnyAction, Decided, LoadWeights, Send, StartReplica, StopReplica, TellNeighbours, WarmReplica
from squall.core.controller import Controller
from squall.core.events import (
    AnyEvent,
    Emptied,
    GpusHeld,
    NodeDown,
    NodeUp,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import Bounds, FleetPlan, Patience, Share, Slots, Weights
from squall.core.fleet_view import ScaleView, Transfer, Wanted
from squall.core.types import ROUTER, SECOND, Nanos, ReplicaId, Role

BOTH = Role.BOTH


class Dial:
    """A scale policy that wants what it is turned to."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, view: ScaleView, /) -> Wanted:
        return Wanted({BOTH: self.count}, "turned")


class Body:
    """A fleet whose processes do at once what they are told, when they are asked to."""

    def __init__(self, plan: FleetPlan, wanted: int) -> None:
        self.dial = Dial(wanted)
        self.plan = plan
        self.controller = Controller(plan, self.dial)
        self.due: deque[AnyEvent] = deque()
        self.log: list[tuple[Nanos, int, AnyEvent, list[AnyAction]]] = []
        self.running: set[ReplicaId] = set()
        self.neighbours: list[Body] = []
        self.now: Nanos = 0

    def tell(self, event: AnyEvent, now: Nanos) -> None:
        actions = self.controller.handle(event, now)
        self.log.append((now, self.dial.count, event, actions))
        for action in actions:
            match action:
                case StartReplica(replica):
                    self.running.add(replica)
                    self.due.append(ReplicaStarted(replica))
                case LoadWeights(replica):
                    self.due.append(WeightsLoaded(replica, 100, 16))
                case WarmReplica(replica):
                    self.due.append(Warmed(replica))
                case StopReplica(replica):
                    self.due = deque(event for event in self.due if getattr(event, "replica", None) != replica)
                    self.due.append(ReplicaStopped(replica))
                case Send(to, ReplicaDown(replica, lost=False)) if to == ROUTER:
                    self.due.append(Emptied(replica))
                case TellNeighbours(said):
                    for other in self.neighbours:
                        heard = other.controller.handle(said, now)
                        assert heard == []
                        other.log.append((now, other.dial.count, said, heard))

    def step(self, now: Nanos) -> None:
        """What it has begun first ends."""
        if self.due:
            event = self.due.popleft()
            if isinstance(event, ReplicaStopped):
                self.running.discard(event.replica)
            self.tell(event, now)

    def lose(self, replica: ReplicaId, now: Nanos) -> None:
        self.running.discard(replica)
        self.due = deque(event for event in self.due if getattr(event, "replica", None) != replica)
        self.tell(ReplicaLost(replica, "killed"), now)

    @property
    def gpus(self) -> list[int]:
        return [gpu for replica in self.running for gpu in self.plan.slots.gpus(replica)]


def plan(fleet: int, minima: tuple[int, ...], size: int, least: int, nodes: int = 2, per_node: int = 4) -> FleetPlan:
    share = Share(fleet, minima, nodes * per_node, per_node, size)
    slots = Slots(nodes * (per_node // size), per_node // size, shared=share)
    return FleetPlan({BOTH: Bounds(least, slots.num, least)}, slots, patience=Patience(down_window=0, idle_ttl=0))


def bodies(*fleets: tuple[int, int, int], nodes: int = 2) -> list[Body]:
    """GPUs of a replica, the least replicas, and those wanted, of each fleet."""
    minima = tuple(size * least for size, least, _ in fleets)
    found = [Body(plan(number, minima, size, least, nodes), wanted) for number, (size, least, wanted) in enumerate(fleets)]
    for body in found:
        body.neighbours = [other for other in found if other is not body]
    return found


def settle(found: list[Body], now: Nanos) -> None:
    """Until nothing is left to happen at this instant."""
    while True:
        due = [body for body in found if body.due or (body.controller.wake_at or 0) <= now]
        if not due:
            return
        for body in due:
            if body.due:
                body.step(now)
            else:
                body.tell(Woke(), now)


def test_who_waits_for_gpus_is_woken_by_whoever_gives_them_back() -> None:
    first, second = bodies((1, 0, 8), (1, 0, 3))
    for body in (first, second):
        body.tell(Woke(), 0)
    settle([first, second], 0)
    assert (len(first.gpus), len(second.gpus)) == (8, 0)
    assert second.controller.gpus == (0, 3)
    first.dial.count = 7
    first.tell(Woke(), SECOND // 2)
    settle([first, second], SECOND // 2)  # nobody tells the second anything but the first
    assert (len(first.gpus), len(second.gpus)) == (7, 1)
    assert second.controller.gpus == (1, 2)
    assert [event for at, _, event, _ in second.log if at == SECOND // 2][:2] == [GpusHeld(0, tuple(range(7))), Woke()]


def test_a_fleet_begins_in_the_places_that_its_plan_names_first() -> None:
    named = plan(0, (0, 0), 1, 0)
    body = Body(replace(named, slots=replace(named.slots, first=(6, 3))), 3)
    body.tell(Woke(), 0)
    assert body.running == {0, 3, 6}


def test_the_target_says_that_there_is_no_place_and_is_raised_when_there_is() -> None:
    first, second = bodies((1, 0, 6), (1, 0, 3))
    first.tell(Woke(), 0)
    second.tell(Woke(), 0)
    first.dial.count = 0
    first.tell(Woke(), SECOND)
    settle([first, second], SECOND)
    decided = [action for *_, actions in second.log for action in actions if isinstance(action, Decided)]
    assert decided == [Decided(BOTH, 0, 2, "turned; there is no place for 1 more"), Decided(BOTH, 2, 3, "turned")]


def test_what_another_fleet_needs_for_its_least_replicas_is_left_to_it() -> None:
    """Whoever comes first wants all."""
    first, second = bodies((1, 1, 8), (2, 2, 2))
    first.tell(Woke(), 0)
    assert len(first.gpus) == 4
    second.tell(Woke(), 0)
    settle([first, second], 0)
    assert (len(first.gpus), len(second.gpus)) == (4, 4)


def test_a_lost_replica_of_the_least_ones_finds_its_gpu_again() -> None:
    first, second = bodies((1, 0, 8), (1, 1, 1))
    for body in (second, first):
        body.tell(Woke(), 0)
    settle([first, second], 0)
    assert (len(first.gpus), len(second.gpus)) == (7, 1)
    [lost] = second.running
    second.lose(lost, SECOND)
    settle([first, second], SECOND)
    assert (len(first.gpus), len(second.gpus)) == (7, 0)
    assert second.controller.wake_at is not None
    second.tell(Woke(), 3 * SECOND)
    settle([first, second], 3 * SECOND)
    assert (len(first.gpus), len(second.gpus)) == (7, 1)


class Cache:
    """A load policy that keeps unused copies for ever."""

    host_ttl_s = None

    def __call__(self, _: object) -> list[Transfer]:
        return []


def with_memory(fleet: int, host_bytes: int) -> Controller:
    """Of weights of 60 bytes, in nodes of one GPU."""
    share = Share(fleet, (0, 0), 3, 1, 1, host_bytes)
    weights = Weights("m", 60)
    return Controller(FleetPlan({BOTH: Bounds(0, 3, 0)}, Slots(3, 1, shared=share), weights), Dial(1), Cache())


def up(controller: Controller, replica: ReplicaId = 0) -> list[AnyAction]:
    """The replica that is wanted comes up."""
    actions = controller.handle(Woke(), 0)
    for event in (ReplicaStarted(replica), WeightsLoaded(replica, 100, 16), Warmed(replica)):
        actions += controller.handle(event, 0)
    return actions


def copies(controller: Controller) -> list[int]:
    return sorted(controller._sources.host_copies)


def test_a_copy_in_use_is_told_to_the_others_and_takes_the_memory_of_the_node() -> None:
    first, second = with_memory(0, 100), with_memory(1, 100)
    told = [action.event for action in up(first) if isinstance(action, TellNeighbours)]
    assert told == [GpusHeld(0, (0,), (), 60), GpusHeld(0, (0,), (0,), 60)]
    for event in told:
        second.handle(event, 0)
    second.handle(GpusHeld(0, (), (0,), 60), 0)  # its GPU is free again, its memory is not
    up(second)
    assert copies(second) == []  # 120 bytes do not fit


def test_a_copy_fits_beside_anothers_where_there_is_room_for_both() -> None:
    second = with_memory(1, 120)
    second.handle(GpusHeld(0, (), (0,), 60), 0)
    up(second)
    assert copies(second) == [0]


def test_a_copy_that_nobody_uses_goes_where_another_fleet_needs_the_memory() -> None:
    second = with_memory(1, 100)
    up(second)
    second.handle(GpusHeld(0, (1,), (0,), 60), SECOND)
    assert copies(second) == [0]  # it is used
    second.handle(ReplicaLost(0, "killed"), SECOND)
    assert copies(second) == [0]
    second.handle(GpusHeld(0, (1,), (1,), 60), SECOND)
    assert copies(second) == [0]  # elsewhere
    second.handle(GpusHeld(0, (1,), (0, 1), 60), SECOND)
    assert copies(second) == []


def test_a_fleet_alone_tells_nobody() -> None:
    controller = Controller(FleetPlan.fixed(2), Dial(2))
    actions = controller.handle(Woke(), 0)
    assert not any(isinstance(action, TellNeighbours) for action in actions)
    with pytest.raises(ValueError, match="alone"):
        _ = controller.gpus


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["turn", "step", "lose", "node", "back", "sleep"]), st.integers(0, 9)),
    max_size=60,
)


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=3), st.lists(st.integers(0, 1), min_size=3, max_size=3), STEPS)
def test_a_gpu_is_one_fleets_whatever_happens_and_each_log_alone_tells_why(
    sizes: list[int], least: list[int], steps: list[tuple[int, str, int]]
) -> None:
    found = bodies(*((size, low, low) for size, low in zip(sizes, least, strict=False)), nodes=3)
    now = 0
    for body in found:
        body.tell(Woke(), now)
    for number, what, amount in steps:
        body = found[number % len(found)]
        settle_wakes(found, now)
        now += SECOND // 4
        match what:
            case "turn":
                body.dial.count = amount
                body.tell(Woke(), now)
            case "step":
                body.step(now)
            case "lose" if body.running:
                body.lose(sorted(body.running)[amount % len(body.running)], now)
            case "node":
                node = amount % 3
                for each in found:
                    each.tell(NodeDown(node, now), now)
                for each in found:
                    for replica in [id for id in sorted(each.running) if node in each.plan.slots.nodes(id)]:
                        each.lose(replica, now)
            case "back":
                for each in found:
                    each.tell(NodeUp(amount % 3), now)
            case "sleep":
                now += SECOND * amount
                body.tell(Woke(), now)
        held = [gpu for each in found for gpu in each.gpus]
        assert len(held) == len(set(held)) <= 12
        for each in found:
            assert each.controller.gpus[0] == len(each.gpus)
    for each in found:
        check_replayed(each)


def settle_wakes(found: list[Body], now: Nanos) -> None:
    """As a driver does at the end of every instant."""
    while late := [body for body in found if body.controller.wake_at is not None and body.controller.wake_at <= now]:
        late[0].tell(Woke(), now)


def check_replayed(body: Body) -> None:
    dial = Dial(0)
    fresh = Controller(body.plan, dial)
    for now, count, event, actions in body.log:
        dial.count = count
        assert fresh.handle(event, now) == actions
