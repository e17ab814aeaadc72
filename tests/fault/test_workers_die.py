"""Workers that are killed, stopped or hang: clients must not notice."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from squall import config as configuration
from squall.config import Config
from squall.errors import ConfigError, ReplicaFailed
from squall.live.engine.interface import Sampling
from squall.live.head import Head
from squall.live.launch import LocalLauncher
from squall.live.stream import Stream
from tests.processes import is_gone


def ask(head: Head, seed: int, max_tokens: int = 60) -> Stream:
    return head.submit(tuple(b"hello"), Sampling(max_tokens=max_tokens, seed=seed))


async def text_of(stream: Stream) -> str:
    return "".join([out.text async for out in stream])


def ours() -> set[int]:
    """Processes that this one has started, whichever thread did."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_that_is_killed_in_mid_stream_goes_unnoticed(fleet: Any, spoken: Any, blow: signal.Signals) -> None:
    async with fleet() as (head, launcher):
        streams = [ask(head, seed) for seed in range(6)]
        beginnings = ["".join([(await anext(stream)).text for _ in range(5)]) for stream in streams]
        victim = launcher.pid(0)
        os.kill(victim, blow)
        rests = await asyncio.gather(*map(text_of, streams))
        assert [a + b for a, b in zip(beginnings, rests, strict=True)] == [spoken(seed, 60) for seed in range(6)]
        while launcher.pid(0) in (None, victim) or any(replica.phase != "ready" for replica in head.stats().replicas):
            await asyncio.sleep(0.02)


async def test_a_worker_that_hangs_is_given_up_and_killed(fleet: Any, spoken: Any) -> None:
    async with fleet(silence_s=1.5) as (head, launcher):
        streams = [ask(head, seed) for seed in range(4)]
        await asyncio.gather(*map(anext, streams))
        victim = launcher.pid(1)
        os.kill(victim, signal.SIGSTOP)
        rests = await asyncio.gather(*map(text_of, streams))
        assert rests == [spoken(seed, 60)[1:] for seed in range(4)]
        while not is_gone(victim):
            await asyncio.sleep(0.02)


async def test_workers_do_not_outlive_the_launcher_that_is_closed(fleet: Any) -> None:
    async with fleet() as (_, launcher):
        pids = [launcher.pid(0), launcher.pid(1)]
        assert not any(map(is_gone, pids))
    assert all(map(is_gone, pids))


async def test_replicas_that_share_a_process_get_one_again_not_one_each(config: Config, tmp_path: Path) -> None:
    """They all ask at once when it has died; a process that nobody knows of would outlive them."""
    path = tmp_path / "config.toml"
    path.write_text(configuration.dumps(config), encoding="utf-8")
    launcher = LocalLauncher(path, tmp_path, [(0, 1, 2)])
    before = ours()
    try:
        await launcher.start(0)
        dead = launcher.pid(0)
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        while launcher.pid(0) is not None:  # a zombie whose other threads still end cannot be waited for yet
            await asyncio.sleep(0.01)
        assert len({await each for each in [asyncio.create_task(launcher.start(replica)) for replica in range(3)]}) == 1
        assert ours() - before == {launcher.pid(0)}
    finally:
        await launcher.close()


async def test_replicas_that_share_a_process_that_does_not_come_up_all_hear_of_it(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "config.toml", tmp_path, [(0, 1)], extra=["--no-such-option"])
    ends = await asyncio.gather(launcher.start(0), launcher.start(1), return_exceptions=True)
    assert all(isinstance(end, ConfigError | ReplicaFailed) for end in ends)
    assert launcher.pid(0) is None


async def test_a_worker_that_finds_the_configuration_wrong_says_what(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('serve.engine = "emulated"\nmodel.name = "llama-3.1-8b"\ncluster.gpu = "h1000"\n')
    launcher = LocalLauncher(path, tmp_path, [(0,)])
    with pytest.raises(ConfigError, match=r"cluster\.gpu 'h1000' is unknown: did you mean"):
        await launcher.start(0)
    assert launcher.pid(0) is None


async def test_a_worker_that_does_not_come_up_shows_its_last_words(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "config.toml", tmp_path, [(0,)], extra=["--no-such-option"])
    with pytest.raises((ReplicaFailed, ConfigError), match="unrecognized arguments: --no-such-option"):
        await launcher.start(0)
