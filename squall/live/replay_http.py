"""A small HTTP/1.1 client for many streams at once: each byte that arrives is stamped and handed on, nothing more.

Knows connections, chunked bodies and server-sent events. Does not know what is asked, nor what an event says. (A general client
costs some 270 microseconds of CPU for each chunk of a stream, so that a hundred streams would measure the client.)
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from socket import SOCK_STREAM
from typing import cast
from urllib.parse import urlsplit

from msgspec import Struct

from squall.core.types import Nanos
from squall.errors import ConfigError

IDLE_S = 2.0
"""A connection that was idle for longer is not used again: the server may be about to close it."""

Sink = Callable[[bytes, Nanos], None]


class HttpFailed(Exception):
    """The connection could not be made, broke, or did not carry HTTP. `str()` is one line."""


class Response(Struct, frozen=True):
    """An answer without its body."""

    status: int
    headers: dict[str, str]


class Address(Struct, frozen=True):
    """Where to connect, and what every path begins with."""

    host: str
    port: int
    tls: bool
    prefix: str

    @property
    def host_header(self) -> str:
        return self.host if self.port == (443 if self.tls else 80) else f"{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    """`http://host:port`, with or without `/v1`.

    Raises:
        ConfigError: it is no such URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"url: {url!r} is no URL ({error}); expected http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url: expected http://host:port or https://host, got {url!r}")
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))


class Connection(asyncio.Protocol):
    """One connection; one request at a time.

    Attributes:
        reusable: the last answer is complete and the server keeps the connection open.
        answered: a byte of the current answer has come.
        idle_since: when the last answer ended, in seconds of the loop's clock.
    """

    def __init__(self) -> None:
        self.reusable = False
        self.answered = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._sink: Sink | None = None
        self._done: asyncio.Future[Response] | None = None
        self._response: Response | None = None
        self._left: int | None = None  # bytes of the body still to come; None where only the end of the connection tells
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    async def request(self, head: bytes, body: bytes, sink: Sink) -> Response:
        """Send a request and hand on the answer's body as it comes; returns when all of it has.

        Raises:
            HttpFailed: the connection broke first.
        """
        assert self._transport is not None
        self.reusable = self.answered = False
        self._sink = sink
        self._response = None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        try:
            return await self._done
        finally:
            self._done = self._sink = None

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.answered = True
        self._buffer += data
        try:
            while self._buffer and self._done is not None and not self._done.done() and self._advance(now):
                pass
        except ValueError as error:
            self._fail(f"the server does not speak HTTP/1.1: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._response is not None and self._left is None and not self._chunked and exc is None:
            self._finish(False)
        self._fail(f"the server closed the connection{f' ({exc})' if exc else ''}")

    def _advance(self, now: Nanos) -> bool:
        """Consume one piece of the buffer; False where it needs more."""
        if self._response is None:
            return self._read_head()
        if self._chunked:
            return self._read_chunk(now)
        size = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        self._emit(self._take(size), now)
        if self._left is not None:
            self._left -= size
            if self._left == 0:
                self._finish(True)
        return bool(self._buffer)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = self._take(end + 4).decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"its answer begins with {lines[0][:40]!r}")
        status = int(rest[:3])
        if status < 200:
            return True
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        self._response = Response(status, headers)
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._left = int(headers["content-length"]) if "content-length" in headers and not self._chunked else None
        if status in (204, 304) or self._left == 0:
            self._finish(True)
        return True

    def _read_chunk(self, now: Nanos) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(self._buffer[:end].split(b";")[0], 16)
        if size == 0:
            trailer = self._buffer.find(b"\r\n\r\n", end)
            if trailer < 0:
                return False
            self._take(trailer + 4)
            self._finish(True)
            return False
        if len(self._buffer) < end + 2 + size + 2:
            return False
        self._take(end + 2)
        self._emit(self._take(size), now)
        self._take(2)
        return True

    def _take(self, size: int) -> bytes:
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def _emit(self, piece: bytes, now: Nanos) -> None:
        if self._sink is not None:
            self._sink(piece, now)

    def _finish(self, keep: bool) -> None:
        assert self._response is not None
        self.reusable = keep and self._response.headers.get("connection", "").lower() != "close" and not self._buffer
        self.idle_since = asyncio.get_running_loop().time()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpFailed(why))


class Client:
    """Connections to one address. Idle ones are used again; there are as many as there are requests in flight.

    Args:
        address: where to.
        api_key: sent as a bearer token.
    """

    def __init__(self, address: Address, api_key: str | None) -> None:
        self._address = address
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None
        self._host_ip: str | None = None
        self._headers = f"Host: {address.host_header}\r\nAccept: text/event-stream, application/json\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def send(self, method: str, path: str, body: bytes, sink: Sink) -> Response:
        """One request. A connection that turns out to have been closed while it was idle is replaced; nothing else is retried.

        Raises:
            HttpFailed: no connection, or it broke.
        """
        head = (
            f"{method} {self._address.prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._on(connection, head, body, sink)
            except HttpFailed:
                if connection.answered:
                    raise
        return await self._on(await self._connect(), head, body, sink)

    async def _on(self, connection: Connection, head: bytes, body: bytes, sink: Sink) -> Response:
        try:
            response = await connection.request(head, body, sink)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _take_idle(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        address = self._address
        try:
            if self._host_ip is None:  # asked once: a look-up takes a thread
                self._host_ip = str((await loop.getaddrinfo(address.host, address.port, type=SOCK_STREAM))[0][4][0])
            name = address.host if self._tls else None
            made = await loop.create_connection(Connection, self._host_ip, address.port, ssl=self._tls, server_hostname=name)
            return made[1]
        except (OSError, UnicodeError) as error:  # the latter of a name that is none
            why = error.strerror if isinstance(error, OSError) else "no host can have this name"
            raise HttpFailed(f"cannot connect to {address.host}:{address.port}: {why or error}") from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class EventParser:
    """Server-sent events out of pieces that may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that is complete now. Comments and other fields are dropped."""
        text = (self._rest + piece).replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        found = []
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found
