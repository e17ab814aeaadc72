"""The endpoints: what is read, who is asked and what is answered.

Knows the frontend, and HTTP only through an `Exchange`. Which path leads here, and how errors are reported, `app.py` knows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest

import squall
from squall.errors import Rejected, RequestError
from squall.live.api import chat, completions, order
from squall.live.api.chat import ChatShape
from squall.live.api.completions import CompletionShape
from squall.live.api.errors import ClientGone
from squall.live.api.exchange import Exchange
from squall.live.api.fields import Fields
from squall.live.api.generate import Shape, answer_stream, answer_whole
from squall.live.api.metrics import Measured, Metrics
from squall.live.api.order import Order
from squall.live.frontend import Frontend

if TYPE_CHECKING:
    from squall.live.tracing import Tracer  # imported only where spans are wanted: it needs an extra

LONG_TEXT = 20_000
"""From so many characters (or tokens) on, tokenising goes on in a thread: other streams go on meanwhile."""

PLAIN_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

Read = Callable[[Fields, str], Awaitable[tuple[Order, Shape]]]


class Service:
    """
    Args:
        frontend: everything behind HTTP.
        metrics: what requests are counted in.
        registry: what a scrape shows.
        tracer: makes a span of every generation request; None makes none.
    """

    def __init__(self, frontend: Frontend, metrics: Metrics, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        self._frontend = frontend
        self._metrics = metrics
        self._registry = registry
        self._tracer = tracer

    # -- generation

    async def chat_completions(self, exchange: Exchange) -> None:
        await self._generate("chat", exchange, self._read_chat)

    async def completions(self, exchange: Exchange) -> None:
        await self._generate("text_completion", exchange, self._read_completion)

    async def _generate(self, operation: str, exchange: Exchange, read: Read) -> None:
        """Read, run, answer; and count and trace how it ended, whatever happens."""
        measured = Measured(self._metrics, time.monotonic_ns())
        try:
            fields = Fields(await exchange.json_object())
            wanted, shape = await read(fields, order.read_model(fields, self._frontend))
            measured.understood(wanted, fields.num_unknown)
            answer = answer_stream if wanted.stream else answer_whole
            await exchange.while_connected(answer(wanted, shape, self._frontend, exchange, measured))
        except (ClientGone, asyncio.CancelledError):
            measured.cancelled()
            raise
        except Exception as error:
            measured.failed(error)
            raise
        else:
            measured.completed()
        finally:
            if self._tracer is not None:
                self._tracer.record(operation, exchange.headers, exchange.request_id, measured)

    async def _read_chat(self, fields: Fields, model: str) -> tuple[Order, Shape]:
        prompt = await self._chat_prompt(fields)
        wanted = chat.read_order(fields, self._frontend, model, prompt)
        return wanted, ChatShape(wanted)

    async def _read_completion(self, fields: Fields, model: str) -> tuple[Order, Shape]:
        tokenizer = self._frontend.tokenizer
        given = completions.read_prompts(fields, tokenizer.vocab_size, self._frontend.max_model_len)
        special = fields.boolean("add_special_tokens", True)
        encoded = await self._encode_all([prompt for prompt in given if isinstance(prompt, str)], special)
        prompts: list[Sequence[int]] = [*encoded] or [prompt for prompt in given if not isinstance(prompt, str)]
        wanted = completions.read_order(fields, self._frontend, model, prompts)
        echoes = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in given] if wanted.echo else []
        return wanted, CompletionShape(wanted, echoes, tokenizer)

    async def _chat_prompt(self, fields: Fields) -> list[int]:
        try:
            text = chat.read_prompt(fields, self._frontend.tokenizer, self._frontend.max_model_len)
        except RecursionError:
            raise RequestError("messages: nested too deeply", param="messages") from None
        return await self._encode(text, fields.boolean("add_special_tokens", False))

    async def _encode(self, text: str, special: bool) -> list[int]:
        return (await self._encode_all([text], special))[0]

    async def _encode_all(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [self._frontend.tokenizer.encode(text, add_special_tokens=special) for text in texts]

        return encode() if sum(map(len, texts)) < LONG_TEXT else await asyncio.to_thread(encode)

    # -- tokens and text

    async def tokenize(self, exchange: Exchange) -> None:
        fields = await self._fields_for_model(exchange)
        if fields.get("messages") is not None:
            tokens = await self._chat_prompt(fields)
        else:
            prompt = fields.text("prompt")
            if prompt is None:
                raise RequestError(
                    "prompt: missing; send a prompt or messages", param="prompt", code="missing_required_parameter"
                )
            tokens = await self._encode(prompt, fields.boolean("add_special_tokens", True))
        await exchange.reply_json({"count": len(tokens), "max_model_len": self._frontend.max_model_len, "tokens": tokens})

    async def detokenize(self, exchange: Exchange) -> None:
        fields = await self._fields_for_model(exchange)
        tokens = fields.get("tokens")
        if not isinstance(tokens, list):
            raise RequestError("tokens: expected an array of token ids", param="tokens")
        skip = fields.boolean("skip_special_tokens", False)

        def decode() -> str:
            tokenizer = self._frontend.tokenizer
            return tokenizer.decode(order.check_token_ids(tokens, "tokens", tokenizer.vocab_size), skip_special_tokens=skip)

        text = decode() if len(tokens) < LONG_TEXT else await asyncio.to_thread(decode)
        await exchange.reply_json({"prompt": text})

    async def _fields_for_model(self, exchange: Exchange) -> Fields:
        """The body; its model, which may be left out here, is a known one."""
        fields = Fields(await exchange.json_object())
        if (name := fields.text("model")) is not None:
            order.known_model(name, self._frontend)
        return fields

    # -- what is served, and how it is

    async def models(self, exchange: Exchange) -> None:
        await exchange.reply_json({"object": "list", "data": self.listed()})

    def listed(self) -> list[dict[str, Any]]:
        """Only what a request would reach now."""
        names: Sequence[str] = self._frontend.model_names if self._is_open else ()
        return [self._model(name) for name in names]

    async def model(self, exchange: Exchange) -> None:
        name = order.known_model(exchange.path_params["id"], self._frontend)
        self._check_open()
        await exchange.reply_json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._frontend.created,
            "owned_by": "squall",
            "root": self._frontend.model_names[0],
            "max_model_len": self._frontend.max_model_len,
        }

    @property
    def _is_open(self) -> bool:
        return self._frontend.ready and not self._frontend.draining

    def _check_open(self) -> None:
        if self._frontend.draining:
            raise Rejected(
                "shutting down; running requests are finished, new ones are not taken", reason="draining", retry_after_s=5.0
            )
        if not self._frontend.ready:
            raise Rejected("no replica is ready yet", reason="no_capacity", retry_after_s=1.0)

    async def health(self, exchange: Exchange) -> None:
        """200 while something can generate, also while draining; else 503."""
        if not self._frontend.ready and not self._frontend.draining:
            self._check_open()
        await exchange.reply(200, b"", ())

    async def alive(self, exchange: Exchange) -> None:
        await exchange.reply(200, b"", ())

    async def accepting(self, exchange: Exchange) -> None:
        """200 while new requests are welcome; else 503."""
        self._check_open()
        await exchange.reply(200, b"", ())

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": squall.__version__})

    async def load(self, exchange: Exchange) -> None:
        await exchange.reply_json({"server_load": self.in_flight})

    @property
    def in_flight(self) -> int:
        """Generation requests being served now."""
        return self._metrics.in_flight

    async def metrics(self, exchange: Exchange) -> None:
        """Always the plain text format: the client library's OpenMetrics writes `vllm:x` as `vllm_x`."""
        await exchange.reply(200, generate_latest(self._registry), [PLAIN_TEXT])
