"""The load generator and the API, with a real server between them."""

from typing import Any

from squall.core.metrics import Outcome
from squall.live.replay import play
from squall.workload.spec import OfferedRequest


def offered(count: int, gap_ms: int = 2, prompt: int = 40, output: int = 12) -> list[OfferedRequest]:
    return [OfferedRequest(i, i * gap_ms * 1_000_000, prompt + i, output) for i in range(count)]


async def test_every_request_is_sent_with_its_exact_length_and_gets_all_its_tokens(head: Any, url: str) -> None:
    head.step_s = 0.001
    seen = []
    record = await play(url, "small", offered(30), progress=lambda *numbers: seen.append(numbers))
    assert [row.outcome for row in record.requests] == [Outcome.COMPLETED] * 30
    assert [row.num_prompt_tokens for row in record.requests] == [40 + i for i in range(30)]
    assert {row.num_output_tokens for row in record.requests} == {12}
    assert sum(record.gaps.count) == 30 * 11
    assert (record.prompts, record.early_stops, record.num_crowded_chunks) == (
        "token ids to /v1/completions, exact lengths",
        0,
        0,
    )
    assert seen[-1] == (30, 0, 0)
