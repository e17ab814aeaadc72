"""A served fleet that may be of no replicas: who asks wakes it, and so has to be let through."""

import asyncio
from pathlib import Path
from typing import Any

from tests.live.in_process import in_process
from tests.live.test_head import all_of, ask, tokens

SETTINGS = (
    "serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "cluster.nodes=1", "cluster.gpus_per_node=1",
    "cluster.ssd_gbps=4000", "serve.time_dilation=0.5", "scale={kind='concurrency', stable_s=0.2}",
)  # fmt: skip


def bounds(initial: int) -> str:
    return f"fleet={{replicas={{min=0, max=1, initial={initial}}}, down_window_s=0.1, idle_ttl_s=0.05}}"


async def test_a_fleet_that_has_gone_to_rest_stays_ready_and_serves_whoever_comes(tmp_path: Path, spoken: Any) -> None:
    async with in_process(tmp_path / "log", *SETTINGS, bounds(1)) as (head, here):
        assert head.ready
        while here.workers:
            await asyncio.sleep(0.01)
            assert head.ready
        assert head.ready
        assert tokens(await all_of(ask(head, 5, 3))) == spoken(3, 5)
        assert here.num_starts == 2


async def test_a_fleet_that_begins_at_rest_is_ready_from_the_start(tmp_path: Path, spoken: Any) -> None:
    async with in_process(tmp_path / "log", *SETTINGS, bounds(0)) as (head, here):
        await asyncio.wait_for(head.until_ready(), 5)
        assert here.num_starts == 0
        assert tokens(await all_of(ask(head, 5, 3))) == spoken(3, 5)


async def test_a_fleet_that_is_sent_to_rest_before_it_is_up_is_ready(tmp_path: Path, spoken: Any) -> None:
    """Its start takes longer than the policy waits for somebody to ask; 503 would be all that anybody hears, for ever."""
    slow = ("load={kind='mock', load_s=30}", "scale={kind='concurrency', stable_s=0.2}")
    async with in_process(tmp_path / "log", *SETTINGS, *slow, bounds(1), begins=0) as (head, here):
        assert not head.ready
        await asyncio.wait_for(head.until_ready(), 5)
        assert here.num_starts == 1
