"""Live pairs among the replicas of a fleet: who may be relieved, and who keeps its role."""

from squall.core.actions import AnyAction, LoadWeights, Send, StartReplica
from squall.core.controller import Controller
from squall.core.disaggregated import DisaggregatedRouter
from squall.core.events import (
    AnyEvent,
    Arrived,
    Disowned,
    HandoffFailed,
    Held,
    LivePaired,
    Offered,
    Progressed,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaUp,
    RoleChanged,
    ScaleWanted,
    Submitted,
    TakenOver,
    Unpaired,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import Bounds, FleetPlan, Slots, Weights
from squall.core.fleet_view import LoadPolicy
from squall.core.handoff_router import HandoffRouter
from squall.core.types import ROUTER, ReplicaId, Request, Role
from squall.policies.load import Disk
from squall.policies.route import LeastLoaded, LeastPromised
from tests.core.test_roles import AsItIs, Counts

PREFILL, DECODE = Role.PREFILL, Role.DECODE
LAYERS = 4


class Subject:
    """Prefill replicas 0 and 1, a decode replica 2, all ready; of eight slots five are free."""

    def __init__(self, requests: dict[ReplicaId, int], policy: LoadPolicy | None = None) -> None:
        bounds = {PREFILL: Bounds(1, 6, 2), DECODE: Bounds(1, 6, 1)}
        plan = FleetPlan(bounds, Slots(8, 8), Weights("m", 80, LAYERS), live_layers=LAYERS)
        self.controller = Controller(plan, AsItIs(), policy or Disk(live=True))
        self.controller.traffic = Counts(requests)
        self.tell(Woke())
        for replica in range(3):
            self.tell(ReplicaStarted(replica), WeightsLoaded(replica, 100, 16), Warmed(replica))

    def tell(self, *events: AnyEvent) -> list[AnyAction]:
        return [action for event in events for action in self.controller.handle(event, 0)]

    def want(self, prefill: int, decode: int) -> list[AnyAction]:
        self.controller.states[PREFILL].manual = prefill
        self.controller.states[DECODE].manual = decode
        return self.tell(ScaleWanted(PREFILL, prefill))


def pairs(actions: list[AnyAction]) -> set[tuple[ReplicaId, ReplicaId]]:
    """Targets and sources that hear of each other."""
    events = [action.event for action in actions if isinstance(action, Send)]
    return {(event.target, event.source) for event in events if isinstance(event, LivePaired)}


def changed(actions: list[AnyAction]) -> set[ReplicaId]:
    """Replicas that the router hears a new role of."""
    told = [action.event for action in actions if isinstance(action, Send) and action.to == ROUTER]
    return {event.replica for event in told if isinstance(event, RoleChanged)}


def test_nobody_of_a_pair_changes_its_role() -> None:
    subject = Subject({0: 5, 1: 3})
    assert StartReplica(3) in subject.want(3, 1)
    assert pairs(subject.tell(ReplicaStarted(3))) == {(3, 0)}
    turned = subject.want(1, 3)  # 1 may change, who shares a queue may not: one more is started
    assert changed(turned) == {1}
    assert StartReplica(4) in turned


def test_when_the_pair_has_ended_they_may() -> None:
    subject = Subject({0: 5, 1: 6})
    subject.want(3, 1)
    assert pairs(subject.tell(ReplicaStarted(3), WeightsLoaded(3, 100, 16), Warmed(3))) == {(3, 1)}
    subject.tell(Unpaired(3, 1))
    assert changed(subject.want(1, 3)) == {0, 3}


def test_a_replica_that_is_relieved_is_not_named_to_the_next_one() -> None:
    subject = Subject({0: 5, 1: 3})
    subject.want(4, 1)
    assert pairs(subject.tell(ReplicaStarted(3), ReplicaStarted(4))) == {(3, 0), (4, 1)}


def test_a_target_without_its_source_relieves_nobody_and_keeps_its_role_until_it_has_given_everything_back() -> None:
    requests = {0: 5, 1: 0}
    subject = Subject(requests)
    subject.want(3, 1)
    assert pairs(subject.tell(ReplicaStarted(3))) == {(3, 0)}
    alone = Unpaired(3, 0, lost=True)
    assert Send(3, alone) in subject.tell(ReplicaLost(0, "a fault"))
    subject.tell(WeightsLoaded(3, 100, 16), Warmed(3))
    requests[3] = 4
    loading = subject.tell(ReplicaStarted(4))  # in the place of 0
    assert [action.transfer.live_partner for action in loading if isinstance(action, LoadWeights)] == [None]
    assert not changed(subject.want(1, 4)) & {3}
    subject.want(3, 1)
    assert Send(ROUTER, ReplicaUp(3, 100, 16, PREFILL)) in subject.tell(alone)
    started = [action.replica for action in subject.want(5, 1) if isinstance(action, StartReplica)]
    assert pairs(subject.tell(*map(ReplicaStarted, started))) == {(started[0], 3)}


def test_a_target_that_ended_its_pair_as_its_source_died_is_announced() -> None:
    """The two words cross: it says nothing more, and would have been ready for nobody."""
    subject = Subject({0: 5, 1: 0})
    subject.want(3, 1)
    assert pairs(subject.tell(ReplicaStarted(3), WeightsLoaded(3, 100, 16), Warmed(3))) == {(3, 0)}
    subject.tell(ReplicaLost(0, "a fault"))
    assert subject.tell(Unpaired(3, 0)) == [Send(ROUTER, ReplicaUp(3, 100, 16, PREFILL))]
    assert subject.tell(Unpaired(3, 0)) == []


def test_when_a_source_dies_with_what_it_took_over_whoever_ran_the_first_layers_holds_them_for_nobody() -> None:
    """Also where the pair has ended before; the router had not been told that the target holds anything."""
    router = DisaggregatedRouter(LeastLoaded(), 100, 10**6, 2, True, LeastPromised())
    request = Request(7, 0, 100, 10)
    for event in (
        ReplicaUp(0, 100, 16, PREFILL),
        ReplicaUp(3, 100, 16, PREFILL, 0),
        Arrived(request),
        TakenOver(0, 3, (7,)),
        Unpaired(3, 0),
    ):
        sent = router.handle(event, 0)
        if isinstance(event, Arrived):
            assert sent[0] == Send(3, Submitted(request))
    actions = router.handle(ReplicaDown(0, lost=True), 0)
    assert actions.index(Send(3, Disowned((7,)))) < actions.index(Send(3, Submitted(request)))


def test_a_replica_that_stands_aside_and_dies_gets_none_of_what_it_was_promised_again() -> None:
    router = HandoffRouter(LeastLoaded(), 100, 10**6, 2, True, moves=True)
    said: list[AnyAction] = []
    for event in (
        ReplicaUp(0, 100, 16),
        Arrived(Request(7, 0, 100, 10)),
        Progressed(0, first=(7,)),
        ReplicaUp(1, 100, 16),
        ReplicaDown(0, lost=False),
        Progressed(0, held=(Held(7, 101),)),
        ReplicaUp(3, 100, 16, Role.BOTH, 1),
    ):
        said += router.handle(event, 0)
    assert [action.to for action in said if isinstance(action, Send) and isinstance(action.event, Offered)] == [1]
    after = [*router.handle(ReplicaDown(1, lost=True), 0), *router.handle(HandoffFailed(0, 7, 1), 0)]
    assert 1 not in {action.to for action in after if isinstance(action, Send)}
