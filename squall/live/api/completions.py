"""`/v1/completions`: text or tokens in, their continuation out.

Knows the fields of this endpoint and the shape of its answers. Does not know how tokens come, nor how bytes leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from squall.errors import RequestError
from squall.live.api import order
from squall.live.api.chat import finite
from squall.live.api.fields import Fields, is_integer, wrong
from squall.live.api.order import Order
from squall.live.api.unsupported import refuse_unsupported
from squall.live.engine.interface import TokenLogprob, TokenOut
from squall.live.engine.tokenizer import Tokenizer
from squall.live.frontend import Frontend

DEFAULT_MAX_TOKENS = 16


def read_prompts(fields: Fields, vocab_size: int, window: int) -> list[str] | list[tuple[int, ...]]:
    """Texts, or prompts that are tokens already; at least one, none of them empty.

    Lengths are looked at first: a body of many megabytes must not keep everyone waiting while each of its tokens is checked.
    """
    value = fields.get("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and is_integer(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", "a string, an array of strings, an array of token ids or an array of such arrays", value)
    order.check_num_choices(len(value), 1)
    if all(isinstance(prompt, str) for prompt in value):
        texts: list[str] = value
        if not all(texts):
            raise RequestError("prompt: is empty; it needs at least one token", param="prompt")
        return texts
    for prompt in value:
        if not isinstance(prompt, list):
            raise wrong("prompt", "strings only, or arrays of token ids only", prompt)
        if not prompt:
            raise RequestError("prompt: is empty; it needs at least one token", param="prompt")
    order.check_window(value, None, "prompt", window)
    return [order.check_token_ids(prompt, "prompt", vocab_size) for prompt in value]


def read_order(fields: Fields, frontend: Frontend, model: str, prompts: Sequence[Sequence[int]]) -> Order:
    """The rest of the request, once its prompts are known in tokens."""
    refuse_unsupported(fields)
    if not all(prompts):
        raise RequestError("prompt: has no tokens; it needs at least one", param="prompt")
    stream, include_usage = order.read_stream(fields)
    echo = fields.boolean("echo", False)
    asked = order.read_max_tokens(fields, low=0 if echo else 1)
    room = order.check_window(prompts, asked, "prompt", frontend.max_model_len)
    max_tokens = min(DEFAULT_MAX_TOKENS, room) if asked is None else asked
    n, best_of = read_counts(fields, len(prompts), stream)
    logprobs = fields.integer("logprobs", 0, 5)
    if logprobs is not None and echo:
        raise RequestError("logprobs: not with echo; squall computes no log-probabilities of prompt tokens", param="logprobs")
    if best_of > n and logprobs is None:
        logprobs_needed: int | None = 0
    else:
        logprobs_needed = logprobs
    return Order(
        model=model,
        prompts=tuple(tuple(prompt) for prompt in prompts),
        sampling=order.read_sampling(fields, frontend.tokenizer.vocab_size, max_tokens=max_tokens, logprobs=logprobs_needed),
        n=n,
        best_of=best_of,
        max_tokens=max_tokens,
        logprobs=logprobs,
        echo=echo,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=fields.boolean("return_token_ids", False),
        session=order.read_session(fields),
    )


def read_counts(fields: Fields, num_prompts: int, stream: bool) -> tuple[int, int]:
    """`n` and `best_of`."""
    n = fields.integer("n", 1, 128) or 1
    best_of = fields.integer("best_of", 0, 20) or n
    if best_of < n:
        raise RequestError(f"best_of: {best_of} is less than n = {n}", param="best_of")
    if best_of > n and stream:
        raise RequestError("best_of: cannot be streamed, as the best is known only at the end", param="best_of")
    order.check_num_choices(num_prompts, best_of)
    return n, best_of


class CompletionShape:
    """How an answer looks.

    Args:
        order: what was asked.
        echoes: the text of each prompt, where it is to be repeated.
        tokenizer: tells which tokens are special: they have no place in the text.
    """

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, order: Order, echoes: Sequence[str], tokenizer: Tokenizer) -> None:
        self._order = order
        self._echoes = echoes
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Mapping[str, Any] | None:
        """The choice of the chunk that opens choice `index`: the prompt, where it is echoed."""
        return self._chunk(index, self._echo(index)) if self._order.echo else None

    def token(self, index: int, out: TokenOut) -> Mapping[str, Any]:
        chunk = self._chunk(index, out.text)
        if self._order.logprobs is not None:
            chunk["logprobs"] = self._logprobs(index, [out])
        if self._order.return_token_ids:
            chunk["token_ids"] = [out.token]
        return chunk

    def closing(self, index: int, out: TokenOut) -> Mapping[str, Any]:
        chunk = self._chunk(index, "")
        chunk.update(finish_reason=out.finish, stop_reason=out.stop_reason)
        return chunk

    def choice(self, index: int, outs: Sequence[TokenOut]) -> Mapping[str, Any]:
        """A whole choice of an answer that is not streamed; without tokens, only the echo."""
        choice = self._chunk(index, self._echo(index) + "".join(out.text for out in outs))
        choice.update(finish_reason=outs[-1].finish if outs else "length", stop_reason=outs[-1].stop_reason if outs else None)
        if self._order.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, outs)
        if self._order.return_token_ids:
            choice["token_ids"] = [out.token for out in outs]
        return choice

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._order.n] if self._order.echo else ""

    @staticmethod
    def _chunk(index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, index: int, outs: Sequence[TokenOut]) -> dict[str, Any]:
        """The four parallel arrays; offsets go on where the choice's last ones ended."""
        tokens, values, tops, offsets = [], [], [], []
        offset = self._offsets.get(index, 0)
        for out in outs:
            assert out.logprob is not None
            tokens.append(token_name(out.logprob))
            values.append(finite(out.logprob.logprob))
            tops.append({token_name(each): finite(each.logprob) for each in (*out.top, out.logprob)})
            offsets.append(offset)
            offset += self._num_characters(out.logprob)
        self._offsets[index] = offset
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _num_characters(self, logprob: TokenLogprob) -> int:
        """How many characters of the text begin in this token."""
        if self._order.sampling.skip_special_tokens and self._tokenizer.is_special(logprob.token):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in logprob.bytes)


def token_name(logprob: TokenLogprob) -> str:
    """The token's text; a token that is a part of a character is named by its bytes, so that no two are confused."""
    try:
        return logprob.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.bytes)
