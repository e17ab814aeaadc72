"""Processes that stand ready: taken when a replica is wanted, kept when one goes, without its weights."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from squall import config as configuration
from squall.core.types import Role
from squall.errors import ConfigError
from squall.live.head import Head
from squall.live.launch import LocalLauncher
from squall.live.plan import served_plan
from squall.live.served import served_model
from squall.live.transport.segment import HostCopies
from tests.live.checkpoints import write_checkpoint
from tests.live.forked import forking
from tests.live.test_weights_between_workers import Fleet


@asynccontextmanager
async def serving(model: Path, folder: Path, *settings: str) -> AsyncIterator[Fleet]:
    """One replica of at most three, and one process that waits."""
    wanted = (f"model.name={model}", "replica.num_blocks=128", "fleet.replicas={min=1, max=3}", "fleet.idle_ttl_s=0.05",
              "fleet.down_window_s=600", "load.kind=p2p", "launcher.warm=1", *settings)  # fmt: skip
    config = configuration.load(None, wanted)
    folder.mkdir()
    path = folder / "config.toml"
    path.write_text(configuration.dumps(config), encoding="utf-8")
    launcher = LocalLauncher(path, folder, [(replica,) for replica in range(3)], warm=config.launcher.warm)
    served = served_model(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(forking())
        head = Head(config, served.names, served.tokenizer(), 512, launcher, plan=served_plan(config, served))
        stack.callback(launcher.kill_all)
        stack.push_async_callback(head.close)
        launcher.attend()
        head.start()
        await head.until_ready()
        yield Fleet(head, launcher, 3)
    HostCopies().sweep(unused=True)


def resident(pid: int | None) -> int:
    """Bytes of shared memory that a process sees in its own memory: arenas and KV pools."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:")) * 1024


async def test_a_warm_process_is_taken_and_kept_without_its_weights(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    async with serving(model, tmp_path / "run") as fleet:
        launcher = fleet.launcher
        alone = await fleet.answer((5, 6, 7), 12)
        await fleet.until(lambda: launcher.warm == [(1,)])
        pid = launcher.pid(1)
        fleet.head.want(Role.BOTH, 2)
        await fleet.ready(2)
        assert launcher.pid(1) == pid
        assert await fleet.answer((5, 6, 7), 12) == alone
        await fleet.until(lambda: launcher.warm == [(2,)])  # another one stands ready now

        assert launcher.pid(2) is not None
        os.kill(launcher.pid(2) or 0, signal.SIGKILL)
        await fleet.until(lambda: launcher.warm == [])
        fleet.head.want(Role.BOTH, 1)
        await fleet.until(lambda: launcher.warm == [(1,)])
        assert launcher.pid(1) == pid
        await fleet.until(lambda: resident(pid) < size / 2)
        fleet.head.want(Role.BOTH, 2)
        await fleet.ready(2)
        assert launcher.pid(1) == pid
        assert [move.num_bytes >= size - 65_536 for move in fleet.moves[1]] == [True, True]  # they came again, all of them
        assert [await fleet.answer((5, 6, 7), 12) for _ in range(4)] == [alone] * 4
        await asyncio.sleep(0)


async def test_a_process_that_is_not_wanted_any_more_while_weights_come_keeps_none_of_them(tmp_path: Path) -> None:
    """The link is slow: eight megabytes take two seconds."""
    async with serving(write_checkpoint(tmp_path / "tiny"), tmp_path / "run", "serve.link_gbps=0.03", "launcher.warm=2") as fleet:
        await fleet.until(lambda: fleet.launcher.warm == [(1,), (2,)])
        pid = fleet.launcher.pid(1)
        fleet.head.want(Role.BOTH, 2)
        await fleet.until(lambda: fleet.layers().get(1, 0) >= 3)
        some = resident(pid)
        fleet.head.want(Role.BOTH, 1)
        await fleet.until(lambda: resident(pid) < some / 2)
        assert (fleet.launcher.pid(1), fleet.launcher.warm) == (pid, [(1,), (2,)])
        assert fleet.moves.get(1, []) == []


def test_warm_actors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'launcher.warm means nothing where launcher.kind = "ray"'):
        configuration.load(None, ['launcher.kind="ray"', "launcher.warm=1"])
