"""A few of the runs of `chaos`; a thousand by `python -m tests.live.chaos`."""

import pytest

from squall.live.engine import attention
from tests.live import chaos


async def test_no_token_changes_whatever_comes_goes_or_breaks_down() -> None:
    total, broken = await chaos.tally(3, 100)
    assert broken == []
    assert total["requests"] > 20
    assert total["near"] == 0


async def test_no_token_changes_where_kv_moves_through_a_mirror_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "readable", lambda _: False)
    total, broken = await chaos.tally(3, 300)
    assert broken == []
    assert total["sendings of KV"] > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_token_changes_in_many_runs() -> None:
    total, broken = await chaos.tally(60, 1_000)
    assert broken == []
    assert total["batches handed over"] > 10
    assert total["replicas lost"] > 10
    assert total["sendings of KV"] > 100


def test_a_difference_is_told_unless_two_tokens_are_as_good_as_each_other() -> None:
    right = chaos.Said((1, 2, 3), (0.5, 5e-5, 0.5))
    assert chaos.difference(right, right) is None
    assert chaos.difference(chaos.Said((1, 9, 3)), right) == "near"
    assert chaos.difference(chaos.Said((9, 2, 3)), right) == "token 0 of 3 differs: (9, 2, 3) instead of (1, 2, 3)"
    assert chaos.difference(chaos.Said((1, 2)), right) == "token 2 of 3 differs: () instead of (3,)"
