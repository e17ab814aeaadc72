"""The tables: every phase can be reached and left, and what cannot happen says so with the object's story."""

import pytest

from squall.core.events import (
    AnyEvent,
    Emptied,
    LayerArrived,
    LoadFailed,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Warmed,
    WeightsLoaded,
)
from squall.core.lifecycle import (
    REPLICA,
    REQUEST,
    TRANSFER,
    Launched,
    Life,
    Phase,
    RequestPhase,
    Revived,
    TransferPhase,
    Withdrawn,
)
from squall.core.types import SECOND
from squall.errors import IllegalTransition

ORDINARY_LIFE: list[AnyEvent | Launched | Withdrawn] = [
    Launched(), ReplicaStarted(7), LayerArrived(7, 0), WeightsLoaded(7, 100, 16), Warmed(7), Withdrawn(), Emptied(7),
]  # fmt: skip


def replica_in(phase: Phase) -> Life[Phase]:
    """A replica that got to `phase` the ordinary way, at 1 s."""
    life = Life("replica 7", REPLICA, Phase.OFF)
    for event in ORDINARY_LIFE:
        if life.phase is phase:
            break
        life.on(event, SECOND)
    if phase is Phase.FAILED:
        life.on(ReplicaLost(7, "gone"), SECOND)
    assert life.phase is phase
    return life


WITH_A_PROCESS = [phase for phase in Phase if phase not in (Phase.OFF, Phase.FAILED)]


def test_a_replica_lives_and_is_switched_off() -> None:
    life = Life("replica 7", REPLICA, Phase.OFF)
    phases = [life.on(event, 0) for event in [*ORDINARY_LIFE, ReplicaStopped(7)]]
    expected = [Phase.STARTING, Phase.LOADING, Phase.LOADING, Phase.WARMING, Phase.READY, Phase.DRAINING, Phase.IDLE, Phase.OFF]
    assert phases == expected


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.IDLE])
def test_a_replica_that_still_has_its_weights_is_revived_at_once(phase: Phase) -> None:
    assert replica_in(phase).on(Revived(), 2 * SECOND) is Phase.READY


@pytest.mark.parametrize("phase", WITH_A_PROCESS)
def test_a_replica_can_be_lost_in_any_phase_and_started_again(phase: Phase) -> None:
    life = replica_in(phase)
    assert life.on(ReplicaLost(7, "gone"), SECOND) is Phase.FAILED
    assert life.on(Launched(), SECOND) is Phase.STARTING


@pytest.mark.parametrize("phase", [*WITH_A_PROCESS, Phase.FAILED])
def test_a_replica_can_be_stopped_in_any_phase(phase: Phase) -> None:
    assert replica_in(phase).on(ReplicaStopped(7), SECOND) is Phase.OFF


def test_an_illegal_event_changes_nothing_and_tells_the_story() -> None:
    life = replica_in(Phase.WARMING)
    story = "1.000s Launched starting > 1.000s ReplicaStarted loading > 1.000s WeightsLoaded warming"
    with pytest.raises(IllegalTransition, match=f"^replica 7 got ReplicaStarted while warming: {story}$"):
        life.on(ReplicaStarted(7), 2 * SECOND)
    assert life.phase is Phase.WARMING
    assert life.story() == story


def test_a_long_story_is_told_from_its_end() -> None:
    life = replica_in(Phase.READY)
    for second in range(100):
        life.on(Withdrawn(), second * SECOND)
        life.on(Revived(), second * SECOND)
    assert life.story().endswith("99.000s Withdrawn draining > 99.000s Revived ready")
    assert life.story().count(">") == 31


def test_a_transfer_ends_once() -> None:
    transfer = Life("weights of replica 7", TRANSFER, TransferPhase.ASKED)
    assert transfer.on(LayerArrived(7, 0), 0) is TransferPhase.MOVING
    assert transfer.on(WeightsLoaded(7, 100, 16), 0) is TransferPhase.DONE
    for event in (LayerArrived(7, 1), WeightsLoaded(7, 100, 16), LoadFailed(7, "late")):
        with pytest.raises(IllegalTransition, match=r"weights of replica 7 got \w+ while done"):
            transfer.on(event, 0)


def test_every_phase_can_be_reached_and_only_the_last_ones_are_final() -> None:
    assert {after for row in REPLICA.values() for after in row.values()} == set(Phase)
    assert {after for row in TRANSFER.values() for after in row.values()} == set(TransferPhase)
    assert {after for row in REQUEST.values() for after in row.values()} == set(RequestPhase)
    assert [phase for phase, row in REPLICA.items() if not row] == []
    assert [phase for phase, row in TRANSFER.items() if not row] == [TransferPhase.DONE, TransferPhase.FAILED]
    finals = [RequestPhase.FINISHED, RequestPhase.CANCELLED, RequestPhase.REJECTED]
    assert [phase for phase, row in REQUEST.items() if not row] == finals


def test_a_cancelled_request_never_comes_back() -> None:
    after = set(REQUEST[RequestPhase.CANCELLING].values())
    assert after == {RequestPhase.CANCELLING, RequestPhase.CANCELLED}
