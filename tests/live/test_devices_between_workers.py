"""Workers in processes of their own, whose weights and KV go from device to device, some killed on the way: every token is right.

Ordinary memory stands for devices, where there is no GPU; with one, workers share it.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from squall.core.types import Role
from tests.live import forked
from tests.live import test_disaggregated_workers as apart
from tests.live.checkpoints import write_checkpoint
from tests.live.forked import Forked
from tests.live.test_weights_between_workers import replayed, said_alone, serving

ON_CUDA = ("serve.device=cuda:0", "replica.dtype=fp32", "cluster.gpu=h200")


class OnDevices(Forked):
    def __init__(self, command: Sequence[str], **more: Any) -> None:
        named = ["tests.live.device_worker" if word == "squall.live.worker" else word for word in command]
        super().__init__(named, **more)


@pytest.fixture(params=["memory", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def home(request: pytest.FixtureRequest) -> Any:
    """What is to be said in the configuration."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield ON_CUDA
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forked, "Forked", OnDevices)
        yield ()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def alone(model: Path, home: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return said_alone(apart.answers, model, tmp_path_factory.mktemp("alone") / "run", *apart.CHUNKED, *home)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", ["source", "target"])
async def test_either_end_may_be_killed_in_the_middle_of_a_hand_off(
    model: Path, home: tuple[str, ...], tmp_path: Path, alone: list[list[int]], end: str, tp: int
) -> None:
    if home and torch.cuda.device_count() < tp:
        pytest.skip("not so many CUDA devices")
    async with apart.apart(model, tmp_path / "run", 2, 2, f"replica.tp={tp}", "serve.link_gbps=0.005", *home) as fleet:
        streaming = asyncio.create_task(apart.answers(fleet))
        found = await apart.under_way(fleet, 0.1)
        fleet.kill(found[end == "target"])
        assert await streaming == alone
        await apart.until_idle(fleet)
    assert replayed(tmp_path / "run") > 100


async def test_weights_go_along_a_chain_whose_middle_is_killed(model: Path, home: tuple[str, ...], tmp_path: Path) -> None:
    """The link is slow: eight megabytes take two thirds of a second a hop."""
    async with serving(model, tmp_path / "run", "load.kind=chain", "serve.link_gbps=0.1", *home) as fleet:
        said = await fleet.answers(12)
        fleet.head.want(Role.BOTH, 3)
        await fleet.until(lambda: min(fleet.layers().get(1, 0), fleet.layers().get(2, 0)) >= 2)
        streaming = asyncio.create_task(fleet.answers(12))
        fleet.kill(1)
        await fleet.until(lambda: fleet.phases()[1] != "ready" or fleet.layers()[1] == 0)
        assert await streaming == said
        await fleet.ready(3)
        assert await fleet.answers(12) == said
        assert fleet.head.stats().num_failed_loads == 0
    assert replayed(tmp_path / "run") > 100
