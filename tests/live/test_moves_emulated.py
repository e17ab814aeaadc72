"""Replicas that pretend and are emptied, in the test's own process: what a client gets, and that nobody was waited for."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from squall.core.events import Adopted, MoveWanted, NoticeGiven
from squall.core.types import Role
from squall.eventlog import read
from squall.live.head import Head
from tests.live.in_process import idle, in_process
from tests.live.test_head import Here, all_of, ask, tokens

SETTINGS = (
    "serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "cluster.nodes=1", "cluster.gpus_per_node=3",
    "fleet={replicas={min=1, max=3, initial=2}, drain='move', idle_ttl_s=0.05}", "serve.time_dilation=0.5",
)  # fmt: skip


def two(log: Path) -> AbstractAsyncContextManager[tuple[Head, Here]]:
    """Two replicas, and a slot for a third one."""
    return in_process(log, *SETTINGS, max_model_len=2048)


def moved(log: Path) -> tuple[int, int]:
    """Requests that were asked to leave, and that have arrived elsewhere."""
    events = [record.event for record in read(log)]
    asked = sum(len(event.requests) for event in events if isinstance(event, MoveWanted))
    return asked, sum(isinstance(event, Adopted) for event in events)


async def test_what_a_replica_decodes_goes_on_elsewhere_when_it_goes(tmp_path: Path, spoken: Any) -> None:
    async with two(tmp_path / "log") as (head, _):
        head.want(Role.BOTH, 2)
        streams = [ask(head, 400, seed, range(40)) for seed in range(8)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        head.want(Role.BOTH, 1)
        rests = await asyncio.gather(*map(all_of, streams))
        assert [[f.token, *tokens(rest)] for f, rest in zip(firsts, rests, strict=True)] == [spoken(s, 400) for s in range(8)]
        await idle(head)
    assert moved(tmp_path / "log")[1] >= 1


async def test_a_worker_that_is_told_to_end_is_replaced_and_emptied(tmp_path: Path, spoken: Any) -> None:
    async with two(tmp_path / "log") as (head, here):
        head.want(Role.BOTH, 2)
        streams = [ask(head, 1200, seed, range(40)) for seed in range(8)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        here.workers[0][0].end()
        rests = await asyncio.gather(*map(all_of, streams))
        assert [[f.token, *tokens(rest)] for f, rest in zip(firsts, rests, strict=True)] == [spoken(s, 1200) for s in range(8)]
        await idle(head)
    assert any(isinstance(record.event, NoticeGiven) for record in read(tmp_path / "log"))
    assert moved(tmp_path / "log")[1] >= 1
