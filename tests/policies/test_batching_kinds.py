"""What each batching policy plans, beside vLLM's V1 (tests/policies/test_batching.py)."""

import msgspec
import pytest

from squall.config import Config
from squall.core.types import FOREVER, Request
from squall.core.views import Plan
from squall.policies.batching import Batching, BlitzBatching, FasterTransformer, LightLlm, Orca, Sarathi, VllmV0


class Waiting(msgspec.Struct):
    """A request in the queue or in prefill."""

    target: int
    computed: int = 0
    blocks: int = 0
    output: int = 10
    hashes: tuple[int, ...] = ()

    @property
    def request(self) -> Request:
        return Request(0, 0, self.target, self.output)


class View(msgspec.Struct):
    """A replica between two steps."""

    num_decodes: int = 0
    prefilling: list[Waiting] = []
    waiting: list[Waiting] = []
    preempted: bool = False
    free_blocks: int = 1_000
    decode_blocks: int = 0
    num_blocks: int = 1_000
    block_size: int = 10
    num_stages: int = 1
    steps_since_mark: int = 0
    grows: bool = False
    decoding: list[tuple[int, int]] = []

    @property
    def num_running(self) -> int:
        return self.num_decodes + len(self.prefilling)

    def latest_grows(self) -> bool:
        return self.grows

    def spans(self) -> list[tuple[int, int]]:
        return self.decoding

    def cached(self, work: Waiting) -> tuple[int, int]:
        return 0, 0


def plan(view: View, policy: Batching) -> Plan:
    return policy(view)  # type: ignore[arg-type] # `cached` takes what the view holds


# -- vllm_v0


def test_v0_prefers_prompts_and_pauses_the_decodes_for_them() -> None:
    assert plan(View(num_decodes=5, waiting=[Waiting(30), Waiting(40)]), VllmV0()) == Plan(1, admit=(30, 40), decodes=0)


def test_v0_decodes_until_somebody_ends_when_nobody_can_be_admitted() -> None:
    full = View(num_decodes=4, waiting=[Waiting(30)])
    assert plan(full, VllmV0(max_num_seqs=4)).steps == FOREVER
    assert plan(full, VllmV0(max_num_seqs=4)).open is False


def test_v0_pads_a_batch_to_its_longest_prompt() -> None:
    view = View(waiting=[Waiting(30), Waiting(10), Waiting(40), Waiting(5)])
    assert plan(view, VllmV0(max_num_batched_tokens=90)).admit == (30, 10)


def test_v0_serves_a_prompt_that_exceeds_the_budget_alone() -> None:
    assert plan(View(waiting=[Waiting(500), Waiting(1)]), VllmV0(max_num_batched_tokens=90)).admit == (500,)


def test_an_admission_leaves_the_watermark_free_unless_nothing_runs() -> None:
    policy = VllmV0(watermark=0.1)
    assert plan(View(num_decodes=1, waiting=[Waiting(100)], free_blocks=109, decode_blocks=0), policy).admit == ()
    assert plan(View(num_decodes=1, waiting=[Waiting(100)], free_blocks=109, decode_blocks=1), policy).admit == (100,)
    assert plan(View(waiting=[Waiting(9_990), Waiting(10)]), policy).admit == (9_990,)


def test_v0_admits_nobody_at_a_preemption() -> None:
    view = View(num_decodes=2, waiting=[Waiting(5)], preempted=True)
    assert plan(view, VllmV0()) == Plan(1, open=False, decodes=256)


def test_with_vidurs_quirk_a_decode_needs_a_free_block_that_it_does_not_take() -> None:
    view = View(num_decodes=2, free_blocks=0)
    for policy in (VllmV0(quirks="vidur"), Sarathi(quirks="vidur")):
        assert plan(view, policy).preempt
        view.grows = True
        assert not plan(view, policy).preempt
        view.grows = False
    assert not plan(view, VllmV0()).preempt


# -- sarathi


def test_sarathi_fills_up_the_step_and_reserves_the_whole_prompt() -> None:
    view = View(num_decodes=12, waiting=[Waiting(95), Waiting(40)])
    made = plan(view, Sarathi(chunk_size=112))
    assert (made.admit, made.reserve) == ((95, 5), (10, 4))


def test_sarathi_runs_the_pieces_of_a_prompt_at_once_but_for_the_last() -> None:
    view = View(num_decodes=12, prefilling=[Waiting(1_000, computed=100)], waiting=[Waiting(1)])
    assert plan(view, Sarathi(chunk_size=112)).steps == 8
    assert plan(view, Sarathi(chunk_size=112)).chunks == (100,)


def test_sarathi_lets_prompts_wait_while_decodes_alone_exceed_the_chunk() -> None:
    view = View(num_decodes=20, prefilling=[Waiting(50, computed=10)], waiting=[Waiting(5)])
    made = plan(view, Sarathi(chunk_size=16))
    assert (made.steps, made.admit, sum(made.chunks)) == (FOREVER, (), 0)


def test_sarathi_looks_at_the_blocks_of_the_whole_prompt() -> None:
    view = View(num_decodes=1, waiting=[Waiting(100)], free_blocks=9)
    assert plan(view, Sarathi(chunk_size=20, watermark=0.0)).admit == ()


def test_a_batch_of_a_pipeline_holds_its_share_of_the_seats() -> None:
    view = View(num_decodes=3, waiting=[Waiting(5), Waiting(5)], num_stages=2)
    assert plan(view, Sarathi(max_num_seqs=8)).admit == (5,)
    assert plan(view, Sarathi(max_num_seqs=8)).decodes == 4


# -- those that reserve


def test_orca_mixes_whole_prompts_with_decodes_and_reserves_all_that_they_may_need() -> None:
    made = plan(View(num_decodes=2, waiting=[Waiting(95, output=16), Waiting(5)]), Orca(max_num_seqs=4))
    assert (made.admit, made.reserve, made.decodes) == ((95, 5), (11, 2), 4)


def test_orca_may_reserve_the_same_for_everybody_but_never_less_than_needed_nor_more_than_there_is() -> None:
    assert plan(View(waiting=[Waiting(5), Waiting(300)]), Orca(reserve_tokens=100)).reserve == (10, 31)
    assert plan(View(waiting=[Waiting(5)], num_blocks=8, free_blocks=8), Orca(reserve_tokens=100)).reserve == (8,)


def test_nobody_joins_a_batch_of_faster_transformer() -> None:
    policy = FasterTransformer(max_num_seqs=2)
    assert plan(View(waiting=[Waiting(5), Waiting(6), Waiting(7)]), policy).admit == (5, 6)
    assert plan(View(num_decodes=1, waiting=[Waiting(7)]), policy) == Plan(FOREVER, open=False)


def test_blitz_keeps_within_three_budgets() -> None:
    queue = [Waiting(40, output=11), Waiting(40, output=11), Waiting(40, output=11)]
    assert plan(View(waiting=queue), BlitzBatching(max_num_batched_tokens=80)).admit == (40, 40)
    assert plan(View(waiting=queue), BlitzBatching(max_total_tokens=149)).admit == (40, 40)
    assert plan(View(waiting=queue, free_blocks=9), BlitzBatching()).admit == (40,)
    assert plan(View(waiting=queue), BlitzBatching()).decodes == 0


def test_blitz_takes_a_request_that_exceeds_a_budget_alone() -> None:
    assert plan(View(waiting=[Waiting(400), Waiting(1)]), BlitzBatching(100, 100)).admit == (400,)


# -- lightllm


def test_lightllm_tries_when_nothing_runs_and_then_every_so_many_steps() -> None:
    policy = LightLlm(max_waiting_iters=10)
    assert plan(View(waiting=[Waiting(5)]), policy) == Plan(1, admit=(5,), decodes=0, mark=True)
    busy = View(num_decodes=1, waiting=[Waiting(5)], decoding=[(20, 5)], steps_since_mark=4)
    assert plan(busy, policy) == Plan(6, open=False)
    busy.steps_since_mark = 10
    assert plan(busy, policy).admit == (5,)


def test_lightllm_counts_what_all_hold_when_each_of_them_ends() -> None:
    """In blocks of one token. The new one ends first, after 10 steps: it holds 40 tokens then and the other one 20."""
    view = View(num_decodes=1, waiting=[Waiting(29, output=12)], decoding=[(10, 20)], block_size=1, steps_since_mark=10)
    view.num_blocks = 60
    assert plan(view, LightLlm()).admit == (29,)
    view.num_blocks = 59
    assert plan(view, LightLlm()) == Plan(10, open=False)


def test_lightllm_goes_on_until_somebody_ends_where_there_is_no_seat_or_no_block() -> None:
    view = View(num_decodes=2, waiting=[Waiting(50)], decoding=[(20, 5), (20, 5)])
    assert plan(view, LightLlm(max_num_seqs=2)) == Plan(FOREVER, open=False)
    view.free_blocks = 4
    assert plan(view, LightLlm()) == Plan(FOREVER, open=False)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("vllm_v0", "max_num_seqs", 0), ("sarathi", "chunk_size", 0), ("orca", "reserve_tokens", -1),
        ("lightllm", "max_waiting_iters", 0),
        ("faster_transformer", "max_num_seqs", 0), ("blitz", "max_total_tokens", 0), ("sarathi", "watermark", 1.0),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_work_is_refused_with_the_key(kind: str, key: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"{key} must be .*{value}"):
        msgspec.convert({"batching": {"kind": kind, key: value}}, Config)
