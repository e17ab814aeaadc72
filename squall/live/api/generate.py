"""Running one order: its sub-requests side by side, their tokens into one answer, streamed or whole.

Knows the order of chunks and what a choice is made of. Does not know which endpoint it serves (a `Shape` says how things look).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from squall.live.api.errors import translate
from squall.live.api.exchange import Exchange
from squall.live.api.metrics import Measured
from squall.live.api.order import Order
from squall.live.api.usage import Usage
from squall.live.engine.interface import TokenOut
from squall.live.frontend import Frontend, TokenStream

DONE = b"data: [DONE]\n\n"

TOKENS_AT_ONCE = 20_000
"""Prompt tokens that are handed to the head in one go: some milliseconds of work."""


class Shape(Protocol):
    """How the answers of one endpoint look: `chat.ChatShape` and `completions.CompletionShape`."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> Mapping[str, Any] | None: ...
    def token(self, index: int, out: TokenOut) -> Mapping[str, Any]: ...
    def closing(self, index: int, out: TokenOut) -> Mapping[str, Any]: ...
    def choice(self, index: int, outs: Sequence[TokenOut]) -> Mapping[str, Any]: ...


async def merged(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, TokenOut]]:
    """All tokens of all streams as they come, each with its stream's index.

    However it ends, streams that have not are cancelled. Raises what the first failing stream raises.
    """
    try:
        if len(streams) == 1:
            async for out in streams[0]:
                yield 0, out
            return
        queue: asyncio.Queue[tuple[int, TokenOut] | Exception | None] = asyncio.Queue()
        pumps = [asyncio.create_task(pump(index, stream, queue)) for index, stream in enumerate(streams)]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
    finally:
        for stream in streams:
            stream.cancel()


async def pump(index: int, stream: TokenStream, queue: asyncio.Queue[tuple[int, TokenOut] | Exception | None]) -> None:
    try:
        async for out in stream:
            queue.put_nowait((index, out))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


async def submit(order: Order, frontend: Frontend) -> list[TokenStream]:
    """Start every sub-request; none where no token is wanted. Lets others go on in between: there may be many long prompts."""
    streams: list[TokenStream] = []
    tokens = 0
    try:
        for prompt, sampling in order.sub_requests() if order.max_tokens else ():
            streams.append(frontend.submit(prompt, sampling, session=order.session))
            tokens += len(prompt)
            if tokens >= TOKENS_AT_ONCE:
                tokens = 0
                await asyncio.sleep(0)
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


async def tokens_of(order: Order, frontend: Frontend, usage: Usage, measured: Measured) -> AsyncGenerator[tuple[int, TokenOut]]:
    """Every token of the order, counted and measured."""
    streams = await submit(order, frontend)
    measured.submitted(streams, usage)
    async with aclosing(merged(streams)) as tokens:
        async for index, out in tokens:
            usage.count(index, out)
            measured.token(index, out, streams[index].queued)
            yield index, out


def header(order: Order, shape: Shape, kind: str) -> dict[str, Any]:
    """What an answer and all its chunks have in common."""
    return {"id": f"{shape.id_prefix}{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": order.model}


async def answer_whole(order: Order, shape: Shape, frontend: Frontend, exchange: Exchange, measured: Measured) -> None:
    """Wait for every token, then reply once."""
    usage = Usage(order)
    outs: list[list[TokenOut]] = [[] for _ in range(len(order.prompts) * order.best_of)]
    async with aclosing(tokens_of(order, frontend, usage, measured)) as tokens:
        async for index, out in tokens:
            outs[index].append(out)
    chosen = best(order, outs)
    answer = header(order, shape, shape.object)
    measured.response_id = answer["id"]
    answer["choices"] = [shape.choice(index, each) for index, each in enumerate(chosen)]
    answer["usage"] = usage.to_json()
    if order.return_token_ids:
        answer["prompt_token_ids"] = order.prompts[0] if len(order.prompts) == 1 else order.prompts
    await exchange.reply_json(answer)


def best(order: Order, outs: list[list[TokenOut]]) -> list[list[TokenOut]]:
    """Of each prompt's `best_of`, the `n` with the highest mean log-probability; all of them where none is to be dropped."""
    if order.best_of == order.n:
        return outs
    chosen = []
    for first in range(0, len(outs), order.best_of):
        ranked = sorted(outs[first : first + order.best_of], key=mean_logprob, reverse=True)
        chosen.extend(ranked[: order.n])
    return chosen


def mean_logprob(outs: Sequence[TokenOut]) -> float:
    values = [out.logprob.logprob for out in outs if out.logprob is not None]
    return sum(values) / len(values) if values else 0.0


class EventStream:
    """The chunks of one streamed answer.

    Headers leave with the first token, so that an error before it is still a proper HTTP error.
    """

    def __init__(self, order: Order, header: Mapping[str, Any], shape: Shape, exchange: Exchange) -> None:
        self._order = order
        self._shape = shape
        self._exchange = exchange
        self._opened: set[int] = set()
        encoded = msgspec.json.encode(header)
        self._before = b"data: " + encoded[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if order.include_usage else b"]}\n\n"

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return self._before + msgspec.json.encode(choice) + self._after

    async def open(self, index: int) -> bytes:
        """The events that come before the first token of choice `index`."""
        if self._exchange.status is None:
            await self._exchange.open_events()
        self._opened.add(index)
        opening = self._shape.opening(index)
        return self._event(opening) if opening is not None else b""

    async def token(self, index: int, out: TokenOut) -> None:
        events = await self.open(index) if index not in self._opened else b""
        if out.text or out.finish is None or out.logprob is not None or self._order.return_token_ids:
            events += self._event(self._shape.token(index, out))
        if out.finish is not None:
            events += self._event(self._shape.closing(index, out))
        await self._exchange.write(events)

    async def echo_only(self) -> None:
        """What is sent where no token is wanted."""
        for index in range(self._order.num_choices):
            events = await self.open(index)
            ended = TokenOut(request=0, token=0, text="", finish="length")
            await self._exchange.write(events + self._event(self._shape.closing(index, ended)))

    async def close(self, usage: Usage) -> None:
        events = b""
        if self._order.include_usage:
            events = self._before + b'],"usage":' + msgspec.json.encode(usage.to_json()) + b"}\n\n"
        await self._exchange.write(events + DONE, more=False)


async def answer_stream(order: Order, shape: Shape, frontend: Frontend, exchange: Exchange, measured: Measured) -> None:
    """Send each token as it comes."""
    usage = Usage(order)
    chunk = header(order, shape, shape.chunk_object)
    measured.response_id = chunk["id"]
    events = EventStream(order, chunk, shape, exchange)
    async with aclosing(tokens_of(order, frontend, usage, measured)) as tokens:
        async for index, out in tokens:
            await events.token(index, out)
    if order.max_tokens == 0:
        await events.echo_only()
    await events.close(usage)


async def break_off(exchange: Exchange, error: Exception) -> None:
    """End a stream that has begun with the error as an event: never in silence, never as if it had succeeded."""
    await exchange.write(b"data: " + translate(error).body() + b"\n\n" + DONE, more=False)
