"""What every request passes before it reaches its endpoint: it gets an id, and its key is looked at.

Knows headers and paths. Does not know what the endpoints do.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from squall.live.api.errors import invalid
from squall.live.api.exchange import JSON, Exchange

OPEN_PATHS = ("/health", "/livez", "/readyz", "/ping", "/version", "/load", "/metrics", "/v1/models")
"""Served without a key: probes, scrapes, and what is served here."""

_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """Gives every response an `x-request-id`: the client's own where it is harmless, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        scope["squall.request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        return await self._app(scope, receive, send_with_id)


class Keys:
    """Lets a request in that carries one of `keys`, as a bearer token or as X-Api-Key. Without keys, everyone."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and not self._is_open(scope["path"]) and not self._knows(Headers(scope=scope)):
            error = invalid(
                "wrong or missing API key; send it as 'Authorization: Bearer KEY'",
                status=401, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),),
            ).error  # fmt: skip
            return await Exchange(scope, receive, send, 0).reply(401, error.body(), [JSON, *error.response_headers()])
        return await self._app(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in OPEN_PATHS or path.startswith("/v1/models/")

    def _knows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Every key is compared, in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(given.encode(), key) for key in self._keys) > 0
