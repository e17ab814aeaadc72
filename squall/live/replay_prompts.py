"""Prompts that a server counts exactly as long as they should be: token ids where it takes them, else words of one token each.

Knows which questions tell what a server can do. Does not know when requests are sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from squall.errors import ConfigError
from squall.live.replay_http import Client, HttpFailed
from squall.workload.prompts import prompt_tokens
from squall.workload.spec import OfferedRequest

LOWEST_ID, NUM_IDS = 32, 256
"""Prompts draw their token ids from here: the bytes or first pieces of every vocabulary, above its special tokens."""

WORDS = (
    " time", " year", " people", " way", " day", " man", " thing", " woman", " life", " world", " hand", " part", " place",
    " case", " week", " work", " fact", " group", " number", " night", " point", " home", " water", " room", " area", " money",
)  # fmt: skip
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")

Count = Callable[[str], Awaitable[int]]


class Prompts(Struct, frozen=True):
    """How to write a prompt for this server.

    Attributes:
        path: the endpoint that takes it.
        words: what a prompt is written in; empty where it is token ids.
        overhead: tokens that the server adds to every prompt.
        exact: the length was verified; otherwise a word is taken for a token.
    """

    path: str
    words: tuple[str, ...]
    overhead: int
    exact: bool
    seed: int = 0
    block_size: int = 16

    def fields(self, request: OfferedRequest) -> dict[str, Any]:
        """The fields of a request body that hold the prompt."""
        length = max(1, request.num_prompt_tokens - self.overhead)
        tokens = prompt_tokens(
            self.seed, request.id, length, NUM_IDS, range(LOWEST_ID),
            session=request.session, block_hashes=request.block_hashes, block_size=self.block_size,
        )  # fmt: skip
        if not self.words:
            return {"prompt": tokens}
        text = "".join(self.words[token % len(self.words)] for token in tokens)
        return {"messages": [{"role": "user", "content": text}]} if self.path.endswith("chat/completions") else {"prompt": text}

    def describe(self) -> str:
        """One line for a person."""
        kind = "words" if self.words else "token ids"
        return f"{kind} to {self.path}, {'exact' if self.exact else 'approximate'} lengths"


async def find_prompts(client: Client, model: str, tokenizer: Path | None, seed: int, block_size: int) -> Prompts:
    """Ask the server what it takes. Costs it one to four requests of a few tokens.

    Raises:
        ConfigError: it does not serve `model`, or takes no kind of prompt.
    """
    probe = Prompts("/v1/completions", (), 0, True, seed, block_size)
    refusal = ""
    for path, words in (("/v1/completions", ()), ("/v1/completions", WORDS), ("/v1/chat/completions", WORDS)):
        candidate = msgspec.structs.replace(probe, path=path, words=words)
        status, answer = await _ask(client, path, {"model": model, "max_tokens": 1, **candidate.fields(_request(24))})
        if status == 200:
            return await _measured(client, model, candidate, answer, tokenizer)
        refusal = f"{path} answers {status}: {_message(answer)}"
        if status not in (400, 404, 405, 415, 422) or _code(answer) == "model_not_found":
            break
    raise ConfigError(f"the server does not take a request for model {model!r}: {refusal}")


async def _measured(client: Client, model: str, prompts: Prompts, answer: Any, tokenizer: Path | None) -> Prompts:
    """`prompts` with the overhead that the server's own count shows."""
    if prompts.words:
        count = await _counter(client, model, tokenizer)
        words = await _one_token_words(count) if count is not None else None
        if words:
            prompts = msgspec.structs.replace(prompts, words=words)
    replace = msgspec.structs.replace
    counted = [_prompt_tokens(answer)]
    for length in (24, 48):
        body = {"model": model, "max_tokens": 1, **prompts.fields(_request(length))}
        counted.append(_prompt_tokens((await _ask(client, prompts.path, body))[1]))
    short, long = counted[1:]
    if short is None or long is None or long - short != 24 or short < 24:
        return replace(prompts, exact=False)
    return replace(prompts, overhead=short - 24, exact=True)


def _request(length: int) -> OfferedRequest:
    """A probe. Its id is nobody else's, so that it leaves nothing useful in a prefix cache."""
    return OfferedRequest(id=1 << 62, arrived_at=0, num_prompt_tokens=length, num_output_tokens=1)


async def _counter(client: Client, model: str, tokenizer: Path | None) -> Count | None:
    """How to count the tokens of a text: a local tokenizer.json, or the server's /tokenize; None where there is neither."""
    if tokenizer is not None:
        return _local_counter(tokenizer)

    async def ask(text: str) -> int:
        status, answer = await _ask(client, "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        if status != 200 or not isinstance(answer, dict) or not isinstance(answer.get("count"), int):
            raise HttpFailed("no /tokenize")
        return int(answer["count"])

    with contextlib.suppress(HttpFailed):
        await ask("a")
        return ask
    return None


def _local_counter(path: Path) -> Count:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"{path}: reading it needs the tokenizers package; pip install tokenizers") from None
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: not a readable tokenizer.json ({error})") from None

    async def count(text: str) -> int:
        return len(backend.encode(text, add_special_tokens=False).ids)

    return count


async def _one_token_words(count: Count) -> tuple[str, ...]:
    """Words that are one token each, also side by side; none where neither words nor letters are."""
    for candidates in (WORDS, LETTERS):
        good = tuple([word for word in candidates if await count(word * 8) == 8])
        mixed = "".join(good + good[::-1])
        if len(good) >= 2 and await count(mixed) == 2 * len(good):
            return good
    return ()


async def _ask(client: Client, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """One small question; the answer is None where it is no JSON."""
    pieces: list[bytes] = []
    response = await client.send("POST", path, msgspec.json.encode(body), lambda piece, _: pieces.append(piece))
    try:
        return response.status, msgspec.json.decode(b"".join(pieces))
    except msgspec.MsgspecError:
        return response.status, None


def _prompt_tokens(answer: Any) -> int | None:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def error_of(answer: Any) -> dict[str, Any]:
    """The error object of an answer, whichever of the two common shapes it has; empty where there is none."""
    if not isinstance(answer, dict):
        return {}
    error = answer.get("error", answer)
    return error if isinstance(error, dict) else {"message": str(error)}


def _message(answer: Any) -> str:
    return str(error_of(answer).get("message") or error_of(answer).get("detail") or "no explanation")[:300]


def _code(answer: Any) -> Any:
    return error_of(answer).get("code")
