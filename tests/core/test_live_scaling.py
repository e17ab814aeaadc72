"""Live scaling: what the two replicas of a pair do, as lists of actions, and what holds whatever happens."""

from squall.core.actions import (
    Abandon,
    AnyAction,
    Chunk,
    Cut,
    Forget,
    Hold,
    Join,
    Reserve,
    RunLayers,
    RunSteps,
    Send,
    SendActivations,
    SendKv,
)
from squall.core.events import (
    ActivationsArrived,
    ActivationsFailed,
    ActivationsSent,
    AnyEvent,
    BatchFormed,
    Cancelled,
    Disowned,
    HandedOver,
    KvArrived,
    KvFailed,
    KvSent,
    LayerArrived,
    LayersDone,
    LivePaired,
    NothingLeft,
    Progressed,
    PullWanted,
    StepsDone,
    Submitted,
    Surrendered,
    TakenOver,
    Unpaired,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.live_batch import LiveLimits
from squall.core.replica import Replica
from squall.core.types import CONTROLLER, ROUTER, Request, RequestId
from squall.policies.batching import Vllm

NOW = 1_000
SOURCE, TARGET = 1, 2
LAYERS = 4
BATCH = 16
"""Prompt tokens of a batch, and blocks of 4 tokens."""
PAIR = LivePaired(TARGET, SOURCE, LAYERS)


def is_paired(machine: Replica) -> bool:
    return machine.live is not None


def request(id: RequestId, prompt: int = 16, output: int = 50, generated: int = 0) -> Request:
    return Request(id, NOW + id, prompt, output, num_output_tokens=generated)


def replica(id: int, num_blocks: int = 100) -> Replica:
    return Replica(id, Vllm(8, BATCH, False), num_blocks, block_size=4)


def at(machine: Replica, *events: AnyEvent) -> list[AnyAction]:
    """These at one instant, and the wake-up at its end where one is wanted."""
    actions = [action for event in events for action in machine.handle(event, NOW)]
    if machine.wake_at == NOW:
        actions += machine.handle(Woke(), NOW)
    return actions


def layers(batch: int, first: int, last: int, *requests: RequestId, tokens: int = 16) -> RunLayers:
    return RunLayers(batch, first, last, tuple(Chunk(each, 0, tokens, 0, last=True) for each in requests))


def target(*requests: Request, arrived: int = 1, limits: LiveLimits | None = None) -> Replica:
    """One that loads: so many layers are there, and these requests in its queue."""
    machine = replica(TARGET)
    if limits is not None:
        machine.limits = limits
    assert at(machine, PAIR) == []
    for layer in range(arrived):
        at(machine, LayerArrived(TARGET, layer))
    begun = at(machine, *(Submitted(each) for each in requests))
    assert [type(action) for action in begun] == ([RunLayers] if requests and arrived else [])
    return machine


def pull(num_blocks: int = 100) -> PullWanted:
    return PullWanted(SOURCE, num_blocks)


# -- the target


def test_a_target_runs_one_layer_at_a_time_of_the_earliest_batch_whose_next_one_has_arrived() -> None:
    machine = target(request(0), request(1))
    assert at(machine, LayersDone(1, 1)) == [layers(2, 0, 1, 1)]
    assert at(machine, LayerArrived(TARGET, 1)) == []
    assert at(machine, LayersDone(2, 1)) == [layers(1, 1, 2, 0)]
    assert at(machine, LayersDone(1, 2)) == [layers(2, 1, 2, 1)]
    assert at(machine, LayersDone(2, 2)) == []
    assert at(machine, LayerArrived(TARGET, 2)) == [layers(1, 2, 3, 0)]


def test_a_target_without_a_layer_gives_whole_batches_and_holds_no_blocks_for_them() -> None:
    machine = target(request(0), request(1), arrived=0)
    assert at(machine, pull()) == [Send(SOURCE, HandedOver(TARGET, 1, 0, (request(0),))), Abandon((0,))]
    assert machine.num_used_blocks == 0
    assert machine.num_waiting == 1


def test_a_pull_waits_for_the_end_of_the_layer_and_then_gets_the_batch_with_its_activations_and_then_its_kv() -> None:
    machine = target(request(0))
    assert at(machine, pull()) == []
    assert at(machine, LayersDone(1, 1)) == [
        Send(SOURCE, HandedOver(TARGET, 1, 1, (request(0),))),
        SendActivations(1, SOURCE, 16),
    ]
    assert machine.num_used_blocks == 4
    assert at(machine, ActivationsSent(1)) == [Send(SOURCE, ActivationsArrived(1)), SendKv(0, SOURCE, 0, 1, 16)]
    assert at(machine, KvSent(0, SOURCE)) == [Abandon((0,)), Send(SOURCE, KvArrived(0, 0, 1))]
    assert machine.num_used_blocks == 0


def test_a_word_that_a_batch_failed_after_it_was_confirmed_changes_nothing() -> None:
    machine = target(request(0))
    at(machine, pull(), LayersDone(1, 1), ActivationsSent(1))
    assert at(machine, ActivationsFailed(1)) == []
    assert at(machine, KvSent(0, SOURCE)) == [Abandon((0,)), Send(SOURCE, KvArrived(0, 0, 1))]


def test_nothing_left_is_an_answer_and_the_next_request_says_so() -> None:
    machine = target()
    assert at(machine, pull()) == [Send(SOURCE, NothingLeft())]
    assert at(machine, Submitted(request(0))) == [Send(SOURCE, BatchFormed()), layers(1, 0, 1, 0)]
    assert at(machine, Submitted(request(1))) == []


def test_a_batch_that_does_not_fit_is_not_given() -> None:
    machine = target(request(0))
    assert at(machine, LayersDone(1, 1)) == []
    assert at(machine, pull(3)) == [Send(SOURCE, NothingLeft(4))]
    assert at(machine, pull(4))[0] == Send(SOURCE, HandedOver(TARGET, 1, 1, (request(0),)))


def test_a_target_begins_no_more_batches_than_it_may_and_gives_the_others_whole() -> None:
    machine = target(request(0), request(1), request(2), limits=LiveLimits(2, 2, 1, 16))
    assert at(machine, LayersDone(1, 1)) == [layers(2, 0, 1, 1)]
    assert at(machine, LayersDone(2, 1)) == []
    assert machine.num_waiting == 1
    assert at(machine, pull())[-1] == layers(3, 0, 1, 2)  # there is room for one more


def test_activations_that_are_not_away_take_slots_and_without_one_no_batch_begins() -> None:
    machine = target(request(0), request(1), limits=LiveLimits(4, 4, 1, 1))
    assert at(machine, LayersDone(1, 1)) == []
    at(machine, pull())
    assert at(machine, pull()) == [Send(SOURCE, HandedOver(TARGET, 2, 0, (request(1),))), Abandon((1,))]
    assert at(machine, Submitted(request(2))) == []
    assert at(machine, ActivationsSent(1))[-1] == layers(3, 0, 1, 2)


def test_the_number_of_pending_batches_falls_with_time() -> None:
    limits = LiveLimits(4, 2, 200, 16)
    assert [limits.pending(elapsed) for elapsed in (0, 199, 200, 399, 400, 10_000)] == [4, 4, 3, 3, 2, 2]


def test_prompts_share_a_batch_up_to_the_budget_and_a_longer_one_has_its_own() -> None:
    machine = target(arrived=0)
    at(machine, *(Submitted(each) for each in (request(0, 9), request(1, 7), request(2, 1), request(3, 40))))
    handed = [at(machine, pull())[0] for _ in range(3)]
    assert [[each.id for each in send.event.requests] for send in handed] == [[0, 1], [2], [3]]  # type: ignore[union-attr]


def test_the_last_layer_waits_for_what_comes_after_it_and_then_yields_first_tokens() -> None:
    machine = target(request(0), request(1, output=1), arrived=LAYERS)
    for done in (1, 2):
        assert at(machine, LayersDone(1, done)) == [layers(1, done, done + 1, 0)]
    assert at(machine, LayersDone(1, 3)) == [layers(2, 0, 1, 1)]
    assert at(machine, WeightsLoaded(TARGET, 100, 4)) == []
    assert at(machine, LayersDone(2, 1)) == [layers(1, 3, 4, 0)]
    assert at(machine, LayersDone(1, 4)) == [Send(ROUTER, Progressed(TARGET, first=(0,))), Hold((0,)), layers(2, 1, 2, 1)]
    assert at(machine, Warmed(TARGET)) == []
    assert at(machine, LayersDone(2, 2)) == [layers(2, 2, 4, 1)]  # nothing has to be waited for any more
    pair = Unpaired(TARGET, SOURCE)
    assert at(machine, LayersDone(2, 4, (1,))) == [
        Send(ROUTER, Progressed(TARGET, first=(1,), finished=(1,))),
        Join((0,), 0),
        RunSteps(1, 384, 1, 17),
        *(Send(to, pair) for to in (SOURCE, ROUTER, CONTROLLER)),
    ]
    assert machine.live is None


def test_what_has_not_begun_when_the_target_is_ready_is_its_own() -> None:
    machine = target(request(0), request(1))
    at(machine, LayersDone(1, 1))
    at(machine, WeightsLoaded(TARGET, 100, 4), Warmed(TARGET))
    assert at(machine, LayersDone(2, 1)) == [layers(1, 1, 4, 0)]
    assert at(machine, pull())[0] == Send(SOURCE, HandedOver(TARGET, 2, 1, (request(1),)))
    assert at(machine, pull()) == [Send(SOURCE, NothingLeft())]
    assert at(machine, Submitted(request(2))) == []
    done = at(machine, LayersDone(1, 4, (0,)))
    assert done[-1] == RunSteps(1, 1, 0, 0, (Chunk(2, 0, 16, 0, last=True),))
    assert is_paired(machine)  # the KV of request 1 is still here
    assert at(machine, pull()) == [Send(SOURCE, NothingLeft())]
    at(machine, ActivationsSent(2))
    assert at(machine, KvSent(1, SOURCE)) == [Abandon((1,)), Send(SOURCE, KvArrived(1, 0, 1)), Cut(1)]
    assert at(machine, StepsDone(1, 1))[-1] == Send(CONTROLLER, Unpaired(TARGET, SOURCE))
    assert not is_paired(machine)
    assert machine.num_used_blocks == 4


def test_a_cancelled_request_leaves_the_queue_or_its_batch_at_once_and_a_layer_that_runs_at_its_end() -> None:
    machine = target(request(0, 8), request(1, 8), request(2))
    gone = [Send(ROUTER, Progressed(TARGET, finished=(2,))), Forget((2,))]
    assert at(machine, Cancelled(2)) == gone
    assert at(machine, Cancelled(1)) == []
    ended = at(machine, LayersDone(1, 1))
    assert ended == [Send(ROUTER, Progressed(TARGET, finished=(1,))), Forget((1,))]
    assert machine.num_used_blocks == 2
    assert at(machine, LayerArrived(TARGET, 1)) == [layers(1, 1, 2, 0, tokens=8)]
    at(machine, Cancelled(0))
    at(machine, LayersDone(1, 2))
    assert machine.num_used_blocks == 0
    assert at(machine, Cancelled(99)) == []


def test_a_target_whose_source_is_lost_gives_back_what_has_no_token_and_loads_alone() -> None:
    machine = target(request(0), request(1), request(2))
    at(machine, pull(), LayersDone(1, 1))  # 0 is handed over, 1 runs, 2 waits
    alone = Unpaired(TARGET, SOURCE, lost=True)
    assert at(machine, alone) == [Abandon((0, 2)), Send(ROUTER, Surrendered(TARGET, (0, 2)))]
    assert at(machine, LayersDone(2, 1)) == [
        Abandon((1,)),
        Send(ROUTER, Surrendered(TARGET, (1,))),
    ]
    failed = at(machine, ActivationsFailed(1))
    assert failed == [Abandon((0,)), Send(CONTROLLER, alone)]  # only now: whatever it is sent from here on stays
    assert machine.num_used_blocks == 0
    assert machine.live is None


# -- the source


def source(*running: Request, num_blocks: int = 100) -> Replica:
    """A replica of a pair that decodes these, and has pulled."""
    machine = replica(SOURCE, num_blocks)
    if running:
        at(machine, *(Submitted(each) for each in running))
        at(machine, StepsDone(1, 1))
    return machine


def handed(batch: int, layer: int, *requests: Request) -> HandedOver:
    return HandedOver(TARGET, batch, layer, requests)


def test_an_idle_source_pulls_with_blocks_set_aside_and_runs_the_rest() -> None:
    machine = source()
    assert at(machine, PAIR) == [Send(TARGET, PullWanted(SOURCE, 20))]
    assert machine.num_used_blocks == 20
    assert at(machine, handed(1, 1, request(0))) == [Send(ROUTER, TakenOver(SOURCE, TARGET, (0,))), Reserve(0, 16)]
    assert machine.num_used_blocks == 4
    assert at(machine, ActivationsArrived(1)) == [layers(1, 1, 4, 0)]
    assert at(machine, LayersDone(1, 4)) == [
        Hold((0,)),
        Send(ROUTER, Progressed(SOURCE, first=(0,))),
        Send(TARGET, PullWanted(SOURCE, 20)),
    ]
    assert at(machine, KvArrived(0, 0, 1)) == [Join((0,), 0), RunSteps(1, 304, 1, 17)]


def test_kv_may_come_before_the_first_token() -> None:
    machine = source()
    at(machine, PAIR)
    at(machine, handed(1, 1, request(0)), ActivationsArrived(1), KvArrived(0, 0, 1))
    done = at(machine, LayersDone(1, 4))
    assert done[:4] == [Hold((0,)), Send(ROUTER, Progressed(SOURCE, first=(0,))), Join((0,), 0), RunSteps(1, 304, 1, 17)]


def test_a_source_surrenders_what_it_has_not_begun_and_finishes_the_rest() -> None:
    machine = source()
    at(machine, *(Submitted(request(id)) for id in range(3)))  # the budget has room for one
    assert at(machine, PAIR) == [Abandon((1, 2)), Send(ROUTER, Surrendered(SOURCE, (1, 2))), Cut(1)]
    assert at(machine, StepsDone(1, 1)) == [
        Send(ROUTER, Progressed(SOURCE, first=(0,))),
        RunSteps(2, 304, 1, 17),
        Send(TARGET, PullWanted(SOURCE, 20)),
    ]


def test_the_rest_of_a_batch_runs_at_the_next_boundary_and_decodes_go_on_after_it() -> None:
    machine = source(request(7))
    at(machine, PAIR)
    assert at(machine, StepsDone(2, 3))[-1] == Send(TARGET, PullWanted(SOURCE, 20))
    assert at(machine, handed(1, 0, request(0)))[-1] == Cut(3)
    assert at(machine, StepsDone(3, 1)) == [layers(1, 0, 4, 0)]
    assert at(machine, LayersDone(1, 4)) == [
        Hold((0,)),
        Send(ROUTER, Progressed(SOURCE, first=(0,))),
        Join((0,), 0),
        RunSteps(4, 140, 2, 21 + 17),
        Send(TARGET, PullWanted(SOURCE, 20)),
    ]


def test_a_request_may_end_at_its_first_token_and_its_blocks_wait_for_what_is_still_written_to_them() -> None:
    machine = source()
    at(machine, PAIR)
    at(machine, handed(1, 2, request(0, output=1)), ActivationsArrived(1))
    assert at(machine, LayersDone(1, 4, (0,)))[0] == Send(ROUTER, Progressed(SOURCE, first=(0,), finished=(0,)))
    assert machine.num_used_blocks == 24
    at(machine, NothingLeft(), KvArrived(0, 0, 2))
    assert machine.num_used_blocks == 0


def test_a_source_that_is_told_of_nothing_asks_again_when_there_is_something() -> None:
    machine = source()
    at(machine, PAIR)
    assert at(machine, NothingLeft()) == []
    assert machine.num_used_blocks == 0
    assert at(machine, BatchFormed()) == [Send(TARGET, PullWanted(SOURCE, 20))]
    assert at(machine, NothingLeft(30)) == [Send(TARGET, PullWanted(SOURCE, 30))]
    assert at(machine, NothingLeft(101)) == [Send(TARGET, PullWanted(SOURCE, 100))]


def test_a_cancelled_request_of_a_batch_in_hand() -> None:
    machine = source()
    at(machine, PAIR)
    at(machine, handed(1, 1, request(0, 8), request(1, 8), request(2, 8)))
    gone = [Send(ROUTER, Progressed(SOURCE, finished=(1,))), Forget((1,))]
    assert at(machine, Cancelled(1)) == gone
    assert at(machine, ActivationsArrived(1)) == [layers(1, 1, 4, 0, 2, tokens=8)]
    assert at(machine, Cancelled(2)) == []
    done = at(machine, LayersDone(1, 4))
    assert done[1] == Send(ROUTER, Progressed(SOURCE, first=(0,), finished=(2,)))
    assert done[2] == Forget((2,))
    at(machine, NothingLeft(), *(KvArrived(id, 0, 1) for id in (1, 2)))
    assert machine.num_used_blocks == 2
    assert at(machine, Cancelled(0)) == [Send(ROUTER, Progressed(SOURCE, finished=(0,))), Forget((0,))]
    at(machine, KvArrived(0, 0, 1))
    assert machine.num_used_blocks == 0


def test_a_request_whose_first_layers_are_lost_is_computed_here_once_more() -> None:
    machine = source()
    at(machine, PAIR)
    at(machine, handed(1, 1, request(0)), ActivationsArrived(1))
    at(machine, LayersDone(1, 4), NothingLeft())
    redone = at(machine, KvFailed(0, SOURCE, 0, 1))
    assert redone[0] == Send(ROUTER, Progressed(SOURCE, preempted=(0,)))
    assert redone[2] == RunSteps(1, 1, 0, 0, (Chunk(0, 0, 16, 0, last=False),))


def test_a_source_whose_target_is_lost_keeps_what_it_took_over() -> None:
    machine = source()
    at(machine, PAIR)
    at(machine, handed(1, 1, request(0)))
    begun = at(machine, Unpaired(TARGET, SOURCE, lost=True))
    assert begun[-1] == RunSteps(1, 1, 0, 0, (Chunk(0, 0, 16, 0, last=True),))
    assert machine.num_used_blocks == 0
    assert machine.live is None


def test_activations_that_do_not_come_make_an_ordinary_prompt_of_a_batch() -> None:
    machine = source()
    at(machine, PAIR)
    at(machine, handed(1, 1, request(0)))
    assert at(machine, ActivationsFailed(1))[-1] == RunSteps(1, 1, 0, 0, (Chunk(0, 0, 16, 0, last=True),))


def test_the_router_may_take_a_request_back_from_whoever_took_it_over() -> None:
    machine = source()
    at(machine, PAIR)
    at(machine, handed(1, 0, request(0, 8), request(1, 8)))
    assert at(machine, Disowned((1,))) == []
    assert at(machine, LayersDone(1, 4))[:3] == [Abandon((1,)), Hold((0,)), Send(ROUTER, Progressed(SOURCE, first=(0,)))]
