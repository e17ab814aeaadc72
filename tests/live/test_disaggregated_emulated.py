"""Prefill and decode replicas that pretend, in the test's own process: what a client gets, and how long KV is on its way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from squall import config as configuration
from squall.core.actions import SendKv
from squall.core.events import KvSent
from squall.core.types import SECOND
from squall.eventlog import read
from squall.live.engine.build import accelerator, emulated_plan, engine_maker
from squall.live.kv_way import PricedKv
from squall.live.predicted_way import Prices
from squall.live.served import served_model
from squall.perf.build import latency_model
from squall.sim.ground import ground
from tests.live.in_process import forgotten, idle, in_process
from tests.live.test_head import all_of, ask, tokens

SETTINGS = (
    "serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "cluster.nodes=2", "cluster.gpus_per_node=2",
    "cluster.nic_gbps=100", "fleet={mode='disaggregated', prefill=2, decode=2}", "queue.max_retries=20",
)  # fmt: skip


async def test_requests_go_from_prefill_to_decode_replicas(tmp_path: Path, spoken: Any) -> None:
    log = tmp_path / "log.jsonl.zst"
    async with in_process(log, *SETTINGS) as (head, here):
        streams = [ask(head, 8 + seed, seed, range(40)) for seed in range(12)]
        answers = await asyncio.gather(*map(all_of, streams))
        assert [tokens(answer) for answer in answers] == [spoken(seed, 8 + seed) for seed in range(12)]
        await idle(head)
        await forgotten(here)
    sent = [(record.machine, record.event) for record in read(log) if isinstance(record.event, KvSent)]
    assert len(sent) == 12
    assert all(source in (0, 1) and event.to in (2, 3) and event.took > 0 for source, event in sent)


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
async def test_when_an_end_breaks_down_the_client_sees_nothing_of_it(tmp_path: Path, spoken: Any, victim: int) -> None:
    async with in_process(tmp_path / "log.jsonl.zst", *SETTINGS, "handoff.delay_s=0.2") as (head, here):
        streams = [ask(head, 12, seed, range(40)) for seed in range(8)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        await asyncio.sleep(0.05)  # in the middle of all hand-offs
        here.break_down(victim)
        rests = await asyncio.gather(*map(all_of, streams))
        told = [[first.token, *tokens(rest)] for first, rest in zip(firsts, rests, strict=True)]
        assert told == [spoken(seed, 12) for seed in range(8)]
        await idle(head)


async def test_who_goes_away_in_the_middle_of_a_hand_off_leaves_nothing(tmp_path: Path) -> None:
    async with in_process(tmp_path / "log.jsonl.zst", *SETTINGS, "handoff.delay_s=0.1") as (head, here):
        streams = [ask(head, 12, seed, range(40)) for seed in range(8)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        for stream in streams:
            stream.cancel()
        await forgotten(here)
        await idle(head)


class Said:
    """A sender that remembers what came of it."""

    def __init__(self) -> None:
        self.sent_bytes: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def offered(self, offer: object) -> None:
        raise AssertionError("nothing can be read")

    def sent(self, request: int, number: int, num_bytes: int) -> None:
        assert (request, number) == (7, 1)
        self.sent_bytes.set_result(num_bytes)

    def failed(self, request: int, number: int) -> None:
        raise AssertionError("nothing fails")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("to", [1, 3])
async def test_kv_takes_what_it_takes_in_the_simulator(tp: int, to: int) -> None:
    """Inside a machine and between two; all layers, and half of them."""
    config = configuration.load(None, (*SETTINGS, f"replica.tp={tp}", f"cluster.gpus_per_node={2 * tp}"))
    model = served_model(config)
    gpu = accelerator(config)
    latency = latency_model(config.latency, model.spec, gpu, config.replica)
    prices = Prices.of(config, emulated_plan(config, model), gpu)
    way = PricedKv(0, engine_maker(config, model)(), prices, config, model.spec)  # type: ignore[arg-type]
    for first, last in ((0, 0), (0, model.spec.num_layers // 2)):
        action = SendKv(7, to, first, last, 1000)
        world = ground(config, model.spec, gpu, latency, 1000)
        wires = world.wires()
        roads = world.roads(wires)
        assert roads is not None
        moves = world.kv_moves(wires)
        moves.start(0, action, 0)
        told: list[Any] = []
        while (at := roads.network.next_end()) is not None:
            told += moves.on(roads.network.advance(at), at)
        ((source, event),) = told
        assert source == 0
        said = Said()
        began = asyncio.get_running_loop().time()
        way.send(action, 1, said)
        assert await said.sent_bytes == event.num_bytes
        assert asyncio.get_running_loop().time() - began >= event.took / SECOND * 0.99
        assert prices.kv_seconds(0, to, event.num_bytes // tp) == pytest.approx(event.took / SECOND, abs=3e-9)
