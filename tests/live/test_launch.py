"""Processes of workers: whoever asked for their end may be called off; they end, and nothing of theirs stays open."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker as a head does that has a folder for what it leaves."""
    config = configuration.load(
        None, ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "serve.event_log=false")
    )
    (tmp_path / "config.toml").write_text(configuration.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "squall.live.worker", "--config", str(tmp_path / "config.toml"), "--replicas", "0"]
    with contextlib.ExitStack() as held:

        def start() -> subprocess.Popen[bytes]:
            pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            process = held.enter_context(subprocess.Popen([*command, "--with-parent", "--outlive-s", "60"], bufsize=0, **pipes))
            held.callback(process.kill)
            return process

        yield start


def test_a_worker_that_no_head_would_find_ends_with_its_own(start: Start) -> None:
    found, unknown = start(), start()
    for process in (found, unknown):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"secret\n")
        assert process.stdout.readline().startswith(b'{"address":')
        process.stdin.write(b"\n" if process is found else b"")
        process.stdin.close()
    assert unknown.wait(20) == 0
    assert found.poll() is None


def test_a_worker_whose_head_dies_before_it_listens_ends_without_a_word(start: Start) -> None:
    process = start()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(b"secret\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
