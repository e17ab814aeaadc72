"""A client that goes away frees what it held, whichever server carries the application and however the answer is sent."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from squall.config import Config
from squall.live.api.app import create_app
from squall.live.api.generate import TOKENS_AT_ONCE, submit
from squall.live.api.order import Order
from squall.live.engine.interface import Sampling


async def connect(url: str, path: str, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a bare socket."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = msgspec.json.encode({"model": "small", "max_tokens": 400, "ignore_eos": True, **body})
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_in_the_middle_frees_its_requests(
    url: str, head: Any, until: Any, stream: bool, n: int
) -> None:
    head.step_s = 0.01
    _, writer = await connect(url, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], stream=stream, n=n)
    await until(lambda: len(head.streams) == n and all(each.sequence.num_output_tokens > 2 for each in head.streams))
    writer.close()
    await until(lambda: not head.active)
    assert all(each.cancelled for each in head.streams)
    steps = [each.sequence.num_output_tokens for each in head.streams]
    await asyncio.sleep(0.05)
    assert [each.sequence.num_output_tokens for each in head.streams] == steps


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_before_the_first_token_frees_its_request(
    url: str, head: Any, until: Any, stream: bool
) -> None:
    head.gate = asyncio.Event()  # never set: no token ever comes
    _, writer = await connect(url, "/v1/completions", prompt="hi", stream=stream)
    await until(lambda: bool(head.active))
    writer.close()
    await until(lambda: not head.active)
    assert head.streams[0].cancelled


async def test_a_client_that_only_ends_its_sending_side_is_taken_for_one_that_has_gone(url: str, head: Any, until: Any) -> None:
    """TCP says the same of both, until something is sent to them."""
    head.gate = asyncio.Event()  # never set
    reader, writer = await connect(url, "/v1/completions", prompt="hi")
    await until(lambda: bool(head.active))
    writer.write_eof()
    await until(lambda: not head.active)
    assert await reader.read() == b""
    assert head.streams[0].cancelled
    writer.close()


async def test_a_request_that_was_left_is_counted_as_cancelled_and_not_in_flight(url: str, head: Any, until: Any) -> None:
    head.step_s = 0.01
    _, writer = await connect(url, "/v1/completions", prompt="hi", stream=True)
    await until(lambda: bool(head.active))
    async with httpx.AsyncClient(base_url=url) as client:
        assert 'squall_requests_in_flight{model="small"} 1.0' in (await client.get("/metrics")).text
        writer.close()
        await until(lambda: not head.active)
        text = (await client.get("/metrics")).text
        assert 'squall_requests_in_flight{model="small"} 0.0' in text
        assert 'squall_requests_total{code="499",model="small",outcome="cancelled"} 1.0' in text


async def test_a_server_that_raises_on_writing_to_nobody_is_understood(head: Any) -> None:
    """ASGI allows `send` to raise OSError once the client is gone; uvicorn does not, other servers do."""
    body = msgspec.json.encode({"model": "small", "prompt": "hi", "stream": True, "max_tokens": 400})
    messages = iter([{"type": "http.request", "body": body}])
    sent = []

    async def receive() -> Any:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            raise OSError("broken pipe")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"", "root_path": ""}
    await create_app(head, Config())(scope, receive, send)
    assert len(sent) == 4
    assert head.streams[0].cancelled


async def test_a_client_that_leaves_while_it_sends_does_no_harm(url: str, head: Any) -> None:
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    reader, other = await connect(url, "/v1/completions", prompt="hi", max_tokens=1)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    other.close()


async def test_a_connection_is_used_again_after_a_stream(url: str, head: Any) -> None:
    reader, writer = await connect(url, "/v1/completions", prompt="hi", max_tokens=2, stream=True)
    await reader.readuntil(b"[DONE]")
    await reader.readuntil(b"0\r\n\r\n")
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_many_long_prompts_let_others_go_on_in_between_and_may_be_left_half_way(make_head: Any) -> None:
    head = make_head(max_model_len=1 << 20)
    order = Order("small", prompts=((65,) * TOKENS_AT_ONCE,) * 5, sampling=Sampling(max_tokens=4), max_tokens=4)
    submitting = asyncio.create_task(submit(order, head))
    await asyncio.sleep(0)
    assert len(head.streams) == 1
    await asyncio.sleep(0)
    assert len(head.streams) == 2
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert [stream.cancelled for stream in head.streams] == [True, True]
    assert not head.active
