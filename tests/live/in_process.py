"""A head and its workers, with real engines or such that pretend, all in the test's own process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from squall import config as configuration
from squall.eventlog import open_log
from squall.live.head import Head
from squall.live.hosts import host_maker
from squall.live.plan import served_plan
from squall.live.served import served_model
from tests.live.test_head import Here


@asynccontextmanager
async def in_process(
    log: Path, *settings: str, max_model_len: int = 512, begins: int | None = None
) -> AsyncIterator[tuple[Head, Here]]:
    """All replicas that the fleet begins with are ready, or so many. What all machines hear and do goes into one log."""
    config = configuration.load(None, settings)
    model = served_model(config)
    make = host_maker(config, model, "token", "127.0.0.1:0")
    async with AsyncExitStack() as stack:
        records = stack.enter_context(open_log(log))
        here = Here(lambda replica: make(replica, records))
        head = Head(config, model.names, model.tokenizer(), max_model_len, here, records, plan=served_plan(config, model))
        head.start()
        stack.push_async_callback(head.close)
        begins = config.fleet.num_initial if begins is None else begins
        while [replica.phase for replica in head.stats().replicas][:begins] != ["ready"] * begins:
            await asyncio.sleep(0.002)
        yield head, here


async def idle(head: Head) -> None:
    """All blocks have come back."""
    while any(replica.num_used_blocks for replica in head.stats().replicas):
        await asyncio.sleep(0.01)


async def forgotten(here: Here) -> None:
    """No engine knows of any request any more."""
    while not all(host.session is not None and host.session.idle for host in here.hosts.values()):
        await asyncio.sleep(0.01)
