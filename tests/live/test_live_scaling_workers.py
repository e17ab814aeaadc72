"""Replicas that answer before their weights have arrived, in processes of their own: every token is that of one replica alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from squall.core.events import AnyEvent, HandedOver, LayersDone, Unpaired
from squall.core.types import Role
from squall.eventlog import read
from tests.live.checkpoints import SIZES, write_checkpoint
from tests.live.test_weights_between_workers import Fleet, replayed, serving

NUM_LAYERS = SIZES["num_hidden_layers"]
PROMPTS = [tuple(range(start, start + 37)) for start in range(10, 250, 12)]
SETTINGS = ("batching.max_num_batched_tokens=80", "batching.max_num_seqs=16", "replica.block_size=8", "replica.max_model_len=512",
            "load={kind='chain', live=true}", "serve.link_gbps=0.05")  # fmt: skip
"""The link is slow: eight megabytes take more than a second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


async def answers(fleet: Fleet, max_tokens: int = 12) -> list[list[int]]:
    """Each prompt greedily and twice with a seed, as the two choices of n = 2 are; every third stops at a string."""
    manners: list[dict[str, Any]] = []
    for at in range(len(PROMPTS)):
        stop = {"stop": ("w7",)} if at % 3 == 0 else {}
        manners += [{**stop}, {"temperature": 1.0, "seed": at, **stop}, {"temperature": 1.0, "seed": 100 + at, **stop}]
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    return await asyncio.gather(*(fleet.answer(p, max_tokens, **manner) for p, manner in zip(prompts, manners, strict=True)))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one replica says that does all."""

    async def ask() -> list[list[int]]:
        async with serving(model, tmp_path_factory.mktemp("alone") / "run", "fleet.replicas=1", *SETTINGS, most=1) as fleet:
            return await answers(fleet)

    return asyncio.run(ask())


@asynccontextmanager
async def pair(model: Path, folder: Path, *more: str) -> AsyncIterator[Fleet]:
    async with serving(model, folder, *SETTINGS, *more, most=2) as fleet:
        yield fleet


async def until_idle(fleet: Fleet) -> None:
    await fleet.until(lambda: all(replica.num_used_blocks == 0 for replica in fleet.head.stats().replicas))


def happened(folder: Path) -> list[tuple[int, AnyEvent]]:
    return [(record.machine, record.event) for record in read(folder / "events.jsonl.zst") if record.event is not None]


async def test_tokens_are_those_of_one_replica(model: Path, tmp_path: Path, alone: list[list[int]]) -> None:
    async with pair(model, tmp_path / "run", "batching.prefix_cache=true") as fleet:
        assert await answers(fleet) == alone  # which fills the prefix cache
        streaming = asyncio.create_task(answers(fleet))
        await asyncio.sleep(0.02)
        fleet.head.want(Role.BOTH, 2)
        while fleet.phases().get(1) != "ready":
            assert await streaming == alone
            streaming = asyncio.create_task(answers(fleet))
        assert await streaming == alone
        await fleet.ready(2)
        assert await answers(fleet) == alone
        await until_idle(fleet)
        await fleet.head.drain(10.0)
    assert replayed(tmp_path / "run") > 100
    seen = happened(tmp_path / "run")
    ran = [event.last_layer for machine, event in seen if machine == 1 and isinstance(event, LayersDone)]
    assert ran
    assert min(ran) == 1  # before half of its layers had arrived
    handed = [event.layer for machine, event in seen if machine == 0 and isinstance(event, HandedOver)]
    assert any(0 < layer < NUM_LAYERS for layer in handed)
    assert [event.lost for machine, event in seen if machine == 0 and isinstance(event, Unpaired)] == [False]
