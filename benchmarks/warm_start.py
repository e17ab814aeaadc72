"""From the decision for one more replica to the first byte of its weights, and until it serves: by a cold and by a warm process.

    python benchmarks/warm_start.py [--model smollm2-135m-instruct] [--times 5] [--smoke]

Issue: under 20 ms to the first byte with a warm process. The weights come from the first replica, through shared memory, so that
what is measured is everything but their way.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from squall import config as configuration
from squall.core.actions import AnyAction, StartReplica
from squall.core.types import Role
from squall.live.head import Head
from squall.live.launch import LocalLauncher
from squall.live.plan import served_plan
from squall.live.rpc.client import ReplicaClient
from squall.live.rpc.convert import WeightsMoved
from squall.live.served import served_model

SETTLE_S = 3.0
"""After a process has come up: it imports, builds its engine, and is quiet."""


class Watched(Head):
    """A head that notes when it begins to start a replica, and when its first byte came."""

    decided_at = first_byte_s = 0.0

    def _perform(self, action: AnyAction) -> None:
        if isinstance(action, StartReplica):
            self.decided_at = time.monotonic()
        super()._perform(action)

    def moved(self, client: ReplicaClient, moved: WeightsMoved) -> None:
        """Told at the end; when it began is told with it."""
        self.first_byte_s = time.monotonic() - moved.seconds + moved.first_byte_s - self.decided_at
        super().moved(client, moved)

    def num_ready(self) -> int:
        return [replica.phase for replica in self.stats().replicas].count("ready")


@asynccontextmanager
async def serving(model: str, warm: int) -> AsyncIterator[tuple[Watched, LocalLauncher]]:
    wanted = (f"model.name={model}", "fleet.replicas={min=1, max=2}", "fleet.idle_ttl_s=0.05", "fleet.down_window_s=600",
              "load.kind=p2p", f"launcher.warm={warm}", "replica.num_blocks=256", "serve.event_log=false")  # fmt: skip
    config = configuration.load(None, wanted)
    served = served_model(config)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.toml").write_text(configuration.dumps(config), encoding="utf-8")
        launcher = LocalLauncher(folder / "config.toml", folder, [(0,), (1,)], warm=warm)
        head = Watched(config, served.names, served.tokenizer(), served.max_model_len, launcher, plan=served_plan(config, served))
        stack.callback(launcher.kill_all)
        stack.push_async_callback(head.close)
        launcher.attend()
        head.start()
        await head.until_ready()
        yield head, launcher


async def measure(model: str, warm: int, times: int) -> tuple[list[float], list[float]]:
    """Seconds to the first byte and to serving, each time."""
    first, ready = [], []
    async with serving(model, warm) as (head, launcher):
        for _ in range(times):
            while warm and not launcher.warm:
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE_S)
            head.want(Role.BOTH, 2)
            while head.num_ready() < 2:
                await asyncio.sleep(0.001)
            ready.append(time.monotonic() - head.decided_at)
            first.append(head.first_byte_s)
            head.want(Role.BOTH, 1)
            while launcher.pid(1) is not None and not launcher.warm:
                await asyncio.sleep(0.01)
    return first, ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="once each, to see that it runs")
    given = parser.parse_args()
    times = 1 if given.smoke else given.times
    print(f"{'process':8} {'first byte, ms':>24} {'serving, ms':>24}   (median, worst of {times})")
    for name, warm in (("warm", 1), ("cold", 0)):
        rows = asyncio.run(measure(given.model, warm, times))
        print(f"{name:8}", *(f"{statistics.median(row) * 1e3:12.1f} {max(row) * 1e3:11.1f}" for row in rows))


if __name__ == "__main__":
    main()
