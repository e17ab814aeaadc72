"""A hand-off, seen by each machine alone: what the source, the target and the router say, and in which order."""

from __future__ import annotations

import pytest

from squall.core.actions import Abandon, AnyAction, Chunk, Cut, Forget, Hold, Join, Reply, Reserve, RunSteps, Send, SendKv
from squall.core.disaggregated import DisaggregatedRouter
from squall.core.events import (
    Adopted,
    AnyEvent,
    Arrived,
    Cancelled,
    Disowned,
    Dropped,
    Emptied,
    HandoffFailed,
    Held,
    Kept,
    KvArrived,
    KvFailed,
    KvSent,
    KvWanted,
    NotHeld,
    Offered,
    Part,
    Progressed,
    Rejection,
    ReplicaDown,
    ReplicaUp,
    RoleChanged,
    StepsDone,
    Submitted,
    Woke,
)
from squall.core.replica import Replica
from squall.core.types import CONTROLLER, ROUTER, ReplicaId, Request, RequestId, Role
from squall.policies.batching import Vllm
from squall.policies.route import LeastLoaded, LeastPromised

SIZE = 4
P, Q, D, E = 0, 1, 2, 3


def request(id: RequestId, prompt: int = 10, output: int = 20) -> Request:
    return Request(id, 0, prompt, output)


def source(num_blocks: int = 100) -> Replica:
    made = Replica(P, Vllm(8, 64), num_blocks, SIZE)
    assert made.handle(RoleChanged(P, Role.PREFILL), 0) == []
    return made


def prefill(machine: Replica, *ids: RequestId) -> list[AnyAction]:
    for id in ids:
        machine.handle(Submitted(request(id)), 0)
    machine.handle(Woke(), 0)
    return machine.handle(StepsDone(machine._run, 1), 0)


def test_a_source_holds_sends_frees_and_tells() -> None:
    machine = source()
    held = Progressed(P, first=(0, 1), held=(Held(0, 10), Held(1, 10)))
    assert prefill(machine, 0, 1) == [Send(ROUTER, held), Hold((0, 1))]
    assert machine.num_used_blocks == 6
    assert machine.handle(KvWanted(0, D), 0) == [SendKv(0, D, 0, 0, 10)]
    assert machine.handle(KvSent(0, D), 0) == [Send(D, KvArrived(0, 0, 0))]
    assert machine.wake_at == 0
    assert machine.handle(Woke(), 0) == [Abandon((0,))]
    assert machine.num_used_blocks == 3


def test_what_a_busy_source_has_sent_becomes_free_at_the_end_of_its_run() -> None:
    machine = source()
    prefill(machine, 0)
    machine.handle(KvWanted(0, D), 0)
    machine.handle(Submitted(request(1)), 0)
    (run,) = machine.handle(Woke(), 0)
    assert run == RunSteps(2, 1, 0, 0, (Chunk(1, 0, 10, 0, last=True),))
    assert machine.handle(KvSent(0, D), 0) == [Send(D, KvArrived(0, 0, 0)), Cut(2)]
    assert machine.num_used_blocks == 3
    assert machine.handle(StepsDone(2, 1), 0) == [
        Send(ROUTER, Progressed(P, first=(1,), held=(Held(1, 10),))), Hold((1,)), Abandon((0,)),
    ]  # fmt: skip


def test_who_comes_back_before_its_blocks_are_free_is_not_abandoned_with_them() -> None:
    """The engine knows requests by their ids, and has forgotten the old one for the new one."""
    machine = source()
    prefill(machine, 0)
    machine.handle(KvWanted(0, D), 0)
    machine.handle(Submitted(request(1)), 0)
    machine.handle(Woke(), 0)
    machine.handle(KvSent(0, D), 0)
    assert machine.handle(Submitted(request(0)), 0) == []  # the receiver has died
    assert machine.num_used_blocks == 3
    told, hold, run = machine.handle(StepsDone(2, 1), 0)
    assert told == Send(ROUTER, Progressed(P, first=(1,), held=(Held(1, 10),)))
    assert hold == Hold((1,))
    assert run == RunSteps(3, 1, 0, 0, (Chunk(0, 0, 10, 0, last=True),))


@pytest.mark.parametrize("ended", [KvSent(0, D), KvFailed(0, D)])
def test_nor_who_comes_back_while_its_old_kv_is_still_read(ended: AnyEvent) -> None:
    machine = source()
    prefill(machine, 0)
    machine.handle(KvWanted(0, D), 0)
    machine.handle(Disowned((0,)), 0)
    machine.handle(Submitted(request(0)), 0)
    assert machine.handle(Woke(), 0) == [RunSteps(2, 1, 0, 0, (Chunk(0, 0, 10, 0, last=True),))]
    assert machine.num_used_blocks == 3  # of both, as soon as the new one has computed
    machine.handle(ended, 0)
    assert Abandon((0,)) not in machine.handle(StepsDone(2, 1), 0)


def test_a_failed_transfer_leaves_the_request_held_and_both_others_hear_of_it() -> None:
    machine = source()
    prefill(machine, 0)
    machine.handle(KvWanted(0, D), 0)
    assert machine.handle(KvFailed(0, D), 0) == [Send(D, KvFailed(0, D)), Send(ROUTER, HandoffFailed(P, 0, D))]
    assert machine.handle(KvWanted(0, E), 0) == [SendKv(0, E, 0, 0, 10)]


def test_a_cancelled_request_is_dropped_when_nothing_reads_its_kv_any_more() -> None:
    machine = source()
    prefill(machine, 0, 1)
    machine.handle(KvWanted(1, D), 0)
    machine.handle(Cancelled(0), 0)
    assert machine.handle(Woke(), 0) == [Send(ROUTER, Progressed(P, finished=(0,))), Forget((0,))]
    assert machine.handle(Cancelled(1), 0) == []
    assert machine.handle(KvSent(1, D), 0) == [Send(D, KvFailed(1, D))]
    assert machine.handle(Woke(), 0) == [Send(ROUTER, Progressed(P, finished=(1,))), Forget((1,))]
    assert machine.num_used_blocks == 0


def test_a_change_of_role_turns_what_nobody_asked_for_into_decodes_without_a_copy() -> None:
    machine = source()
    prefill(machine, 0, 1, 2)
    machine.handle(KvWanted(1, D), 0)
    assert machine.handle(RoleChanged(P, Role.DECODE), 0) == [Send(ROUTER, Kept(P, (0, 2)))]
    assert machine.handle(KvWanted(2, D), 0) == [Send(D, KvFailed(2, D))]
    join, run = machine.handle(Woke(), 0)
    assert join == Join((0, 2), 0)
    assert isinstance(run, RunSteps)
    assert (run.num_decodes, run.decode_context) == (2, 22)
    assert machine.handle(KvSent(1, D), 0) == [Send(D, KvArrived(1, 0, 0)), Cut(run.run)]


def test_what_was_on_its_way_at_a_change_of_role_decodes_where_it_is_when_it_does_not_arrive() -> None:
    """Nobody would ask for it again where the replica is the only one left that decodes."""
    machine = source()
    prefill(machine, 0, 1)
    for id in (0, 1):
        machine.handle(KvWanted(id, D), 0)
    machine.handle(Cancelled(1), 0)
    assert machine.handle(RoleChanged(P, Role.DECODE), 0) == []
    assert machine.handle(KvFailed(0, D), 0) == [Send(D, KvFailed(0, D)), Send(ROUTER, Kept(P, (0,)))]
    assert machine.handle(KvFailed(1, D), 0) == [Send(D, KvFailed(1, D))]
    assert Join((0,), 0) in machine.handle(Woke(), 0)


def test_who_is_asked_whether_it_holds_something_keeps_it_or_says_no() -> None:
    machine = source()
    prefill(machine, 0)
    assert machine.handle(Dropped(0, by=D), 0) == []
    assert machine.handle(Dropped(7, by=D), 0) == [Send(ROUTER, NotHeld(P, 7))]
    machine.handle(Disowned((0,)), 0)
    assert machine.handle(Woke(), 0) == [Abandon((0,))]


def target(num_blocks: int = 100) -> Replica:
    made = Replica(D, Vllm(8, 64), num_blocks, SIZE)
    made.handle(RoleChanged(D, Role.DECODE), 0)
    return made


def offered(id: RequestId, *parts: Part) -> Offered:
    return Offered(request(id), 10, parts or (Part(P),))


def test_a_target_takes_blocks_first_asks_and_decodes_when_all_is_there() -> None:
    machine = target()
    assert machine.handle(offered(0), 0) == []
    assert machine.handle(Woke(), 0) == [Reserve(0, 10), Send(P, KvWanted(0, D))]
    assert machine.num_used_blocks == 3
    assert machine.handle(KvArrived(0, 0, 0), 0) == [Send(ROUTER, Adopted(D, 0))]
    assert machine.handle(Woke(), 0) == [Join((0,), 0), RunSteps(1, 388, 1, 11)]


def test_both_halves_share_one_reservation() -> None:
    machine = target()
    machine.handle(offered(0, Part(Q, 0, 5), Part(P, 5, 0)), 0)
    assert machine.handle(Woke(), 0) == [Reserve(0, 10), Send(Q, KvWanted(0, D, 0, 5)), Send(P, KvWanted(0, D, 5, 0))]
    assert machine.handle(KvArrived(0, 5, 0), 0) == []
    assert machine.handle(KvArrived(0, 0, 5), 0) == [Send(ROUTER, Adopted(D, 0))]


def test_half_that_never_comes_gives_the_blocks_back_when_nobody_writes_to_them() -> None:
    machine = target()
    machine.handle(offered(0, Part(Q, 0, 5), Part(P, 5, 0)), 0)
    machine.handle(Woke(), 0)
    assert machine.handle(Dropped(0, by=Q), 0) == [Send(ROUTER, NotHeld(D, 0))]
    assert machine.num_used_blocks == 3
    assert machine.handle(KvArrived(0, 5, 0), 0) == []
    assert machine.handle(Woke(), 0) == [Abandon((0,))]
    assert machine.num_used_blocks == 0


@pytest.mark.parametrize("comes_first", [True, False])
def test_who_waited_for_a_half_in_vain_says_so_of_a_request_that_nobody_wants(comes_first: bool) -> None:
    """Whoever sent the other half may have let go of it before it could know."""
    machine = target()
    machine.handle(offered(0, Part(Q, 0, 5), Part(P, 5, 0)), 0)
    machine.handle(Woke(), 0)
    comes, lacks = KvArrived(0, 5, 0), KvFailed(0, D, 0, 5)
    first, last = (comes, lacks) if comes_first else (lacks, comes)
    if comes_first:
        assert machine.handle(first, 0) == []
    assert machine.handle(Cancelled(0), 0) == []
    if not comes_first:
        assert machine.handle(first, 0) == []
    assert machine.handle(last, 0) == [Send(ROUTER, NotHeld(D, 0))]
    assert machine.handle(Woke(), 0) == [Abandon((0,))]
    assert machine.num_used_blocks == 0


def test_offers_wait_for_blocks_in_their_order() -> None:
    machine = target(num_blocks=8)
    for id in range(3):
        machine.handle(offered(id), 0)
    actions = machine.handle(Woke(), 0)
    assert [action.request for action in actions if isinstance(action, Reserve)] == [0, 1]
    machine.handle(KvFailed(0, D), 0)
    assert machine.handle(Woke(), 0) == [Abandon((0,)), Reserve(2, 10), Send(P, KvWanted(2, D))]


def test_an_offer_waits_while_somebody_may_still_write_to_the_blocks_of_an_earlier_one_of_the_request() -> None:
    machine = Replica(D, Vllm(8, 64), 100, SIZE)
    machine.handle(Offered(request(0), 10, (Part(P, 0, 3), Part(Q, 3, 0))), 0)
    machine.handle(Woke(), 0)
    assert machine.handle(Dropped(0, by=P), 0) == [Send(ROUTER, NotHeld(D, 0))]  # its half is lost, the other one is on its way
    again = Offered(request(0), 11, (Part(Q),))
    assert machine.handle(again, 0) == []
    assert machine.wake_at is None
    assert (machine.num_used_blocks, machine.handoffs and machine.handoffs.num_expected) == (3, 2)
    assert machine.handle(KvArrived(0, 3, 0), 0) == []
    assert machine.handle(Woke(), 0) == [Abandon((0,)), Reserve(0, 11, ()), Send(Q, KvWanted(0, D))]
    assert machine.handle(KvArrived(0, 0, 0), 0) == [Send(ROUTER, Adopted(D, 0))]
    assert machine.num_used_blocks == 3


def test_blocks_of_no_use_are_free_when_whoever_was_to_write_to_them_is_lost() -> None:
    machine = Replica(D, Vllm(8, 64), 100, SIZE)
    machine.handle(Offered(request(0), 10, (Part(P, 0, 3), Part(Q, 3, 0))), 0)
    machine.handle(Woke(), 0)
    machine.handle(Dropped(0, by=P), 0)
    assert machine.handle(ReplicaDown(Q, lost=True), 0) == []
    assert machine.handle(Woke(), 0) == [Abandon((0,))]
    assert machine.num_used_blocks == 0


def router(max_retries: int = 2, blocks: int = 20) -> DisaggregatedRouter:
    """Prefill replicas 0 and 1, decode replicas 2 and 3, 80 tokens each."""
    made = DisaggregatedRouter(LeastLoaded(), 100, 10_000, max_retries, False, LeastPromised())
    for replica, role in ((P, Role.PREFILL), (Q, Role.PREFILL), (D, Role.DECODE), (E, Role.DECODE)):
        assert made.handle(ReplicaUp(replica, blocks, SIZE, role), 0) == []
    return made


def arrive(made: DisaggregatedRouter, *ids: RequestId) -> list[AnyAction]:
    return [action for id in ids for action in made.handle(Arrived(request(id)), 0)]


def held(made: DisaggregatedRouter, replica: ReplicaId, *ids: RequestId) -> list[AnyAction]:
    return made.handle(Progressed(replica, first=ids, held=tuple(Held(id, 10) for id in ids)), 0)


def offer(to: ReplicaId, id: RequestId, by: ReplicaId) -> Send:
    return Send(to, Offered(request(id), 10, (Part(by),)))


def test_prompts_go_to_prefill_replicas_and_from_there_to_the_decode_replica_that_was_promised_least() -> None:
    made = router()
    assert [action.to for action in arrive(made, 0, 1, 2) if isinstance(action, Send)] == [P, Q, P]
    assert held(made, P, 0, 2) == [offer(D, 0, P), offer(E, 2, P)]
    assert held(made, Q, 1) == [offer(D, 1, Q)]
    assert made.outstanding(D) == (2, 20)
    assert made.handle(Adopted(D, 0), 0) == []
    assert made.outstanding(P) == (1, 10)


def test_a_request_counts_for_one_role_at_a_time() -> None:
    made = router(blocks=10)  # one request of up to 30 tokens each
    arrive(made, 0, 1, 2)
    prefills = made.demand(Role.PREFILL)
    assert (prefills.num_waiting, prefills.num_waiting_tokens, prefills.num_promised_tokens) == (3, 30, 90)
    held(made, P, 0, 2)
    held(made, Q, 1)
    prefills, decodes = made.demand(Role.PREFILL), made.demand(Role.DECODE)
    assert (prefills.num_waiting, prefills.num_running, prefills.num_promised_tokens) == (0, 0, 0)
    assert (decodes.num_waiting, decodes.num_queued, decodes.num_queued_tokens, decodes.num_promised_tokens) == (2, 1, 10, 90)
    made.handle(Adopted(D, 0), 0)
    decodes = made.demand(Role.DECODE)
    assert (decodes.num_waiting, decodes.num_running) == (1, 1)
    assert made.handle(Progressed(D, finished=(0,)), 0) == [offer(D, 1, Q)]
    decodes = made.demand(Role.DECODE)
    assert (decodes.num_queued, decodes.num_promised_tokens) == (0, 60)


def test_a_replica_that_was_promised_far_more_than_the_others_gets_nothing_until_it_falls_below() -> None:
    made = DisaggregatedRouter(LeastLoaded(), 100, 10_000, 2, False, LeastLoaded(output_tokens=0), max_ratio=1.1)
    for replica, role in ((P, Role.PREFILL), (D, Role.DECODE), (E, Role.DECODE)):
        made.handle(ReplicaUp(replica, 40, SIZE, role), 0)
    for id, (prompt, output) in enumerate([(1, 99), (60, 10), (1, 20)]):
        made.handle(Arrived(request(id, prompt, output)), 0)
        actions = made.handle(Progressed(P, first=(id,), held=(Held(id, prompt),)), 0)
        assert [action.to for action in actions if isinstance(action, Send)] == [[D], [E], [E]][id]
    made.handle(Adopted(D, 0), 0)
    made.handle(Progressed(D, finished=(0,)), 0)
    made.handle(Arrived(request(3, 1, 20)), 0)
    (told,) = made.handle(Progressed(P, first=(3,), held=(Held(3, 1),)), 0)
    assert isinstance(told, Send)
    assert told.to == D


def test_a_lost_target_is_forgotten_and_the_request_offered_again_from_where_it_is_held() -> None:
    made = router()
    arrive(made, 0)
    held(made, P, 0)
    assert made.handle(ReplicaDown(D, lost=True), 0) == [Send(P, Dropped(0, by=D)), offer(E, 0, P)]
    assert made.handle(NotHeld(P, 0), 0) == [Send(E, Disowned((0,))), Send(Q, Submitted(request(0)))]


def test_what_is_held_without_its_first_layers_begins_again_where_these_were_lost_before() -> None:
    """Its holder had not heard of that yet; nobody would ever answer whoever asks a dead replica for them."""
    made = router()
    arrive(made, 0)
    made.handle(ReplicaDown(Q, lost=True), 0)
    held_in_part = Progressed(P, first=(0,), held=(Held(0, 10, head=Q, num_layers=2),))
    assert made.handle(held_in_part, 0) == [Send(P, Disowned((0,))), Send(P, Submitted(request(0)))]
    assert made.handle(ReplicaDown(D, lost=True), 0) == []
    made.handle(Progressed(P, finished=(0,)), 0)
    assert made.num_outstanding == 0


def test_nobody_begins_again_at_the_replica_whose_loss_makes_it_begin_again() -> None:
    """Q has nothing else to do, and would be the first choice."""
    made = router()
    arrive(made, 0, 1, 2)
    made.handle(Progressed(Q, first=(1,), finished=(1,)), 0)
    for replica in (D, E):
        made.handle(ReplicaDown(replica, lost=True), 0)
    made.handle(Progressed(P, first=(0,), held=(Held(0, 10, head=Q, num_layers=2),)), 0)
    assert made.handle(ReplicaDown(Q, lost=True), 0) == [Send(P, Disowned((0,))), Send(P, Submitted(request(0)))]
    assert made.outstanding(P) == (2, 20)


def test_who_may_wait_for_a_word_of_a_source_hears_of_its_end_though_it_had_been_emptied_before() -> None:
    """What was on its way was of no use any more, so that the source could go; the target kept the blocks for it."""
    made = router()
    arrive(made, 0)
    made.handle(Progressed(P, first=(0,), held=(Held(0, 10, head=Q, num_layers=2),)), 0)
    assert made.handle(ReplicaDown(Q, lost=True), 0) == [Send(D, Dropped(0, by=Q))]
    assert Send(P, Disowned((0,))) in made.handle(NotHeld(D, 0), 0)
    made.handle(Progressed(P, finished=(0,)), 0)
    assert made.handle(ReplicaDown(P, lost=False), 0) == [Send(CONTROLLER, Emptied(P))]
    assert made.handle(ReplicaDown(P, lost=True), 0) == [Send(D, ReplicaDown(P, lost=True))]
    assert made.handle(ReplicaDown(P, lost=True), 0) == []


def test_a_lost_source_may_have_sent_all_in_time() -> None:
    made = router()
    arrive(made, 0, 2, 4)
    held(made, P, 0, 4)
    assert made.handle(ReplicaDown(P, lost=True), 0) == [Send(D, Dropped(0, by=P)), Send(E, Dropped(4, by=P))]
    assert made.handle(Adopted(D, 0), 0) == []
    assert made.handle(NotHeld(E, 4), 0) == [Send(Q, Submitted(request(4)))]
    assert made.handle(Progressed(D, finished=(0,)), 0) == []


def test_room_that_was_promised_to_what_is_lost_goes_to_whoever_waits_for_it() -> None:
    made = router(max_retries=0, blocks=8)  # one request each
    arrive(made, 0, 1, 2, 3)
    held(made, P, 0)
    held(made, Q, 1, 3)
    assert made.handle(ReplicaDown(P, lost=True), 0)[0] == Send(D, Dropped(0, by=P))
    refused, offered_now = made.handle(NotHeld(D, 0), 0)
    assert isinstance(refused, Reply)
    assert offered_now == offer(D, 3, Q)


def test_a_transfer_that_fails_too_often_is_given_up() -> None:
    made = router(max_retries=1)
    arrive(made, 0)
    held(made, P, 0)
    assert made.handle(HandoffFailed(P, 0, D), 0) == [offer(D, 0, P)]
    reply, cancel = made.handle(HandoffFailed(P, 0, D), 0)
    assert isinstance(reply, Reply)
    assert (reply.request, reply.rejection) == (0, Rejection.LOST)
    assert cancel == Send(P, Cancelled(0))
    assert made.handle(Progressed(P, finished=(0,)), 0) == []
    assert made.num_outstanding == 0


def test_a_request_that_is_cancelled_on_its_way_is_taken_back_at_both_ends() -> None:
    made = router()
    arrive(made, 0)
    held(made, P, 0)
    assert made.handle(Cancelled(0), 0) == [Send(P, Cancelled(0)), Send(D, Cancelled(0))]
    assert made.handle(Progressed(P, finished=(0,)), 0) == []
    assert made.outstanding(D) == made.outstanding(P) == (0, 0)


def cancelled_in_halves(made: DisaggregatedRouter, *, promised: bool = True) -> None:
    """Its first layers are at Q, the others at P; it is promised to D, and nobody wants it any more."""
    arrive(made, 0)
    if not promised:
        for replica in (D, E):
            made.handle(ReplicaDown(replica, lost=True), 0)
    made.handle(Progressed(P, first=(0,), held=(Held(0, 10, head=Q, num_layers=2),)), 0)
    target = [Send(D, Cancelled(0))] if promised else []
    assert made.handle(Cancelled(0), 0) == [Send(P, Cancelled(0)), Send(Q, Disowned((0,))), *target]


WORDS: list[tuple[bool, AnyEvent, list[AnyAction]]] = [
    (True, NotHeld(D, 0), [Send(P, Dropped(0, by=D))]),  # one half has come, the other one does not
    (True, HandoffFailed(Q, 0, D), [Send(Q, Disowned((0,))), Send(P, Dropped(0, by=Q))]),
    (False, ReplicaDown(Q, lost=True), [Send(P, Dropped(0, by=Q))]),
]


@pytest.mark.parametrize(("promised", "word", "asked"), WORDS, ids=["half", "failed", "lost"])
@pytest.mark.parametrize("holds", [True, False])
def test_who_holds_the_rest_of_what_nobody_wants_is_asked_whether_it_will_tell(
    promised: bool, word: AnyEvent, asked: list[AnyAction], holds: bool
) -> None:
    """It ends once: by its holder's word, or, where that has let go of it already, by the answer."""
    made = router()
    cancelled_in_halves(made, promised=promised)
    assert made.handle(word, 0) == asked
    assert made.num_outstanding == 1
    made.handle(Progressed(P, finished=(0,)) if holds else NotHeld(P, 0), 0)
    assert made.num_outstanding == 0
    assert made.outstanding(P) == (0, 0)
    assert made.demand(Role.DECODE).num_promised_tokens == made.demand(Role.DECODE).num_waiting == 0
    assert made.handle(NotHeld(P, 0), 0) == []


def test_a_changed_role_takes_its_requests_along_and_a_promise_for_them_is_broken() -> None:
    made = router()
    arrive(made, 0, 1, 2)
    held(made, P, 0)
    made.handle(RoleChanged(P, Role.DECODE), 0)
    assert made.handle(Kept(P, (0,)), 0) == [Send(D, Dropped(0, by=P))]
    prefills, decodes = made.demand(Role.PREFILL), made.demand(Role.DECODE)
    assert (prefills.num_waiting, prefills.num_promised_tokens) == (1, 30)
    assert (decodes.num_waiting, decodes.num_running, decodes.num_promised_tokens) == (1, 1, 60)
    assert made.handle(NotHeld(D, 0), 0) == []


def test_a_withdrawn_prefill_replica_is_empty_when_its_last_kv_has_left() -> None:
    made = router()
    arrive(made, 0)
    held(made, P, 0)
    assert made.handle(ReplicaDown(P, lost=False), 0) == []
    assert made.handle(Adopted(D, 0), 0) == [Send(CONTROLLER, Emptied(P))]
