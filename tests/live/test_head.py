"""A head with workers in its own process: what a client gets, whatever happens to replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from squall.config import Config, Queue, ReplicaSpec
from squall.core.types import MILLISECOND, ROUTER, ReplicaId
from squall.errors import ConfigError, ModelError, Rejected, ReplicaFailed
from squall.eventlog import open_log, read
from squall.fleet_tables import Fleet
from squall.live import streams as streams_module
from squall.live.engine.hashing import block_hashes
from squall.live.engine.interface import Sampling, TokenOut
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.frontend import Frontend
from squall.live.head import Head
from squall.live.host import Host
from squall.live.stream import Stream
from squall.live.worker import Worker
from squall.policies.batching import Vllm
from squall.policies.route import Pull


class Here:
    """A launcher whose workers live in this process; one worker a replica, made anew at each start."""

    token = "ours"

    def __init__(self, make: Callable[[ReplicaId], Host]) -> None:
        self.make = make
        self.hosts: dict[ReplicaId, Host] = {}
        self.workers: dict[ReplicaId, tuple[Worker, asyncio.Task[None], asyncio.Future[str]]] = {}
        self.num_starts = 0

    async def start(self, replica: ReplicaId) -> str:
        self.num_starts += 1
        host = self.hosts[replica] = self.make(replica)
        worker = Worker([host], self.token, 5.0, 60.0)
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(worker.serve("127.0.0.1:0", listening.set_result))
        self.workers[replica] = (worker, running, listening)  # whoever asked may go before it listens: it is stopped all the same
        return await asyncio.shield(listening)

    async def stop(self, replica: ReplicaId) -> None:
        if (entry := self.workers.pop(replica, None)) is not None:
            entry[0].end(at_once=True)
            await entry[1]

    async def kill(self, address: str) -> None:
        for replica, entry in list(self.workers.items()):
            if entry[2].done() and entry[2].result() == address:
                await self.stop(replica)

    async def close(self) -> None:
        for replica in list(self.workers):
            await self.stop(replica)

    def break_down(self, replica: ReplicaId) -> None:
        """The worker ends in the middle of its work."""
        self.workers[replica][0].end(at_once=True)


@asynccontextmanager
async def fleet(
    here: Here, replicas: int = 1, log: Path | None = None, say: Callable[[str], None] = lambda _: None, **more: Any
) -> AsyncIterator[Head]:
    config = Config(
        fleet=Fleet(replicas=replicas),
        replica=ReplicaSpec(block_size=4),
        batching=Vllm(max_num_seqs=8, max_num_batched_tokens=64),
        **more,
    )
    async with AsyncExitStack() as stack:
        records = stack.enter_context(open_log(log)) if log is not None else None
        head = Head(config, ["pretend"], ByteTokenizer(), 512, here, records, say)
        head.start()
        stack.push_async_callback(head.close)
        while head.stats().replicas == () or any(replica.phase != "ready" for replica in head.stats().replicas):
            await asyncio.sleep(0.002)
        yield head


def ask(head: Head, max_tokens: int, seed: int = 7, prompt: Sequence[int] = range(4), **more: Any) -> Stream:
    return head.submit(prompt, Sampling(max_tokens=max_tokens, seed=seed, **more))


async def all_of(stream: Stream) -> list[TokenOut]:
    return [out async for out in stream]


async def some_of(stream: Stream, count: int) -> list[TokenOut]:
    return [await anext(stream) for _ in range(count)]


def tokens(outs: Sequence[TokenOut]) -> list[int]:
    return [out.token for out in outs]


@pytest.fixture
def here(make_host: Any) -> Here:
    return Here(make_host)


@pytest.fixture
def slow(make_host: Any) -> Here:
    """An answer of 400 tokens takes 20 s: it is not over before we are."""
    return Here(lambda replica: make_host(replica, step=50 * MILLISECOND))


async def test_many_clients_get_their_own_tokens_in_order(here: Here, spoken: Any) -> None:
    async with fleet(here, replicas=2) as head:
        frontend: Frontend = head
        assert frontend.ready
        streams = [ask(head, max_tokens=5 + seed, seed=seed) for seed in range(12)]
        answers = await asyncio.gather(*map(all_of, streams))
        assert [tokens(answer) for answer in answers] == [spoken(seed, 5 + seed) for seed in range(12)]
        assert {answer[-1].finish for answer in answers} == {"length"}
        assert all(stream.queued is not None and stream.queued >= 0 for stream in streams)


async def test_the_choices_of_one_prompt_share_its_hashes(here: Here, spoken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(tokens: Sequence[int], *more: Any) -> tuple[int, ...]:
        asked.append(tokens)
        return block_hashes(tokens, *more)

    monkeypatch.setattr(streams_module, "block_hashes", noted)
    async with fleet(here, replicas=1) as head:
        first, second = tuple(range(40)), tuple(range(1, 41))
        streams = [ask(head, 3, seed, prompt) for prompt in (first, second) for seed in range(4)]
        answers = await asyncio.gather(*map(all_of, streams))
        assert [tokens(answer) for answer in answers] == [spoken(seed, 3) for seed in range(4)] * 2
        assert asked == [first, second]
        assert [len(stream.request.block_hashes) for stream in streams] == [40 // 4] * 8
        assert len({stream.request.block_hashes for stream in streams}) == 2


async def test_when_a_replica_dies_the_client_sees_nothing_of_it(here: Here, spoken: Any) -> None:
    async with fleet(here, replicas=2) as head:
        streams = [ask(head, max_tokens=100, seed=seed) for seed in range(4)]
        beginnings = await asyncio.gather(*(some_of(stream, 10) for stream in streams))
        here.break_down(0)
        rests = await asyncio.gather(*map(all_of, streams))
        assert [tokens(a) + tokens(b) for a, b in zip(beginnings, rests, strict=True)] == [spoken(seed, 100) for seed in range(4)]
        while here.num_starts < 3 or [replica.phase for replica in head.stats().replicas] != ["ready", "ready"]:
            await asyncio.sleep(0.01)
        assert here.num_starts == 3


async def test_who_hears_that_a_replica_is_lost_hears_once_that_it_serves_again(here: Here) -> None:
    said: list[str] = []
    async with fleet(here, replicas=2, say=said.append) as head:
        for count in (1, 2):
            here.break_down(0)
            while said.count("replica 0 serves again") < count:
                await asyncio.sleep(0.005)
            assert [replica.phase for replica in head.stats().replicas] == ["ready", "ready"]
        await all_of(ask(head, max_tokens=20))
    assert [line.partition(":")[0] for line in said] == ["replica 0 is lost", "replica 0 serves again"] * 2


async def test_a_replica_that_could_not_load_is_said_to_serve_when_it_does(make_host: Any) -> None:
    made: list[Host] = []

    def make(replica: ReplicaId) -> Host:
        made.append(make_host(replica))
        if len(made) == 1:
            made[0].engine.load = _refuse  # type: ignore[method-assign]
        return made[-1]

    said: list[str] = []
    head = Head(Config(), ["pretend"], ByteTokenizer(), 512, Here(make), say=said.append)
    head.start()
    try:
        await head.until_ready()
        assert said == ["replica 0 cannot load the model: model.safetensors: truncated", "replica 0 serves again"]
    finally:
        await head.close()


async def test_text_that_was_held_back_is_neither_lost_nor_said_twice(here: Here, spoken: Any) -> None:
    expected = bytes(spoken(7, 60)).decode()
    stop = expected[9:11] + "\N{SNOWMAN}"  # its beginning is said, its end never
    async with fleet(here, replicas=2) as head:
        stream = ask(head, max_tokens=60, stop=(stop,))
        beginning = await some_of(stream, 11)
        here.break_down(0)
        assert "".join(out.text for out in [*beginning, *await all_of(stream)]) == expected


async def test_a_request_that_kills_every_replica_is_given_up_with_an_error_after_its_tokens(slow: Here) -> None:
    async with fleet(slow, replicas=2, queue=Queue(max_retries=0)) as head:
        stream = ask(head, max_tokens=400)
        await some_of(stream, 3)
        slow.break_down(0)
        with pytest.raises(ReplicaFailed, match="lost its replica"):
            await all_of(stream)


async def test_when_a_machine_fails_nobody_waits_for_what_it_would_have_said(slow: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client of a head with a bug may hang, neither one in mid-stream nor one that comes later."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    async with fleet(slow) as head:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        stream = ask(head, max_tokens=400)
        await some_of(stream, 3)
        monkeypatch.setitem(head._driver._machines, ROUTER, SimpleNamespace(handle=broken, wake_at=None))
        with pytest.raises(ReplicaFailed, match="a bug stopped the head"):
            await all_of(ask(head, max_tokens=4))
        with pytest.raises(ReplicaFailed, match="a bug stopped the head"):
            await all_of(stream)
        assert head.failed
        with pytest.raises(ReplicaFailed, match="a bug stopped the head"):
            await all_of(ask(head, max_tokens=4))


async def test_a_request_that_has_not_begun_is_rejected_when_it_is_given_up(here: Here) -> None:
    async with fleet(here, queue=Queue(max_retries=0), route=Pull(max_outstanding=4)) as head:
        here.hosts[0].engine.run = lambda action, emit: (_ for _ in ()).throw(RuntimeError("broken"))  # type: ignore[method-assign]
        with pytest.raises(Rejected) as rejected:
            await all_of(ask(head, max_tokens=4))
        assert rejected.value.reason == "lost"
        assert rejected.value.retry_after_s is not None


async def test_what_is_finished_is_not_done_again_when_the_replica_dies_before_it_says_so(here: Here, spoken: Any) -> None:
    async with fleet(here, replicas=2) as head:
        keep, heard = head.heard, []

        def deaf(client: Any, to: Any, event: Any) -> None:
            if type(event).__name__ == "Progressed":
                heard.append(event)
            else:
                keep(client, to, event)

        head.heard = deaf  # type: ignore[method-assign]
        assert tokens(await all_of(ask(head, max_tokens=5))) == spoken(7, 5)
        assert head._router.num_outstanding == 1
        head.heard = keep  # type: ignore[method-assign]
        here.break_down(0)
        while head._router.num_outstanding:
            await asyncio.sleep(0.002)
        session = here.hosts[1].session
        assert session is not None
        while not session.idle:
            await asyncio.sleep(0.002)


async def test_a_request_larger_than_the_pool_is_refused_for_good(make_host: Any) -> None:
    async with fleet(Here(lambda replica: make_host(replica, num_blocks=8))) as head:
        with pytest.raises(Rejected, match="do not fit into a KV cache of 32 tokens") as rejected:
            await all_of(ask(head, max_tokens=40))
        assert (rejected.value.reason, rejected.value.retry_after_s) == ("too_large", None)


async def test_fifty_requests_that_cannot_be_served_are_held_against_nobody(make_host: Any, spoken: Any) -> None:
    """Replicas answer for what they do, not for what they are asked (sgl-project/sglang#25811)."""
    here = Here(lambda replica: make_host(replica, num_blocks=8))
    async with fleet(here, replicas=2) as head:
        refused = await asyncio.gather(*(all_of(ask(head, max_tokens=40)) for _ in range(50)), return_exceptions=True)
        assert all(isinstance(error, Rejected) for error in refused)
        assert [replica.phase for replica in head.stats().replicas] == ["ready", "ready"]
        answers = await asyncio.gather(*(all_of(ask(head, max_tokens=5, seed=seed)) for seed in range(4)))
        assert [tokens(answer) for answer in answers] == [spoken(seed, 5) for seed in range(4)]
        assert here.num_starts == 2


async def test_a_full_queue_says_when_to_come_back(slow: Here) -> None:
    async with fleet(slow, queue=Queue(max_requests=1), route=Pull(max_outstanding=1)) as head:
        running, queued, refused = (ask(head, max_tokens=5) for _ in range(3))
        with pytest.raises(Rejected) as rejected:
            await anext(refused)
        assert rejected.value.reason == "queue_full"
        assert rejected.value.retry_after_s is not None
        assert head.stats().num_queued == 1
        assert len(await all_of(running)) == len(await all_of(queued)) == 5


async def test_a_client_that_goes_away_frees_its_place_whether_queued_or_running(here: Here) -> None:
    async with fleet(here, route=Pull(max_outstanding=1)) as head:
        running, queued, last = (ask(head, max_tokens=400) for _ in range(3))
        await some_of(running, 2)
        queued.cancel()
        running.cancel()
        running.cancel()
        await some_of(last, 2)
        last.cancel()
        while head._router.num_outstanding or head._router.num_queued:
            await asyncio.sleep(0.002)
        session = here.hosts[0].session
        assert session is not None
        while not session.idle:
            await asyncio.sleep(0.002)


async def test_a_client_that_goes_away_before_anything_happened_costs_nothing(here: Here) -> None:
    async with fleet(here) as head:
        ask(head, max_tokens=400).cancel()
        assert len(await all_of(ask(head, max_tokens=3))) == 3
        while head._router.num_outstanding:
            await asyncio.sleep(0.002)


async def test_draining_finishes_what_runs_and_refuses_what_comes(slow: Here, spoken: Any) -> None:
    async with fleet(slow, replicas=2) as head:
        running = [ask(head, max_tokens=10, seed=seed) for seed in range(4)]
        await asyncio.gather(*(some_of(stream, 1) for stream in running))
        draining = asyncio.create_task(head.drain(10.0))
        await asyncio.sleep(0)
        assert head.draining
        with pytest.raises(Rejected) as rejected:
            await anext(ask(head, max_tokens=5))
        assert (rejected.value.reason, rejected.value.retry_after_s is not None) == ("draining", True)
        rests = await asyncio.gather(*map(all_of, running))
        assert [tokens(rest) for rest in rests] == [spoken(seed, 10)[1:] for seed in range(4)]
        await draining
        assert {replica.phase for replica in head.stats().replicas} == {"off"}
        assert not slow.workers


async def test_draining_does_not_wait_for_ever(slow: Here) -> None:
    said: list[str] = []
    async with fleet(slow) as head:
        head._say = said.append
        stream = ask(head, max_tokens=400)
        await some_of(stream, 1)
        await head.drain(0.05)
        assert said == ["not finished within 0.05 s: 1 request"]
    with pytest.raises(ReplicaFailed, match="shut down before the request was finished"):
        await all_of(stream)


async def test_requests_that_come_before_the_first_replica_wait_for_it(here: Here, spoken: Any) -> None:
    config = Config(replica=ReplicaSpec(block_size=4))
    head = Head(config, ["pretend"], ByteTokenizer(), 512, here)
    head.start()
    assert not head.ready
    try:
        assert tokens(await all_of(ask(head, max_tokens=5))) == spoken(7, 5)
    finally:
        await head.close()


async def test_a_shared_prompt_is_computed_once_and_counted(here: Here) -> None:
    async with fleet(here) as head:
        first, second = [await all_of(ask(head, max_tokens=3, prompt=range(40))) for _ in range(2)]
        assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 36)
        while head.stats().num_prefix_cache_hits != 36:
            await asyncio.sleep(0.01)
        assert head.stats().num_prefix_cache_queries == 80
        here.break_down(0)
        while head.ready:
            await asyncio.sleep(0.002)
        assert head.stats().num_prefix_cache_hits == 36


@pytest.mark.parametrize("where", ["launch", "load"])
async def test_what_the_user_can_put_right_is_told_before_anything_ran(make_host: Any, where: str) -> None:
    def make(replica: ReplicaId) -> Host:
        if where == "launch":
            raise ConfigError("replica.num_blocks is 0")
        host: Host = make_host(replica)
        host.engine.load = _refuse  # type: ignore[method-assign]
        return host

    said: list[str] = []
    head = Head(Config(), ["pretend"], ByteTokenizer(), 512, Here(make), say=said.append)
    head.start()
    assert head.load_failure is not None
    try:
        assert await head.load_failure == ("replica.num_blocks is 0" if where == "launch" else "model.safetensors: truncated")
    finally:
        await head.close()
    assert said


def _refuse() -> None:
    raise ModelError("model.safetensors: truncated")


async def test_the_log_of_a_stormy_run_is_replayable(here: Here, tmp_path: Path) -> None:
    from squall.twin.observe import observe

    path = tmp_path / "events.jsonl.zst"
    async with fleet(here, replicas=2, log=path) as head:
        streams = [ask(head, max_tokens=60, seed=seed) for seed in range(6)]
        await asyncio.gather(*(some_of(stream, 5) for stream in streams))
        streams.pop().cancel()
        here.break_down(1)
        await asyncio.gather(*map(all_of, streams))
        await head.drain(10.0)
    seen = observe(read(path))
    assert seen.mismatches == []
    assert sum(seen.num_events.values()) > 30
