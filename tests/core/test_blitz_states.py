"""The states of BlitzScale's planner, as role, phase and transfer: what each counts as (docs/handoff.md)."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from squall.core.controller import Controller
from squall.core.events import AnyEvent, Emptied, LayerArrived, ReplicaStarted, ScaleWanted, Unpaired, Warmed, WeightsLoaded, Woke
from squall.core.fleet_plan import Bounds, FleetPlan, Slots
from squall.core.fleet_view import LoadPolicy
from squall.core.lifecycle import Phase, TransferPhase
from squall.core.types import SECOND, ReplicaId, Role
from squall.policies.load import Chain, P2p
from tests.core.test_live_fleet import Subject as Live
from tests.core.test_roles import AsItIs, Counts

PREFILL, DECODE = Role.PREFILL, Role.DECODE
UP = (ReplicaStarted, LayerArrived, WeightsLoaded, Warmed)


def started(replica: ReplicaId, until: type[AnyEvent] | None) -> Sequence[AnyEvent]:
    """What is heard of a replica up to an event of that kind."""
    told: list[AnyEvent] = []
    for event in (ReplicaStarted(replica), LayerArrived(replica, 0), WeightsLoaded(replica, 100, 16), Warmed(replica)):
        if until is None:
            break
        told.append(event)
        if type(event) is until:
            break
    return told


def fleet(until: type[AnyEvent] | None) -> Controller:
    """Prefill replicas 0 and 1, decode replicas 2 and 3, all as far."""
    bounds = {PREFILL: Bounds(1, 4, 2), DECODE: Bounds(1, 4, 2)}
    controller = Controller(FleetPlan(bounds, Slots(4, 8)), AsItIs())
    controller.traffic = Counts(dict.fromkeys(range(4), 1))
    controller.handle(Woke(), 0)
    for replica in range(4):
        for event in started(replica, until):
            controller.handle(event, 0)
    return controller


def counts(controller: Controller) -> list[tuple[int, int, int, int]]:
    """Ready, coming, draining and idle replicas: of prefill, of decode."""
    states = controller.states
    return [(s.num_ready, s.num_coming, s.num_draining, s.num_idle) for s in (states[PREFILL], states[DECODE])]


def want(controller: Controller, prefill: int, decode: int) -> None:
    controller.states[PREFILL].manual, controller.states[DECODE].manual = prefill, decode
    controller.handle(ScaleWanted(PREFILL, prefill), SECOND)


@pytest.mark.parametrize(
    ("until", "phase", "transfer"),
    [
        (None, Phase.STARTING, None),
        (ReplicaStarted, Phase.LOADING, TransferPhase.ASKED),
        (LayerArrived, Phase.LOADING, TransferPhase.MOVING),  # Loading, and Casting along a chain
        (WeightsLoaded, Phase.WARMING, None),
    ],
)
def test_loading_prefill_and_loading_decode_are_coming(
    until: type[AnyEvent] | None, phase: Phase, transfer: TransferPhase | None
) -> None:
    controller = fleet(until)
    assert counts(controller) == [(0, 2, 0, 0), (0, 2, 0, 0)]
    member = controller.fleet[0]
    assert member.phase is phase
    assert (None if member.transfer is None else member.transfer.phase) is transfer


def test_prefill_and_decode_are_ready_and_inactive_is_nothing() -> None:
    controller = fleet(Warmed)
    assert counts(controller) == [(2, 0, 0, 0), (2, 0, 0, 0)]
    assert FleetPlan.fixed(1).slots.num == 1
    assert set(controller.fleet) == {0, 1, 2, 3}


def test_mutating_to_decode_is_ready_to_decode_at_once() -> None:
    controller = fleet(Warmed)
    want(controller, 1, 3)
    assert counts(controller) == [(1, 0, 0, 0), (3, 0, 0, 0)]


def test_shutting_prefill_and_shutting_decode_count_as_nothing_and_come_back_as_aus() -> None:
    controller = fleet(Warmed)
    want(controller, 1, 1)
    assert counts(controller) == [(1, 0, 1, 0), (1, 0, 1, 0)]
    want(controller, 2, 2)
    assert counts(controller) == [(2, 0, 0, 0), (2, 0, 0, 0)]


def test_shutting_null_serves_nothing_and_is_revived_as_either() -> None:
    controller = fleet(Warmed)
    want(controller, 1, 2)
    (drained,) = [replica for replica, member in controller.fleet.items() if member.phase is Phase.DRAINING]
    controller.handle(Emptied(drained), SECOND)
    assert counts(controller) == [(1, 0, 0, 1), (2, 0, 0, 0)]
    want(controller, 1, 3)
    assert counts(controller) == [(1, 0, 0, 0), (3, 0, 0, 0)]
    assert controller.fleet[drained].role is DECODE


def test_new_refactory_and_old_prefill_count_as_any_that_loads_warms_or_is_ready() -> None:
    """A pair: the new one loads and works with the old one, which goes on; neither is a phase of its own."""
    pair = Live({0: 5, 1: 3})
    pair.want(3, 1)
    pair.tell(ReplicaStarted(3))
    target, source = pair.controller.fleet[3], pair.controller.fleet[0]
    seen: list[tuple[Phase, Phase, list[tuple[int, int, int, int]]]] = []
    for event in (LayerArrived(3, 0), WeightsLoaded(3, 100, 16), Warmed(3), Unpaired(3, 0)):
        pair.tell(event)
        seen.append((target.phase, source.phase, counts(pair.controller)))
    assert target.source is not None
    assert target.source.live_partner == 0
    assert seen == [
        (Phase.LOADING, Phase.READY, [(2, 1, 0, 0), (1, 0, 0, 0)]),  # NewPrefill and OldPrefill
        (Phase.WARMING, Phase.READY, [(2, 1, 0, 0), (1, 0, 0, 0)]),  # RefactoryPrefill
        (Phase.READY, Phase.READY, [(3, 0, 0, 0), (1, 0, 0, 0)]),
        (Phase.READY, Phase.READY, [(3, 0, 0, 0), (1, 0, 0, 0)]),
    ]


@pytest.mark.parametrize(("policy", "senders"), [(P2p(avoid_kv=False), {0: 1, 2: 1}), (Chain(), {2: 1, 3: 1})])
def test_sending_and_casting_are_the_transfer_of_whoever_loads_and_no_state_of_whoever_sends(
    policy: LoadPolicy, senders: dict[ReplicaId, int]
) -> None:
    """Two prefill replicas load: each from a replica of its own, or one from the decode replica and the other one from it."""
    controller = Live({}, policy).controller
    for role, count in ((PREFILL, 4), (DECODE, 1)):
        controller.states[role].manual = count
    controller.handle(ScaleWanted(PREFILL, 4), 0)
    for replica in (3, 4):
        controller.handle(ReplicaStarted(replica), 0)
        controller.handle(LayerArrived(replica, 0), 0)
    members = controller.fleet
    transfers = [members[replica].transfer for replica in (3, 4)]
    assert [transfer is not None and transfer.phase for transfer in transfers] == [TransferPhase.MOVING] * 2
    assert counts(controller) == [(2, 2, 0, 0), (1, 0, 0, 0)]
    sending = {replica: member.num_sending for replica, member in members.items() if member.num_sending}
    assert sending == senders


def test_the_page_and_these_tests_name_every_state_of_the_planner() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "handoff.md").read_text()
    rows = "\n".join(re.findall(r"^\| (.+?) \| .+ \| .+ \| .+ \| .+ \|$", page.split("## BlitzScale's states")[1], re.MULTILINE))
    states = (
        "Inactive LoadingPrefill LoadingDecode NewPrefill RefactoryPrefill OldPrefill Prefill Decode MutatingToDecode AusPrefill "
        "AusDecode ShuttingPrefill ShuttingDecode ShuttingNull RdmaSending NvlinkSending RdmaLoading NvlCasting RdmaCasting "
        "TanzCasting"
    )
    assert [name for name in re.findall(r"\w+", rows) if name not in ("BlitzScale", "either")] == states.split(" ")
