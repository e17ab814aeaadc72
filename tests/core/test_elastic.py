"""The controller of a fleet that grows and shrinks: damping, victims, places, nodes that go; and what holds whatever happens."""

from __future__ import annotations

import itertools
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from squall.core.actions import AnyAction, Decided, LoadWeights, Reply, Send, StartReplica, StopReplica, WarmReplica
from squall.core.controller import Controller
from squall.core.damping import bounded, lowered, within
from squall.core.demand import Demand
from squall.core.events import (
    AnyEvent,
    Arrived,
    Cancelled,
    Emptied,
    LoadFailed,
    NodeDown,
    NodeUp,
    Progressed,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    ScaleWanted,
    Submitted,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import Bounds, FleetPlan, Patience, Slots
from squall.core.fleet_view import LoadView, Place, ScaleView, Transfer, Wanted
from squall.core.lifecycle import Phase
from squall.core.router import Router
from squall.core.types import MILLISECOND, ROUTER, SECOND, Nanos, ReplicaId, Request, RequestId, Role
from squall.policies.route import Pull

BOTH = Role.BOTH


class Dial(Struct):
    """A scale policy that a test turns by hand; None: it has no opinion."""

    wanted: int | None

    def __call__(self, _view: ScaleView) -> Wanted:
        return Wanted({} if self.wanted is None else {BOTH: self.wanted}, "turned")


class Counts:
    """What a router would say."""

    def __init__(self) -> None:
        self.both = Demand()
        self.requests: dict[ReplicaId, int] = {}

    def demand(self, _role: Role) -> Demand:
        return self.both

    def outstanding(self, replica: ReplicaId) -> tuple[int, int]:
        return self.requests.get(replica, 0), 0


class Subject:
    """A controller, its dial and its router's counts; time passes only where a test says so."""

    def __init__(
        self, wanted: int, most: int = 8, least: int = 0, per_node: int = 4, patience: Patience | None = None, **more: object
    ):
        self.dial = Dial(wanted)
        self.counts = Counts()
        bounds = {BOTH: Bounds(least, most, wanted)}
        plan = FleetPlan(bounds, Slots(8, per_node, **more), patience=patience or Patience())  # type: ignore[arg-type]
        self.controller = Controller(plan, self.dial)
        self.controller.traffic = self.counts
        self.now: Nanos = 0
        self.tell(Woke())

    def tell(self, *events: AnyEvent) -> list[AnyAction]:
        return [action for event in events for action in self.controller.handle(event, self.now)]

    def up(self, *replicas: ReplicaId) -> None:
        for replica in replicas:
            self.tell(ReplicaStarted(replica), WeightsLoaded(replica, 100, 16), Warmed(replica))

    def turn(self, wanted: int | None) -> list[AnyAction]:
        self.dial.wanted = wanted
        return self.tell(Woke())

    def sleep(self, seconds: float) -> list[AnyAction]:
        """Wake-ups as they are wanted, for so long."""
        until = self.now + round(seconds * SECOND)
        actions: list[AnyAction] = []
        while (at := self.controller.wake_at) is not None and at <= until:
            self.now = max(self.now, at)
            actions += self.tell(Woke())
        self.now = until
        return actions


def down(replica: ReplicaId) -> Send:
    return Send(ROUTER, ReplicaDown(replica, lost=False))


def up(replica: ReplicaId) -> Send:
    return Send(ROUTER, ReplicaUp(replica, 100, 16))


def test_upwards_at_once_and_then_at_most_every_tenth_of_a_second() -> None:
    subject = Subject(1)
    assert subject.turn(2) == [Decided(BOTH, 1, 2, "turned"), StartReplica(1)]
    subject.now = 50 * MILLISECOND
    assert subject.turn(4) == []  # loads on their way do not hold it up, only the interval does
    subject.now = 100 * MILLISECOND
    assert subject.turn(4) == [Decided(BOTH, 2, 4, "turned"), StartReplica(2), StartReplica(3)]


def test_every_role_changes_for_a_reason_of_its_own() -> None:
    counts = {Role.PREFILL: 2, Role.DECODE: 3}
    plan = FleetPlan({role: Bounds(1, 4, 1) for role in counts}, Slots(8, 8))
    controller = Controller(plan, lambda _: Wanted(counts, {Role.PREFILL: "prompts wait", Role.DECODE: "KV is promised"}))
    controller.traffic = Counts()
    decided = [action for action in controller.handle(Woke(), 0) if isinstance(action, Decided)]
    assert decided == [Decided(Role.PREFILL, 1, 2, "prompts wait"), Decided(Role.DECODE, 1, 3, "KV is promised")]


def test_downwards_only_to_what_was_wanted_at_most_over_the_window() -> None:
    subject = Subject(4)
    subject.up(0, 1, 2, 3)
    subject.sleep(40)
    subject.turn(1)
    assert subject.sleep(10) == []
    subject.turn(3)
    assert subject.sleep(1) == []
    subject.turn(1)
    assert subject.sleep(18.9) == []
    assert subject.sleep(1)[:2] == [Decided(BOTH, 4, 3, "turned"), down(3)]


def test_downwards_once_a_window() -> None:
    subject = Subject(5)
    subject.up(0, 1, 2, 3, 4)
    subject.sleep(40)
    subject.turn(4)
    subject.sleep(15)
    subject.turn(1)
    assert subject.sleep(16)[0] == Decided(BOTH, 5, 4, "turned")
    assert not any(isinstance(action, Decided) for action in subject.sleep(28))  # though one was enough over the latest thirty
    assert subject.sleep(2)[0] == Decided(BOTH, 4, 1, "turned")


class Apart(Struct):
    """So many of each role, by what there is to do."""

    reactive: ClassVar[bool] = True
    prefill: int
    decode: int

    def __call__(self, _view: ScaleView) -> Wanted:
        return Wanted({Role.PREFILL: self.prefill, Role.DECODE: self.decode}, "turned")


def test_a_size_that_was_too_small_is_left_alone_but_where_another_role_has_no_place() -> None:
    dial, counts = Apart(1, 3), Counts()
    plan = FleetPlan({Role.PREFILL: Bounds(1, 3, 1), Role.DECODE: Bounds(1, 3, 3)}, Slots(4, 4))
    controller = Controller(plan, dial)
    controller.traffic = counts
    instants = itertools.count(0, SECOND)

    def decided_within(seconds: int) -> list[tuple[Role, int, int]]:
        found = []
        for now in itertools.islice(instants, seconds):
            counts.both.num_arrived += 20
            counts.both.num_arrived_tokens += 2000
            found += [one for one in controller.handle(Woke(), now) if isinstance(one, Decided)]
        return [(one.role, one.before, one.after) for one in found]

    assert decided_within(60) == []
    dial.decode = 2
    assert decided_within(40) == [(Role.DECODE, 3, 2)]
    dial.decode = 3
    assert decided_within(40) == [(Role.DECODE, 2, 3)]
    dial.decode = 2
    assert decided_within(300) == []  # two were too few
    dial.prefill = 2
    assert decided_within(2) == [(Role.PREFILL, 1, 2), (Role.DECODE, 3, 2)]


class Fullness(Struct):
    """One more where over 80 % of the KV blocks are promised."""

    def __call__(self, view: ScaleView) -> Wanted:
        seen = view.roles[BOTH]
        full = seen.num_promised_tokens / (seen.num_blocks * seen.block_size)
        return Wanted({BOTH: seen.num_ready + (full > 0.8)}, f"{full:.0%}")


def test_whoever_is_left_has_blocks_of_its_own_only() -> None:
    """field issue 2: 1,920 tokens fill 60 % of two pools of 1,600, and would fill 120 % of one."""
    subject = Subject(2)
    subject.up(0, 1)
    subject.counts.both.num_promised_tokens = 1920
    state = subject.controller.states[BOTH]
    assert lowered(Fullness(), subject.controller, state, 1) == 2
    subject.counts.both.num_promised_tokens = 1200
    assert lowered(Fullness(), subject.controller, state, 1) == 1


def test_no_opinion_keeps_the_target() -> None:
    """field issues 9, 16 and 17: what is not known is not zero."""
    subject = Subject(3)
    subject.up(0, 1, 2)
    assert subject.turn(None) == []
    assert subject.sleep(600) == []
    assert subject.controller.states[BOTH].target == 3


def test_rates_that_are_not_known_are_none_and_not_zero() -> None:
    """field issues 9 and 17."""
    subject = Subject(1)
    seen = subject.controller.states[BOTH]
    assert (seen.arrived_per_s, seen.arrived_tokens_per_s, seen.mean_unfinished(10.0)) == (None, None, None)
    assert (seen.block_size, seen.next_ready_s) == (0, None)
    subject.sleep(20)
    assert (seen.arrived_per_s, seen.mean_unfinished(10.0)) == (0.0, 0.0)


def test_a_replica_that_reports_nothing_still_counts_with_what_it_has() -> None:
    """field issues 9, 10 and 13: one silent replica is not idle, and does not hold up the others."""
    subject = Subject(2)
    subject.up(0, 1)
    subject.counts.both.num_running = 40
    subject.counts.requests = {0: 0, 1: 40}
    subject.sleep(60)
    subject.turn(1)
    actions = subject.sleep(40)
    assert down(0) in actions
    assert down(1) not in actions


def test_the_least_loaded_goes_first_and_before_it_whoever_is_not_ready() -> None:
    """field issue 51."""
    subject = Subject(4, patience=Patience(down_window=0))
    subject.up(0, 1, 2)
    subject.counts.requests = {0: 5, 1: 9, 2: 7}
    assert subject.turn(3)[1:] == [StopReplica(3)]
    assert subject.turn(2)[1:] == [down(0)]
    assert subject.turn(1)[1:] == [down(2)]


def test_a_draining_or_idle_replica_is_revived_before_anything_is_started() -> None:
    subject = Subject(3, patience=Patience(up_interval=0, down_window=0, idle_ttl=333 * MILLISECOND))
    subject.up(0, 1, 2)
    subject.turn(1)
    subject.tell(Emptied(2))
    assert [subject.controller.fleet[replica].phase for replica in range(3)] == [Phase.READY, Phase.DRAINING, Phase.IDLE]
    assert subject.turn(4)[1:] == [up(1), up(2), StartReplica(3)]


def test_an_idle_replica_stops_after_its_ttl_to_the_nanosecond() -> None:
    subject = Subject(2, patience=Patience(down_window=0, idle_ttl=333 * MILLISECOND))
    subject.up(0, 1)
    subject.turn(1)
    subject.tell(Emptied(1))
    begin = subject.now
    while not (actions := subject.tell(Woke())):
        assert subject.controller.wake_at is not None
        subject.now = subject.controller.wake_at
    assert (actions, subject.now - begin) == ([StopReplica(1)], 333 * MILLISECOND)


def test_a_replica_that_never_answers_is_given_up_and_another_slot_is_tried() -> None:
    """field issues 6 and 7."""
    subject = Subject(1, patience=Patience(start_timeout=60 * SECOND))
    subject.up(0)
    subject.turn(2)
    actions = subject.sleep(61)
    assert actions == [StopReplica(1), StartReplica(2)]


def test_a_replica_that_never_answers_does_not_keep_the_fleet_from_shrinking() -> None:
    """field issues 6 and 7."""
    subject = Subject(1)
    subject.up(0)
    subject.sleep(60)
    subject.turn(3)
    subject.turn(1)
    assert subject.sleep(31) == [Decided(BOTH, 3, 1, "turned"), StopReplica(1), StopReplica(2)]


def test_more_than_there_are_slots_is_not_waited_for() -> None:
    subject = Subject(1, most=20)
    assert subject.turn(20)[0] == Decided(BOTH, 1, 8, "turned; there is no place for 12 more")
    assert subject.sleep(10) == []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 40)), min_size=2, max_size=2),
    st.integers(0, 90),
)
def test_above_the_budget_a_role_gives_up_one_at_a_time_whoever_is_furthest_above_its_minimum(
    sizes: list[tuple[int, int, int]], num_slots: int
) -> None:
    bounds = {role: Bounds(low, low + more, low) for role, (low, more, _) in zip((Role.PREFILL, Role.DECODE), sizes, strict=True)}
    states = Controller(FleetPlan(bounds, Slots(num_slots, 1)), Dial(None)).states
    wanted = {role: low + min(extra, more) for role, (low, more, extra) in zip(bounds, sizes, strict=True)}
    expected = {role: max(count, 1) if any(wanted.values()) and bounds[role].maximum else count for role, count in wanted.items()}
    while sum(expected.values()) > num_slots:
        above = max(expected, key=lambda role: (expected[role] - bounds[role].minimum, expected[role]))
        if not expected[above]:
            break
        expected[above] -= 1
    counts, whys = bounded(states, wanted)
    within(states, counts, num_slots, whys)
    assert counts == expected


def test_somebody_may_say_how_many_and_the_policy_takes_over_again() -> None:
    """field issue 8: from what is observed, not from what was written last."""
    subject = Subject(1)
    subject.up(0)
    assert subject.tell(ScaleWanted(BOTH, 3)) == [Decided(BOTH, 1, 3, "asked for"), StartReplica(1), StartReplica(2)]
    assert subject.tell(ScaleWanted(BOTH, 1)) == [Decided(BOTH, 3, 1, "asked for"), StopReplica(1), StopReplica(2)]
    assert subject.tell(ScaleWanted(BOTH)) == []


def test_a_replica_that_fails_is_replaced_on_another_slot_at_once() -> None:
    subject = Subject(2)
    subject.up(0, 1)
    assert subject.tell(ReplicaLost(0, "killed")) == [Send(ROUTER, ReplicaDown(0, lost=True)), StartReplica(2)]


def test_whoever_is_on_a_node_that_is_reclaimed_serves_until_there_is_another() -> None:
    subject = Subject(2, per_node=2)
    subject.up(0, 1)
    assert subject.tell(NodeDown(0, 60 * SECOND)) == [StartReplica(2), StartReplica(3)]
    assert subject.tell(ReplicaStarted(2), WeightsLoaded(2, 100, 16), Warmed(2))[-1] == up(2)
    actions = subject.tell(ReplicaStarted(3), WeightsLoaded(3, 100, 16), Warmed(3))
    assert actions[-3:] == [up(3), down(0), down(1)]
    assert subject.tell(Emptied(0)) == [StopReplica(0)]
    subject.now = 60 * SECOND
    assert subject.tell(NodeDown(0, 60 * SECOND)) == []
    assert subject.tell(ReplicaLost(1, "reclaimed")) == [Send(ROUTER, ReplicaDown(1, lost=True))]
    assert subject.tell(NodeUp(0)) == []


def test_half_of_the_notice_is_the_most_that_is_waited_for_a_replacement() -> None:
    subject = Subject(1, per_node=1)
    subject.up(0)
    subject.tell(NodeDown(0, 60 * SECOND))
    assert down(0) not in subject.sleep(29)
    assert down(0) in subject.sleep(2)


class Chain(Struct):
    """Whoever has the weights starts a chain through all targets."""

    def __call__(self, view: LoadView) -> list[Transfer]:
        source = Place("gpu", view.sources[0].replica) if view.sources else Place("store")
        return [Transfer(view.model, source, tuple(target.replica for target in view.targets), "chain")]


def test_those_that_start_together_are_planned_together_and_go_on_when_their_source_dies() -> None:
    subject = Subject(1)
    subject.controller = Controller(subject.controller.plan, subject.dial, Chain())
    subject.tell(Woke())
    subject.up(0)
    subject.turn(4)
    chain = Transfer("", Place("gpu", 0), (1, 2, 3), "chain")
    assert subject.tell(ReplicaStarted(2), ReplicaStarted(1), ReplicaStarted(3)) == [LoadWeights(r, chain) for r in (2, 1, 3)]
    rest = Transfer("", Place("store"), (1, 2, 3), "chain")
    actions = subject.tell(ReplicaLost(0, "killed"))
    assert [action for action in actions if isinstance(action, LoadWeights)] == [LoadWeights(r, rest) for r in (1, 2, 3)]
    subject.tell(WeightsLoaded(1, 100, 16))
    rest = Transfer("", Place("gpu", 1), (3,), "chain")
    actions = subject.tell(ReplicaLost(2, "killed"))
    assert LoadWeights(3, rest) in actions


# -- whatever happens


class World:
    """Performs the controller's actions, some of them badly, in any order that the contract allows."""

    def __init__(self) -> None:
        self.pending: dict[ReplicaId, AnyAction] = {}
        self.processes: set[ReplicaId] = set()
        self.known: set[ReplicaId] = set()
        self.draining: set[ReplicaId] = set()
        self.subject = Subject(2, most=6, patience=Patience(down_window=SECOND, start_timeout=5 * SECOND))
        self.perform([StartReplica(0), StartReplica(1)])

    def tell(self, event: AnyEvent) -> None:
        self.perform(self.subject.tell(event))

    def perform(self, actions: list[AnyAction]) -> None:
        for action in actions:
            match action:
                case Send(_, ReplicaUp(replica)):
                    assert replica in self.processes
                    assert replica not in self.known
                    self.known.add(replica)
                    self.draining.discard(replica)
                case Send(_, ReplicaDown(replica, lost)):
                    self.known.discard(replica)
                    self.draining.discard(replica)
                    if not lost:
                        self.draining.add(replica)
                case StartReplica(replica):
                    assert replica not in self.processes
                    self.processes.add(replica)
                    self.pending[replica] = action
                case LoadWeights(replica) | WarmReplica(replica) | StopReplica(replica):
                    assert replica in self.processes
                    self.pending[replica] = action
        assert self.processes <= set(range(8))

    def play(self, replica: ReplicaId, well: bool) -> None:
        """The next thing that can happen to `replica` happens, well or badly."""
        if replica not in self.processes:
            return
        match self.pending.pop(replica, None):
            case StopReplica():
                self.processes.remove(replica)
                self.draining.discard(replica)
                self.tell(ReplicaStopped(replica))
            case LoadWeights() if not well:
                self.tell(LoadFailed(replica, "bad luck"))
            case _ if not well:
                self.processes.remove(replica)
                self.draining.discard(replica)
                self.tell(ReplicaLost(replica, "bad luck"))
            case StartReplica():
                self.tell(ReplicaStarted(replica))
            case LoadWeights():
                self.tell(WeightsLoaded(replica, 100, 16))
            case WarmReplica():
                self.tell(Warmed(replica))
            case None if replica in self.draining:
                self.draining.remove(replica)
                self.tell(Emptied(replica))


MOVES = st.one_of(
    st.tuples(st.just("play"), st.integers(0, 7), st.booleans()),
    st.tuples(st.just("turn"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("sleep"), st.integers(1, 40), st.booleans()),
    st.tuples(st.just("node"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("notice"), st.integers(0, 1), st.booleans()),
)


@settings(max_examples=100, deadline=None)
@given(moves=st.lists(MOVES, max_size=50), wanted=st.integers(1, 6))
def test_the_fleet_comes_to_what_is_wanted_whatever_happened_on_the_way(moves: list[tuple[str, int, bool]], wanted: int) -> None:
    world = World()
    subject = world.subject
    for kind, number, flag in moves:
        match kind:
            case "play":
                world.play(number, flag)
            case "turn":
                subject.dial.wanted = None if number == 9 else number
                world.tell(Woke())
            case "sleep":
                world.perform(subject.sleep(number / 10))
            case "notice":
                world.tell(NodeDown(number, subject.now + 5 * SECOND))
            case "node" if flag:
                world.tell(NodeUp(number))
            case "node":
                world.tell(NodeDown(number, subject.now))
                for replica in [replica for replica in sorted(world.processes) if replica // 4 == number]:
                    if not isinstance(world.pending.get(replica), StopReplica):
                        world.pending.pop(replica, None)
                        world.play(replica, well=False)
    world.tell(NodeUp(0))
    world.tell(NodeUp(1))
    subject.dial.wanted = wanted
    for _ in range(60):
        world.perform(subject.sleep(2.0))
        for replica in range(8):
            world.play(replica, well=True)
    assert len(world.known) == wanted
    assert world.processes == world.known


# -- what the router counts


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["arrive", "first", "finish", "cancel", "lose", "up"]), st.integers(0, 2)), max_size=80
    )
)
def test_what_is_asked_of_the_fleet_is_counted_right_whatever_happens(moves: list[tuple[str, int]]) -> None:
    router = Router(Pull(3), 100, 10**6, 2, elastic=True)
    waiting: dict[ReplicaId, list[RequestId]] = {}
    running: dict[ReplicaId, list[RequestId]] = {}
    prompts: dict[RequestId, int] = {}
    arrived = 0

    def tell(event: AnyEvent) -> None:
        for action in router.handle(event, arrived):
            if isinstance(action, Send) and isinstance(action.event, Submitted):
                waiting[action.to].append(action.event.request.id)
            elif isinstance(action, Reply):
                prompts.pop(action.request, None)

    for kind, replica in moves:
        match kind:
            case "arrive":
                prompts[arrived] = 100 + arrived
                tell(Arrived(Request(arrived, arrived, 100 + arrived, 10)))
                arrived += 1
            case "up" if replica not in waiting:
                waiting[replica], running[replica] = [], []
                tell(ReplicaUp(replica, 1000, 16))
            case "lose" if replica in waiting:
                del waiting[replica], running[replica]
                tell(ReplicaDown(replica, lost=True))
            case "first" if waiting.get(replica):
                running[replica].append(waiting[replica].pop(0))
                tell(Progressed(replica, first=(running[replica][-1],)))
            case "finish" if running.get(replica):
                gone = running[replica].pop(0)
                del prompts[gone]
                tell(Progressed(replica, finished=(gone,)))
            case "cancel" if waiting.get(replica):
                gone = waiting[replica].pop()
                del prompts[gone]
                tell(Cancelled(gone))
                tell(Progressed(replica, finished=(gone,)))
        at_replicas = [id for ids in waiting.values() for id in ids]
        begun = [id for ids in running.values() for id in ids]
        queued = prompts.keys() - set(at_replicas) - set(begun)
        demand = router.demand(BOTH)
        assert (demand.num_queued, demand.num_waiting, demand.num_running) == (len(queued), len(at_replicas), len(begun))
        assert demand.num_queued_tokens == sum(prompts[id] for id in queued)
        assert demand.num_waiting_tokens == sum(prompts[id] for id in at_replicas)
        assert demand.num_promised_tokens == sum(prompts[id] + 10 for id in (*at_replicas, *begun))
        assert (demand.num_arrived, demand.oldest_queued_at is None) == (arrived, not queued)
