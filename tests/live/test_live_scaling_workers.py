"""Replicas that answer before their weights have arrived, in processes of their own: every token is that of one replica alone."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from squall.core.events import AnyEvent, HandedOver, LayersDone, Unpaired
from squall.core.types import Role
from squall.eventlog import read
from tests.live.checkpoints import NUM_LAYERS, write_checkpoint
from tests.live.test_weights_between_workers import Fleet, replayed, said_alone, serving

PROMPTS = [tuple(range(start, start + 37)) for start in range(10, 250, 12)]
SETTINGS = ("batching.max_num_batched_tokens=80", "batching.max_num_seqs=16", "replica.block_size=8", "replica.max_model_len=512",
            "load={kind='chain', live=true}", "serve.link_gbps=0.05")  # fmt: skip
"""The link is slow: eight megabytes take more than a second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


async def answers(fleet: Fleet) -> list[list[int]]:
    return await fleet.answers_in_all_manners(PROMPTS, 12)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one replica says that does all."""
    return said_alone(answers, model, tmp_path_factory.mktemp("alone") / "run", *SETTINGS)


@asynccontextmanager
async def pair(model: Path, folder: Path, *more: str, apart: bool = False) -> AsyncIterator[Fleet]:
    """One replica that may become two; or one for prefill that may, and one that decodes."""
    bounds = "fleet={mode='disaggregated', prefill={min=1, max=2}, decode=1}" if apart else None
    async with serving(model, folder, *SETTINGS, *more, most=3 if apart else 2, bounds=bounds) as fleet:
        await fleet.ready(2 if apart else 1)
        yield fleet


def busy_until(fleet: Fleet, alone: list[list[int]], over: Callable[[], bool]) -> "asyncio.Future[tuple[None, None]]":
    """Two at a time ask and ask again, so that there is always somebody to relieve."""

    async def ask() -> None:
        while not over():
            assert await answers(fleet) == alone

    return asyncio.gather(ask(), ask())


async def until_idle(fleet: Fleet) -> None:
    await fleet.until(lambda: all(replica.num_used_blocks == 0 for replica in fleet.head.stats().replicas))


def happened(folder: Path) -> list[tuple[int, AnyEvent]]:
    return [(record.machine, record.event) for record in read(folder / "events.jsonl.zst") if record.event is not None]


async def test_tokens_are_those_of_one_replica(model: Path, tmp_path: Path, alone: list[list[int]]) -> None:
    async with pair(model, tmp_path / "run", "batching.prefix_cache=true") as fleet:
        assert await answers(fleet) == alone  # which fills the prefix cache
        busy = busy_until(fleet, alone, lambda: fleet.phases().get(1) == "ready")
        fleet.head.want(Role.BOTH, 2)
        await busy
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


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("end", ["source", "target", "neither"])
async def test_either_end_may_be_killed(model: Path, tmp_path: Path, alone: list[list[int]], apart: bool, end: str) -> None:
    role, target = (Role.PREFILL, 2) if apart else (Role.BOTH, 1)
    async with pair(model, tmp_path / "run", apart=apart) as fleet:
        busy = busy_until(fleet, alone, lambda: fleet.layers().get(target, 0) >= 2)
        fleet.head.want(role, 2)
        await fleet.until(lambda: fleet.layers().get(target, 0) >= 2)
        if end != "neither":
            fleet.kill(target if end == "target" else 0)
        await busy
        assert await answers(fleet) == alone
        await until_idle(fleet)
    assert replayed(tmp_path / "run") > 100
    lost = [event.lost for _, event in happened(tmp_path / "run") if isinstance(event, Unpaired)]
    assert any(lost) == (end != "neither")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(12))
async def test_random_kills_at_random_moments(model: Path, tmp_path: Path, alone: list[list[int]], seed: int) -> None:
    dice = random.Random(seed)
    apart = bool(seed % 2)
    role = Role.PREFILL if apart else Role.BOTH
    async with pair(model, tmp_path / "run", f"batching.prefix_cache={dice.choice(['true', 'false'])}", apart=apart) as fleet:
        for _ in range(4):
            streaming = asyncio.create_task(answers(fleet))
            await asyncio.sleep(0.02)
            fleet.head.want(role, dice.choice([1, 2, 2, 2]))
            await asyncio.sleep(dice.uniform(0, 2.0))
            await fleet.kill_one(dice)
            assert await streaming == alone
        await until_idle(fleet)
    assert replayed(tmp_path / "run") > 100
