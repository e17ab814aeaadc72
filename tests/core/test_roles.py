"""Two roles in one fleet: all nine combinations of plans, and replicas that change their role."""

import pytest
from msgspec import Struct

from squall.core.actions import AnyAction, Decided, Send, StartReplica, StopReplica
from squall.core.controller import Controller
from squall.core.demand import Demand
from squall.core.events import (
    Emptied,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    RoleChanged,
    ScaleWanted,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_plan import Bounds, FleetPlan, Patience, Slots
from squall.core.fleet_view import ScaleView, Wanted
from squall.core.types import ROUTER, SECOND, ReplicaId, Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE


class AsItIs(Struct, frozen=True):
    """No opinion: somebody turns the roles by hand."""

    def __call__(self, _view: ScaleView) -> Wanted:
        return Wanted({}, "")


class Counts:
    """What a router would say."""

    def __init__(self, requests: dict[ReplicaId, int]) -> None:
        self.requests = requests
        self.quiet = Demand()

    def demand(self, _role: Role) -> Demand:
        return self.quiet

    def outstanding(self, replica: ReplicaId) -> tuple[int, int]:
        return self.requests.get(replica, 0), 0


def fleet(requests: dict[ReplicaId, int] | None = None, slots: int = 8) -> Controller:
    """Prefill replicas 0 and 1, decode replicas 2 and 3, all ready; of eight slots four are free."""
    bounds = {PREFILL: Bounds(1, 4, 2), DECODE: Bounds(1, 4, 2)}
    controller = Controller(FleetPlan(bounds, Slots(slots, 8), patience=Patience(idle_ttl=SECOND)), AsItIs())
    controller.traffic = Counts(requests if requests is not None else {0: 5, 1: 3, 2: 4, 3: 2})
    controller.handle(Woke(), 0)
    for replica in range(4):
        for event in (ReplicaStarted(replica), WeightsLoaded(replica, 100, 16), Warmed(replica)):
            controller.handle(event, 0)
    return controller


def turn(controller: Controller, prefill: int, decode: int) -> list[AnyAction]:
    """What the controller does when both are wanted at one instant, without what it merely notes."""
    for role, count in ((PREFILL, prefill), (DECODE, decode)):
        controller.states[role].manual = count
    wanted = controller.handle(ScaleWanted(PREFILL, prefill), SECOND)
    return [action for action in wanted if not isinstance(action, Decided)]


def down(replica: ReplicaId) -> Send:
    return Send(ROUTER, ReplicaDown(replica, lost=False))


def changed(replica: ReplicaId, role: Role) -> list[AnyAction]:
    return [Send(ROUTER, RoleChanged(replica, role)), Send(replica, RoleChanged(replica, role))]


def up(replica: ReplicaId, role: Role) -> list[AnyAction]:
    return [Send(replica, RoleChanged(replica, role)), Send(ROUTER, ReplicaUp(replica, 100, 16, role))]


NINE: dict[tuple[int, int], list[AnyAction]] = {
    (3, 3): [StartReplica(4), StartReplica(5)],
    (3, 2): [StartReplica(4)],
    (2, 3): [StartReplica(4)],
    (2, 2): [],
    (1, 2): [down(1)],
    (2, 1): [down(3)],
    (1, 1): [down(1), down(3)],
    (1, 3): changed(1, DECODE),  # nothing is loaded, and nobody leaves
    (3, 1): [StartReplica(4), down(3)],  # who decodes cannot change at once
}
"""Prefill and decode replicas wanted, where there are two of each; requests at 0 to 3: 5, 3, 4, 2."""


@pytest.mark.parametrize("plan", NINE)
def test_all_nine_combinations_of_plans(plan: tuple[int, int]) -> None:
    assert turn(fleet(), *plan) == NINE[plan]


def test_who_drains_comes_back_before_anybody_changes_its_role() -> None:
    controller = fleet()
    assert turn(controller, 2, 1) == [down(3)]
    assert turn(controller, 1, 2) == [*up(3, DECODE), down(1)]


def test_an_idle_replica_of_the_other_role_comes_before_one_that_works() -> None:
    controller = fleet()
    turn(controller, 1, 2)
    controller.handle(Emptied(1), SECOND)
    assert turn(controller, 1, 3) == up(1, DECODE)
    assert controller.fleet[1].role is DECODE


def test_a_decode_replica_that_has_nothing_to_decode_becomes_a_prefill_replica() -> None:
    assert turn(fleet({0: 5, 1: 3, 2: 4, 3: 0}), 3, 1) == changed(3, PREFILL)


def test_a_replica_on_its_way_changes_its_role_in_silence_and_comes_up_with_the_new_one() -> None:
    controller = fleet({2: 1, 3: 1})
    assert turn(controller, 2, 3) == [StartReplica(4)]
    assert turn(controller, 3, 2) == []
    controller.handle(ReplicaStarted(4), SECOND)
    controller.handle(WeightsLoaded(4, 100, 16), SECOND)
    assert controller.handle(Warmed(4), SECOND) == up(4, PREFILL)


def test_only_as_many_change_as_are_too_many_and_the_rest_is_loaded() -> None:
    assert turn(fleet(), 1, 4) == [*changed(1, DECODE), StartReplica(4)]


def test_a_full_cluster_changes_roles_where_it_cannot_load() -> None:
    assert turn(fleet(slots=4), 1, 3) == changed(1, DECODE)


def test_an_idle_replica_that_nobody_wants_stops_after_its_time() -> None:
    controller = fleet()
    turn(controller, 2, 1)
    controller.handle(Emptied(3), SECOND)
    actions = controller.handle(Woke(), 2 * SECOND)
    assert [action for action in actions if not isinstance(action, Decided)] == [StopReplica(3)]
    assert controller.handle(ReplicaStopped(3), 2 * SECOND) == [Send(ROUTER, ReplicaDown(3, lost=True))]


def test_a_role_that_gets_nobody_up_wherever_it_tries_is_lent_a_replica_by_the_other_one() -> None:
    controller = fleet(slots=4)
    for failures in range(1, 3):
        at = failures * 10 * SECOND
        for replica in (2, 3):
            lost = controller.handle(ReplicaLost(replica, "no disk"), at)
        if failures == 1:
            assert lost == [Send(ROUTER, ReplicaDown(3, lost=True))]  # they may well come back
            assert controller.handle(Woke(), at + SECOND) == [StartReplica(2), StartReplica(3)]
    assert lost == changed(1, DECODE)
    assert [len(state.ready) for state in controller.states.values()] == [1, 1]


def test_a_role_does_not_lend_its_last_replica() -> None:
    controller = fleet(slots=4)
    controller.handle(ReplicaLost(1, "no disk"), SECOND)
    for at in (10 * SECOND, 20 * SECOND):
        for replica in (2, 3):
            controller.handle(ReplicaLost(replica, "no disk"), at)
        controller.handle(Woke(), at + SECOND)
    assert controller.fleet[0].role is PREFILL
