"""What lies between two layers of a batch comes into another engine's process, over a wire that breaks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from squall.core.actions import Chunk, RunLayers, SendActivations
from squall.errors import TransferFailed
from squall.live.activations import ActivationsOffer, PulledActivations
from squall.live.engine.interface import Job, Sampling
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.kv import Stop
from tests.live.checkpoints import SIZES, write_checkpoint
from tests.live.transport.conftest import Wire

BATCH, NUMBER = 7, 12_345
NUM_TOKENS = 20


class Sender:
    """See `activations.Sender`."""

    def __init__(self) -> None:
        self.offers: SimpleQueue[ActivationsOffer] = SimpleQueue()
        self.ends: list[str] = []

    def offered(self, offer: ActivationsOffer) -> None:
        self.offers.put(offer)

    def sent(self, number: int) -> None:
        self.ends.append(f"{number} is sent")

    def failed(self, number: int) -> None:
        self.ends.append(f"{number} has failed")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    made = TorchEngine(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny"), ByteTokenizer(), num_blocks=8, block_size=8)
    made.load()
    made.add(Job(1, tuple(range(NUM_TOKENS)), Sampling(max_tokens=4)))
    return made


@contextmanager
def end(engine: TorchEngine, replica: int) -> Iterator[PulledActivations]:
    """One replica's part, reachable over TCP alone."""
    made = PulledActivations(replica, engine)
    made.endpoint = Endpoint(f"replica {replica}", "token", local=False, on_notify=made.on_notify)
    try:
        yield made
    finally:
        made.close()
        made.endpoint.close()


def moved(engine: TorchEngine, flips: Sequence[int] = (), breaks: Sequence[int] = ()) -> tuple[Sender, Wire, bytes]:
    """How it ended for the sender, the wire, and what came."""
    engine.run_batch(RunLayers(BATCH, 0, 1, (Chunk(1, 0, NUM_TOKENS, 0, last=True),)), lambda _: None)
    sender = Sender()
    with end(engine, 0) as source, end(engine, 1) as target:
        wire = Wire(source.endpoint.addresses[0], flips, breaks)
        source.endpoint.addresses = (wire.address,)
        try:
            source.send(SendActivations(BATCH, 1, NUM_TOKENS), NUMBER, sender)
            came = target.take(sender.offers.get(timeout=10), Stop()).result(10)
        finally:
            wire.close()
    assert (came.requests, came.num_tokens) == ((1,), (NUM_TOKENS,))
    return sender, wire, bytes(came.data)


def test_a_wire_that_breaks_anywhere_costs_nothing_also_where_the_sender_has_heard_that_it_has_come(engine: TorchEngine) -> None:
    """Whose word is lost on the way back has nothing any more that could be read again."""
    _, whole, right = moved(engine)
    num_bytes = whole.num_bytes
    assert len(right) == NUM_TOKENS * SIZES["hidden_size"] * 4 < num_bytes  # type: ignore[operator]
    for at in (1, num_bytes // 2, num_bytes - 1):
        sender, wire, came = moved(engine, breaks=[at])
        assert (came, sender.ends, wire.num_connections) == (right, [f"{NUMBER} is sent"], 2)


def test_what_comes_wrong_again_and_again_does_not_come(engine: TorchEngine) -> None:
    _, whole, right = moved(engine)
    flips = [at * whole.num_bytes - len(right) for at in (1, 2, 3)]
    with pytest.raises(TransferFailed, match="activations of batch 7 of replica 0: they came with a wrong checksum"):
        moved(engine, flips)
