import pytest

from squall.core.actions import AnyAction, Chunk, Cut, Forget, Preempt, Regrouped, RunSteps, Send
from squall.core.events import Arrived, Cancelled, Progressed, StepsDone, Submitted, Woke
from squall.core.replica import Replica
from squall.core.types import FOREVER, ROUTER, Request, RequestId
from squall.core.views import BatchingView, Plan
from squall.policies.batching import Vllm

NOW = 1_000


def request(id: RequestId, prompt: int, output: int = 50, *, hashes: tuple[int, ...] = (), generated: int = 0) -> Request:
    return Request(id, NOW + id, prompt, output, num_output_tokens=generated, block_hashes=hashes)


def replica(num_blocks: int = 100, *, seqs: int = 8, budget: int = 64, cache: bool = True) -> Replica:
    return Replica(3, Vllm(seqs, budget, cache), num_blocks, block_size=4)


def begin(machine: Replica, *requests: Request) -> list[AnyAction]:
    """An idle replica gets these at one instant."""
    for each in requests:
        assert machine.handle(Submitted(each), NOW) == []
    assert machine.wake_at == NOW
    return machine.handle(Woke(), NOW)


def done(machine: Replica, run: int, steps: int = 1, *stopped: RequestId) -> list[AnyAction]:
    return machine.handle(StepsDone(run, steps, stopped), NOW)


def decode(machine: Replica, *requests: Request) -> None:
    """These have their first token, and run 2 is in progress."""
    begin(machine, *requests)
    done(machine, 1)


def progressed(
    *, first: tuple[RequestId, ...] = (), finished: tuple[RequestId, ...] = (), preempted: tuple[RequestId, ...] = ()
) -> Send:
    return Send(ROUTER, Progressed(3, first, finished, preempted))


def test_an_idle_replica_waits_for_the_end_of_the_instant_and_then_plans_for_all() -> None:
    machine = replica()
    assert begin(machine, request(0, 10), request(1, 6)) == [
        RunSteps(1, 1, 0, 0, (Chunk(0, 0, 10, 0, last=True), Chunk(1, 0, 6, 0, last=True)))
    ]
    assert machine.wake_at is None


def test_a_prefill_ends_in_the_first_token_and_then_decodes_until_it_is_stopped() -> None:
    machine = replica()
    begin(machine, request(0, 10), request(1, 6))
    assert done(machine, 1) == [progressed(first=(0, 1)), RunSteps(2, 188, 2, 11 + 7)]
    assert done(machine, 2, 5, 1) == [progressed(finished=(1,)), RunSteps(3, 384, 1, 11 + 5)]
    assert done(machine, 3, 7, 0) == [progressed(finished=(0,))]
    assert machine.num_running == machine.num_used_blocks == 0


def test_a_request_may_stop_at_its_first_token() -> None:
    machine = replica()
    begin(machine, request(0, 10), request(1, 6))
    assert done(machine, 1, 1, 0, 1) == [progressed(first=(0, 1), finished=(0, 1))]
    assert machine.num_used_blocks == 0


def test_an_arrival_cuts_a_run_that_it_could_join_and_only_once() -> None:
    machine = replica()
    decode(machine, request(0, 10))
    assert machine.handle(Submitted(request(1, 6)), NOW) == [Cut(2)]
    assert machine.handle(Submitted(request(2, 5)), NOW) == []
    assert done(machine, 2) == [RunSteps(3, 1, 1, 12, (Chunk(1, 0, 6, 0, last=True), Chunk(2, 0, 5, 0, last=True)))]


def test_a_single_step_is_not_cut() -> None:
    machine = replica()
    begin(machine, request(0, 10))
    assert machine.handle(Submitted(request(1, 6)), NOW) == []


def test_a_full_batch_is_not_cut() -> None:
    machine = replica(seqs=1)
    decode(machine, request(0, 10))
    assert machine.handle(Submitted(request(1, 6)), NOW) == []
    assert done(machine, 2, 9, 0)[-1] == RunSteps(3, 1, 0, 0, (Chunk(1, 0, 6, 0, last=True),))


def test_saturation_does_not_shorten_a_run() -> None:
    """Request 1 cannot be admitted before request 0 ends; request 2 is behind it."""
    machine = replica(num_blocks=20)
    decode(machine, request(0, 40, 40))
    assert machine.handle(Submitted(request(1, 60, 5)), NOW) == [Cut(2)]
    assert done(machine, 2) == [RunSteps(3, 36, 1, 42)]
    assert machine.handle(Submitted(request(2, 4)), NOW) == []
    assert done(machine, 3, 8, 0)[-1] == RunSteps(4, 1, 0, 0, (Chunk(1, 0, 60, 0, last=True), Chunk(2, 0, 4, 0, last=True)))


def test_a_long_prompt_runs_in_pieces_and_its_last_piece_alone() -> None:
    machine = replica(seqs=2, budget=10)
    assert begin(machine, request(0, 45)) == [RunSteps(1, 1, 0, 0, (Chunk(0, 0, 10, 0, last=False),))]
    assert done(machine, 1) == [RunSteps(2, 3, 0, 0, (Chunk(0, 10, 10, 0, last=False),))]
    assert machine.handle(Submitted(request(1, 3)), NOW) == []
    assert done(machine, 2, 3) == [RunSteps(3, 1, 0, 0, (Chunk(0, 40, 5, 0, last=True), Chunk(1, 0, 3, 0, last=True)))]
    assert done(machine, 3)[0] == progressed(first=(0, 1))


def test_the_latest_arrival_is_preempted_and_recomputes_what_it_had() -> None:
    machine = replica(num_blocks=11, cache=False)
    decode(machine, request(0, 16, 20), request(1, 12, 20))
    assert machine.pool.num_available == 4
    actions = done(machine, 2, 8)
    assert actions == [progressed(preempted=(1,)), Preempt((1,)), RunSteps(3, 1, 1, 25)]
    assert machine.num_preemptions == 1
    assert done(machine, 3) == [RunSteps(4, 16, 1, 26)]
    assert done(machine, 4, 3, 0) == [
        progressed(finished=(0,)),
        RunSteps(5, 1, 0, 0, (Chunk(1, 0, 12 + 9, 0, last=True),)),
    ]
    assert done(machine, 5) == [RunSteps(6, 20, 1, 22)]


def test_a_tie_in_arrival_is_decided_by_id() -> None:
    machine = replica(num_blocks=11, cache=False)
    decode(machine, Request(7, NOW, 16, 20), Request(5, NOW, 12, 20))
    assert done(machine, 2, 8)[1] == Preempt((7,))


def test_the_earlier_request_is_kept_though_it_was_admitted_later() -> None:
    machine = replica(num_blocks=11, cache=False)
    decode(machine, request(9, 16, 20), request(2, 12, 20))
    assert done(machine, 2, 8)[1] == Preempt((9,))


def test_a_partial_prefill_gives_way_to_a_decode_that_needs_a_block() -> None:
    """Pieces of one token: request 1 has taken the last block when request 0 needs its third."""
    machine = replica(num_blocks=4, seqs=2, budget=2, cache=False)
    decode(machine, request(0, 2, 12))
    machine.handle(Submitted(request(1, 8, 1)), NOW)
    assert done(machine, 2) == [RunSteps(3, 1, 1, 4, (Chunk(1, 0, 1, 0, last=False),))]
    assert done(machine, 3) == [RunSteps(4, 4, 1, 5, (Chunk(1, 1, 1, 0, last=False),))]
    assert done(machine, 4, 4) == [progressed(preempted=(1,)), Preempt((1,)), RunSteps(5, 1, 1, 9)]
    assert done(machine, 5) == [RunSteps(6, 1, 1, 10, (Chunk(1, 0, 1, 0, last=False),))]


def test_a_piece_that_does_not_fit_sends_its_own_request_back() -> None:
    machine = replica(num_blocks=6, budget=8, cache=False)
    decode(machine, request(0, 7, 17))
    machine.handle(Submitted(request(1, 20, 4)), NOW)
    assert done(machine, 2) == [RunSteps(3, 1, 1, 9, (Chunk(1, 0, 7, 0, last=False),))]
    assert done(machine, 3) == [progressed(preempted=(1,)), Preempt((1,)), RunSteps(4, 1, 1, 10)]
    assert done(machine, 4) == [RunSteps(5, 1, 1, 11, (Chunk(1, 0, 7, 0, last=False),))]


def test_a_request_continued_here_computes_what_it_generated_elsewhere() -> None:
    machine = replica()
    assert begin(machine, request(0, 10, generated=5)) == [RunSteps(1, 1, 0, 0, (Chunk(0, 0, 15, 0, last=True),))]
    assert done(machine, 1) == [progressed(first=(0,)), RunSteps(2, 384, 1, 16)]


def test_a_cached_prefix_is_used_and_at_least_one_token_is_computed() -> None:
    machine = replica()
    begin(machine, request(0, 9, hashes=(11, 12)))
    done(machine, 1, 1, 0)
    assert begin(machine, request(1, 8, hashes=(11, 12))) == [RunSteps(2, 1, 0, 0, (Chunk(1, 4, 4, 4, last=True),))]
    assert (machine.num_prefix_queries, machine.num_prefix_hits) == (9 + 8, 4)
    assert done(machine, 2, 1, 1) == [progressed(first=(1,), finished=(1,))]
    assert begin(machine, request(2, 9, hashes=(11, 12))) == [RunSteps(3, 1, 0, 0, (Chunk(2, 8, 1, 8, last=True),))]


def test_without_a_prefix_cache_hashes_are_ignored() -> None:
    machine = replica(cache=False)
    begin(machine, request(0, 9, hashes=(11, 12)))
    done(machine, 1, 1, 0)
    assert machine.pool.num_free == 100
    assert begin(machine, request(1, 9, hashes=(11, 12))) == [RunSteps(2, 1, 0, 0, (Chunk(1, 0, 9, 0, last=True),))]


def test_two_prompts_computed_in_one_step_do_not_share_and_one_of_them_stays_private() -> None:
    machine = replica()
    begin(machine, request(0, 9, hashes=(11, 12)), request(1, 9, hashes=(11, 12)))
    done(machine, 1, 1, 0, 1)
    assert machine.pool.num_free == 98
    assert machine.pool.match((11, 12), 2) == (2, 0)


def test_a_run_names_the_blocks_that_it_may_evict_and_goes_no_further() -> None:
    machine = replica(num_blocks=8)
    begin(machine, request(0, 17, 4, hashes=(11, 12, 13, 14)))
    done(machine, 1, 1, 0)
    assert begin(machine, request(1, 15, 18)) == [RunSteps(2, 1, 0, 0, (Chunk(1, 0, 15, 0, last=True),))]
    assert done(machine, 2) == [progressed(first=(1,)), RunSteps(3, 16, 1, 16, (), (14, 13, 12, 11))]
    assert done(machine, 3, 6) == [RunSteps(4, 8, 1, 22, (), (12, 11))]


def test_the_pieces_of_a_long_prompt_are_one_run_however_much_they_evict() -> None:
    machine = replica(num_blocks=100)
    hashes = tuple(range(1, 100))
    begin(machine, request(0, 397, 4, hashes=hashes))
    done(machine, 1)
    done(machine, 2, 5)
    done(machine, 3, 1, 0)
    assert begin(machine, request(1, 397, 4)) == [RunSteps(4, 1, 0, 0, (Chunk(1, 0, 64, 0, last=False),), hashes[:83:-1])]
    assert done(machine, 4) == [RunSteps(5, 5, 0, 0, (Chunk(1, 64, 64, 0, last=False),), hashes[83:3:-1])]
    assert done(machine, 5, 5) == [RunSteps(6, 1, 0, 0, (Chunk(1, 384, 13, 0, last=True),), hashes[3::-1])]


def test_a_prompt_that_is_admitted_may_evict_too() -> None:
    machine = replica(num_blocks=8)
    begin(machine, request(0, 17, 4, hashes=(11, 12, 13, 14)))
    done(machine, 1, 1, 0)
    assert begin(machine, request(1, 24, 4)) == [RunSteps(2, 1, 0, 0, (Chunk(1, 0, 24, 0, last=True),), (14, 13))]


def test_a_waiting_request_is_cancelled_at_once() -> None:
    machine = replica(seqs=1)
    decode(machine, request(0, 10), request(1, 6))
    assert machine.handle(Cancelled(1), NOW) == [progressed(finished=(1,)), Forget((1,)), Cut(2)]
    assert machine.num_waiting == 0


def test_a_waiting_request_of_an_idle_replica_is_cancelled_before_it_plans() -> None:
    machine = replica()
    machine.handle(Submitted(request(0, 10)), NOW)
    assert machine.handle(Cancelled(0), NOW) == [progressed(finished=(0,)), Forget((0,))]
    assert machine.handle(Woke(), NOW) == []


def test_a_running_request_is_cancelled_at_the_next_boundary() -> None:
    machine = replica()
    decode(machine, request(0, 10), request(1, 6))
    assert machine.handle(Cancelled(0), NOW) == [Cut(2)]
    assert done(machine, 2, 3) == [progressed(finished=(0,)), Forget((0,)), RunSteps(3, 388, 1, 10)]


def test_a_request_that_stops_before_its_cancellation_takes_effect_has_just_finished() -> None:
    machine = replica()
    decode(machine, request(0, 10))
    machine.handle(Cancelled(0), NOW)
    machine.handle(Cancelled(0), NOW)
    assert done(machine, 2, 3, 0) == [progressed(finished=(0,))]


def test_a_request_cancelled_in_its_prefill_leaves_its_prompt_in_the_cache() -> None:
    machine = replica()
    begin(machine, request(0, 9, hashes=(11, 12)))
    machine.handle(Cancelled(0), NOW)
    assert done(machine, 1) == [progressed(first=(0,), finished=(0,)), Forget((0,))]
    assert machine.pool.match((11, 12), 2) == (2, 0)
    assert machine.num_used_blocks == 0


def test_a_cancellation_of_nobody_is_ignored() -> None:
    assert replica().handle(Cancelled(5), NOW) == []


def test_a_request_that_can_never_fit_is_a_bug_of_whoever_sent_it() -> None:
    machine = replica(num_blocks=4)
    assert machine.handle(Submitted(request(0, 10, 7)), NOW) == []
    with pytest.raises(ValueError, match="request 1 can never fit into the 4 blocks of replica 3"):
        machine.handle(Submitted(request(1, 10, 8)), NOW)


def test_the_end_of_another_run_is_a_bug() -> None:
    machine = replica()
    begin(machine, request(0, 10))
    with pytest.raises(ValueError, match="replica 3 is not in run 2"):
        done(machine, 2)


def test_an_event_for_another_machine_is_a_bug() -> None:
    with pytest.raises(TypeError, match="replica 3 cannot handle Arrived"):
        replica().handle(Arrived(request(0, 10)), NOW)


class Greedy:
    """A policy without validity, which takes whoever waits whether there are blocks or not."""

    prefix_cache = False

    def __call__(self, view: BatchingView) -> Plan:
        return Plan(admit=tuple(work.target for work in view.waiting))


def test_a_policy_that_does_not_say_how_long_its_plan_holds_gets_single_steps() -> None:
    machine = Replica(3, Greedy(), num_blocks=10, block_size=4)
    begin(machine, request(0, 10, 9))
    assert done(machine, 1)[-1] == RunSteps(2, 1, 1, 11)


def test_a_policy_that_admits_more_than_fits_is_named() -> None:
    machine = Replica(3, Greedy(), num_blocks=4, block_size=4)
    machine.handle(Submitted(request(0, 10, 2)), NOW)
    machine.handle(Submitted(request(1, 10, 2)), NOW)
    with pytest.raises(ValueError, match="Greedy admitted more than the 4 free blocks can hold"):
        machine.handle(Woke(), NOW)


def test_a_plan_without_end_is_bounded_by_blocks_alone() -> None:
    machine = replica(num_blocks=1_000, cache=False)
    decode(machine, request(0, 8, 3_000), request(1, 8, 900))
    assert Vllm()(machine).steps == FOREVER
    assert done(machine, 2, 4)[-1] == RunSteps(3, (1_000 - 6) // 2 * 4, 2, 2 * 13)


class Scripted:
    """Answers with the next of some plans."""

    prefix_cache = False

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)

    def __call__(self, view: BatchingView) -> Plan:
        return self.plans.pop(0)


def scripted(*plans: Plan, num_blocks: int = 100) -> Replica:
    return Replica(3, Scripted(*plans), num_blocks, block_size=4)


def test_decodes_that_pause_neither_advance_nor_take_blocks_and_who_is_new_joins_them() -> None:
    machine = scripted(Plan(admit=(8,)), Plan(admit=(6,), decodes=0), Plan(9))
    begin(machine, request(0, 8))
    machine.handle(Submitted(request(1, 6)), NOW)
    assert done(machine, 1)[-1] == RunSteps(2, 1, 0, 0, (Chunk(1, 0, 6, 0, last=True),))
    assert machine.num_used_blocks == 2
    assert done(machine, 2) == [progressed(first=(1,)), RunSteps(3, 9, 2, 9 + 7)]
    assert machine.num_used_blocks == 2 + 2


def test_the_earliest_arrivals_go_on_where_only_a_part_may_and_fewest_move() -> None:
    machine = scripted(Plan(admit=(4, 4, 4)), Plan(5, decodes=2), Plan(5, decodes=1), Plan(5))
    begin(machine, request(0, 4), request(1, 4), request(2, 4))
    assert done(machine, 1)[-1] == RunSteps(2, 5, 2, 10, group=0, regrouped=(Regrouped(1, (2,)),))
    assert done(machine, 2, 5)[-1] == RunSteps(3, 5, 1, 10, group=1, regrouped=(Regrouped(0, (2,)), Regrouped(1, (0,))))
    assert done(machine, 3, 5)[-1] == RunSteps(4, 5, 3, 15 + 10 + 5, regrouped=(Regrouped(0, (0,)),))


def test_blocks_are_reserved_with_the_first_piece_and_not_taken_again() -> None:
    machine = scripted(Plan(admit=(4,), reserve=(6,)), Plan(2, (4,)), Plan(1, (10,)), Plan(FOREVER), num_blocks=9)
    assert begin(machine, request(0, 22, 9)) == [RunSteps(1, 1, 0, 0, (Chunk(0, 0, 4, 0, False, num_reserved=6),))]
    done(machine, 1)
    assert machine.num_used_blocks == 6
    done(machine, 2, 2)
    assert done(machine, 3) == [progressed(first=(0,)), RunSteps(4, 12, 1, 23)]
    assert machine.num_used_blocks == 6


def test_who_holds_all_that_it_may_need_takes_no_more_and_its_run_has_no_end_of_its_own() -> None:
    machine = scripted(Plan(admit=(22,), reserve=(8,)), Plan(FOREVER), Plan(), num_blocks=9)
    begin(machine, request(0, 22, 10))
    assert done(machine, 1)[-1] == RunSteps(2, FOREVER, 1, 23)
    assert machine.num_used_blocks == 8
    assert done(machine, 2, 9, 0) == [progressed(finished=(0,))]
    assert machine.num_used_blocks == 0


def test_a_reservation_is_for_the_prompt_or_for_all() -> None:
    machine = scripted(Plan(admit=(22,), reserve=(7,)))
    machine.handle(Submitted(request(0, 22, 10)), NOW)
    with pytest.raises(
        ValueError, match="the policy reserves 7 blocks for request 0: more than its prompt fills and fewer than the 8"
    ):
        machine.handle(Woke(), NOW)


def test_a_run_ends_before_it_touches_the_blocks_to_be_kept() -> None:
    machine = scripted(Plan(admit=(8,)), Plan(FOREVER, keep=3), num_blocks=10)
    begin(machine, request(0, 8, 30))
    assert done(machine, 1)[-1] == RunSteps(2, 20, 1, 9)


def test_a_policy_may_send_the_latest_arrival_back() -> None:
    machine = scripted(Plan(admit=(8, 8)), Plan(preempt=True), Plan(2))
    begin(machine, request(0, 8), request(1, 8))
    assert done(machine, 1) == [progressed(first=(0, 1), preempted=(1,)), Preempt((1,)), RunSteps(2, 2, 1, 9)]


def test_steps_are_counted_since_the_last_mark() -> None:
    machine = scripted(Plan(admit=(8,), mark=True), Plan(9), Plan(9, mark=True), Plan(9))
    begin(machine, request(0, 8))
    done(machine, 1)
    assert machine.steps_since_mark == 0
    done(machine, 2, 7)
    assert machine.steps_since_mark == 0
    done(machine, 3, 4)
    assert machine.steps_since_mark == 4


def test_a_policy_can_ask_what_each_decode_holds_and_may_still_add() -> None:
    machine = scripted(Plan(admit=(8, 5)), Plan(9), Plan(9))
    begin(machine, request(0, 8, 10), request(1, 5, 4))
    done(machine, 1)
    done(machine, 2, 2)
    assert list(machine.spans()) == [(11, 6), (8, 0)]
    assert machine.latest_grows() is False
    assert machine.decode_blocks == 0
