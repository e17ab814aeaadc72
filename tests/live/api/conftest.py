"""A small head in one process, and three ways to reach the API in front of it: no network, a real server, the official client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.types import ASGIApp

from squall.config import Config
from squall.core.types import Nanos, Role
from squall.live.api.app import create_app
from squall.live.api.connections import Connections
from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.engine.sequence import SequenceState
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.frontend import (
    Decision,
    FleetStatus,
    FrontendStats,
    Journey,
    LoadStats,
    ReplicaStats,
    ReplicaStatus,
    RoleStatus,
    ScaleStats,
)

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz .", dtype=np.uint8)


class SmallStream:
    """A request of `SmallFrontend`: one token whenever one is asked for, after `step_s`."""

    def __init__(self, head: "SmallFrontend", sequence: SequenceState, number: int) -> None:
        self.head = head
        self.sequence = sequence
        self.number = number
        self.cancelled = False
        self.queued: Nanos | None = None
        self.journey = Journey()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOut:
        if self.sequence.finished:
            raise StopAsyncIteration
        await asyncio.sleep(self.head.step_s)
        if self.head.gate is not None:
            await self.head.gate.wait()
        failure = self.head.failures.get(self.sequence.num_output_tokens)
        if failure is not None:
            self.head.active.discard(self.number)
            raise failure
        self.queued = 1_000_000
        out = self.head.step(self.sequence)
        if out.finish is not None:
            self.head.active.discard(self.number)
        return out

    def cancel(self) -> None:
        if not self.sequence.finished:
            self.cancelled = True
        self.head.active.discard(self.number)


class SmallFrontend:
    """A head whose model is a hash: seeded noise over letters, or `says` when it is set. Everything else is as in life.

    Attributes:
        says: the text that the model insists on, after which it ends.
        step_s: seconds a token takes.
        gate: while it is not set, no token comes.
        failures: what to raise instead of the token with that number.
        active: requests that hold KV.
    """

    def __init__(self, max_model_len: int = 512) -> None:
        self.model_names: Sequence[str] = ("small", "small/alias")
        self.created = 1_700_000_000
        self.max_model_len = max_model_len
        self.tokenizer = ByteTokenizer()
        self.draining = False
        self.ready = True
        self.says: str | None = None
        self.wanted: int | None = None
        self.step_s = 0.0
        self.gate: asyncio.Event | None = None
        self.failures: dict[int, Exception] = {}
        self.active: set[int] = set()
        self.submitted: list[tuple[tuple[int, ...], Sampling]] = []
        self.sessions: list[int] = []
        self.streams: list[SmallStream] = []

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, session: int = 0) -> SmallStream:
        number = len(self.submitted)
        self.submitted.append((tuple(prompt), sampling))
        self.sessions.append(session)
        self.active.add(number)
        sequence = SequenceState(Job(number, tuple(prompt), sampling), self.tokenizer, self.max_model_len)
        stream = SmallStream(self, sequence, number)
        self.streams.append(stream)
        return stream

    def stats(self) -> FrontendStats:
        replica = ReplicaStats(0, "ready", len(self.active), 0, 100, 4 * len(self.active))
        return FrontendStats(
            (replica,), num_queued=0, num_preemptions=3, num_prefix_cache_queries=70, num_prefix_cache_hits=21,
            loads=(LoadStats("chain", 2, 3.5, 1_000, 1),), scales=(ScaleStats("both", self.wanted or 1, 4, 3),),
        )  # fmt: skip

    def fleet(self) -> FleetStatus:
        return FleetStatus(
            (RoleStatus("both", 1, 8, self.wanted or 1, self.wanted, 1, 0, 0, 0),),
            (ReplicaStatus(0, "both", "ready", 30, "disk", "ssd 0", len(self.active)),),
            (Decision(1_700_000_000.5, "both", 1, 2, "asked for"),),
        )

    def want(self, role: Role, count: int | None) -> None:
        assert role is Role.BOTH
        self.wanted = count

    def step(self, sequence: SequenceState) -> TokenOut:
        """The next token: the best of the logits, plus Gumbel noise of (seed, position) where there is a temperature."""
        sampling, position = sequence.job.sampling, sequence.num_output_tokens
        logits = self._logits(sequence)
        log_probs = logits - np.log(np.exp(logits).sum())
        for token, bias in (sampling.logit_bias or {}).items():
            logits[token] += bias
        logits[list(sequence.forbidden)] = -np.inf
        if sampling.temperature > 0:
            noise = np.random.default_rng([sampling.seed, position]).gumbel(size=len(logits))
            logits = logits / sampling.temperature + noise
        token = int(logits.argmax())
        if sampling.logprobs is None:
            return sequence.accept(token)
        best = np.argsort(-log_probs)[: sampling.logprobs]
        return sequence.accept(token, float(log_probs[token]), [(int(each), float(log_probs[each])) for each in best])

    def _logits(self, sequence: SequenceState) -> "np.ndarray[Any, np.dtype[np.float64]]":
        logits = np.full(self.tokenizer.vocab_size, -20.0)
        position = sequence.num_output_tokens
        if self.says is not None:
            wanted = [*self.says.encode(), self.tokenizer.END]
            logits[wanted[position] if position < len(wanted) else ord("~")] = 20.0
        else:
            tail = sequence.tokens[-4:]
            logits[LETTERS] = np.random.default_rng([*tail, position]).normal(size=len(LETTERS))
        return logits


@pytest.fixture
def head() -> SmallFrontend:
    return SmallFrontend()


@pytest.fixture
def make_head() -> type[SmallFrontend]:
    return SmallFrontend


@pytest.fixture
def config() -> Config:
    return Config()


@pytest.fixture
def app(head: SmallFrontend, config: Config) -> ASGIApp:
    return create_app(head, config, max_body_bytes=1 << 20)


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """The API without a network."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://squall") as client:
        yield client


@asynccontextmanager
async def served(head: SmallFrontend, config: Config, **options: Any) -> AsyncIterator[str]:
    """The API behind a real server on a port of its own; yields its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(head, config), port=0, log_level="warning", lifespan="off", **options))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running


@pytest.fixture(params=["h11", Connections(1000, print)], ids=["h11", "ours"])
async def url(head: SmallFrontend, config: Config, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The API behind a real server: as it is served, and with uvicorn's other HTTP implementation."""
    async with served(head, config, http=request.param) as url:
        yield url


@pytest.fixture
async def address(head: SmallFrontend, config: Config) -> AsyncIterator[str]:
    """The API behind a real server."""
    async with served(head, config) as url:
        yield url


Post = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture
def chat(client: httpx.AsyncClient) -> Post:
    """Post a chat request; fields override a short valid one, None removes a field."""

    async def post(**fields: Any) -> httpx.Response:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **fields}
        return await client.post("/v1/chat/completions", json=body)

    return post


@pytest.fixture
def complete(client: httpx.AsyncClient) -> Post:
    """Post a completion request; fields override a short valid one."""

    async def post(**fields: Any) -> httpx.Response:
        return await client.post("/v1/completions", json={"model": "small", "prompt": "hi", "max_tokens": 8, **fields})

    return post


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for a condition; fails after a minute."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)

    return wait


@pytest.fixture
def scrape(client: httpx.AsyncClient) -> Callable[[], Awaitable[dict[str, float]]]:
    """Everything on /metrics, as `name{labels}` and value."""

    async def read() -> dict[str, float]:
        lines = (await client.get("/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    return read


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]


@pytest.fixture
def data() -> Callable[[str], list[str]]:
    return events
