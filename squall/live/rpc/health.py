"""The standard `grpc.health.v1.Health` of a worker. Knows no replica.

It answers anybody, so it reads nothing of what anybody sends: whatever could be asked for has one and the same status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse as Status

SERVICE = "grpc.health.v1.Health"


class Health:
    """The worker's."""

    def __init__(self) -> None:
        self._serves = False
        self._changed = asyncio.Event()

    def set(self, *, serves: bool) -> None:
        self._serves = serves
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods = {
            name: grpc.stream_stream_rpc_method_handler(method, response_serializer=Status.SerializeToString)
            for name, method in (("Check", self._check), ("Watch", self._watch))
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _check(self, _unread: Any, _context: Any) -> AsyncIterator[Status]:
        yield self._status()

    async def _watch(self, _unread: Any, _context: Any) -> AsyncIterator[Status]:
        while True:
            changed = self._changed
            yield self._status()
            await changed.wait()

    def _status(self) -> Status:
        return Status(status=Status.SERVING if self._serves else Status.NOT_SERVING)
