"""A worker, as its head sees it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from squall import config as configuration
from squall.core.actions import LoadWeights, RunSteps, StopReplica, WarmReplica
from squall.core.events import (
    AnyEvent,
    Cancelled,
    Disowned,
    HandedOver,
    KvFailed,
    KvWanted,
    LoadFailed,
    Offered,
    Part,
    Progressed,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    StepsDone,
    Submitted,
    Warmed,
    WeightsLoaded,
)
from squall.core.fleet_view import Place, Transfer
from squall.core.types import MILLISECOND, MachineId, Request
from squall.errors import ModelError, PeerLost
from squall.live.activations import ActivationsOffer
from squall.live.driver import Priority
from squall.live.engine.emulated import EmulatedEngine
from squall.live.engine.interface import Job, RunEnded, Sampling, TokenOut
from squall.live.host import Host
from squall.live.hosts import host_maker
from squall.live.rpc import convert
from squall.live.rpc.client import ReplicaClient
from squall.live.rpc.convert import Peer, ReplicaLoad, WeightsMoved
from squall.live.rpc.generated import squall_pb2 as pb
from squall.live.rpc.service import HEAD, MAX_ASKED, MAX_MESSAGE, NONCE, PROOF, SERVICE, Door, introduce, session_of
from squall.live.served import served_model
from squall.live.session import Session
from squall.live.transport.frames import proof
from squall.live.transport.kv import KvOffer
from squall.live.worker import _replicas
from tests.live.conftest import TOKEN


class Ear:
    """Remembers what a replica says."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.out: dict[int, list[int]] = {}
        self.loads: list[ReplicaLoad] = []
        self.order: list[str] = []
        self.changed = asyncio.Event()
        self.began: list[int] = []
        self.peer: Peer | None = None
        self.moves: list[WeightsMoved] = []
        self.offers: list[KvOffer | ActivationsOffer] = []

    def heard(self, client: ReplicaClient, to: MachineId, event: AnyEvent) -> None:
        self.events.append(event)
        self.order.append(type(event).__name__)
        self.changed.set()

    def tokens(self, client: ReplicaClient, tokens: Sequence[TokenOut]) -> None:
        for out in tokens:
            self.out.setdefault(out.request, []).append(out.token)
            self.order.append("finish" if out.finish else "token")
        self.changed.set()

    def load(self, client: ReplicaClient, load: ReplicaLoad) -> None:
        self.loads.append(load)
        self.changed.set()

    def begun(self, client: ReplicaClient, requests: Sequence[int]) -> None:
        self.began += requests

    def reachable(self, client: ReplicaClient, peer: Peer) -> None:
        self.peer = peer

    def handed_over(self, client: ReplicaClient, to: MachineId, event: HandedOver, jobs: Sequence[Job]) -> None:
        self.events.append(event)

    def offered(self, client: ReplicaClient, offer: KvOffer | ActivationsOffer) -> None:
        self.offers.append(offer)

    def moved(self, client: ReplicaClient, moved: WeightsMoved) -> None:
        self.moves.append(moved)

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def finished(self) -> None:
        await self.until(lambda: "finish" in self.order)

    async def hears(self, kind: type[AnyEvent]) -> Any:
        await self.until(lambda: any(isinstance(event, kind) for event in self.events))
        return next(event for event in self.events if isinstance(event, kind))


class Talk:
    """A head's side of one session."""

    def __init__(self, client: ReplicaClient, ear: Ear, over: asyncio.Task[str]) -> None:
        self.client = client
        self.ear = ear
        self.over = over

    async def bring_up(self) -> None:
        self.client.send(LoadWeights(0, Transfer("m", Place("ssd", 0), (0,), "disk")))
        await self.ear.hears(WeightsLoaded)
        self.client.send(WarmReplica(0))
        await self.ear.hears(Warmed)

    def submit(
        self, id: int, max_tokens: int, prompt: int = 4, output: tuple[int, ...] = (), hashes: tuple[int, ...] = ()
    ) -> None:
        request = Request(id, 0, prompt, max_tokens, num_output_tokens=len(output), block_hashes=hashes)
        sampling = Sampling(max_tokens=max_tokens, seed=id)
        self.client.send(Submitted(request), Job(id, tuple(range(prompt)), sampling, output, hashes))


@asynccontextmanager
async def talking(address: str, replica: int = 0, token: str = TOKEN) -> AsyncIterator[Talk]:
    ear = Ear()
    client = ReplicaClient(replica, ear, token)
    over = asyncio.create_task(client.run(address))
    try:
        yield Talk(client, ear, over)
    finally:
        over.cancel()
        await asyncio.gather(over, return_exceptions=True)


async def test_a_replica_comes_up_step_by_step_and_answers_a_request(make_host: Any, serving: Any, spoken: Any) -> None:
    async with serving([make_host()]) as (_, address), talking(address) as talk:
        await talk.bring_up()
        assert talk.ear.events == [ReplicaStarted(0), WeightsLoaded(0, num_blocks=256, block_size=4), Warmed(0)]
        talk.submit(1, max_tokens=5)
        await talk.ear.until(lambda: any(isinstance(e, Progressed) and e.finished for e in talk.ear.events))
        assert talk.ear.out == {1: spoken(1, 5)}
        assert talk.ear.began == [1]


async def test_tokens_come_before_the_progress_that_they_make(make_host: Any, serving: Any) -> None:
    async with serving([make_host()]) as (_, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=3)
        await talk.ear.until(lambda: talk.ear.order.count("Progressed") == 2)
        assert talk.ear.order[-5:] == ["token", "Progressed", "token", "finish", "Progressed"]


async def test_a_continued_request_says_only_what_is_missing(make_host: Any, serving: Any, spoken: Any) -> None:
    async with serving([make_host()]) as (_, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=6, output=tuple(spoken(1, 4)))
        await talk.ear.hears(Progressed)
        await talk.ear.finished()
        assert talk.ear.out == {1: spoken(1, 6)[4:]}


async def test_a_cancelled_request_frees_its_blocks_within_one_step(make_host: Any, serving: Any) -> None:
    host: Host = make_host(step=20 * MILLISECOND)
    assert isinstance(host.engine, EmulatedEngine)
    async with serving([host]) as (_, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=200, prompt=40)
        talk.submit(2, max_tokens=200)
        await talk.ear.until(lambda: len(talk.ear.out.get(2, ())) >= 2)
        talk.client.send(Cancelled(1))
        await talk.ear.until(lambda: any(isinstance(e, Progressed) and 1 in e.finished for e in talk.ear.events))
        said = len(talk.ear.out[1])
        await talk.ear.until(lambda: len(talk.ear.out[2]) >= said + 3)
        assert len(talk.ear.out[1]) == said
        ledger = host.engine.ledger
        await talk.ear.until(lambda: ledger.num_held == -(-(4 + len(talk.ear.out[2])) // 4))  # the engine is a step ahead of us


def at_the_end_of_a_run(session: Session, *messages: pb.ToReplica) -> None:
    """A head says this when the next run has ended, and before the machine hears of that."""
    driver = session._driver
    assert driver is not None
    post = driver.post

    def ended(machine: MachineId, event: AnyEvent, priority: Priority) -> None:
        post(machine, event, priority)
        if isinstance(event, StepsDone):
            driver.post = post  # type: ignore[method-assign]
            for message in messages:
                session.receive(message)

    driver.post = ended  # type: ignore[method-assign]


async def test_a_request_that_comes_back_while_its_end_is_on_its_way_is_answered(
    make_host: Any, serving: Any, spoken: Any
) -> None:
    """Its run has ended, and the machine has yet to hear of it: what is dropped then is the request that was."""
    host = make_host()
    async with serving([host]) as (worker, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=400)
        await talk.ear.until(lambda: len(talk.ear.out.get(1, [])) > 3)
        session = host.session
        assert session is not None
        again = Job(1, tuple(range(4)), Sampling(max_tokens=5, seed=1))
        session.receive(convert.to_replica(Cancelled(1)))
        at_the_end_of_a_run(session, convert.to_replica(Submitted(Request(1, 0, 4, 5)), again))
        await talk.ear.finished()
        assert talk.ear.out[1][-5:] == spoken(1, 5)
        assert not worker.failed


async def test_a_request_that_is_offered_again_while_it_gets_blocks_for_an_earlier_offer_gets_blocks_again(
    serving: Any, spoken: Any
) -> None:
    settings = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "fleet.mode=disaggregated",
                "fleet.prefill=1", "fleet.decode=1", "replica.num_blocks=64", "replica.max_model_len=512")  # fmt: skip
    config = configuration.load(None, settings)
    host = host_maker(config, served_model(config), TOKEN, "127.0.0.1:0")(0, None)
    offer = convert.to_replica(Offered(Request(2, 0, 20, 5), 20, (Part(1),)), Job(2, tuple(range(20)), Sampling(max_tokens=5)))
    async with serving([host]) as (worker, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=400)
        await talk.ear.until(lambda: len(talk.ear.out.get(1, [])) > 3)
        session = host.session
        assert session is not None
        session.receive(offer)  # which gets its blocks at that boundary
        at_the_end_of_a_run(session, convert.to_replica(Disowned((2,))), offer)
        await talk.ear.hears(KvWanted)
        talk.client.send(KvFailed(2, 0))  # the source's answer, after which nobody writes to the first blocks
        await talk.ear.until(lambda: [event for event in talk.ear.events if isinstance(event, KvWanted)][1:])
        assert not worker.failed


async def test_when_the_head_goes_away_all_is_freed_and_the_next_one_finds_the_weights(make_host: Any, serving: Any) -> None:
    host: Host = make_host()
    assert isinstance(host.engine, EmulatedEngine)
    loads: list[int] = []
    host.engine.load = lambda: loads.append(1)  # type: ignore[method-assign]
    async with serving([host]) as (_, address):
        async with talking(address) as talk:
            await talk.bring_up()
            talk.submit(1, max_tokens=400)
            await talk.ear.until(lambda: len(talk.ear.out.get(1, ())) >= 2)
        while host.session is not None:
            await asyncio.sleep(0.001)
        async with talking(address) as talk:
            await talk.bring_up()
            assert host.engine.ledger.num_held == 0
            talk.submit(1, max_tokens=3)
            await talk.ear.finished()
        assert loads == [1]


async def test_the_next_head_finds_no_block_taken_by_what_the_last_one_cached(make_host: Any, serving: Any) -> None:
    host: Host = make_host(num_blocks=8)
    async with serving([host]) as (_, address):
        for _ in range(2):
            async with talking(address) as talk:
                await talk.bring_up()
                talk.submit(1, max_tokens=1, prompt=32, hashes=tuple(range(1, 9)))
                await talk.ear.finished()
                assert talk.ear.order.count("finish") == 1
            while host.session is not None:
                await asyncio.sleep(0.001)
    assert host.failed is None


async def test_a_second_head_is_refused_and_the_first_does_not_notice(make_host: Any, serving: Any) -> None:
    async with serving([make_host()]) as (_, address), talking(address) as talk:
        await talk.bring_up()
        async with talking(address) as other:
            assert await other.over == "already exists: replica 0 has a head already"
        talk.submit(1, max_tokens=2)
        await talk.ear.finished()


async def test_several_replicas_share_a_worker_and_a_stranger_is_turned_away(make_host: Any, serving: Any, spoken: Any) -> None:
    async with serving([make_host(0), make_host(3)]) as (_, address):
        async with talking(address, 0) as a, talking(address, 3) as b:
            for talk in (a, b):
                await talk.bring_up()
                talk.submit(1, max_tokens=4)
            for talk in (a, b):
                await talk.ear.finished()
                assert talk.ear.out == {1: spoken(1, 4)}
        async with talking(address, 7) as c:
            assert await c.over == "not found: replica 7 is not here; here are 0, 3"


async def test_weights_that_cannot_be_loaded_are_reported_in_one_line(make_host: Any, serving: Any) -> None:
    host = make_host()

    def load() -> None:
        raise ModelError("model.safetensors: truncated;\nfetch it again")

    host.engine.load = load
    async with serving([host]) as (worker, address), talking(address) as talk:
        talk.client.send(LoadWeights(0, Transfer("m", Place("ssd", 0), (0,), "disk")))
        assert await talk.ear.hears(LoadFailed) == LoadFailed(0, "model.safetensors: truncated; fetch it again")
        assert not worker.failed


async def test_an_engine_that_breaks_takes_its_worker_with_it(
    make_host: Any, serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host()

    def run(action: RunSteps, emit: Callable[[Sequence[TokenOut]], None]) -> RunEnded:
        raise RuntimeError("out of memory")

    host.engine.run = run
    async with serving([host]) as (worker, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=3)
        assert await talk.ear.hears(ReplicaLost) == ReplicaLost(0, "RuntimeError: out of memory")
        await talk.over
        while not worker.failed:
            await asyncio.sleep(0.001)
    assert "out of memory" in caplog.text


async def test_a_replica_that_is_stopped_says_so_and_ends_the_session(make_host: Any, serving: Any) -> None:
    async with serving([make_host()]) as (_, address), talking(address) as talk:
        await talk.bring_up()
        talk.client.send(StopReplica(0))
        assert await talk.over == "the worker ended the session"
        assert talk.ear.events[-1] == ReplicaStopped(0)


async def test_a_worker_that_should_end_finishes_its_requests_first(make_host: Any, serving: Any, spoken: Any) -> None:
    async with serving([make_host()]) as (worker, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=60)
        await talk.ear.until(lambda: len(talk.ear.out.get(1, ())) >= 2)
        worker.end()
        await talk.over
        assert talk.ear.out == {1: spoken(1, 60)}


async def test_a_worker_that_no_head_wants_ends_by_itself(make_host: Any, serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving([make_host()], grace_s=0.05) as (worker, _):
        await worker._end.wait()
    assert "no head for 0.05 s" in caplog.text


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (pb.ToReplica(event=pb.Event(cancelled=pb.Cancelled(request=1))), "Cancelled before the weights were loaded"),
        (pb.ToReplica(action=pb.Action(cut=pb.Cut(run=1))), "a head does not ask for Cut"),
        (pb.ToReplica(event=pb.Event()), "without a known event"),
    ],
)
async def test_nonsense_ends_the_session_with_a_reason(
    make_host: Any, serving: Any, message: pb.ToReplica, complaint: str
) -> None:
    async with serving([make_host()]) as (_, address), talking(address) as talk:
        talk.client._outbox.put_nowait(message)
        why = await talk.over
        assert why.startswith("invalid argument")
        assert complaint in why


async def test_a_session_begins_with_its_replica(serving: Any, make_host: Any) -> None:
    async with serving([make_host()]) as (_, address), grpc.aio.insecure_channel(address) as channel:
        call = session_of(channel)(None, metadata=await introduce(channel, TOKEN))
        await call.write(pb.ToReplica(action=pb.Action(cut=pb.Cut(run=1))))
        with pytest.raises(grpc.aio.AioRpcError, match="the first message of a session must be open"):
            await call.read()


async def test_a_head_that_does_not_know_the_token_gets_no_session(serving: Any, make_host: Any) -> None:
    host = make_host()
    async with serving([host]) as (_, address):
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(PeerLost, match="does not know the token"):  # an honest head goes away here
                await introduce(channel, "a guess")
            told = await session_of(channel)(None, metadata=((NONCE, b"any"),)).trailing_metadata()
            asked = dict(told)[NONCE]
            assert isinstance(asked, bytes)
            for guess in (b"a guess", proof("a guess", HEAD, asked), b""):
                call = session_of(channel)(None, metadata=((NONCE, asked), (PROOF, guess)))
                with pytest.raises(grpc.aio.AioRpcError, match="only a head that knows this fleet's token") as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert host.session is None
        async with talking(address) as talk:
            await talk.bring_up()


async def test_a_worker_that_does_not_know_the_token_gets_no_request(serving: Any, make_host: Any) -> None:
    async with serving([make_host()]) as (_, address), talking(address, token="another") as talk:
        assert await talk.over == "what listens there is no worker of this fleet: it does not know the token"


async def test_a_proof_that_was_overheard_opens_nothing(serving: Any, make_host: Any) -> None:
    async with serving([make_host()]) as (_, address), grpc.aio.insecure_channel(address) as channel:
        overheard = await introduce(channel, TOKEN)
        for replica, said in ((7, "replica 7 is not here"), (0, "only a head that knows this fleet's token")):
            call = session_of(channel)(None, metadata=overheard)
            await call.write(pb.ToReplica(open=pb.Open(replica=replica)))
            with pytest.raises(grpc.aio.AioRpcError, match=said):
                await call.read()


TOO_LARGE = "x" * (MAX_MESSAGE + 1)
"""Whoever read it would refuse it for its size."""


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ((), grpc.StatusCode.OK),  # and is told what to prove
        (((NONCE, b"any"),), grpc.StatusCode.OK),
        (((NONCE, b"any"), (PROOF, b"any")), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_of_a_stranger_nothing_is_read(
    metadata: tuple[tuple[str, bytes], ...], code: grpc.StatusCode, serving: Any, make_host: Any
) -> None:
    async with serving([make_host()]) as (_, address), grpc.aio.insecure_channel(address) as channel:
        call = session_of(channel)(None, metadata=metadata)
        job = Job(1, (), Sampling(max_tokens=1, stop=(TOO_LARGE,)))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # over, before it was taken
            await call.write(pb.ToReplica(job=convert.to_message(job)))
        assert await call.code() is code


def test_only_so_many_may_be_about_to_prove_themselves() -> None:
    door = Door(TOKEN)
    first, *others = (door._ask() for _ in range(MAX_ASKED + 1))
    assert list(door._asked) == others
    assert first not in others


async def test_the_standard_health_service_answers(make_host: Any, serving: Any) -> None:
    async with serving([make_host()]) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE, TOO_LARGE):  # of which nothing is read
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_whoever_watches_the_health_of_a_worker_sees_its_end(make_host: Any, serving: Any) -> None:
    async with serving([make_host()]) as (worker, address), grpc.aio.insecure_channel(address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        seen = [(await watching.read()).status]
        worker.end()
        seen.append((await watching.read()).status)
        assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


async def test_a_silent_worker_counts_as_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = ReplicaClient(0, Ear(), TOKEN, silence_s=0.2)
        assert await client.run(f"127.0.0.1:{deaf.getsockname()[1]}") == "no sign of life for 0.2 s"


async def test_the_heartbeat_counts_blocks_and_cached_tokens(make_host: Any, serving: Any) -> None:
    async with serving([make_host(step=5 * MILLISECOND)]) as (_, address), talking(address) as talk:
        await talk.bring_up()
        talk.submit(1, max_tokens=400, prompt=9)
        await talk.ear.until(lambda: any(load.num_running for load in talk.ear.loads))
        load = next(load for load in talk.ear.loads if load.num_running)
        assert (load.num_running, load.num_waiting, load.num_blocks) == (1, 0, 256)
        assert load.num_used_blocks >= 3


@pytest.mark.parametrize(("text", "ids"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2", [0, 2]), ("0-1,5-6", [0, 1, 5, 6])])
def test_replicas_are_given_as_ranges(text: str, ids: list[int]) -> None:
    assert _replicas(text) == ids


@pytest.mark.parametrize("ends", ["patience", "worker"])
async def test_a_head_that_opens_no_session_is_sent_away(
    ends: str, make_host: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("squall.live.worker.OPEN_S", 0.05 if ends == "patience" else 60.0)
    async with serving([make_host()]) as (worker, address), grpc.aio.insecure_channel(address) as channel:
        call = session_of(channel)(None, metadata=await introduce(channel, TOKEN))
        while worker._door._asked:  # until it waits for what the call opens
            await asyncio.sleep(0.01)
        if ends == "worker":
            worker.end()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "the first message of a session must be open"


async def test_a_bug_in_a_session_is_in_the_log_of_the_worker_and_told_to_the_head(
    make_host: Any, serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def receive(session: Session, message: pb.ToReplica) -> None:
        raise KeyError(7)

    monkeypatch.setattr(Session, "receive", receive)
    async with serving([make_host()]) as (_, address):
        client = ReplicaClient(0, Ear(), TOKEN)
        client.send(StopReplica(0))
        assert await client.run(address) == "internal: KeyError: 7"
    (logged,) = caplog.records
    assert logged.message == "the session of replica 0 ends"
    assert logged.exc_info is not None
    assert logged.exc_info[0] is KeyError


async def test_a_head_that_goes_away_is_no_bug(make_host: Any, serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()
    async with serving([host]) as (_, address):
        for _ in range(3):
            running = asyncio.create_task(ReplicaClient(0, Ear(), TOKEN).run(address))
            while host.session is None:
                await asyncio.sleep(0.01)
            running.cancel()
            while host.session is not None:
                await asyncio.sleep(0.01)
    assert not caplog.records
