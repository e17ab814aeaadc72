"""Real replicas inside the test's own process: what is lost, broken or called off between two layers changes no token."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from squall.core.events import ActivationsFailed, HandedOver, Unpaired
from squall.core.types import Role
from squall.live.activations import PulledActivations
from squall.live.head import Head
from squall.live.stream import Stream
from squall.live.transport.region import Region
from tests.live.checkpoints import write_checkpoint
from tests.live.in_process import forgotten, idle, in_process
from tests.live.test_head import Here, all_of, ask, tokens
from tests.live.test_live_scaling_emulated import happened, parted, ready

SETTINGS = ("replica.num_blocks=256", "replica.block_size=8", "replica.max_model_len=512", "fleet.replicas={min=1, max=2}",
            "fleet.down_window_s=600", "cluster.gpus_per_node=2", "queue.max_retries=20",
            "batching.max_num_batched_tokens=96", "batching.max_num_seqs=32",
            "load={kind='chain', live=true}", "serve.link_gbps=0.1")  # fmt: skip
NUM = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def fleet(model: Path, log: Path) -> AbstractAsyncContextManager[tuple[Head, Here]]:
    return in_process(log, f"model.name={model}", *SETTINGS)


def burst(head: Head) -> list[Stream]:
    """Greedily and with seeds, answers of one token among them."""
    manners = [{"temperature": 0.0}, {"temperature": 1.0}]
    prompts = [[(10 + 7 * seed + at) % 290 for at in range(40 + seed)] for seed in range(NUM)]
    return [ask(head, 1 + seed % 5, seed, prompts[seed], ignore_eos=True, **manners[seed % 2]) for seed in range(NUM)]


async def answers(head: Head) -> list[list[int]]:
    return [tokens(answer) for answer in await asyncio.gather(*map(all_of, burst(head)))]


async def with_help(head: Head) -> tuple[list[list[int]], list[list[int]]]:
    """What one replica says alone, and what it says last while another one helps that loads, or first where that differs."""
    alone = said = await answers(head)
    head.want(Role.BOTH, 2)
    coming = asyncio.create_task(ready(head, 2))
    while said == alone and not coming.done():  # a fast machine is done with one burst before there is any help
        said = await answers(head)
    await coming
    await parted(head)
    await idle(head)
    return alone, said


async def test_tokens_are_those_of_one_replica(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.zst"
    async with fleet(model, log) as (head, here):
        alone, said = await with_help(head)
        assert said == alone
        assert await answers(head) == alone
        await forgotten(here)
    seen = happened(log)
    assert any(event.layer > 0 for machine, event in seen if machine == 0 and isinstance(event, HandedOver))
    assert not any(event.lost for _, event in seen if isinstance(event, Unpaired))


async def test_a_layer_that_came_wrong_comes_again_and_is_not_computed_with_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[int] = []
    accept = Region.accept

    def spoil(region: Region, section: int) -> bool:
        """The second layer has another bit, once, in the memory of whoever fetched it."""
        if section == 2 and not wrong:
            wrong.append(section)
            region.memory[region.sections[section].offset] ^= 1
        return accept(region, section)

    monkeypatch.setattr(Region, "accept", spoil)
    async with fleet(model, tmp_path / "log.jsonl.zst") as (head, _):
        alone, said = await with_help(head)
        assert said == alone
    assert wrong == [2]
    happened(tmp_path / "log.jsonl.zst")


async def test_activations_that_cannot_be_had_are_computed_once_more(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every other batch is spoilt in the memory of whoever sends it."""
    sent: list[int] = []
    offer = PulledActivations._offer

    def spoil(way: PulledActivations, made: object, data: memoryview) -> None:
        sent.append(len(sent))
        offer(way, made, data)  # type: ignore[arg-type]
        if sent[-1] % 2 == 0:
            data[0] ^= 1

    monkeypatch.setattr(PulledActivations, "_offer", spoil)
    log = tmp_path / "log.jsonl.zst"
    async with fleet(model, log) as (head, _):
        alone, said = await with_help(head)
        assert said == alone
    failed = [event for machine, event in happened(log) if machine == 0 and isinstance(event, ActivationsFailed)]
    assert failed or not sent
    assert not failed or "wrong checksum" in caplog.text


async def test_clients_that_go_away_between_two_layers(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.zst"
    async with fleet(model, log) as (head, here):
        alone = await answers(head)
        streams = burst(head)
        head.want(Role.BOTH, 2)
        while {each.replica: each.num_layers for each in head.stats().replicas}.get(1, 0) < 2:
            await asyncio.sleep(0.001)
        for stream in streams[::3]:
            stream.cancel()
        kept = [at for at in range(NUM) if at % 3]
        said = await asyncio.gather(*(all_of(streams[at]) for at in kept))
        assert [tokens(answer) for answer in said] == [alone[at] for at in kept]
        await ready(head, 2)
        await parted(head)
        await idle(head)
        await forgotten(here)
    happened(log)
