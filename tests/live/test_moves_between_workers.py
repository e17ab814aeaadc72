"""Workers in processes of their own that are emptied, or change their role, in the middle of answers: every token is right."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from squall.core.actions import SendKv
from squall.core.events import Kept, MoveWanted, Progressed, RoleChanged
from squall.core.fleet_view import ScaleView, Wanted
from squall.core.types import Role
from squall.eventlog import read
from tests.live.checkpoints import write_checkpoint
from tests.live.test_disaggregated_workers import PROMPTS, moving, under_way, until_idle
from tests.live.test_weights_between_workers import Fleet, replayed, said_alone, serving

SHAPE = ("batching.max_num_batched_tokens=48", "batching.max_num_seqs=40", "replica.block_size=8", "replica.max_model_len=512",
         "replica.num_blocks=1024", "fleet.drain=move", "batching.prefix_cache=true")  # fmt: skip
LONG = 200
SOME = PROMPTS[:5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


async def answers(fleet: Fleet) -> list[list[int]]:
    """Each prompt greedily and twice with a seed, as two choices of n = 2 are; some stop at a string, some shun repetition."""
    asked: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    for at, prompt in enumerate(SOME):
        more: dict[str, Any] = {"stop": ("w7 w7", "w3")} if at % 3 == 0 else {"frequency_penalty": 0.5} if at % 3 == 1 else {}
        asked += [(prompt, more), *((prompt, {"temperature": 1.0, "seed": seed + at, **more}) for seed in (0, 100))]
    return await asyncio.gather(*(fleet.answer(prompt, LONG, **manner) for prompt, manner in asked))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one replica says that nobody disturbs."""
    return said_alone(answers, model, tmp_path_factory.mktemp("alone") / "run", *SHAPE)


class WhereKvWaits(Struct, frozen=True):
    """Where KV waits for a place, a prefill replica is to decode; asked only when somebody wants something."""

    @property
    def constant(self) -> bool:
        return True

    def __call__(self, view: ScaleView) -> Wanted:
        waits = view.roles[Role.DECODE].num_queued > 6
        return Wanted({Role.PREFILL: 1, Role.DECODE: 2} if waits else {Role.PREFILL: 2, Role.DECODE: 1}, "KV waits")


@asynccontextmanager
async def elastic(model: Path, folder: Path, *more: str) -> AsyncIterator[Fleet]:
    """Two replicas that do all, ready."""
    async with serving(model, folder, *SHAPE, *more, most=2) as fleet:
        fleet.head.want(Role.BOTH, 2)
        await fleet.ready(2)
        yield fleet


def decoding(fleet: Fleet) -> Counter[int]:
    """Requests that have a token, by replica."""
    entries = fleet.head._router._entries.values()
    return Counter(entry.backend.replica for entry in entries if entry.backend is not None and entry.started)


async def both_decoding(fleet: Fleet, alone: list[list[int]]) -> asyncio.Task[list[list[int]]]:
    """Answers on their way, four at each replica; asked for again where one replica was done before the other one got to it."""
    streaming = asyncio.create_task(answers(fleet))
    await fleet.until(lambda: streaming.done() or min(decoding(fleet)[replica] for replica in (0, 1)) >= 4)
    if not streaming.done():
        return streaming
    assert streaming.result() == alone
    return await both_decoding(fleet, alone)


async def one_goes(fleet: Fleet, alone: list[list[int]]) -> asyncio.Task[list[list[int]]]:
    """Answers of which one, at least, is leaving a replica that goes; asked for again where all were said before it could."""
    streaming = await both_decoding(fleet, alone)
    fleet.head.want(Role.BOTH, 1)
    await fleet.until(lambda: streaming.done() or bool(moving(fleet)))
    if not streaming.done():
        return streaming
    assert streaming.result() == alone
    fleet.head.want(Role.BOTH, 2)
    await fleet.ready(2)
    return await one_goes(fleet, alone)


def leaving(folder: Path) -> int:
    """Requests that were held though they had decoded for a while."""
    events = [record.event for record in read(folder / "events.jsonl.zst")]
    asked = {request for event in events if isinstance(event, MoveWanted) for request in event.requests}
    held = [held for event in events if isinstance(event, Progressed) for held in event.held]
    return sum(each.request in asked and each.num_tokens > len(PROMPTS[0]) for each in held)


async def test_a_replica_that_goes_moves_what_it_decodes_and_no_token_changes(
    model: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    async with elastic(model, tmp_path / "run", "serve.link_gbps=0.02") as fleet:
        streaming = await one_goes(fleet, alone)
        await fleet.until(lambda: "ready" in fleet.phases().values() and list(fleet.phases().values()).count("ready") == 1)
        await fleet.until(lambda: "draining" not in fleet.phases().values())
        assert await streaming == alone
        await until_idle(fleet)
        await fleet.head.drain(10.0)
    assert replayed(tmp_path / "run") > 50
    assert leaving(tmp_path / "run")  # nobody waited for these


@pytest.mark.parametrize("end", ["source", "target"])
async def test_either_end_may_be_killed_in_the_middle_of_a_move(
    model: Path, tmp_path: Path, alone: list[list[int]], end: str
) -> None:
    """The link is slow: some two hundred kilobytes take a third of a second."""
    async with elastic(model, tmp_path / "run", "serve.link_gbps=0.005") as fleet:
        streaming = await one_goes(fleet, alone)
        found = await under_way(fleet, 0.05)
        fleet.kill(found[end == "target"])
        assert await streaming == alone
        await until_idle(fleet)
    assert replayed(tmp_path / "run") > 50


async def test_a_prefill_replica_that_becomes_a_decode_replica_keeps_what_it_held(
    model: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    bounds = "fleet={mode='disaggregated', prefill={min=1, max=2, initial=2}, decode={min=1, max=2, initial=1}}"
    more = "serve.link_gbps=0.005", "handoff.max_transfers=1", f"scale.kind={__name__}:WhereKvWaits", "replica.num_blocks=64"
    async with serving(model, tmp_path / "run", *SHAPE, *more, most=3, bounds=bounds) as fleet:
        await fleet.ready(3)
        streaming = asyncio.create_task(answers(fleet))
        await fleet.until(lambda: fleet.head._router.demand(Role.DECODE).num_queued > 6)
        fleet.head.want(Role.DECODE, None)  # the policy is asked once more
        await fleet.until(lambda: [r.role for r in fleet.head.stats().replicas if r.phase == "ready"].count("decode") == 2)
        assert await streaming == alone
        await until_idle(fleet)
        await fleet.head.drain(10.0)
    assert replayed(tmp_path / "run") > 50
    events = [record.event for record in read(tmp_path / "run" / "events.jsonl.zst")]
    changed = {event.replica for event in events if isinstance(event, RoleChanged) and event.role is Role.DECODE}
    kept = [event for event in events if isinstance(event, Kept)]
    assert kept
    assert {event.replica for event in kept} <= changed
    sent = Counter(
        action.request for record in read(tmp_path / "run" / "events.jsonl.zst") for action in record.actions
        if isinstance(action, SendKv)
    )  # fmt: skip
    assert not [request for event in kept for request in event.requests if sent[request]]  # without a copy


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
async def test_replicas_come_go_and_die_at_random_moments(model: Path, tmp_path: Path, alone: list[list[int]], seed: int) -> None:
    dice = random.Random(seed)
    async with elastic(model, tmp_path / "run", f"serve.link_gbps={dice.choice([0.005, 0.05, 1.0])}") as fleet:
        for _ in range(4):
            streaming = asyncio.create_task(answers(fleet))
            for count in (1, 2):
                await asyncio.sleep(dice.uniform(0, 1.0))
                fleet.head.want(Role.BOTH, count)
            if dice.random() < 0.3:
                await fleet.kill_one(dice)
            assert await streaming == alone
        await until_idle(fleet)
    assert replayed(tmp_path / "run") > 50
