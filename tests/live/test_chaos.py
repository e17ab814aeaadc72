"""A few of the runs of `chaos`; a thousand by `python -m tests.live.chaos`."""

import pytest

from squall.live.engine import devices
from tests.live import as_devices, chaos


async def test_no_token_changes_whatever_comes_goes_or_breaks_down() -> None:
    total, broken = await chaos.tally(3, 100)
    assert broken == []
    assert total["requests"] > 20
    assert total["near"] == 0


@pytest.mark.parametrize("home", ["lent", "unlent"])
async def test_no_token_changes_where_weights_and_kv_lie_on_devices(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_of", as_devices.HOMES[home])
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
