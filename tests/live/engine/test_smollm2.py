"""The embedded model against `transformers`, which loads the same directory.

`transformers` computes the logits of every prompt with our tokens behind it, once. If its best token is ours at every place,
its own greedy continuation is ours, token for token. Another token is legal only where the two best logits lie within 1e-4.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from squall.core.actions import Preempt, RunSteps
from squall.live.engine.hashing import block_hashes
from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.engine.tokenizer import HfTokenizer
from squall.live.engine.torch_engine import TorchEngine

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("default:.* tie:UserWarning")]

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 30, 31, 32, 48, 63, 64, 77, 110, 128, 200, 400, 1500)
NUM_TOKENS = 6
TOLERANCE = 1e-4
STORY = (
    "Once upon a time there was a lighthouse keeper named Ada who counted ships: 1, 2, 3 and sometimes 1,024. "
    'She wrote "Nordlicht" and "Étoile" in her book — 日本丸 too — and at night she read about storms, stars and steam engines. '
)

Outputs = dict[int, list[int]]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> HfTokenizer:
    return HfTokenizer(smollm2)


@pytest.fixture(scope="module")
def prompts(tokenizer: HfTokenizer) -> list[tuple[int, ...]]:
    """Pieces of a text that never repeats itself exactly; some share their beginning."""
    pieces = [tokenizer.encode(f"Chapter {i}. {STORY}") for i in range(40)]
    text = [token for piece in pieces for token in piece]
    return [tuple(text[:length]) if i % 2 else tuple(text[11 * i : 11 * i + length]) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def engine(smollm2: Path, tokenizer: HfTokenizer) -> TorchEngine:
    engine = TorchEngine(smollm2, tokenizer, num_blocks=260, block_size=16)
    engine.load()
    return engine


def jobs(prompts: list[tuple[int, ...]], hashed: bool = False, logprobs: int | None = None) -> list[Job]:
    greedy = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    return [Job(i, prompt, greedy, (), block_hashes(prompt, 16, b"s") if hashed else ()) for i, prompt in enumerate(prompts)]


def tokens(driven: Any) -> Outputs:
    return {request: [out.token for out in outs] for request, outs in driven.outputs.items()}


@pytest.fixture(scope="module")
def whole(engine: TorchEngine, prompts: list[tuple[int, ...]], drive: Callable[..., Any]) -> dict[int, list[TokenOut]]:
    """All at once, prompts whole."""
    engine.reset()
    return drive(engine, *jobs(prompts, logprobs=5), max_num_batched_tokens=4096).outputs  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def together(whole: dict[int, list[TokenOut]]) -> Outputs:
    return {request: [out.token for out in outs] for request, outs in whole.items()}


@pytest.fixture(scope="module")
def expected(smollm2: Path, oracle: Any, prompts: list[tuple[int, ...]], together: Outputs) -> dict[int, Tensor]:
    """What `transformers` thinks of the next token at each place where we said one: logits [tokens, vocabulary]."""
    return {i: oracle(smollm2, [*prompt, *together[i]], keep=NUM_TOKENS + 1)[:-1] for i, prompt in enumerate(prompts)}


def check(said: Outputs, together: Outputs, expected: dict[int, Tensor]) -> None:
    """Every token is transformers' best. One that is not must tie with it and is reported; what follows it is its own."""
    for request, tokens in said.items():
        for place, (token, logits) in enumerate(zip(tokens, expected[request], strict=True)):
            if token != (best := int(logits.argmax())):
                gap = float(logits[best] - logits[token])
                assert gap <= TOLERANCE, f"request {request}, token {place}: {token} instead of {best}, {gap} below it"
                warnings.warn(f"request {request}, token {place}: {token} and {best} tie ({gap:.1e} apart)", stacklevel=2)
            if token != together[request][place]:
                break


def test_greedy_tokens_are_those_of_transformers(together: Outputs, expected: dict[int, Tensor]) -> None:
    assert [len(tokens) for tokens in together.values()] == [NUM_TOKENS] * 20
    check(together, together, expected)


def test_each_prompt_alone_gives_the_same(
    engine: TorchEngine, prompts: list[tuple[int, ...]], together: Outputs, expected: Any, drive: Any
) -> None:
    alone: Outputs = {}
    for job in jobs(prompts):
        engine.reset()
        alone.update(tokens(drive(engine, job)))
    check(alone, together, expected)


def test_chunks_preemption_and_the_prefix_cache_change_nothing(
    smollm2: Path, tokenizer: HfTokenizer, prompts: list[tuple[int, ...]], together: Outputs, expected: Any, drive: Any
) -> None:
    """A small budget of tokens, a pool too small for all, prompts that begin alike. One by one: test_torch_engine.py."""
    engine = TorchEngine(smollm2, tokenizer, num_blocks=95, block_size=16)
    engine.load()
    driven = drive(engine, *jobs(prompts, hashed=True), max_num_seqs=64, max_num_batched_tokens=640)
    chunks = [chunk for action in driven.actions if isinstance(action, RunSteps) for chunk in action.chunks]
    assert len({chunk.request for chunk in chunks if not chunk.last}) > 1
    assert any(isinstance(action, Preempt) for action in driven.actions)
    assert driven.machine.num_prefix_hits > 150
    check(tokens(driven), together, expected)


def test_logprobs_are_within_a_ten_thousandth(whole: dict[int, list[TokenOut]], expected: dict[int, Tensor]) -> None:
    for request, outs in whole.items():
        logprobs = expected[request].log_softmax(dim=1)
        for out, row in zip(outs, logprobs, strict=True):
            assert out.logprob is not None
            for entry in (out.logprob, *out.top):
                assert entry.logprob == pytest.approx(float(row[entry.token]), abs=TOLERANCE)


def test_logits_are_within_a_ten_thousandth(smollm2: Path, prompts: list[tuple[int, ...]], oracle: Any, forward: Any) -> None:
    torch.testing.assert_close(forward(smollm2, prompts[12]), oracle(smollm2, prompts[12]), atol=TOLERANCE, rtol=0)


def test_it_answers_a_question(engine: TorchEngine, tokenizer: HfTokenizer, drive: Any) -> None:
    engine.reset()
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}]))
    outs = drive(engine, Job(1, tuple(prompt), Sampling(max_tokens=30, temperature=0.0))).outputs[1]
    assert "".join(out.text for out in outs) == "The capital of France is Paris."
    assert (outs[-1].finish, outs[-1].token) == ("stop", 2)


def test_its_tokenizer_is_that_of_transformers(smollm2: Path, tokenizer: HfTokenizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        theirs: Any = AutoTokenizer.from_pretrained(smollm2)
    texts = [
        STORY,
        "",
        " ",
        "\n\n\t x",
        "12345 3.14",
        "don't I'll",
        "<|im_start|>user\nhi<|im_end|>",
        "ÿ\x00\u00ad",
        "def f(x):\n    return x",
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for chat in (messages, messages[1:]):
        assert tokenizer.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    digits = tokenizer.encode("2024")
    assert len(digits) == 4
