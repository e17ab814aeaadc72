"""Clients' connections, before and between requests: how many there may be, and what each must say how soon.

uvicorn sees to none of it, and says nothing where no descriptor is free: whoever opened connections and kept silent held them
for ever, and took them from everybody else. Knows no paths and no answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from squall.live.api.errors import ApiError, invalid
from squall.live.descriptors import allow_files

HEAD_S = 20.0
"""How long a client may take from its connection, or the first byte of a request, to the end of the headers."""

MAX_HEAD = 64 * 1024
"""Bytes of a request's line and headers."""

SPARE_FILES = 256
"""Descriptors that clients do not get: workers' sockets and pipes, logs, a probe's connection."""


class Connections:
    """Makes uvicorn's protocol for each connection.

    Args:
        limit: how many there may be; those past it are told so and closed.
        say: tells a person, once until there is room again.
    """

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.limit = limit
        self._say = say
        self._is_full = False

    def __call__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> Connection:
        return Connection(self, config, server_state, app_state, _loop)

    def has_room(self, num: int) -> bool:
        """Whether one of `num` connections may stay."""
        full = num > self.limit
        if full and not self._is_full:
            self._say(
                f"{self.limit} connections are open, as many as the limit on open files allows (ulimit -n); more are refused"
            )
        self._is_full = full or (self._is_full and num > self.limit * 0.9)
        return not full


class Connection(HttpToolsProtocol):
    """One client's. What is refused here is an OpenAI error object like any other."""

    def __init__(
        self, door: Connections, config: Config, server_state: ServerState, app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:  # fmt: skip
        super().__init__(config, server_state, app_state, loop)
        self._door = door
        self._has_begun = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._door.has_room(len(self.connections)):
            self._await_head()
        else:
            self._refuse(ApiError(503, "service_unavailable", "too many connections are open", "no_capacity"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._deadline is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._deadline is not None and self._head_bytes > MAX_HEAD:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()
        self._has_begun = True

    def on_headers_complete(self) -> None:
        self._end_of_head()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:  # they came all at once
            raise self._refuse_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(invalid(f"this is no HTTP request that can be read: {msg}").error)

    def _await_head(self) -> None:
        self._has_begun = False
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_S, self._too_late)

    def _end_of_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        """Whoever has begun is told; a connection on which nothing was said is closed as one kept alive is."""
        if self._has_begun:
            self._refuse(invalid(f"the headers did not come within {HEAD_S:g} s", status=408).error)
        else:
            self._end_of_head()
            self.transport.close()

    def _refuse_head(self) -> Exception:
        """What is returned, raised within the parser, ends it."""
        refused = invalid(f"the headers are larger than {MAX_HEAD} bytes", status=431)
        self._refuse(refused.error)
        return refused

    def _refuse(self, error: ApiError) -> None:
        self._end_of_head()
        body = error.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
        lines += [b"%s: %s" % header for header in (*headers, *error.response_headers())]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()


def room_for_clients() -> int:
    """How many connections there may be: as many as files may be open, but for what else is."""
    num = allow_files()
    return max(num - SPARE_FILES, num // 2)
