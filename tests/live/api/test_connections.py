"""Connections that ask for nothing, for too much, or are too many."""

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from squall.config import Config
from squall.live.api import connections
from squall.live.api.connections import MAX_HEAD, SPARE_FILES, Connections, room_for_clients
from squall.live.descriptors import MOST
from tests.live.api.conftest import SmallFrontend, served

PROBE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def port(head: SmallFrontend, config: Config, said: list[str]) -> AsyncIterator[int]:
    async with served(head, config, http=Connections(3, said.append)) as url:
        yield int(url.rpartition(":")[2])


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and error of an answer after which the connection ends."""
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(PROBE)
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).split(b"\r\n")[0]


async def test_whoever_says_nothing_is_closed_and_whoever_begins_is_told(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    async with connected(port) as (reader, _):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    async with connected(port) as (reader, writer):
        writer.write(PROBE[:-2])
        status, error = await answer(reader)
        assert (status, error["message"]) == (408, "the headers did not come within 0.2 s")
    async with connected(port) as (reader, writer):
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        writer.write(PROBE[:-2])  # a second request on the same connection
        assert (await answer(reader))[0] == 408


async def test_a_client_that_is_kept_alive_is_not_hurried(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    async with connected(port) as (reader, writer):
        for _ in range(3):
            assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
            await asyncio.sleep(0.3)


async def test_headers_without_end_are_refused(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(PROBE[:-2] + b"X: " + b"a" * MAX_HEAD)
        status, error = await answer(reader)
        assert (status, error["message"]) == (431, f"the headers are larger than {MAX_HEAD} bytes")


async def test_headers_that_are_too_large_are_refused_where_they_come_at_once(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(PROBE[:-2] + b"X: " + b"a" * MAX_HEAD + b"\r\n\r\n")
        status, error = await answer(reader)
        assert (status, error["message"]) == (431, f"the headers are larger than {MAX_HEAD} bytes")
        assert await reader.read() == b""


async def test_what_is_no_http_is_refused_as_everything_is(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        status, error = await answer(reader)
        assert status == 400
        assert error["type"] == "invalid_request_error"


async def test_too_many_are_told_so_and_a_person_once(port: int, said: list[str]) -> None:
    async with connected(port) as first, connected(port) as second, connected(port) as third:
        assert [await ask(*each) for each in (first, second, third)] == [b"HTTP/1.1 200 OK"] * 3
        for _ in range(2):
            async with connected(port) as (reader, _):
                status, error = await answer(reader)
                assert (status, error["message"], error["code"]) == (503, "too many connections are open", "no_capacity")
        assert said == ["3 connections are open, as many as the limit on open files allows (ulimit -n); more are refused"]
        first[1].close()
        await asyncio.sleep(0.05)
        async with connected(port) as fourth:
            assert await ask(*fourth) == b"HTTP/1.1 200 OK"


async def test_a_body_that_does_not_come_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squall.live.api.exchange.BODY_S", 0.1)
    async with connected(port) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        status, error = await answer(reader)
        assert (status, error["message"]) == (408, "the body did not come within 0.1 s")


def test_clients_get_what_the_system_allows_but_for_some() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        room = room_for_clients()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == min(hard, MOST)
        assert room == max(soft - SPARE_FILES, soft // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
