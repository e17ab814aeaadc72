"""Replicas that pretend, in the test's own process, help before they have loaded: clients get what they would have got anyway."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from squall.core.events import AnyEvent, HandedOver, LayersDone, Unpaired
from squall.core.types import Role
from squall.eventlog import read
from squall.live.head import Head
from squall.live.stream import Stream
from squall.twin.observe import observe
from tests.live.in_process import forgotten, idle, in_process
from tests.live.test_head import Here, all_of, ask, tokens

SETTINGS = (
    "serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "cluster.nodes=4", "cluster.gpus_per_node=1",
    "cluster.nic_gbps=100", "queue.max_retries=20", "load={kind='chain', live=true}",
    "fleet.idle_ttl_s=0.1", "fleet.down_window_s=600", "serve.time_dilation=0.5",
)  # fmt: skip
"""Sixteen gigabytes over 100 Gbps take 1.3 s, of which half is slept."""
COLOCATED = "fleet.replicas={min=1, max=3}"
APART = "fleet={mode='disaggregated', prefill={min=1, max=2}, decode=1}"
NUM = 16


def elastic(log: Path, *more: str) -> AbstractAsyncContextManager[tuple[Head, Here]]:
    return in_process(log, *SETTINGS, *more, max_model_len=4096)


def burst(head: Head, count: int = NUM) -> list[Stream]:
    """Different prompts of 1,500 tokens, and answers of one token to eight of them."""
    return [ask(head, 1 + seed % 8, seed, [(seed + at) % 250 for at in range(1500)]) for seed in range(count)]


async def ready(head: Head, count: int) -> None:
    while [replica.phase for replica in head.stats().replicas].count("ready") < count:
        await asyncio.sleep(0.005)


def layers(head: Head, replica: int) -> int:
    return {each.replica: each.num_layers for each in head.stats().replicas}.get(replica, 0)


async def parted(head: Head) -> None:
    """Nothing is shared any more."""
    while head._pairs:
        await asyncio.sleep(0.005)


async def helped(head: Head, replica: int, count: int = 4) -> None:
    """Some of its layers are there, and it shares work."""
    while layers(head, replica) < count or not head._pairs:
        await asyncio.sleep(0.002)


async def busy(head: Head, spoken: Any, over: Callable[[], bool]) -> None:
    """One burst after the other, so that there is always somebody to relieve."""
    while True:
        answers = await asyncio.gather(*map(all_of, burst(head)))
        assert [tokens(answer) for answer in answers] == [spoken(seed, 1 + seed % 8) for seed in range(NUM)]
        if over():
            return


def happened(log: Path) -> list[tuple[int, AnyEvent]]:
    """All that was logged, which machines of today would do again."""
    seen = observe(read(log))
    assert seen.mismatches == []
    return [(record.machine, record.event) for record in read(log) if record.event is not None]


@pytest.mark.parametrize(("fleet", "role", "target"), [(COLOCATED, Role.BOTH, 1), (APART, Role.PREFILL, 2)])
async def test_a_replica_that_loads_relieves_an_overloaded_one(
    tmp_path: Path, spoken: Any, fleet: str, role: Role, target: int
) -> None:
    log = tmp_path / "log.jsonl.zst"
    async with elastic(log, fleet) as (head, here):
        coming = asyncio.create_task(ready(head, 2 if role is Role.BOTH else 3))
        asking = asyncio.create_task(busy(head, spoken, coming.done))
        await asyncio.sleep(0)
        head.want(role, 2)
        await asking
        await parted(head)
        await idle(head)
        await forgotten(here)
        again = burst(head, 4)
        await asyncio.gather(*map(all_of, again))
        await idle(head)
    seen = happened(log)
    assert min(event.last_layer for machine, event in seen if machine == target and isinstance(event, LayersDone)) == 1
    handed = [event.layer for _, event in seen if isinstance(event, HandedOver)]
    assert any(0 < layer < 16 for layer in handed)  # before half of the layers had arrived
    assert not any(event.lost for _, event in seen if isinstance(event, Unpaired))


@pytest.mark.parametrize(("fleet", "role", "target"), [(COLOCATED, Role.BOTH, 1), (APART, Role.PREFILL, 2)])
@pytest.mark.parametrize("end", ["source", "target"])
async def test_either_end_may_break_down(tmp_path: Path, spoken: Any, fleet: str, role: Role, target: int, end: str) -> None:
    """Over a link so slow that there is time for many bursts."""
    log = tmp_path / "log.jsonl.zst"
    async with elastic(log, fleet, "cluster.nic_gbps=20") as (head, here):
        most = here.num_starts + 1
        asking = [asyncio.create_task(busy(head, spoken, lambda: here.num_starts > most)) for _ in range(2)]
        await asyncio.sleep(0)
        head.want(role, 2)
        await helped(head, target)
        here.break_down(target if end == "target" else 0)
        await asyncio.gather(*asking)
        await idle(head)
        head.want(role, None)
    assert any(event.lost for _, event in happened(log) if isinstance(event, Unpaired))


async def test_who_goes_away_leaves_nothing(tmp_path: Path, spoken: Any) -> None:
    log = tmp_path / "log.jsonl.zst"
    async with elastic(log, COLOCATED, "batching.max_num_batched_tokens=4096") as (head, here):
        streams = burst(head)
        head.want(Role.BOTH, 2)
        while layers(head, 1) < 4:
            await asyncio.sleep(0.002)
        for stream in streams[::2]:
            stream.cancel()
        answers = await asyncio.gather(*map(all_of, streams[1::2]))
        assert [tokens(answer) for answer in answers] == [spoken(seed, 1 + seed % 8) for seed in range(1, NUM, 2)]
        await ready(head, 2)
        await idle(head)
        await forgotten(here)
    happened(log)


async def test_two_pairs_at_once(tmp_path: Path, spoken: Any) -> None:
    log = tmp_path / "log.jsonl.zst"
    settings = "fleet.replicas={min=1, max=4, initial=2}", "load={kind='p2p', live=true}"
    async with elastic(log, *settings) as (head, _):
        streams = burst(head, 24)
        head.want(Role.BOTH, 4)
        answers = await asyncio.gather(*map(all_of, streams))
        assert [tokens(answer) for answer in answers] == [spoken(seed, 1 + seed % 8) for seed in range(24)]
        await ready(head, 4)
        await parted(head)
    pairs = {(event.target, event.source) for machine, event in happened(log) if machine >= 0 and isinstance(event, Unpaired)}
    assert {target for target, _ in pairs} == {2, 3}
    assert {source for _, source in pairs} == {0, 1}
