"""What both generation endpoints ask for, in the same words: how to sample, how often, and whether to stream.

Knows field names and their ranges. Does not know chat, HTTP or what comes back.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from squall.errors import RequestError
from squall.live.api.fields import INT64, Fields, is_integer, shown, wrong
from squall.live.engine.interface import Sampling
from squall.live.frontend import Frontend

MAX_CHOICES = 2048
"""The most sub-requests (prompts times choices) that one request may start."""

MAX_STOP_CHARACTERS = 1024
"""The longest stop string: at every token, the text's end is compared with the beginnings of all."""


class Order(Struct, frozen=True):
    """One API request, checked and tokenised.

    Attributes:
        model: the name that the client used.
        prompts: at least one, each at least one token long.
        sampling: of all sub-requests but for the seed: theirs come from this one's.
        n, best_of: choices returned and generated for each prompt.
        max_tokens: as in `sampling`, but may be 0 (with echo).
        logprobs: how many alternatives the answer shows; `sampling` may ask for more than is shown.
        session: requests of one session share a prefix; 0 means none.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    n: int = 1
    best_of: int = 1
    max_tokens: int = 1
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    session: int = 0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def sub_requests(self) -> Iterator[tuple[tuple[int, ...], Sampling]]:
        """Prompt and sampling of each, `best_of` in a row for each prompt."""
        index = 0
        for prompt in self.prompts:
            for _ in range(self.best_of):
                yield prompt, structs.replace(self.sampling, seed=derived_seed(self.sampling.seed, index))
                index += 1


def derived_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th sub-request: the given one for the first, unrelated ones after it."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def read_model(fields: Fields, frontend: Frontend) -> str:
    """
    Raises:
        RequestError: 404 `model_not_found` for a name that is not served.
    """
    name = fields.text("model")
    if name is None:
        raise missing_model()
    return known_model(name, frontend)


def known_model(name: str, frontend: Frontend) -> str:
    if name not in frontend.model_names:
        raise unknown_model(name, frontend.model_names)
    return name


def missing_model() -> RequestError:
    return RequestError("model: missing; GET /v1/models lists the names", param="model", code="missing_required_parameter")


def unknown_model(name: str, known: Sequence[str]) -> RequestError:
    served = ", ".join(repr(each) for each in known)
    return RequestError(
        f"model: {shown(name)} is not served here; {served} is", param="model", code="model_not_found", status=404
    )


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether a stream ends with the usage."""
    stream = fields.boolean("stream", False)
    options = fields.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise wrong("stream_options", "an object", options)
    if not stream:
        raise RequestError("stream_options: allowed only with stream = true", param="stream_options")
    include_usage = options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise wrong("stream_options.include_usage", "true or false", include_usage)
    return stream, bool(include_usage)


def check_window(prompts: Sequence[Sequence[int]], max_tokens: int | None, param: str, window: int) -> int:
    """How many tokens the longest prompt leaves, at least 1.

    Raises:
        RequestError: `context_length_exceeded`, with the numbers.
    """
    longest = max(len(prompt) for prompt in prompts)
    room = window - longest
    code = "context_length_exceeded"
    if room < 1:
        raise RequestError(
            f"{param}: {longest} tokens do not fit the context of {window} tokens, which must also hold at least one of output",
            param=param, code=code,
        )  # fmt: skip
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            f"max_tokens: the prompt's {longest} tokens and {shown(max_tokens)} of output exceed the context of {window} tokens; "
            f"ask for at most {room}",
            param="max_tokens", code=code,
        )  # fmt: skip
    return room


def read_sampling(fields: Fields, vocab_size: int, *, max_tokens: int, logprobs: int | None) -> Sampling:
    """Everything that decides which tokens come. Where no seed is given, one is drawn."""
    seed = fields.integer("seed", -INT64)
    min_tokens = fields.integer("min_tokens", 0) or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that may be generated", param="min_tokens"
        )
    top_k = fields.integer("top_k", -1, (1 << 31) - 1) or 0
    return Sampling(
        max_tokens=max(max_tokens, 1),
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=fields.number("top_p", 1.0, 0, 1),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, 0, 1),
        seed=seed % INT64 if seed is not None else secrets.randbits(63),
        stop=read_stop(fields),
        stop_token_ids=read_stop_token_ids(fields, vocab_size),
        ignore_eos=fields.boolean("ignore_eos", False),
        min_tokens=min_tokens,
        logprobs=logprobs,
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        logit_bias=read_logit_bias(fields, vocab_size),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )


def read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong("stop", "a string or an array of up to 4 strings, none of them empty", value)
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise RequestError(f"stop: of {longest} characters; at most {MAX_STOP_CHARACTERS} are compared", param="stop")
    return tuple(stops)


def read_stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("stop_token_ids", "an array of token ids", value)
    if len(value) > vocab_size:
        raise wrong("stop_token_ids", f"at most the {vocab_size} tokens that there are", value)
    return check_token_ids(value, "stop_token_ids", vocab_size)


def check_token_ids(tokens: list[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    """
    Raises:
        RequestError: naming the first that is no integer or not in the vocabulary.
    """
    for token in tokens:
        if not is_integer(token):
            raise wrong(param, "token ids", token)
        if not 0 <= token < vocab_size:
            raise RequestError(f"{param}: token id {shown(token)} is outside the vocabulary of {vocab_size} tokens", param=param)
    return tuple(tokens)


def read_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float] | None:
    value = fields.get("logit_bias")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("logit_bias", "an object of token ids and biases", value)
    if len(value) > vocab_size:
        raise RequestError(f"logit_bias: {len(value)} biases for a vocabulary of {vocab_size} tokens", param="logit_bias")
    biases: dict[int, float] = {}
    offenders = []
    for key, bias in value.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 18 else None
        if token is None:
            offenders.append(f"{shown(key)} is no token id")
        elif token >= vocab_size:
            offenders.append(f"token id {token} is outside the vocabulary of {vocab_size} tokens")
        elif not (is_integer(bias) or isinstance(bias, float)) or not -100 <= bias <= 100:
            offenders.append(f"the bias of {token} is {shown(bias)}, not a number between -100 and 100")
        else:
            biases[token] = float(bias)
    if offenders:
        more = f"; and {len(offenders) - 10} more" if len(offenders) > 10 else ""
        raise RequestError(f"logit_bias: {'; '.join(offenders[:10])}{more}", param="logit_bias")
    return biases or None


def read_session(fields: Fields) -> int:
    """Requests with the same `prompt_cache_key` are one session."""
    key = fields.text("prompt_cache_key")
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1 if key else 0


def check_num_choices(num_prompts: int, num_each: int) -> None:
    if num_prompts * num_each > MAX_CHOICES:
        raise RequestError(
            f"n: {num_prompts} prompts of {num_each} choices each are more than the {MAX_CHOICES} that one request may ask for",
            param="n",
        )


def read_max_tokens(fields: Fields, low: int = 1) -> int | None:
    """`max_completion_tokens`, or its older name; None where neither is given."""
    new, old = fields.integer("max_completion_tokens", low), fields.integer("max_tokens", low)
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_tokens: {shown(old)} contradicts max_completion_tokens = {shown(new)}; send one of them", param="max_tokens"
        )
    return old if new is None else new
