"""The gRPC service by name, and how its connections are kept honest. Knows no replica and no head."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from squall.errors import PeerLost
from squall.live.rpc.generated import squall_pb2 as pb
from squall.live.transport.frames import nonce, proof, proves

SERVICE = "squall.v1.Worker"
SESSION = f"/{SERVICE}/Session"

MAX_MESSAGE = 64 << 20
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

NONCE, PROOF = "squall-nonce-bin", "squall-proof-bin"
HEAD, WORKER = "head", "worker"
"""The two sides of a proof."""

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


# -- both ends prove that they know the fleet's token (see `Open` in squall.proto)


class Introduction:
    """The head's side of one call.

    Args:
        token: what all workers of the fleet know.

    Attributes:
        metadata: of the call.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = nonce()
        self.metadata = ((NONCE, self._nonce),)

    async def answer(self, call: grpc.aio.StreamStreamCall[pb.ToReplica, pb.FromReplica]) -> bytes:
        """Our proof, once the worker has given its own. Raises PeerLost where it cannot."""
        said = dict(await call.initial_metadata() or ())
        if not proves(bytes(said.get(PROOF, b"")), self._token, WORKER, self._nonce):
            raise PeerLost("what listens there is no worker of this fleet: it does not know the token")
        return proof(self._token, HEAD, bytes(said.get(NONCE, b"")))


async def introduce(context: grpc.aio.ServicerContext[pb.ToReplica, pb.FromReplica], token: str) -> bytes:
    """The worker's side: prove ourselves; returns the nonce that `Open` has to answer."""
    asked = dict(context.invocation_metadata() or ()).get(NONCE, b"")
    ours = nonce()
    await context.send_initial_metadata(((NONCE, ours), (PROOF, proof(token, WORKER, bytes(asked)))))
    return ours


def answers(given: bytes, token: str, ours: bytes) -> bool:
    """Whether `Open` proved that it knows the token."""
    return proves(given, token, HEAD, ours)
