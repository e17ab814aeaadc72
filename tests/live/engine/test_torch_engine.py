"""The engine with a small model, planned by the real replica machine or by hand."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from squall.core.actions import Chunk, Preempt, Regrouped, RunSteps
from squall.errors import ConfigError
from squall.live.engine.hashing import block_hashes
from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine

Start = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def start(tiny: Path) -> Start:
    def start(num_blocks: int = 200, block_size: int = 4, **options: Any) -> TorchEngine:
        engine = TorchEngine(tiny, ByteTokenizer(), num_blocks=num_blocks, block_size=block_size, **options)
        engine.load()
        engine.warm()
        return engine

    return start


@pytest.fixture(scope="module")
def engine(start: Start) -> TorchEngine:
    return start()


@pytest.fixture
def fresh(engine: TorchEngine) -> Iterator[TorchEngine]:
    engine.reset()
    yield engine
    engine.reset()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * i * 7 + i) % 256 for i in range(length))


def job(
    request: int, length: int = 9, tokens: int = 12, output: tuple[int, ...] = (), hashed: bool = False, **sampling: Any
) -> Job:
    given = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    text = prompt(request, length)
    return Job(request, text, given, output, block_hashes(text, 4, b"s") if hashed else ())


def said(outs: Sequence[TokenOut]) -> list[int]:
    return [out.token for out in outs]


def alone(engine: TorchEngine, drive: Any, one: Job) -> list[TokenOut]:
    engine.reset()
    return drive(engine, one).outputs[one.request]  # type: ignore[no-any-return]


MIXED = [
    job(1, 1, 20),
    job(2, 37, 3),
    job(3, 8, 30, temperature=1.0, seed=5),
    job(4, 64, 9, temperature=0.7, seed=6, top_p=0.9, logprobs=2),
    job(5, 15, 1),
    job(6, 16, 25, temperature=1.3, seed=7, presence_penalty=0.5, top_k=50),
    job(7, 17, 14, temperature=1.0, seed=5),
]


def test_greedy_tokens_are_the_argmax_of_the_logits(fresh: TorchEngine, drive: Any, forward: Any, tiny: Path) -> None:
    one = job(1, 30, 12)
    tokens = said(drive(fresh, one).outputs[1])
    assert len(tokens) == 12
    logits = forward(tiny, [*one.prompt, *tokens])
    assert tokens == logits[29:-1].argmax(dim=-1).tolist()


def test_tokens_do_not_depend_on_the_batch(fresh: TorchEngine, drive: Any) -> None:
    together = drive(fresh, *MIXED).outputs
    for one in MIXED:
        assert said(together[one.request]) == said(alone(fresh, drive, one))


@pytest.mark.parametrize("budget", [3, 7, 20])
def test_tokens_do_not_depend_on_how_prompts_are_cut(budget: int, fresh: TorchEngine, drive: Any) -> None:
    whole = drive(fresh, *MIXED).outputs
    fresh.reset()
    driven = drive(fresh, *MIXED, max_num_seqs=budget, max_num_batched_tokens=budget)
    assert any(len(action.chunks) and not action.chunks[-1].last for action in driven.actions if isinstance(action, RunSteps))
    assert {request: said(outs) for request, outs in driven.outputs.items()} == {r: said(outs) for r, outs in whole.items()}


@pytest.mark.parametrize("hashed", [False, True])
def test_tokens_do_not_depend_on_preemption(hashed: bool, start: Start, drive: Any) -> None:
    jobs = [job(i, 6 + 3 * i, 40, hashed=hashed, temperature=i % 2, seed=i) for i in range(8)]
    roomy = drive(start(), *jobs).outputs
    tight = drive(start(num_blocks=26), *jobs)
    assert sum(len(action.requests) for action in tight.actions if isinstance(action, Preempt)) >= 3
    assert tight.machine.pool.num_available == 26
    assert {request: said(outs) for request, outs in tight.outputs.items()} == {r: said(outs) for r, outs in roomy.items()}


def test_tokens_do_not_depend_on_the_prefix_cache(start: Start, drive: Any) -> None:
    engine = start(num_blocks=60)
    shared = prompt(1, 40)
    prompts = [shared, shared[:30] + prompt(2, 20), shared, prompt(3, 50), shared[:39], prompt(4, 50), shared[:8] + prompt(5, 4)]
    jobs = [
        Job(i, text, Sampling(max_tokens=9, temperature=0.0, ignore_eos=True), (), block_hashes(text, 4, b"s"))
        for i, text in enumerate(prompts)
    ]
    driven = drive(engine)
    for one in jobs:
        driven.submit(one)
        driven.run()
    assert [driven.outputs[i][0].num_cached_tokens for i in range(3)] == [0, 28, 36]
    evictions = sum(len(action.evictable) for action in driven.actions if isinstance(action, RunSteps))
    assert evictions > 10
    for one in jobs:
        assert said(driven.outputs[one.request]) == said(alone(engine, drive, Job(one.request, one.prompt, one.sampling)))


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 1},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4, "top_k": 40},
        {"min_tokens": 12, "stop_token_ids": tuple(range(0, 256, 2))},
    ],
)
def test_a_request_continued_elsewhere_goes_on_as_if_nothing_had_happened(
    sampling: dict[str, Any], fresh: TorchEngine, drive: Any
) -> None:
    """Whatever the choice of a token depends on that was there before counts from the first token, not from the move."""
    one = job(3, 20, 15, temperature=1.0, seed=5, **sampling)
    whole = drive(fresh, one).outputs[3]
    assert len(whole) >= 12
    for cut in (1, 7, len(whole) - 1):
        fresh.reset()
        rest = drive(fresh, Job(3, one.prompt, one.sampling, tuple(said(whole[:cut])))).outputs[3]
        assert [(out.token, out.text, out.finish) for out in rest] == [(out.token, out.text, out.finish) for out in whole[cut:]]


def test_native_kernels_and_pytorch_say_the_same(fresh: TorchEngine, start: Start, drive: Any) -> None:
    plain = start(native=False)
    ours, theirs = drive(fresh, *MIXED).outputs, drive(plain, *MIXED).outputs
    assert {request: said(outs) for request, outs in ours.items()} == {request: said(outs) for request, outs in theirs.items()}


def run(engine: TorchEngine, *action: Any) -> tuple[Any, list[list[TokenOut]]]:
    steps: list[list[TokenOut]] = []
    ended = engine.run(RunSteps(*action), lambda tokens: steps.append(list(tokens)))
    return ended, steps


def test_a_run_ends_at_the_first_stop_and_names_it_in_order(fresh: TorchEngine) -> None:
    for request, tokens in ((9, 4), (4, 4), (7, 50)):
        fresh.add(job(request, 8, tokens))
    chunks = tuple(Chunk(request, 0, 8, 0, True) for request in (9, 4, 7))
    ended, steps = run(fresh, 1, 1, 0, 0, chunks)
    assert (ended.steps, ended.stopped) == (1, ())
    ended, steps = run(fresh, 2, 40, 3, 27)
    assert (ended.run, ended.steps, ended.stopped) == (2, 3, (4, 9))
    assert [len(tokens) for tokens in steps] == [3, 3, 3]
    ended, steps = run(fresh, 3, 5, 1, 12)
    assert (ended.steps, ended.stopped) == (5, ())


def test_a_long_prompt_is_taken_in_equal_pieces_in_one_run(fresh: TorchEngine, drive: Any) -> None:
    one = job(1, 25, 5)
    fresh.add(one)
    ended, steps = run(fresh, 1, 4, 0, 0, (Chunk(1, 0, 6, 0, False),))
    assert (ended.steps, steps) == (4, [])
    _, first = run(fresh, 2, 1, 0, 0, (Chunk(1, 24, 1, 0, True),))
    _, rest = run(fresh, 3, 9, 1, 26)
    assert said([out for tokens in first + rest for out in tokens]) == said(alone(fresh, drive, one))


def test_decodes_pause_change_groups_and_go_on_where_they_were(fresh: TorchEngine, drive: Any) -> None:
    jobs = [job(request, 8, 30) for request in (1, 2, 3)]
    for each in jobs:
        fresh.add(each)
    said_by: dict[int, list[TokenOut]] = {1: [], 2: [], 3: []}

    def hear(tokens: Sequence[TokenOut]) -> None:
        for out in tokens:
            said_by[out.request].append(out)

    for action in (
        RunSteps(1, 1, 0, 0, tuple(Chunk(request, 0, 8, 0, True, 5) for request in (1, 2))),
        RunSteps(2, 3, 2, 18),
        RunSteps(3, 1, 0, 0, (Chunk(3, 0, 8, 0, True),)),  # 1 and 2 pause, 3 joins them
        RunSteps(4, 2, 1, 9, group=1, regrouped=(Regrouped(1, (3,)),)),
        RunSteps(5, 2, 2, 24),
        RunSteps(6, 4, 3, 28 + 11, group=1, regrouped=(Regrouped(1, (1, 2)),)),
    ):
        fresh.run(action, hear)
    assert [len(said_by[request]) for request in (1, 2, 3)] == [10, 10, 7]
    for each in jobs:
        assert said(said_by[each.request]) == said(alone(fresh, drive, each))[: len(said_by[each.request])]


def test_a_cut_ends_the_run_at_the_next_boundary_and_only_that_run(fresh: TorchEngine) -> None:
    fresh.add(job(1, 8, 100))
    run(fresh, 1, 1, 0, 0, (Chunk(1, 0, 8, 0, True),))
    fresh.cut(1)
    fresh.cut(2)  # before it begins: one step is done all the same
    assert run(fresh, 2, 50, 1, 9)[0].steps == 1

    def cut_while_it_runs(_: object) -> None:
        cutting = threading.Thread(target=fresh.cut, args=(3,))
        cutting.start()
        cutting.join()

    ended = fresh.run(RunSteps(3, 80, 1, 10), cut_while_it_runs)
    assert 1 <= ended.steps < 80
    assert run(fresh, 4, 5, 1, 10 + ended.steps)[0].steps == 5


def test_a_forgotten_request_frees_its_blocks_and_unknown_ones_are_ignored(start: Start) -> None:
    engine = start(num_blocks=6)
    for request in range(20):
        engine.add(job(request, 20, 30))
        run(engine, request, 1, 0, 0, (Chunk(request, 0, 20, 0, True),))
        engine.forget((request, 1000))
    with pytest.raises(RuntimeError, match="the machine sees 1 decodes over 21 tokens, the engine 0 over 0"):
        run(engine, 21, 1, 1, 21)


def test_after_a_reset_every_block_is_free_and_nothing_is_cached(start: Start, drive: Any) -> None:
    engine = start(num_blocks=12)
    for _ in range(3):
        outs = drive(engine, job(1, 40, 6, hashed=True)).outputs[1]
        assert (len(outs), outs[0].num_cached_tokens) == (6, 0)
        engine.reset()


def test_a_context_that_is_full_ends_the_sequence(start: Start, drive: Any) -> None:
    engine = start(max_model_len=24)
    outs = drive(engine, job(1, 20, 100)).outputs[1]
    assert (len(outs), outs[-1].finish) == (4, "length")


def test_it_computes_in_bfloat16_too(start: Start, drive: Any) -> None:
    engine = start(dtype="bf16")
    assert len(drive(engine, job(1, 20, 6), job(2, 3, 6), max_num_seqs=2, max_num_batched_tokens=8).outputs[1]) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "serve.device is 'tpu'; use 'cpu' or 'cuda'"),
        ({"dtype": "int8"}, "replica.dtype is 'int8'; the built-in engine computes in fp32, bf16, fp16"),
        ({"max_model_len": 257}, "replica.max_model_len is 257; .* reaches 256 tokens"),
    ],
)
def test_what_it_cannot_do_it_refuses(options: dict[str, Any], message: str, start: Start) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**options)


def test_a_missing_gpu_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"there is no CUDA device here.*; use 'cpu'"):
        start(device="cuda")
