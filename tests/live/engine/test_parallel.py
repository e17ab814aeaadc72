"""A tensor-parallel engine: two ranks in two processes say what one says, and end together."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from squall.core.actions import Chunk, Preempt
from squall.errors import ConfigError, ModelError, PeerRefused, ReplicaFailed, TransferFailed
from squall.live.engine import devices
from squall.live.engine.hashing import block_hashes
from squall.live.engine.interface import Job, Sampling
from squall.live.engine.loader import load_from_disk, load_from_peers
from squall.live.engine.team import Team
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine
from squall.live.parallel_way import ParallelWay
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Source
from tests.live.as_devices import lent, unlent
from tests.live.engine.test_hand_over import JOBS, PROMPT, decode, offered, ordinary, peers, prefill, taken
from tests.live.forked import forking

NEAR_TIE = 1e-4
"""Of two logits: ranks add up in another order."""

Start = Callable[..., TorchEngine]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * i * 7 + i) % 256 for i in range(length))


def job(request: int, length: int, tokens: int, **sampling: Any) -> Job:
    text = prompt(request, length)
    given = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return Job(request, text, given, (), block_hashes(text, 4, b"s"))


def engine_of(folder: Path, tp: int, num_blocks: int = 200, **options: Any) -> TorchEngine:
    team = Team(tp, timeout_s=20.0) if tp > 1 else None
    if team is not None:
        team.start()
    return TorchEngine(folder, ByteTokenizer(), num_blocks=num_blocks, block_size=4, team=team, **options)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    engines: list[TorchEngine] = []

    def start(folder: Path, tp: int, **options: Any) -> TorchEngine:
        engine = engine_of(folder, tp, **options)
        engines.append(engine)
        engine.load()
        engine.warm()
        return engine

    yield start
    for engine in engines:
        if engine.team is not None:
            engine.team.close()


@pytest.fixture(scope="module")
def pair(start: Start, tiny: Path) -> TorchEngine:
    """Four heads, two KV heads and a vocabulary of 260 over two ranks."""
    return start(tiny, 2)


@pytest.fixture(scope="module")
def tight(start: Start, tiny: Path) -> TorchEngine:
    return start(tiny, 2, num_blocks=26)


def agree(driven: Any, jobs: list[Job], folder: Path, oracle: Any) -> None:
    """Every greedy token is the best, or as good as the best within NEAR_TIE, of the logits that `transformers` has."""
    for one in jobs:
        tokens = [out.token for out in driven.outputs[one.request]]
        assert len(tokens) == one.sampling.max_tokens
        logits = oracle(folder, [*one.prompt, *tokens])[len(one.prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        taken = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert bool((best - taken < NEAR_TIE).all())


GREEDY = [job(1, 1, 9), job(2, 37, 3), job(3, 8, 12), job(4, 64, 5), job(5, 15, 1)]


@pytest.mark.parametrize("budget", [64, 7])
def test_batched_and_chunked_the_tokens_are_those_of_the_model(
    budget: int, pair: TorchEngine, drive: Any, tiny: Path, oracle: Any
) -> None:
    pair.reset()
    driven = drive(pair, *GREEDY, max_num_seqs=min(8, budget), max_num_batched_tokens=budget)
    agree(driven, GREEDY, tiny, oracle)


def test_preempted_the_tokens_are_those_of_the_model(tight: TorchEngine, drive: Any, tiny: Path, oracle: Any) -> None:
    tight.reset()
    jobs = [job(i, 6 + 3 * i, 24) for i in range(8)]
    driven = drive(tight, *jobs)
    assert sum(len(action.requests) for action in driven.actions if isinstance(action, Preempt)) >= 2
    agree(driven, jobs, tiny, oracle)


def test_from_the_prefix_cache_the_tokens_are_those_of_the_model(pair: TorchEngine, drive: Any, tiny: Path, oracle: Any) -> None:
    pair.reset()
    shared = prompt(1, 40)
    texts = [shared, shared[:30] + prompt(2, 20), shared]
    greedy = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    jobs = [Job(i, text, greedy, (), block_hashes(text, 4, b"s")) for i, text in enumerate(texts)]
    driven = drive(pair)
    for one in jobs:
        driven.submit(one)
        driven.run()
    assert [driven.outputs[i][0].num_cached_tokens for i in range(3)] == [0, 28, 36]
    agree(driven, jobs, tiny, oracle)


def test_sampled_with_a_seed_the_tokens_are_those_of_one_rank(pair: TorchEngine, start: Start, drive: Any, tiny: Path) -> None:
    pair.reset()
    jobs = [job(i, 9 + i, 8, temperature=1.0, seed=i) for i in range(4)]
    ours, alone = drive(pair, *jobs).outputs, drive(start(tiny, 1), *jobs).outputs
    assert {i: [out.token for out in outs] for i, outs in ours.items()} == {
        i: [out.token for out in outs] for i, outs in alone.items()
    }


@pytest.mark.parametrize(
    ("family", "tp", "changes"),
    [
        ("qwen3", 2, {"num_key_value_heads": 1}),  # one KV head, which both ranks have; norms of q and k
        ("llama", 4, {"attention_bias": True, "mlp_bias": True, "vocab_size": 262, "tie_word_embeddings": True}),  # biases once
    ],
)
def test_logits_of_every_kind_of_layer_are_those_of_the_model(
    family: str, tp: int, changes: dict[str, Any], start: Start, checkpoint: Any, oracle: Any
) -> None:
    folder = checkpoint(family, **changes)
    engine = start(folder, tp)
    engine.add(Job(1, prompt(1, 21), Sampling(max_tokens=2)))
    step = engine.prepare([Chunk(1, 0, 21, 0, True)])
    ours = torch.tensor(engine.scores(step, engine.run_layers(step, 0, engine.num_layers)))
    assert torch.allclose(ours, oracle(folder, prompt(1, 21), 1), atol=2e-4)


def test_a_step_in_pieces_may_have_its_first_layers_computed_elsewhere(pair: TorchEngine, start: Start, tiny: Path) -> None:
    """Ranks that have not computed what comes before a layer are given it; two steps may take turns."""
    pair.reset()
    whole = start(tiny, 1)
    steps = []
    for request in (1, 2):
        for engine in (pair, whole):
            engine.add(Job(request, prompt(request, 12), Sampling(max_tokens=2)))
        steps.append((pair.prepare([Chunk(request, 0, 12, 0, True)]), whole.prepare([Chunk(request, 0, 12, 0, True)])))
    first = [whole.run_layers(theirs, 0, 1) for _, theirs in steps]
    handed = [pair.hidden_from_bytes(ours, whole.hidden_to_bytes(h)) for (ours, _), h in zip(steps, first, strict=True)]
    middle = [pair.run_layers(ours, 1, 2, h) for (ours, _), h in zip(steps, handed, strict=True)]
    for (ours, theirs), ours_h, theirs_h in zip(steps, middle, first, strict=True):
        scores = pair.scores(ours, pair.run_layers(ours, 2, 3, ours_h))
        expected = whole.scores(theirs, whole.run_layers(theirs, 1, 3, theirs_h))
        assert torch.allclose(torch.tensor(scores), torch.tensor(expected), atol=1e-4)


@pytest.mark.parametrize("tp", [3, 8])
def test_heads_that_cannot_be_dealt_out_are_named(tp: int, tiny: Path) -> None:
    engine = TorchEngine(tiny, ByteTokenizer(), num_blocks=8, team=Team(tp))
    with pytest.raises(ModelError, match=rf"replica.tp is {tp}, which does not divide .* 4 attention heads"):
        engine.build()


@pytest.mark.model
def test_smollm2_over_three_ranks_says_what_it_says_alone(smollm2: Path, start: Start, drive: Any) -> None:
    jobs = [job(i, 5 + 11 * i, 6) for i in range(3)]
    ours, alone = (drive(start(smollm2, tp), *jobs).outputs for tp in (3, 1))
    for one in jobs:
        assert [out.token for out in ours[one.request]] == [out.token for out in alone[one.request]]


# -- KV


@pytest.fixture(scope="module")
def twin(start: Start, tiny: Path) -> TorchEngine:
    return start(tiny, 2)


def move(a: TorchEngine, b: TorchEngine, one: Job, halves: Sequence[tuple[int, int]] = ((0, 3),), backend: int = 0) -> int:
    """What `a` has begun goes on at `b`. Returns the bytes that moved."""
    with peers(a, b) as (at_a, at_b):
        length = a.pause(one.request)
        b.adopt(one, length)
        assert a.blocks(one.request) != b.blocks(one.request)
        moved = [taken(b, at_b, offered(a, at_a, one.request, length, *layers, backend)) for layers in halves]
    a.forget([one.request])
    b.resume(one.request)
    return sum(moved)


@pytest.mark.parametrize("backend", [0, -1], ids=["shm", "tcp"])
@pytest.mark.parametrize("sampling", JOBS)
def test_each_rank_gives_its_own_heads_to_the_one_of_its_number(
    sampling: str, backend: int, pair: TorchEngine, twin: TorchEngine, tiny: Path
) -> None:
    pair.reset()
    twin.reset()
    twin.add(Job(1, PROMPT[:9], JOBS["greedy"]))  # so that block numbers differ
    twin.prepare([Chunk(1, 0, 9, 0, True)])
    one = Job(5, PROMPT, JOBS[sampling])
    tokens = [*prefill(pair, one), *decode(pair, 2, len(PROMPT) + 1, 4)]
    halves = [(2, 3), (0, 2)]
    moved = move(pair, twin, replace(one, output=tuple(tokens)), halves, backend)
    assert moved == 3 * 2 * 7 * 4 * 2 * 12 * 4  # layers, keys and values, blocks, tokens, heads of both, dim, bytes
    assert [*tokens, *decode(twin, 3, len(PROMPT) + 5, 7)] == ordinary(tiny, one)


@pytest.fixture(scope="module")
def on_devices(tiny: Path) -> Iterator[list[TorchEngine]]:
    """Two of two ranks each, to which rank 0 lends what lies on their devices; the first has its weights, the second none."""
    engines = [engine_of(tiny, 2), engine_of(tiny, 2, num_blocks=64)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(devices, "device_of", lent)
        engines[0].load()
        engines[1].build()
    yield engines
    for engine in engines:
        assert engine.team is not None
        engine.team.close()


def test_ranks_compute_with_what_rank_0_fills_on_their_devices_and_their_weights_and_kv_go_from_device_to_device(
    on_devices: list[TorchEngine], tiny: Path
) -> None:
    full, empty = on_devices
    with closing(Endpoint("full", "t")) as source, closing(Endpoint("empty", "t")) as target:
        for weights in full.shards:
            source.register(weights.arena.region)
        for weights in empty.shards:
            load_from_peers(weights, target, [Source(source.addresses)])
            assert not any(weights.arena.region.memory)  # not by the host
    one = Job(5, PROMPT, JOBS["seeded"])
    tokens = [*prefill(full, one), *decode(full, 2, len(PROMPT) + 1, 4)]
    empty.add(Job(1, PROMPT[:9], JOBS["greedy"]))  # so that block numbers differ
    empty.prepare([Chunk(1, 0, 9, 0, True)])
    for there, here, backend in ((full, empty, 0), (empty, full, -1)):
        assert move(there, here, replace(one, output=tuple(tokens)), [(2, 3), (0, 2)], backend) > 0
        assert here.cache.memory is not None
        assert any(here.cache.memory.view) == (backend == -1)
        tokens += decode(here, 3, len(PROMPT) + len(tokens), 1)
    assert [*tokens, *decode(full, 4, len(PROMPT) + len(tokens), 5)] == ordinary(tiny, one)


def test_ranks_whose_devices_cannot_lend_get_their_weights_by_the_host_and_their_kv_stays(
    start: Start, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device_of", unlent)
    engine = start(tiny, 2)
    assert engine.kv_region is None
    way = ParallelWay(engine, (), (), moves_kv=True)
    with pytest.raises(ConfigError, match=r"KV of several GPUs moves only where .*: use replica\.tp = 1, or a colocated fleet"):
        way.prepare()
    one = Job(1, PROMPT, JOBS["greedy"])
    assert [*prefill(engine, one), *decode(engine, 2, len(PROMPT) + 1, 11)] == ordinary(tiny, one)


def test_ranks_that_have_the_same_head_each_get_it(start: Start, checkpoint: Any) -> None:
    folder = checkpoint("qwen3", num_key_value_heads=1)
    a, b = start(folder, 2), start(folder, 2)
    b.add(Job(1, PROMPT[:9], JOBS["greedy"]))
    b.prepare([Chunk(1, 0, 9, 0, True)])
    one = Job(5, PROMPT, JOBS["seeded"])
    tokens = prefill(a, one)
    assert move(a, b, replace(one, output=tuple(tokens)), [(0, a.num_layers)]) == a.kv_pool.num_bytes(a.num_layers, 6)
    assert [*tokens, *decode(b, 3, len(PROMPT) + 1, 11)] == ordinary(folder, one)


def test_kv_of_another_degree_is_refused_and_both_sides_say_so(
    pair: TorchEngine, start: Start, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair.reset()
    whole, one = start(tiny, 1), Job(5, PROMPT, JOBS["greedy"])
    prefill(pair, one)
    whole.adopt(one, len(PROMPT))
    why = r"e0 holds KV of .*, replica\.tp = 2; e1 wants KV of .*, replica\.tp = 1"
    with peers(pair, whole) as (at_pair, at_whole):
        what = offered(pair, at_pair, 5, len(PROMPT), 0, 3)
        with pytest.raises(PeerRefused, match=why):
            taken(whole, at_whole, what)
    (said,) = caplog.messages
    assert re.match(f"e0 refused e1: {why}", said)


# -- weights


def test_ranks_of_a_peer_give_each_its_shard(tiny: Path, pair: TorchEngine, start: Start, drive: Any, oracle: Any) -> None:
    source, target = Endpoint("a", "secret"), Endpoint("b", "secret")
    engine = engine_of(tiny, 2)
    try:
        engine.build()
        for weights in pair.shards:
            source.register(weights.arena.region)
        assert engine.layers_ready == 0
        load_from_peers(engine.shards[0], target, [Source(source.addresses)])
        assert engine.layers_ready == 0  # rank 1 has none
        with pytest.raises(TransferFailed, match="embed is needed"):
            engine.warm()
        load_from_peers(engine.shards[1], target, [Source(source.addresses)])
        assert engine.layers_ready == 3
        agree(drive(engine, GREEDY[1]), [GREEDY[1]], tiny, oracle)
    finally:
        source.close()
        target.close()
        assert engine.team is not None
        engine.team.close()


def test_a_peer_of_another_degree_is_refused(tiny: Path, pair: TorchEngine, start: Start) -> None:
    source, target = Endpoint("a", "secret"), Endpoint("b", "secret")
    whole = start(tiny, 1)
    for weights in pair.shards:
        source.register(weights.arena.region)
    fresh = engine_of(tiny, 1)
    fresh.build()
    with pytest.raises(PeerRefused, match=r"a holds .*shard 0 of 2.*; b wants .*shard 0 of 1"):
        load_from_peers(fresh.weights, target, [Source(source.addresses)])
    assert whole.layers_ready == 3
    source.close()
    target.close()


def test_a_shard_of_wide_rows_reads_its_columns_alone(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both ranks together read of the files is the model once, and what they share twice."""
    from squall.live.engine import loader
    from squall.live.engine.architecture import read_decoder_config
    from squall.live.engine.weights import Shard, allocate

    folder = checkpoint(hidden_size=96, num_attention_heads=32, num_key_value_heads=2, head_dim=64, intermediate_size=4096)
    read = [0]
    own = loader._Reader.read

    def counted(self: Any, path: Path, offset: int, into: memoryview) -> None:
        read[0] += len(into)
        own(self, path, offset, into)

    monkeypatch.setattr(loader._Reader, "read", counted)
    config = read_decoder_config(folder)
    shards = [allocate(config, torch.float32, torch.device("cpu"), Shard(rank, 2)) for rank in range(2)]
    for weights in shards:
        load_from_disk(weights, folder, tied=config.tied)
    held = sum(view.numel() * 4 for weights in shards for view in weights.views.values())
    assert read[0] == held
    whole = allocate(config, torch.float32, torch.device("cpu"))
    load_from_disk(whole, folder, tied=config.tied)
    for layer, (a, b) in zip(whole.layers, zip(*(weights.layers for weights in shards), strict=True), strict=True):
        assert torch.equal(layer.down, torch.cat((a.down, b.down), dim=1))
        assert torch.equal(layer.out, torch.cat((a.out, b.out), dim=1))


# -- the end


def test_a_rank_that_is_killed_ends_the_replica_at_once(tiny: Path, drive: Any) -> None:
    engine = engine_of(tiny, 2)
    assert engine.team is not None
    heard = threading.Event()
    reasons: list[ReplicaFailed] = []

    def lost(error: ReplicaFailed) -> None:
        reasons.append(error)
        heard.set()

    engine.team.on_lost = lost
    try:
        engine.load()
        drive(engine, GREEDY[0])
        os.kill(engine.team.pids[0], signal.SIGKILL)
        assert heard.wait(20)
        assert str(reasons[0]) == "rank 1 of 2 was killed by SIGKILL"
        engine.reset()
        with pytest.raises(ReplicaFailed, match="rank 1 of 2 was killed by SIGKILL"):
            drive(engine, GREEDY[0])
    finally:
        engine.team.close()


def test_a_rank_that_hangs_is_waited_for_until_the_deadline(tiny: Path, drive: Any) -> None:
    team = Team(2, timeout_s=5.0)
    team.start()
    engine = TorchEngine(tiny, ByteTokenizer(), num_blocks=64, block_size=4, team=team)
    try:
        engine.build()
        load_from_disk(engine.shards[0], tiny, tied=engine.tied)
        load_from_disk(engine.shards[1], tiny, tied=engine.tied)
        os.kill(team.pids[0], signal.SIGSTOP)
        with pytest.raises(ReplicaFailed, match=r"the ranks of the replica lost touch: .*[Tt]imed out"):
            drive(engine, GREEDY[0])
    finally:
        team.close()
    assert not alive(team.pids[0])


def test_ranks_end_with_rank_0(tiny: Path) -> None:
    team = Team(3)
    team.start()
    pids = team.pids
    assert all(map(alive, pids))
    team.close()
    team.close()
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
