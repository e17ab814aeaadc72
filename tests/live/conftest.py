"""Workers and heads inside the test's own process: real sessions over real gRPC, engines that pretend."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from squall.core.types import MILLISECOND, Nanos, ReplicaId
from squall.errors import ModelError
from squall.live import models
from squall.live.engine.emulated import EmulatedEngine, pseudo_token
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.host import Host
from squall.live.worker import Worker
from squall.perf.latency import BatchShape, Progression
from squall.policies.batching import Vllm

TOKENIZER = ByteTokenizer()
TOKEN = "ours"
"""What the heads and workers of tests know."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model."""
    try:
        return models.find("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


class Constant:
    """Every step takes as long."""

    source = "constant"
    num_stages = 1

    def __init__(self, step: Nanos) -> None:
        self.step = step

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        return [Progression(steps, self.step * 16, 0)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        return (self.step,)


class MakeHost(Protocol):
    def __call__(self, replica: ReplicaId = ..., *, step: Nanos = ..., num_blocks: int = ..., **more: Any) -> Host: ...


@pytest.fixture
def make_host() -> MakeHost:
    """A replica with an emulated engine: blocks of 4 tokens, one a millisecond."""

    def make(replica: ReplicaId = 0, *, step: Nanos = MILLISECOND, num_blocks: int = 256, **more: Any) -> Host:
        engine = EmulatedEngine(Constant(step), num_blocks, 4, 512, TOKENIZER)
        return Host(replica, engine, Vllm(max_num_seqs=8, max_num_batched_tokens=64), more.get("log"))

    return make


Serving = Callable[..., Any]


@pytest.fixture
def serving() -> Serving:
    """`async with serving(hosts) as (worker, address)`: a worker on a port of its own."""

    @asynccontextmanager
    async def serve(
        hosts: Sequence[Host], drain_timeout_s: float = 5.0, grace_s: float = 60.0
    ) -> AsyncIterator[tuple[Worker, str]]:
        worker = Worker(hosts, TOKEN, 5.0, grace_s)
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(worker.serve("127.0.0.1:0", listening.set_result))
        try:
            yield worker, await listening
        finally:
            worker.end(at_once=True)
            await running

    return serve


@pytest.fixture
def spoken() -> Callable[[int, int], list[int]]:
    """What a request with this seed says, in so many tokens."""
    return lambda seed, count: [pseudo_token(TOKENIZER, seed, position) for position in range(count)]
