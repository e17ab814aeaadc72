"""Processes of workers: whoever asked for their end may be called off; they end, and nothing of theirs stays open."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from squall import config as configuration
from squall.live.launch import LocalLauncher


@pytest.mark.parametrize("by", ["stop", "kill", "start of the next one"])
async def test_what_a_process_had_open_is_closed_though_nobody_waits_for_its_end_any_more(by: str, tmp_path: Path) -> None:
    config = configuration.load(
        None, ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "serve.event_log=false")
    )
    (tmp_path / "config.toml").write_text(configuration.dumps(config), encoding="utf-8")
    launcher = LocalLauncher(tmp_path / "config.toml", tmp_path, [(0,)])
    address = await launcher.start(0)
    process = launcher._workers[(0,)].process
    if by == "start of the next one":
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    ways = {"stop": launcher.stop(0), "kill": launcher.kill(address), "start of the next one": launcher.start(0)}
    asked = asyncio.create_task(ways.pop(by))
    for way in ways.values():
        way.close()
    await asyncio.sleep(0)  # it has begun
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    await launcher.close()
    assert process.poll() is not None
    assert [pipe.closed for pipe in (process.stdin, process.stdout) if pipe is not None] == [True, True]
