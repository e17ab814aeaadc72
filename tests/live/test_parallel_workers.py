"""Replicas of two ranks, in processes: served, scaled from a peer shard by shard, and lost with one of their ranks."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from squall import config as configuration
from squall.core.types import Role
from squall.errors import ConfigError
from squall.live.engine.build import refuse_uneven
from squall.live.served import served_model
from tests.live.checkpoints import NUM_LAYERS, write_checkpoint
from tests.live.test_weights_between_workers import Fleet, replayed, serving
from tests.processes import children, is_gone

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def kill_a_rank(fleet: Fleet, replica: int) -> None:
    """Rank 1, and not the worker, which is rank 0."""
    pid = fleet.launcher.pid(replica)
    assert pid is not None
    (rank,) = children(pid)
    os.kill(rank, signal.SIGKILL)


async def test_two_ranks_say_what_one_says_pass_their_shards_on_and_end_together(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path / "one", most=1) as fleet:
        alone = await fleet.answers(8)
    async with serving(model, tmp_path / "two", "replica.tp=2", "load.kind=p2p", most=2) as fleet:
        assert await fleet.answers(8) == alone
        fleet.head.want(Role.BOTH, 2)
        await fleet.ready(2)
        (move,) = fleet.moves[1]
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        assert move.kind == "p2p"
        assert size <= move.num_bytes <= 1.1 * size  # both shards: norms twice, alignment
        assert fleet.layers() == {0: NUM_LAYERS, 1: NUM_LAYERS}
        assert await fleet.answers(8) == alone

        first, second = (fleet.launcher.pid(replica) or 0 for replica in (0, 1))
        (its_rank,), (other_rank,) = children(first), children(second)
        os.kill(its_rank, signal.SIGKILL)  # while it has nothing to do
        await fleet.until(lambda: fleet.phases()[0] != "ready")
        await fleet.until(lambda: is_gone(first))
        assert await fleet.answers(8) == alone
        fleet.kill(1)
        await fleet.until(lambda: is_gone(other_rank))


async def test_each_rank_gets_its_shard_from_a_copy_of_its_own(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path / "run", "replica.tp=2", "load.kind=host", most=2) as fleet:
        alone = await fleet.answers(8)
        fleet.head.want(Role.BOTH, 2)
        await fleet.ready(2)
        assert [move.kind for move in fleet.moves[1]] == ["host"]
        assert await fleet.answers(8) == alone


@pytest.mark.parametrize("victim", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW)])
async def test_a_rank_may_be_killed_while_shards_move_and_the_others_go_on_from_where_they_were(
    model: Path, tmp_path: Path, victim: int
) -> None:
    """The link is slow: eight megabytes take two thirds of a second a hop."""
    async with serving(model, tmp_path / "run", "replica.tp=2", "load.kind=chain", "serve.link_gbps=0.1") as fleet:
        alone = await fleet.answers(12)
        fleet.head.want(Role.BOTH, 3)
        await fleet.until(lambda: min(fleet.layers().get(1, 0), fleet.layers().get(2, 0)) >= 2)
        streaming = asyncio.create_task(fleet.answers(12))
        kill_a_rank(fleet, victim)
        await fleet.until(lambda: fleet.phases()[victim] != "ready" or fleet.layers()[victim] == 0)
        assert await streaming == alone
        await fleet.ready(3)
        assert await fleet.answers(12) == alone
        assert fleet.head.stats().num_failed_loads == 0
    assert replayed(tmp_path / "run") > 100


def test_a_degree_that_does_not_fit_is_refused_before_anything_starts(model: Path) -> None:
    config = configuration.load(None, (f"model.name={model}", "replica.tp=3"))
    with pytest.raises(
        ConfigError, match=r"replica.tp is 3, but .* has 4 heads, 2 KV heads and \d+ MLP columns, which divide by 1, 2, 4: use"
    ):
        refuse_uneven(config, served_model(config))
