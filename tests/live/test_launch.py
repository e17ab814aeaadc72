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
from squall.live.estate import FILE, Estate
from squall.live.launch import LocalLauncher


def config_file(folder: Path) -> Path:
    settings = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "serve.event_log=false")
    path = folder / "config.toml"
    path.write_text(configuration.dumps(configuration.load(None, settings)), encoding="utf-8")
    return path


@pytest.mark.parametrize("by", ["stop", "kill", "start of the next one"])
async def test_what_a_process_had_open_is_closed_though_nobody_waits_for_its_end_any_more(by: str, tmp_path: Path) -> None:
    launcher = LocalLauncher(config_file(tmp_path), tmp_path, [(0,)])
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
    command = [sys.executable, "-m", "squall.live.worker", "--config", str(config_file(tmp_path)), "--replicas", "0"]
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


async def test_whoever_the_next_head_does_not_want_ends_but_for_those_that_stand_ready(tmp_path: Path) -> None:
    launcher = LocalLauncher(config_file(tmp_path), tmp_path, [(0,), (1,), (2,)], ("--grace-s", "inf"))
    try:
        await asyncio.gather(*map(launcher.start, range(3)))
        launcher._warm = 1
        launcher.keep([1, 2], 0.2)
        await launcher.start(0)  # wanted again in time
        await asyncio.sleep(1.0)
        assert launcher.num_running == 3
        launcher.keep([1], 0.2)
        async with asyncio.timeout(60):
            while launcher.num_running == 3:
                await asyncio.sleep(0.02)
        assert (launcher.num_running, launcher.pid(1) is not None, launcher.warm) == (2, True, [(0,)])
    finally:
        await launcher.close()


async def test_who_stood_ready_is_taken_over_and_replaced_when_its_patience_ends(tmp_path: Path) -> None:
    state, config = tmp_path / "state", config_file(tmp_path)

    def head() -> tuple[Estate, LocalLauncher]:
        estate = Estate(state, "a", 1.0, print)
        return estate, LocalLauncher(config, tmp_path, [(0,), (1,)], warm=1, estate=estate)

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.02)

    held, first = head()
    await first.start(0)
    await until(lambda: (state / FILE).read_bytes().count(b'"pid"') == 2)
    pids = [first.pid(0), first.pid(1)]
    left = [worker.process for worker in first._workers.values()]
    os.close(held._lock)  # as the system does when a head dies

    held, second = head()
    with held:
        second.attend()
        assert [second.pid(0), second.pid(1)] == pids
        for process in left:  # so does this: their patience begins
            assert process.stdin is not None
            process.stdin.close()
        await until(lambda: second.pid(0) not in pids)
        await until(lambda: second.warm == [(0,)])
        await second.close()
    for process in left:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
