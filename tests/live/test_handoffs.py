"""One replica's hand-offs over real links: a sender that is gone, one that hangs, and a disk that is full meanwhile."""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from squall.core.actions import Reserve
from squall.core.events import AnyEvent, KvFailed
from squall.core.types import MachineId
from squall.live.engine.interface import Job, Sampling
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine
from squall.live.handoffs import Handoffs
from squall.live.pulled_kv import PulledKv
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.kv import KvOffer
from tests.live.checkpoints import NUM_LAYERS, write_checkpoint

SENDER, RECEIVER = 0, 1
REQUEST = 5
JOB = Job(REQUEST, tuple(range(20)), Sampling(max_tokens=4))


class Desk:
    """A session whose engine's thread is the loop's; keeps what it is to tell other machines."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[MachineId, AnyEvent]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def in_engine(self, call: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        result = call()
        if done is not None:
            done(result)

    def on_loop(self, call: Callable[[Any], None], argument: Any) -> None:
        self._loop.call_soon_threadsafe(call, argument)

    def tell(self, to: MachineId, event: AnyEvent) -> None:
        self.told.put_nowait((to, event))

    def ended(self, event: AnyEvent) -> None:
        raise AssertionError(f"it sends nothing: {event}")

    def offer(self, offer: KvOffer) -> None:
        raise AssertionError(f"it offers nothing: {offer}")

    def awaits(self, request: int) -> bool:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def kv(model: Path) -> Iterator[PulledKv]:
    """A receiver's, which gives a sender ten seconds to be heard of."""
    engine = TorchEngine(model, ByteTokenizer(), num_blocks=8, block_size=8)
    engine.load()
    made = PulledKv(RECEIVER, engine, lambda told: Endpoint("receiver", "token", patience_s=10.0, on_notify=told))
    yield made
    made.close()
    made.endpoint.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """Standard error is a file on it, and nobody else takes in what is logged."""
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing it fails, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        patch.setattr(logging.getLogger(), "handlers", [])
        yield
    with contextlib.suppress(OSError):
        full.close()


def receiving(kv: PulledKv, address: str) -> tuple[Handoffs, Desk]:
    """Blocks are taken, and their KV can be had at `address`, says its sender."""
    desk = Desk()
    handoffs = Handoffs(RECEIVER, kv, desk)
    handoffs.expect(REQUEST, 20, JOB)
    handoffs.perform(Reserve(REQUEST, 20))
    pool = kv.engine.kv_pool  # type: ignore[attr-defined]
    sums = (0,) * NUM_LAYERS
    handoffs.take(KvOffer(REQUEST, 0, NUM_LAYERS, 20, (0, 1, 2), sums, pool, (address,), SENDER, RECEIVER, 1))
    return handoffs, desk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
async def test_a_sender_hears_that_its_kv_did_not_come_though_nothing_can_be_logged(kv: PulledKv) -> None:
    with full_disk():
        _, desk = receiving(kv, "tcp://127.0.0.1:1")
        assert await asyncio.wait_for(desk.told.get(), 5) == (SENDER, KvFailed(REQUEST, RECEIVER, 0, NUM_LAYERS))


async def test_who_is_let_go_does_not_wait_for_a_sender_that_hangs(kv: PulledKv) -> None:
    """The engine waits until nobody writes to the blocks; nobody does before the sender has said something."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        handoffs, desk = receiving(kv, f"tcp://127.0.0.1:{hanging.getsockname()[1]}")
        connection, _ = await asyncio.to_thread(hanging.accept)
        with connection:
            handoffs.let_go([REQUEST])()
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):  # the receiver still waits to be greeted
                connection.recv(1)
        assert desk.told.get_nowait() == (SENDER, KvFailed(REQUEST, RECEIVER, 0, NUM_LAYERS))


async def test_who_is_let_go_waits_until_nothing_is_written_to_its_blocks(kv: PulledKv, model: Path) -> None:
    """The sender's link is slow: a layer of three blocks takes a quarter of a second."""
    engine = TorchEngine(model, ByteTokenizer(), num_blocks=8, block_size=8)
    engine.load()
    assert engine.kv_region is not None
    engine.kv_region.memory[:] = bytes([1]) * len(engine.kv_region.memory)
    sender = Endpoint("sender", "token", local=False, gbps=0.0004)
    sender.register(engine.kv_region)
    ours = kv.engine.kv_region.memory  # type: ignore[attr-defined]
    try:
        handoffs, _ = receiving(kv, sender.addresses[0])
        while not any(ours):
            await asyncio.sleep(0.001)
        handoffs.let_go([REQUEST])()
        before = bytes(ours)
        await asyncio.sleep(0.3)
        assert bytes(ours) == before
    finally:
        sender.close()
