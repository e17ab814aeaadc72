"""Workers on a Ray cluster, which is this machine: an actor a replica, lost and brought back, and gone at the end."""

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from squall import config as configuration
from squall.errors import ConfigError
from squall.launch_tables import Launcher
from squall.live.engine.interface import Sampling
from squall.live.head import Head
from squall.live.plan import served_plan
from squall.live.ray_launch import RayLauncher
from squall.live.served import served_model
from tests.processes import commands

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

SETTINGS = (
    "serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "fleet.replicas=2", 'launcher.kind="ray"',
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason='needs Ray: pip install "squall[ray]"')
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def workers() -> dict[int, int]:
    """Processes of replicas that Ray's actors have started, by replica."""
    ours = (command for command in commands() if "squall.live.worker" in command[1])
    return {
        int(words[words.index("--replicas") + 1]): pid
        for pid, words in ours
        if "squall-ray-" in words[words.index("--config") + 1]
    }


async def test_one_actor_a_replica(cluster: Any) -> None:
    config = configuration.load(None, SETTINGS)
    served = served_model(config)
    said: list[str] = []
    launcher = RayLauncher(config.launcher, configuration.dumps(config), 1, on_gpu=False)
    head = Head(config, served.names, served.tokenizer(), 512, launcher, say=said.append, plan=served_plan(config, served))

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.05)

    def phases() -> dict[int, str]:
        return {replica.replica: replica.phase for replica in head.stats().replicas}

    async def answer() -> int:
        return len([out async for out in head.submit((1, 2, 3), Sampling(max_tokens=5, ignore_eos=True))])

    try:
        launcher.prepare(range(2))
        head.start()
        await until(lambda: list(phases().values()) == ["ready", "ready"])
        assert await answer() == 5
        states = [actor["State"] for actor in cluster._private.state.actors().values()]
        assert states.count("ALIVE") == 2
        os.kill(workers()[1], signal.SIGKILL)
        await until(lambda: any(line.startswith("replica 1 is lost") for line in said))
        assert await answer() == 5
    finally:
        await head.close()
        launcher.kill_all()
    await until(lambda: not workers())


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'launcher.kind = "ray" needs Ray: pip install \'squall\[ray\]\''):
        RayLauncher(Launcher(kind="ray"), "", 1, on_gpu=False)
