"""A batch of prompts runs layer by layer here, the rest elsewhere, whoever leaves in between: tokens are those of one engine."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from squall.core.actions import Chunk, RunLayers, RunSteps
from squall.live.engine.interface import Activations, Job, LiveEngine, Sampling, TokenOut
from squall.live.engine.kv import BlockTables
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine

PROMPTS = {1: tuple(range(40, 63)), 2: tuple(range(9, 17)), 3: tuple(range(100, 131))}
SAMPLINGS = {
    1: Sampling(max_tokens=4, temperature=0, ignore_eos=True),
    2: Sampling(max_tokens=4, temperature=0.9, seed=7, ignore_eos=True),
    3: Sampling(max_tokens=1, temperature=0, ignore_eos=True),
}
NUM_LAYERS = 3


def engine(folder: Path) -> TorchEngine:
    made = TorchEngine(folder, ByteTokenizer(), num_blocks=32, block_size=4)
    made.load()
    return made


def job(request: int) -> Job:
    return Job(request, PROMPTS[request], SAMPLINGS[request], block_hashes=tuple(range(request * 10, request * 10 + 2)))


def some(batch: int, first: int, last: int, *requests: int) -> RunLayers:
    return RunLayers(batch, first, last, tuple(Chunk(each, 0, len(PROMPTS[each]), 0, last=True) for each in requests))


def first_tokens(on: LiveEngine, action: RunLayers, given: Activations | None = None) -> tuple[dict[int, int], tuple[int, ...]]:
    said: list[TokenOut] = []
    ended = on.run_batch(action, said.extend, given)
    assert (ended.batch, ended.last_layer) == (action.batch, action.last_layer)
    return {out.request: out.token for out in said}, ended.stopped


def ordinary(folder: Path, *requests: int) -> dict[int, int]:
    on = engine(folder)
    said: list[TokenOut] = []
    for run, request in enumerate(requests, start=1):
        on.add(job(request))
        on.run(RunSteps(run, 1, 0, 0, some(1, 0, 1, request).chunks), said.extend)
        on.forget([request])
    return {out.request: out.token for out in said}


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("left", [(1, 2, 3), (1, 3), (2,)])
def test_the_rest_of_a_batch_runs_elsewhere_without_those_who_have_left(tiny: Path, cut: int, left: Sequence[int]) -> None:
    here, there = engine(tiny), engine(tiny)
    for request in PROMPTS:
        here.add(job(request))
    for layer in range(cut):
        assert first_tokens(here, some(7, layer, layer + 1, 1, 2, 3)) == ({}, ())
    for request in left:
        there.adopt(replace(job(request), block_hashes=()), len(PROMPTS[request]))
    given = here.activations(7)
    assert given.requests == (1, 2, 3)
    assert given.num_tokens == (23, 8, 31)
    assert len(given.data) == 62 * 48 * 4
    tokens, stopped = first_tokens(there, some(7, cut, NUM_LAYERS, *left), given)
    assert tokens == ordinary(tiny, *left)
    assert stopped == tuple(request for request in left if request == 3)
    with pytest.raises(KeyError):
        here.activations(7)


def test_who_leaves_between_two_layers_leaves_the_others_as_they_were(tiny: Path) -> None:
    on = engine(tiny)
    for request in PROMPTS:
        on.add(job(request))
    first_tokens(on, some(1, 0, 1, 1, 2, 3))
    first_tokens(on, some(2, 0, 1, 3))  # another batch in between
    on.forget([2])
    first_tokens(on, some(1, 1, 2, 1, 3))
    assert first_tokens(on, some(1, 2, NUM_LAYERS, 3, 1))[0] == ordinary(tiny, 1, 3)


def test_whoever_had_its_first_token_from_layers_decodes_as_always_and_shares_no_block(tiny: Path) -> None:
    on = engine(tiny)
    on.add(job(1))
    said: list[TokenOut] = []
    on.run_batch(some(1, 0, NUM_LAYERS, 1), said.extend)
    on.resume(1)
    on.run(RunSteps(1, 3, 1, 24), said.extend)
    alone = engine(tiny)
    alone.add(job(1))
    expected: list[TokenOut] = []
    alone.run(RunSteps(1, 1, 0, 0, some(1, 0, 1, 1).chunks), expected.extend)
    assert alone._blocks.num_held == 2
    alone.run(RunSteps(2, 3, 1, 24), expected.extend)
    assert [out.token for out in said] == [out.token for out in expected]
    assert (on._blocks.num_held, on._blocks.num_free) == (0, 32)


def test_a_batch_that_nobody_is_left_of_is_not_kept(tiny: Path) -> None:
    on = engine(tiny)
    for request in (1, 2):
        on.add(job(request))
    first_tokens(on, some(1, 0, 1, 1, 2))
    on.forget([1])
    on.forget([2])
    with pytest.raises(KeyError):
        on.activations(1)


def test_what_is_given_must_be_of_the_batch(tiny: Path) -> None:
    here, there = engine(tiny), engine(tiny)
    here.add(job(1))
    first_tokens(here, some(1, 0, 1, 1))
    given = here.activations(1)
    there.add(job(2))
    with pytest.raises(ValueError, match="8 tokens of request 2 are not in what is known of batch 1"):
        there.run_batch(some(1, 1, 3, 2), lambda _: None, given)
    there.add(job(1))
    with pytest.raises(ValueError, match="a hidden state of 4412 bytes; 23 tokens of 48"):
        there.run_batch(some(1, 1, 3, 1), lambda _: None, replace(given, data=given.data[:-4]))
    with pytest.raises(ValueError, match="nothing is kept of the batch"):
        there.run_batch(some(2, 1, 3, 1), lambda _: None)


def test_a_replica_that_works_already_is_warmed_without_touching_what_it_holds(tiny: Path) -> None:
    on = engine(tiny)
    on.add(job(1))
    first_tokens(on, some(1, 0, NUM_LAYERS, 1))
    before = [keys[list(on.blocks(1))].clone() for keys in on.cache.keys]
    on.warm()
    assert all(bool((keys[list(on.blocks(1))] == kept).all()) for keys, kept in zip(on.cache.keys, before, strict=True))
    on.add(Job(9, tuple(range(104)), SAMPLINGS[1]))
    on.adopt(Job(8, tuple(range(100)), SAMPLINGS[1]), 104)
    assert on._blocks.spare is None
    on.warm()


def test_blocks_that_are_evicted_are_free() -> None:
    tables = BlockTables(4, 4)
    tables.attach(1, ())
    tables.extend(1, 8, iter(()))
    tables.file(1, (10, 11), 8)
    tables.release(1)
    assert (tables.num_free, tables.num_held) == (2, 2)
    tables.evict([11])
    assert (tables.num_free, tables.num_held) == (3, 1)
    with pytest.raises(RuntimeError, match="block b, to be evicted, is not held"):
        tables.evict([11])
