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
"""A peer whose machine or network is gone without a word (cable, power) is noticed within ten seconds.

One that only stands still (SIGSTOP) is not, as its kernel goes on answering for it. A head hears it by the silence of a replica,
which says its load twice a second (`client.SILENCE_S`); a worker keeps its session, as its head may go on.
"""

NONCE, PROOF = "squall-nonce-bin", "squall-proof-bin"
HEAD, WORKER = "head", "worker"
"""The two sides of a proof."""

MAX_ASKED = 1024
"""Heads that may be about to prove themselves at a time."""

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


# -- both ends prove that they know the fleet's token (see `Session` in squall.proto)

Metadata = tuple[tuple[str, bytes], ...]


async def introduce(channel: grpc.aio.Channel, token: str) -> Metadata:
    """The head's side: what opens a session, once. Raises PeerLost where no worker of this fleet listens there."""
    ours = nonce()
    call = session_of(channel)(None, wait_for_ready=True, metadata=((NONCE, ours),))
    try:
        said, code = dict(await call.trailing_metadata() or ()), await call.code()
        if code is not grpc.StatusCode.OK:
            raise PeerLost(f"{code.name.lower().replace('_', ' ')}: {await call.details()}")
    finally:
        call.cancel()
    if not proves(bytes(said.get(PROOF, b"")), token, WORKER, ours):
        raise PeerLost("what listens there is no worker of this fleet: it does not know the token")
    asked = bytes(said.get(NONCE, b""))
    return ((NONCE, asked), (PROOF, proof(token, HEAD, asked)))


class Door:
    """The worker's side: nothing that a call brings is read, however large, before its metadata proves that it is a head's.

    Args:
        token: what all workers of the fleet know.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._asked: dict[bytes, None] = {}  # what nobody has answered yet, oldest first

    async def admits(self, context: grpc.aio.ServicerContext[pb.ToReplica, pb.FromReplica]) -> bool:
        """Whether the call goes on. One without a proof is told what to prove, once; a wrong one is aborted."""
        said = dict(context.invocation_metadata() or ())
        theirs = bytes(said.get(NONCE, b""))
        if PROOF not in said:
            context.set_trailing_metadata(((NONCE, self._ask()), (PROOF, proof(self._token, WORKER, theirs))))
            return False
        known = theirs in self._asked
        self._asked.pop(theirs, None)
        if not (known and proves(bytes(said[PROOF]), self._token, HEAD, theirs)):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "only a head that knows this fleet's token gets a session here")
        return True

    def _ask(self) -> bytes:
        while len(self._asked) >= MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        ours = nonce()
        self._asked[ours] = None
        return ours
