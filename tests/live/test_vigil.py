"""Silence counts while we could have heard something, and not while we stood still."""

import asyncio
import time

import pytest

from squall.live import vigil
from squall.live.vigil import Vigil


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "TICK_S", 0.05)
    monkeypatch.setattr(vigil, "LATE_S", 0.2)


async def test_it_is_over_after_so_much_silence_and_not_before() -> None:
    watching = Vigil(0.4)
    over = asyncio.create_task(watching.over())
    for _ in range(8):
        await asyncio.sleep(0.1)
        watching.heard()
    assert not over.done()
    await asyncio.wait_for(over, 10)
    assert not watching.stood_still


async def test_while_we_stand_still_nobody_is_silent() -> None:
    watching = Vigil(0.6)
    over = asyncio.create_task(watching.over())
    await asyncio.sleep(0.1)
    time.sleep(1.0)  # as SIGSTOP does: the loop does not run
    assert watching.stood_still
    await asyncio.sleep(0.2)
    assert not over.done()
    assert watching.stood_still
    await asyncio.wait_for(over, 10)
