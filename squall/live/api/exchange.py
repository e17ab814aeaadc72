"""One HTTP request and its answer, close to ASGI: a streamed chunk costs one `send`.

Knows bodies, size limits, headers and that clients leave. Does not know what is asked or answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from squall.live.api.errors import ClientGone, invalid

JSON = (b"content-type", b"application/json")
BODY_S = 60.0
"""How long a client may take to send its body."""

EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """
    Attributes:
        status: of the answer; None until its headers are sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.status: int | None = None
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._object: dict[str, Any] | Exception | None = None

    @property
    def request_id(self) -> str:
        return str(self.scope.get("squall.request_id", ""))

    @property
    def path_params(self) -> dict[str, str]:
        return self.scope.get("path_params") or {}

    async def json_object(self) -> dict[str, Any]:
        """The body, as a JSON object; the same whoever asks, and however often.

        Raises:
            Refusal: 400, 408, 413 or 415.
            ClientGone: before all of it came.
        """
        if self._object is None:
            try:
                self._object = await self._read_object()
            except Exception as error:
                self._object = error
        if isinstance(self._object, Exception):
            raise self._object
        return self._object

    async def _read_object(self) -> dict[str, Any]:
        media = self.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media != "application/json" and not media.endswith("+json"):
            raise invalid(f"Content-Type: expected application/json, got {media[:60]!r}", status=415)
        try:
            async with asyncio.timeout(BODY_S):
                raw = await self.body()
        except TimeoutError:
            raise invalid(
                f"the body did not come within {BODY_S:g} s", status=408, headers=((b"connection", b"close"),)
            ) from None
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise invalid("the body is nested too deeply", code="invalid_json") from None
        if not isinstance(body, dict):
            raise invalid('the body must be a JSON object, such as {"model": ...}', code="invalid_json")
        return body

    async def body(self) -> bytes:
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 19:
            self._check_size(int(declared))
        parts = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            self._check_size(size)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise invalid(f"the body is larger than {self._max_body_bytes} bytes", status=413)

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, but cancel it as soon as the client closes its connection.

        Raises:
            ClientGone: it did.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._disconnected())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (JSON,)) -> None:
        """The whole answer at once."""
        self.status = status
        length = (b"content-length", str(len(body)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": body})

    async def reply_json(self, value: Any) -> None:
        await self.reply(200, msgspec.json.encode(value))

    async def open_events(self) -> None:
        """The headers of a stream of server-sent events."""
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": list(EVENTS)})

    async def write(self, events: bytes, *, more: bool = True) -> None:
        """A piece of the stream; the last one where there is no `more`.

        Raises:
            ClientGone: the server says so (some keep silent, and only `while_connected` notices).
        """
        try:
            await self._send({"type": "http.response.body", "body": events, "more_body": more})
        except OSError:
            raise ClientGone from None
