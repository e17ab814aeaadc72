"""Addresses, and answers that come in pieces."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ConfigError
from squall.live.replay_http import Connection, EventParser, parse_address


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://[", ""])
def test_a_url_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url: "):
        parse_address(url)


def test_a_url_may_end_in_v1_and_have_a_path() -> None:
    assert parse_address("http://h:8/v1/").prefix == ""
    address = parse_address("https://h/team/v1")
    assert (address.prefix, address.port, address.tls, address.host_header) == ("/team", 443, True, "h")
    assert parse_address("http://h:8").host_header == "h:8"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_events_may_be_cut_anywhere(places: list[int], newline: bytes) -> None:
    lines = [
        b'data: {"a":"\xc3\xa9"}',
        b"",
        b": keep-alive",
        b"",
        b"event: x",
        b"data: one",
        b"data: two",
        b"",
        b"data:[DONE]",
        b"",
        b"",
    ]
    parser = EventParser()
    found = [data for piece in cut(newline.join(lines), places) for data in parser.feed(piece)]
    assert found == [b'{"a":"\xc3\xa9"}', b"one\ntwo", b"[DONE]"]


class Wire(asyncio.Transport):
    """Where a connection writes, in a test that feeds it by hand."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "body", "reusable"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n",
            b"abc0123456789",
            True,
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 X\r\ncontent-length: 4\r\n\r\nbusy", b"busy", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", b"", False),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end", False),
    ],
)
@given(places=st.lists(st.integers(0, 10_000), max_size=12))
def test_answers_may_be_cut_anywhere(answer: bytes, body: bytes, reusable: bool, places: list[int]) -> None:
    async def receive() -> tuple[bytes, bool]:
        connection = Connection()
        connection.connection_made(Wire())
        pieces: list[bytes] = []
        answered = asyncio.create_task(connection.request(b"", b"", lambda piece, _: pieces.append(piece)))
        await asyncio.sleep(0)
        for piece in cut(answer, places):
            connection.data_received(piece)
        if not reusable and not answered.done():
            connection.connection_lost(None)
        await answered
        return b"".join(pieces), connection.reusable

    assert asyncio.run(receive()) == (body, reusable)
