"""The gRPC service by name, and how its connections are kept honest. Knows no replica and no head."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from squall.live.rpc.generated import squall_pb2 as pb

SERVICE = "squall.v1.Worker"
SESSION = f"/{SERVICE}/Session"

MAX_MESSAGE = 256 << 20
"""Bytes. The largest message is a prompt; bulk data never travels here."""

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),  # servers only: our clients' pings are welcome
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # workers are ours, not the web
]
"""A peer that is gone without a word (cable, power) is noticed within ten seconds."""

Session = Callable[[AsyncIterator[pb.ToReplica], "grpc.aio.ServicerContext[pb.ToReplica, pb.FromReplica]"], Awaitable[None]]


def handler(session: Session) -> grpc.GenericRpcHandler[Any, Any]:
    """The server's side of the service."""
    method = grpc.stream_stream_rpc_method_handler(
        session,
        request_deserializer=pb.ToReplica.FromString,
        response_serializer=pb.FromReplica.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Session": method})


def session_of(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable[pb.ToReplica, pb.FromReplica]:
    """The client's side of the service."""
    return channel.stream_stream(
        SESSION, request_serializer=pb.ToReplica.SerializeToString, response_deserializer=pb.FromReplica.FromString
    )
