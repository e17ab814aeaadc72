"""A replica that is emptied, seen by each machine alone: what the router asks for, what the replica does, who notices first."""

from __future__ import annotations

from squall.core.actions import Abandon, AnyAction, Cut, Hold, Join, RunSteps, Send, SendKv, StartReplica, StopReplica
from squall.core.events import (
    Adopted,
    Arrived,
    Cancelled,
    Emptied,
    HandoffFailed,
    Held,
    KeepWanted,
    Kept,
    KvFailed,
    KvWanted,
    MoveWanted,
    NoticeGiven,
    Offered,
    Part,
    Progressed,
    ReplicaDown,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    ReturnWanted,
    StepsDone,
    Submitted,
    Surrendered,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.handoff_router import HandoffRouter
from squall.core.replica import Replica
from squall.core.types import CONTROLLER, ROUTER, SECOND, ReplicaId, Request, RequestId
from squall.policies.batching import Vllm
from squall.policies.route import LeastLoaded
from tests.core.test_elastic import Subject, down, up

A, B = 0, 1
SIZE = 4


def request(id: RequestId) -> Request:
    return Request(id, id, 10, 20)


def router(*blocks: int) -> HandoffRouter:
    made = HandoffRouter(LeastLoaded(), 100, 10_000, 2, False)
    for replica, count in enumerate(blocks):
        made.handle(ReplicaUp(replica, count, SIZE), 0)
    return made


def begin(made: HandoffRouter, replica: ReplicaId, *ids: RequestId) -> None:
    """These requests have a token there."""
    for id in ids:
        assert made.handle(Arrived(request(id)), 0) == [Send(replica, Submitted(request(id)))]
    made.handle(Progressed(replica, first=ids), 0)


def emptying(*blocks: int) -> HandoffRouter:
    """Two that decode are at A, which is withdrawn, and B takes over one at a time."""
    made = router(20)
    begin(made, A, 0, 1)
    made.handle(ReplicaUp(B, 8, SIZE), 0)
    assert made.handle(ReplicaDown(A, lost=False), 0) == [Send(A, MoveWanted((0,)))]
    return made


def offer(id: RequestId, num_tokens: int) -> Send:
    return Send(B, Offered(request(id), num_tokens, (Part(A),)))


# -- the router


def test_who_decodes_leaves_when_there_is_room_and_the_replica_is_empty_when_all_have_arrived() -> None:
    made = emptying()
    assert made.handle(Progressed(A, held=(Held(0, 14),)), 0) == [offer(0, 14)]
    assert made.demand(up(A).event.role).num_waiting == 1  # type: ignore[union-attr]
    assert made.handle(Adopted(B, 0), 0) == []
    assert made.outstanding(A) == (1, 10)
    assert made.handle(Progressed(B, finished=(0,)), 0) == [Send(A, MoveWanted((1,)))]
    assert made.handle(Progressed(A, held=(Held(1, 20),)), 0) == [offer(1, 20)]
    assert made.handle(Adopted(B, 1), 0) == [Send(CONTROLLER, Emptied(A))]
    assert made.handle(Progressed(B, finished=(1,)), 0) == []
    assert made.num_outstanding == 0


def test_who_has_no_token_goes_back_to_the_front_of_the_queue() -> None:
    made = router(20, 1)
    begin(made, A, 0)
    made.handle(Arrived(request(1)), 0)
    made.handle(ReplicaUp(2, 20, SIZE), 0)
    assert made.handle(ReplicaDown(A, lost=False), 0) == [Send(A, ReturnWanted((1,))), Send(A, MoveWanted((0,)))]
    assert made.handle(Surrendered(A, (1,)), 0) == [Send(2, Submitted(request(1)))]
    assert made.outstanding(A) == (1, 10)


def test_nobody_is_asked_to_leave_where_nobody_takes_anything() -> None:
    made = router(20)
    begin(made, A, 0)
    made.handle(Arrived(request(1)), 0)
    assert made.handle(ReplicaDown(A, lost=False), 0) == []
    assert made.handle(Progressed(A, first=(1,), finished=(0,)), 0) == []
    assert made.handle(Progressed(A, finished=(1,)), 0) == [Send(CONTROLLER, Emptied(A))]


def test_a_place_is_free_again_when_the_request_ends_before_it_leaves() -> None:
    made = emptying()
    assert made.outstanding(B) == (1, 10)
    assert made.handle(Progressed(A, finished=(0,)), 0) == [Send(A, MoveWanted((1,)))]
    assert made.handle(Cancelled(1), 0) == [Send(A, Cancelled(1))]
    assert made.outstanding(B) == (0, 0)


def test_who_leaves_as_the_last_one_without_a_place_ends_has_left() -> None:
    """Both in one message: that it leaves was not noted, and its end at the other replica was an error."""
    made = emptying()
    assert made.handle(Progressed(A, finished=(1,), held=(Held(0, 14),)), 0) == [offer(0, 14)]
    assert made.handle(Adopted(B, 0), 0) == [Send(CONTROLLER, Emptied(A))]
    assert made.handle(Progressed(B, finished=(0,)), 0) == []
    assert (made.num_outstanding, made.outstanding(B)) == (0, (0, 0))


def test_when_a_place_is_lost_its_request_stays_until_there_is_another() -> None:
    made = emptying()
    assert made.handle(ReplicaDown(B, lost=True), 0) == []
    assert made.handle(Progressed(A, held=(Held(0, 14),)), 0) == [Send(A, KeepWanted((0,)))]
    assert made.handle(ReplicaUp(2, 8, SIZE), 0) == [Send(A, MoveWanted((1,)))]
    assert made.handle(Kept(A, (0,)), 0) == []
    assert made.outstanding(A) == (2, 20)


def test_who_cannot_be_moved_again_and_again_stays() -> None:
    made = emptying()
    assert made.handle(Progressed(A, held=(Held(0, 14),)), 0) == [offer(0, 14)]
    for _ in range(2):
        assert made.handle(HandoffFailed(A, 0, B), 0) == [offer(0, 14)]
    assert made.handle(HandoffFailed(A, 0, B), 0) == [Send(A, KeepWanted((0,))), Send(A, MoveWanted((1,)))]
    assert made.handle(Kept(A, (0,)), 0) == []  # and is not asked any more


def test_whoever_is_revived_asks_nobody_else_to_leave() -> None:
    made = emptying()
    made.handle(ReplicaUp(A, 20, SIZE), 0)
    assert made.handle(Progressed(A, held=(Held(0, 14),)), 0) == [offer(0, 14)]  # it had a place
    assert made.handle(Adopted(B, 0), 0) == []
    assert made.handle(Progressed(B, finished=(0,)), 0) == []


# -- the replica


def replica() -> Replica:
    """One decodes, one is in prefill, one waits."""
    made = Replica(A, Vllm(2, 16), 100, SIZE)
    made.handle(Submitted(request(0)), 0)
    made.handle(Woke(), 0)
    made.handle(Submitted(Request(1, 1, 40, 20)), 0)
    made.handle(Submitted(request(2)), 0)
    made.handle(StepsDone(1, 1), 0)
    return made


def test_at_the_next_boundary_who_decodes_is_held_and_the_others_are_given_back() -> None:
    made = replica()
    assert made.handle(ReturnWanted((0, 1, 2)), 0) == [Cut(2)]
    assert made.handle(MoveWanted((0,)), 0) == []
    assert made.handle(StepsDone(2, 1), 0) == [
        Send(ROUTER, Progressed(A, held=(Held(0, 11),))), Hold((0,)), Abandon((1, 2)), Send(ROUTER, Surrendered(A, (1, 2))),
    ]  # fmt: skip
    assert (made.num_used_blocks, made.num_running, made.num_waiting) == (3, 0, 0)
    assert made.handle(KvWanted(0, B), 0) == [SendKv(0, B, 0, 0, 11)]


def test_what_is_to_stay_decodes_again_where_it_is_at_once_or_when_it_could_not_be_sent() -> None:
    made = replica()
    made.handle(ReturnWanted((1, 2)), 0)
    made.handle(MoveWanted((0,)), 0)
    made.handle(StepsDone(2, 1), 0)
    made.handle(KvWanted(0, B), 0)
    assert made.handle(KeepWanted((0,)), 0) == []
    assert made.handle(KvFailed(0, B), 0) == [Send(B, KvFailed(0, B)), Send(ROUTER, Kept(A, (0,)))]
    join, run = made.handle(Woke(), 0)
    assert join == Join((0,), 0)
    assert isinstance(run, RunSteps)
    assert (run.num_decodes, run.decode_context) == (1, 12)


# -- the controller


def test_whoever_was_told_to_end_serves_until_there_is_another_and_its_slot_is_free_afterwards() -> None:
    subject = Subject(1)
    subject.up(0)
    assert subject.tell(NoticeGiven(0, 30 * SECOND)) == [StartReplica(1)]
    actions: list[AnyAction] = subject.tell(ReplicaStarted(1), WeightsLoaded(1, 100, 16), Warmed(1))
    assert actions[-2:] == [up(1), down(0)]
    assert subject.tell(Emptied(0)) == [StopReplica(0)]
    subject.tell(ReplicaStopped(0))
    subject.dial.wanted = 8  # all slots
    assert StartReplica(0) in subject.sleep(2.0)
