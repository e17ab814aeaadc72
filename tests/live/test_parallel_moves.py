"""Replicas of two ranks whose KV and batches move, in processes: a rank is killed meanwhile, and every token is right."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from squall.core.events import HandedOver, KvSent, LayersDone, Unpaired
from squall.core.types import Role
from tests.live import test_disaggregated_workers as apart
from tests.live import test_live_scaling_workers as live
from tests.live import test_moves_between_workers as moves
from tests.live.checkpoints import NUM_LAYERS, write_checkpoint
from tests.live.test_parallel_workers import SLOW, kill_a_rank
from tests.live.test_weights_between_workers import replayed, said_alone
from tests.processes import children

TWO = "replica.tp=2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


# -- from prefill to decode


@pytest.fixture(scope="module")
def handed_off(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one replica of one rank says that does all."""
    return said_alone(apart.answers, model, tmp_path_factory.mktemp("alone") / "run", *apart.CHUNKED)


async def test_kv_is_handed_off_rank_by_rank(model: Path, tmp_path: Path, handed_off: list[list[int]]) -> None:
    async with apart.apart(model, tmp_path / "run", 1, 1, TWO, "batching.prefix_cache=true") as fleet:
        assert await apart.answers(fleet) == handed_off
        assert await apart.answers(fleet) == handed_off  # from the prefix cache
        await apart.until_idle(fleet)
        await fleet.head.drain(10.0)
    assert replayed(tmp_path / "run") > 100
    sent = [event for _, event in live.happened(tmp_path / "run") if isinstance(event, KvSent)]
    blocks = -(-len(apart.PROMPTS[0]) // 8)
    assert len(sent) == 2 * sum(len(answer) > 1 for answer in handed_off)
    assert {event.num_bytes for event in sent} == {2 * NUM_LAYERS * blocks * 8 * 2 * 32 * 4}  # both ranks', a head each


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_rank_of_either_end_may_be_killed_in_the_middle_of_a_hand_off(
    model: Path, tmp_path: Path, handed_off: list[list[int]], end: str
) -> None:
    async with apart.apart(model, tmp_path / "run", 2, 2, TWO, "serve.link_gbps=0.005") as fleet:
        streaming = asyncio.create_task(apart.answers(fleet))
        found = await apart.under_way(fleet, 0.1)
        kill_a_rank(fleet, found[end == "target"])
        assert await streaming == handed_off
        await apart.until_idle(fleet)
    assert replayed(tmp_path / "run") > 100


# -- from a replica that goes


@pytest.fixture(scope="module")
def moved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return said_alone(moves.answers, model, tmp_path_factory.mktemp("alone") / "run", *moves.SHAPE)


@pytest.mark.parametrize("end", ["neither", pytest.param("source", marks=SLOW), pytest.param("target", marks=SLOW)])
async def test_what_a_replica_decodes_moves_rank_by_rank_and_a_rank_may_be_killed(
    model: Path, tmp_path: Path, moved: list[list[int]], end: str
) -> None:
    link = "serve.link_gbps=0.02" if end == "neither" else "serve.link_gbps=0.005"
    async with moves.elastic(model, tmp_path / "run", TWO, link) as fleet:
        streaming = await moves.one_goes(fleet, moved)
        if end != "neither":
            found = await apart.under_way(fleet, 0.05)
            kill_a_rank(fleet, found[end == "target"])
        assert await streaming == moved
        await apart.until_idle(fleet)
        await fleet.head.drain(10.0)
    assert replayed(tmp_path / "run") > 50
    assert end != "neither" or moves.leaving(tmp_path / "run")


# -- while weights come


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return said_alone(live.answers, model, tmp_path_factory.mktemp("alone") / "run", *live.SETTINGS)


async def test_two_ranks_work_while_they_load(model: Path, tmp_path: Path, shared: list[list[int]]) -> None:
    async with live.pair(model, tmp_path / "run", TWO) as fleet:
        assert await live.answers(fleet) == shared
        busy = live.busy_until(fleet, shared, lambda: fleet.phases().get(1) == "ready")
        fleet.head.want(Role.BOTH, 2)
        await busy
        assert await live.answers(fleet) == shared
        await live.until_idle(fleet)
        await fleet.head.drain(10.0)
    assert replayed(tmp_path / "run") > 100
    seen = live.happened(tmp_path / "run")
    ran = [event.last_layer for machine, event in seen if machine == 1 and isinstance(event, LayersDone)]
    assert min(ran) == 1  # before half of its layers had arrived
    handed = [event.layer for machine, event in seen if machine == 0 and isinstance(event, HandedOver)]
    assert any(0 < layer < NUM_LAYERS for layer in handed)


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_rank_of_either_end_may_be_killed_while_both_work_on_a_batch(
    model: Path, tmp_path: Path, shared: list[list[int]], end: str, together: bool
) -> None:
    role, target = (Role.BOTH, 1) if together else (Role.PREFILL, 2)
    async with live.pair(model, tmp_path / "run", TWO, apart=not together) as fleet:
        busy = live.busy_until(fleet, shared, lambda: fleet.layers().get(target, 0) >= 2)
        fleet.head.want(role, 2)
        await fleet.until(lambda: fleet.layers().get(target, 0) >= 2)
        kill_a_rank(fleet, target if end == "target" else 0)
        await busy
        assert await live.answers(fleet) == shared
        await live.until_idle(fleet)
    assert replayed(tmp_path / "run") > 100
    assert any(event.lost for _, event in live.happened(tmp_path / "run") if isinstance(event, Unpaired))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
async def test_any_process_may_be_killed_at_any_moment(model: Path, tmp_path: Path, shared: list[list[int]], seed: int) -> None:
    """Replicas come, go and die: what they decode moves, and those that load work meanwhile."""
    dice = random.Random(seed)
    role = Role.PREFILL if seed % 2 else Role.BOTH
    more = TWO, "fleet.drain=move", f"batching.prefix_cache={dice.choice(['true', 'false'])}"
    async with live.pair(model, tmp_path / "run", *more, apart=bool(seed % 2)) as fleet:
        for _ in range(4):
            streaming = asyncio.create_task(live.answers(fleet))
            await asyncio.sleep(0.02)
            fleet.head.want(role, dice.choice([1, 2, 2, 2]))
            await asyncio.sleep(dice.uniform(0, 2.5))
            workers = [pid for replica in range(fleet.most) if (pid := fleet.launcher.pid(replica)) is not None]
            os.kill(dice.choice([*workers, *(rank for pid in workers for rank in children(pid))]), signal.SIGKILL)
            assert await streaming == shared
        await live.until_idle(fleet)
    assert replayed(tmp_path / "run") > 100
