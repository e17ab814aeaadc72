"""The ASGI application: which path leads to which endpoint, and how whatever goes wrong is answered.

    app = create_app(frontend, config)

Knows routes and errors. What the endpoints do is in `service.py`; everything behind them is a `Frontend`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from squall.config import Config
from squall.live.api.errors import ClientGone, invalid, is_bug, translate
from squall.live.api.exchange import JSON, Exchange
from squall.live.api.fleet import FleetService
from squall.live.api.gate import Keys, RequestIds
from squall.live.api.generate import break_off
from squall.live.api.metrics import Exporter, build_metrics, build_registry
from squall.live.api.service import Service
from squall.live.api.several import Part, Several
from squall.live.frontend import Frontend

if TYPE_CHECKING:
    from squall.live.tracing import Tracer

MAX_BODY_BYTES = 8 << 20
"""The largest request body that is read."""

_log = logging.getLogger(__name__)

Handle = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """An endpoint as an ASGI application: errors become answers here, and only here.

    Args:
        handle: answers one exchange, or raises.
    """

    def __init__(self, handle: Handle, max_body_bytes: int) -> None:
        self._handle = handle
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._max_body_bytes)
        try:
            await self._handle(exchange)
        except ClientGone:
            _log.info("request %s: the client went away", exchange.request_id)
        except Exception as error:
            if is_bug(error):
                _log.exception("request %s failed", exchange.request_id)
            await report(exchange, error)


async def report(exchange: Exchange, error: Exception) -> None:
    """Answer with the error, or, where a stream has begun, end it with the error."""
    if exchange.status is None:
        seen = translate(error)
        await exchange.reply(seen.status, seen.body(), [JSON, *seen.response_headers()])
    else:
        await break_off(exchange, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such route, wrong method) in the shape of all others."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    what = f"{request.method} {request.url.path}"[:200]
    if error.status_code == 405:
        message = f"{what}: this path takes {headers.get('Allow', 'other methods')}"
    elif error.status_code == 404:
        message = f"{what}: no such path"
    else:
        message = f"{what}: {error.detail}"
    seen = invalid(message, status=error.status_code).error
    return Response(seen.body(), error.status_code, headers={**headers, "x-should-retry": "false"}, media_type="application/json")


def create_app(
    frontend: Frontend,
    config: Config,
    tracer: Tracer | None = None,
    *,
    others: Sequence[tuple[Frontend, Config]] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> ASGIApp:
    """The OpenAI-compatible endpoint of `frontend`.

    Args:
        frontend: everything behind HTTP.
        config: `serve.api_keys`, `serve.cors_origins`, `serve.vllm_metrics` and `replica.block_size` are read.
        tracer: makes a span of every generation request; None makes none.
        others: the same of more models; of their `[serve]` nothing is read.
        max_body_bytes: larger bodies are refused with 413.
    """
    served = [(frontend, config), *others]
    metrics = [build_metrics(each) for each, _ in served]
    registry = build_registry(
        [
            Exporter(counted, each, of.replica.block_size, config.serve.vllm_metrics)
            for counted, (each, of) in zip(metrics, served, strict=True)
        ]
    )
    parts = [
        Part(each, Service(each, counted, registry, tracer), FleetService(each))
        for counted, (each, _) in zip(metrics, served, strict=True)
    ]
    service: Service | Several = parts[0].service if len(parts) == 1 else Several(parts)
    fleet: FleetService | Several = parts[0].fleet if isinstance(service, Service) else service
    table: list[tuple[str, tuple[str, ...], Handle]] = [
        ("/v1/chat/completions", ("POST",), service.chat_completions),
        ("/v1/completions", ("POST",), service.completions),
        ("/v1/models", ("GET",), service.models),
        ("/v1/models/{id:path}", ("GET",), service.model),
        ("/tokenize", ("POST",), service.tokenize),
        ("/detokenize", ("POST",), service.detokenize),
        ("/health", ("GET",), service.health),
        ("/livez", ("GET",), service.alive),
        ("/readyz", ("GET",), service.accepting),
        ("/ping", ("GET", "POST"), service.health),
        ("/version", ("GET",), service.version),
        ("/load", ("GET",), service.load),
        ("/metrics", ("GET",), service.metrics),
        ("/fleet", ("GET",), fleet.status),
        ("/fleet/scale", ("POST",), fleet.scale),
    ]
    app = Starlette(
        routes=[Route(path, Endpoint(handle, max_body_bytes), methods=list(methods)) for path, methods, handle in table],
        middleware=[*cors(config.serve.cors_origins), Middleware(RequestIds), Middleware(Keys, config.serve.api_keys)],
        exception_handlers={HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False
    return app


def cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Which web pages may call the endpoint from a browser: none, unless they are named."""
    if not origins:
        return []
    everything = ("*",)
    return [
        Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=everything, allow_headers=everything, allow_credentials=True,
            expose_headers=("x-request-id",),
        )
    ]  # fmt: skip
