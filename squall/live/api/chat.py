"""`/v1/chat/completions`: messages in, an assistant's message out.

Knows the fields of this endpoint and the shape of its answers. Does not know how tokens come, nor how bytes leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from squall.errors import RequestError
from squall.live.api import order
from squall.live.api.fields import Fields, wrong
from squall.live.api.order import Order
from squall.live.api.unsupported import refuse_unsupported
from squall.live.engine.interface import TokenLogprob, TokenOut
from squall.live.engine.tokenizer import Tokenizer
from squall.live.frontend import Frontend

ROLES = ("developer", "system", "user", "assistant", "tool")
RESERVED = {"self", "messages", "add_generation_prompt"}
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def read_prompt(fields: Fields, tokenizer: Tokenizer, window: int) -> str:
    """The conversation as the model's chat template writes it; `window` is the longest context.

    Raises:
        RequestError: naming the message, or what the template says.
    """
    given = fields.get("messages")
    check_number(given, window)
    messages = read_messages(given)
    variables = fields.get("chat_template_kwargs")
    if variables is not None and (not isinstance(variables, dict) or RESERVED & variables.keys()):
        raise wrong("chat_template_kwargs", "an object without self, messages and add_generation_prompt", variables)
    generate = fields.boolean("add_generation_prompt", True)
    return tokenizer.render_chat(messages, add_generation_prompt=generate, **(variables or {}))


def check_number(messages: Any, window: int) -> None:
    """Refuse at a glance what is hopelessly long: each message and each part of one is a token at the least."""
    if not isinstance(messages, list):
        return
    contents = (message.get("content") for message in messages[: window + 1] if isinstance(message, dict))
    number = max(len(messages), sum(len(content) for content in contents if isinstance(content, list)))
    if number > window:
        raise RequestError(
            f"messages: {number} messages or parts of them do not fit the context of {window} tokens",
            param="messages", code="context_length_exceeded",
        )  # fmt: skip


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as templates want them: content is text, `developer` is called `system`."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a non-empty array of messages", value)
    messages = [read_message(message, f"messages[{index}]") for index, message in enumerate(value)]
    if len(messages) > 1 and messages[-1]["role"] == messages[-2]["role"] == "assistant":
        raise RequestError("messages: ends with two assistant messages; merge them", param="messages")
    return messages


def read_message(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(place, "an object with role and content", value)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{place}.role", f"one of {', '.join(ROLES)}", role)
    content = value.get("content")
    if content is None and role == "assistant":
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list) and content:
        text = "\n".join(read_part(part, f"{place}.content[{index}]") for index, part in enumerate(content))
    else:
        raise wrong(f"{place}.content", "a string or a non-empty array of text parts", content)
    return {**value, "role": "system" if role == "developer" else role, "content": text}


def read_part(value: Any, place: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise wrong(place, "an object with type and text", value)
    if value["type"] != "text":
        raise RequestError(
            f"{place}.type: expected 'text', the only kind of content that this model reads", param=f"{place}.type"
        )
    if not isinstance(value.get("text"), str):
        raise wrong(f"{place}.text", "a string", value.get("text"))
    return str(value["text"])


def read_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise RequestError("top_logprobs: needs logprobs = true", param="top_logprobs")
    return (top or 0) if wanted else None


def read_order(fields: Fields, frontend: Frontend, model: str, prompt: Sequence[int]) -> Order:
    """The rest of the request, once its prompt is known in tokens."""
    refuse_unsupported(fields)
    if not prompt:
        raise RequestError("messages: the chat template makes an empty prompt of them", param="messages")
    stream, include_usage = order.read_stream(fields)
    asked = order.read_max_tokens(fields)
    room = order.check_window((prompt,), asked, "messages", frontend.max_model_len)
    max_tokens = room if asked is None else asked
    n = fields.integer("n", 1, 128) or 1
    logprobs = read_logprobs(fields)
    return Order(
        model=model,
        prompts=(tuple(prompt),),
        sampling=order.read_sampling(fields, frontend.tokenizer.vocab_size, max_tokens=max_tokens, logprobs=logprobs),
        n=n,
        best_of=n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=fields.boolean("return_token_ids", False),
        session=order.read_session(fields),
    )


class ChatShape:
    """How an answer looks."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, order: Order) -> None:
        self._order = order

    def opening(self, index: int) -> Mapping[str, Any]:
        """The choice of the chunk that opens choice `index`."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def token(self, index: int, out: TokenOut) -> Mapping[str, Any]:
        chunk = self._chunk(index, {"content": out.text})
        if out.logprob is not None:
            chunk["logprobs"] = {"content": [logprob_item(out)], "refusal": None}
        if self._order.return_token_ids:
            chunk["token_ids"] = [out.token]
        return chunk

    def closing(self, index: int, out: TokenOut) -> Mapping[str, Any]:
        chunk = self._chunk(index, {})
        chunk.update(finish_reason=out.finish, stop_reason=out.stop_reason)
        return chunk

    def choice(self, index: int, outs: Sequence[TokenOut]) -> Mapping[str, Any]:
        """A whole choice of an answer that is not streamed."""
        logprobs = None
        if self._order.logprobs is not None:
            logprobs = {"content": [logprob_item(out) for out in outs], "refusal": None}
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(out.text for out in outs), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": outs[-1].finish,
            "stop_reason": outs[-1].stop_reason,
        }
        if self._order.return_token_ids:
            choice["token_ids"] = [out.token for out in outs]
        return choice

    @staticmethod
    def _chunk(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def logprob_item(out: TokenOut) -> dict[str, Any]:
    """A token of `logprobs.content`, with its alternatives."""
    assert out.logprob is not None
    return {**one_logprob(out.logprob), "top_logprobs": [one_logprob(each) for each in out.top]}


def one_logprob(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token": logprob.text, "logprob": finite(logprob.logprob), "bytes": list(logprob.bytes)}


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry: at most 0, at least LOWEST_LOGPROB (also for what is no number)."""
    return min(logprob, 0.0) if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
