import msgspec
import pytest

from squall.core.replica import Replica
from squall.core.types import FOREVER, Request
from squall.core.views import Plan
from squall.policies.batching import Vllm


class Waiting(msgspec.Struct):
    """A request in the queue or in prefill."""

    target: int
    computed: int = 0
    blocks: int = 0
    cached: int = 0
    in_use: int = 0
    request: Request = Request(0, 0, 1, 1)

    @property
    def hashes(self) -> tuple[int, ...]:
        return tuple(range(1, self.cached + 1))


class View(msgspec.Struct):
    """A replica between two steps."""

    num_decodes: int = 0
    prefilling: list[Waiting] = []
    waiting: list[Waiting] = []
    preempted: bool = False
    free_blocks: int = 1_000
    num_blocks: int = 1_000
    block_size: int = 16
    num_stages: int = 1
    decode_blocks: int = 0
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
        return work.cached, work.in_use


POLICY = Vllm(max_num_seqs=4, max_num_batched_tokens=100)


def plan(view: View, policy: Vllm = POLICY) -> Plan:
    return policy(view)  # type: ignore[arg-type] # `cached` takes what the view holds


def test_decodes_alone_go_on_until_somebody_arrives() -> None:
    assert plan(View(num_decodes=3)) == Plan(FOREVER, open=True)


def test_a_full_batch_is_closed_to_arrivals() -> None:
    assert plan(View(num_decodes=4)) == Plan(FOREVER, open=False)


def test_the_queue_is_admitted_in_order_within_budget() -> None:
    view = View(num_decodes=2, waiting=[Waiting(60), Waiting(60), Waiting(5)])
    assert plan(view) == Plan(1, admit=(60, 38))


def test_the_queue_is_admitted_in_order_within_seats() -> None:
    view = View(num_decodes=2, waiting=[Waiting(10), Waiting(10), Waiting(10)])
    assert plan(view).admit == (10, 10)


def test_a_head_that_does_not_fit_keeps_the_others_waiting_and_the_plan_stays_valid() -> None:
    view = View(num_decodes=2, waiting=[Waiting(60), Waiting(5)], free_blocks=3)
    assert plan(view) == Plan(FOREVER, open=False)


def test_blocks_are_counted_over_all_that_are_admitted() -> None:
    view = View(waiting=[Waiting(32), Waiting(32), Waiting(1)], free_blocks=4)
    assert plan(view).admit == (32, 32)


def test_a_long_prompt_is_cut_where_the_budget_ends() -> None:
    assert plan(View(waiting=[Waiting(250), Waiting(1)])).admit == (100,)


def test_the_pieces_of_a_long_prompt_are_planned_at_once_but_for_the_last() -> None:
    view = View(num_decodes=20, prefilling=[Waiting(1000, computed=100, blocks=7)], waiting=[Waiting(1)])
    assert plan(view, Vllm(64, 120)) == Plan(8, chunks=(100,), open=False)


def test_the_last_piece_leaves_the_rest_of_the_budget_to_the_queue() -> None:
    view = View(num_decodes=1, prefilling=[Waiting(130, computed=100, blocks=7)], waiting=[Waiting(200)])
    assert plan(view) == Plan(1, chunks=(30,), admit=(69,))


def test_the_last_piece_comes_before_the_queue_for_blocks_too() -> None:
    view = View(prefilling=[Waiting(130, computed=100, blocks=7)], waiting=[Waiting(16)], free_blocks=2)
    assert plan(view) == Plan(1, chunks=(30,))


def test_nobody_is_admitted_at_a_preemption_and_the_next_step_asks_again() -> None:
    assert plan(View(num_decodes=2, waiting=[Waiting(5)], preempted=True)) == Plan(1)


def test_cached_blocks_cost_no_budget_and_those_in_use_no_free_block() -> None:
    view = View(waiting=[Waiting(170, cached=8, in_use=6)], free_blocks=5)
    assert plan(view).admit == (42,)
    view.free_blocks = 4
    assert plan(view) == Plan(FOREVER, open=False)


def test_a_prompt_that_will_not_fit_whole_is_begun_unless_whole_prompts_are_asked_for() -> None:
    view = View(waiting=[Waiting(250, cached=2, in_use=1)], free_blocks=14)  # 16 blocks in all, one of them in use
    whole = Vllm(max_num_seqs=4, max_num_batched_tokens=100, whole_prompts=True)
    assert plan(view).admit == (100,)
    assert plan(view, whole) == Plan(FOREVER, open=False)
    view.free_blocks = 15
    assert plan(view, whole).admit == (100,)


def test_whole_prompts_set_nothing_aside_for_those_that_are_begun() -> None:
    view = View(num_decodes=1, waiting=[Waiting(50), Waiting(250), Waiting(10)], free_blocks=20)
    assert plan(view, Vllm(max_num_seqs=4, max_num_batched_tokens=100, whole_prompts=True)).admit == (50, 49)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        (
            {"max_num_seqs": 300, "max_num_batched_tokens": 256},
            r"max_num_batched_tokens must be at least max_num_seqs \(300\), not 256",
        ),
    ],
)
def test_a_policy_that_cannot_work_is_refused_with_the_reason(table: dict[str, int], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"kind": "vllm", **table}, Vllm)


def test_a_replica_is_the_view_that_a_policy_reads() -> None:
    assert POLICY(Replica(0, POLICY, num_blocks=10, block_size=4)) == Plan(FOREVER, open=True)
