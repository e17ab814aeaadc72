"""Two engines do the work of one: layers here and there, KV from one pool to another. Tokens are those of an ordinary run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from squall.core.actions import Chunk, RunSteps
from squall.errors import PeerRefused, TransferFailed
from squall.live.engine.interface import Job, LayerEngine, Sampling, TokenOut
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.kv import KvOffer, Ledger, offer, pull
from tests.live.as_devices import homes as homes

PROMPT = tuple(range(40, 63))
JOBS = {
    "greedy": Sampling(max_tokens=12, temperature=0, ignore_eos=True),
    "seeded": Sampling(max_tokens=12, temperature=0.9, seed=7, presence_penalty=0.5, ignore_eos=True),
}


def engine(folder: Path, num_blocks: int = 32) -> TorchEngine:
    made = TorchEngine(folder, ByteTokenizer(), num_blocks=num_blocks, block_size=4)
    made.load()
    return made


def decode(on: TorchEngine, run: int, context: int, steps: int) -> list[int]:
    said: list[TokenOut] = []
    on.run(RunSteps(run=run, steps=steps, num_decodes=1, decode_context=context, chunks=()), said.extend)
    return [out.token for out in said]


def prefill(on: TorchEngine, job: Job) -> list[int]:
    on.add(job)
    said: list[TokenOut] = []
    on.run(
        RunSteps(run=1, steps=1, num_decodes=0, decode_context=0, chunks=(Chunk(job.request, 0, len(job.prompt), 0, True),)),
        said.extend,
    )
    return [out.token for out in said]


def ordinary(folder: Path, job: Job) -> list[int]:
    alone = engine(folder)
    return [*prefill(alone, job), *decode(alone, 2, len(PROMPT) + 1, 11)]


@contextmanager
def peers(*engines: TorchEngine, ledgers: Sequence[Ledger] = ()) -> Iterator[list[Endpoint]]:
    ends = []
    for index, each in enumerate(engines):
        on_notify = ledgers[index].on_notify if index < len(ledgers) else None
        ends.append(Endpoint(f"e{index}", "t", on_notify=on_notify))
        assert each.kv_region is not None
        ends[-1].register(each.kv_region)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def offered(by: TorchEngine, at: Endpoint, request: int, tokens: int, first: int, last: int, backend: int = 0) -> KvOffer:
    assert by.kv_region is not None
    return offer(by.kv_region, by.kv_pool, (at.addresses[backend],), request, tokens, by.blocks(request), (first, last))


def taken(to: TorchEngine, at: Endpoint, what: KvOffer) -> int:
    blocks = to.blocks(what.request)
    assert to.kv_region is not None
    return pull(at, what, to.kv_region, to.kv_pool, blocks)


@pytest.mark.parametrize("sampling", JOBS)
@pytest.mark.parametrize("backend", [0, -1], ids=["shm", "tcp"])
@pytest.mark.usefixtures("homes")
def test_a_request_moves_in_the_middle_of_its_decode(tiny: Path, sampling: str, backend: int) -> None:
    job = Job(5, PROMPT, JOBS[sampling])
    a, b = engine(tiny), engine(tiny, 64)
    b.add(Job(1, PROMPT[:9], JOBS["greedy"]))  # so that block numbers differ
    b.prepare([Chunk(1, 0, 9, 0, True)])
    freed: list[int] = []
    ledger = Ledger(lambda taken: freed.append(taken.request))
    tokens = [*prefill(a, job), *decode(a, 2, len(PROMPT) + 1, 4)]
    with peers(a, b, ledgers=[ledger]) as (at_a, at_b):
        length = a.pause(job.request)
        assert length == len(PROMPT) + 4
        moving = Job(5, PROMPT, JOBS[sampling], tuple(tokens))
        b.adopt(moving, length)
        assert a.blocks(5) != b.blocks(5)
        what = offered(a, at_a, 5, length, 0, 3, backend)
        ledger.offered(5, 0, 3)
        assert freed == []
        assert taken(b, at_b, what) == 3 * 2 * 7 * 4 * 2 * 12 * 4  # layers, keys and values, blocks, tokens, heads, dim, bytes
        assert freed == [5]  # the receiver has said that it is there
    a.forget([5])
    b.resume(5)
    assert [*tokens, *decode(b, 3, length + 1, 7)] == ordinary(tiny, job)


@pytest.mark.parametrize("sampling", JOBS)
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.usefixtures("homes")
def test_head_layers_here_tail_layers_there_and_both_halves_of_the_kv_to_a_third(tiny: Path, sampling: str, cut: int) -> None:
    job = Job(5, PROMPT, JOBS[sampling])
    target, source, third = engine(tiny), engine(tiny, 48), engine(tiny, 64)
    chunk = Chunk(5, 0, len(PROMPT), 0, True)
    for each in (target, source):
        each.add(job)
    head = target.prepare([chunk])
    hidden = None
    for layer in range(cut):  # one at a time, as they arrive
        hidden = target.run_layers(head, layer, layer + 1, hidden)
    tail = source.prepare([chunk])
    if hidden is not None:
        hidden = source.hidden_from_bytes(tail, target.hidden_to_bytes(hidden))
    (first,) = source.finish(tail, source.run_layers(tail, cut, 3, hidden))
    third.adopt(Job(5, PROMPT, JOBS[sampling], (first.token,)), len(PROMPT))
    with peers(target, source, third) as (at_target, at_source, at_third):
        if cut:
            taken(third, at_third, offered(target, at_target, 5, len(PROMPT), 0, cut))
        if cut < 3:
            taken(third, at_third, offered(source, at_source, 5, len(PROMPT), cut, 3))
    third.resume(5)
    assert [first.token, *decode(third, 2, len(PROMPT) + 1, 11)] == ordinary(tiny, job)


def test_a_layer_may_be_run_again_after_an_interruption(tiny: Path) -> None:
    job = Job(5, PROMPT, JOBS["greedy"])
    on = engine(tiny)
    on.add(job)
    step = on.prepare([Chunk(5, 0, len(PROMPT), 0, True)])
    once = on.run_layers(step, 0, 2)
    again = on.run_layers(step, 1, 2, on.run_layers(step, 0, 1))
    assert torch.equal(once, again)
    assert [out.token for out in on.finish(step, on.run_layers(step, 2, 3, again))] == ordinary(tiny, job)[:1]


def test_no_layer_runs_before_its_weights_have_arrived(tiny: Path) -> None:
    on: LayerEngine = TorchEngine(tiny, ByteTokenizer(), num_blocks=32, block_size=4)
    on.build()
    on.add(Job(5, PROMPT, JOBS["greedy"]))
    step = on.prepare([Chunk(5, 0, len(PROMPT), 0, True)])
    assert (on.layers_ready, on.num_layers) == (0, 3)
    with pytest.raises(TransferFailed, match="embed is needed"):
        on.run_layers(step, 0, 1)
    with pytest.raises(TransferFailed, match="layer 2 is needed"):
        on.run_layers(step, 2, 3, torch.zeros(len(PROMPT), 48))


def test_kv_that_is_not_what_was_offered_is_not_taken(tiny: Path, checkpoint: Callable[..., Path]) -> None:
    job = Job(5, PROMPT, JOBS["greedy"])
    a, b = engine(tiny), engine(tiny)
    freed: list[int] = []
    ledger = Ledger(lambda taken: freed.append(taken.request))
    prefill(a, job)
    with peers(a, b, ledgers=[ledger]) as (at_a, at_b):
        what = offered(a, at_a, 5, len(PROMPT), 0, 3)
        ledger.offered(5, 0, 3)
        a.cache.keys[1][a.blocks(5)[2]] += 1
        b.adopt(job, len(PROMPT))
        with pytest.raises(TransferFailed, match="KV of request 5, layers 0 to 2: layer 1 came 3 times with a wrong checksum"):
            taken(b, at_b, what)
        assert freed == []
        assert ledger.withdraw(5)
        assert not ledger.withdraw(5)
        other = engine(checkpoint("qwen3", num_hidden_layers=2))
        other.adopt(job, len(PROMPT))
        with pytest.raises(PeerRefused, match=r"e0 holds KV of .*; e1 wants KV of"):
            taken(other, at_b, what)
    with pytest.raises(TransferFailed, match="cannot be reached"):
        taken(b, at_b, what)
