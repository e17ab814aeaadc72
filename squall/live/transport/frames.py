"""What two peers say to each other, byte for byte. Knows sockets, not what regions are for.

A frame is a header (magic, version, kind, length) and a body: a message in MessagePack, or raw bytes whose number both sides
know already. Whatever does not fit (another magic or version, a length that nobody agreed on, a message that cannot be
read) ends the connection: after it, no byte can be trusted.

    client                          server
                                    Challenge(nonce, node, version)
    Hello(proof, nonce, node)       Welcome(proof) | Refused            both prove that they know the token
    Open(region, fingerprint)       Opened(size, checksums) [+ descriptor, a device's memory, or what NIXL must know] | Refused
    Read(region, segments)          Wait* then Data | Held | Refused | Failed
    Sum(region, section)            SumIs | Wait | Refused | Failed
    Write(region, segments) + Data  Done | Refused
    Notify(payload)                 Done
"""

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from squall.errors import PeerLost, PeerRefused
from squall.live.transport.device import Lent
from squall.live.transport.memory import remainder
from squall.live.transport.nixl import Held as NixlHeld
from squall.live.transport.throttle import PIECE, Throttle

VERSION = 3
MAX_MESSAGE = 8 << 20
"""Bytes of a message; the longest list KV blocks."""

MAX_GREETING = 4096
"""Bytes of one from whoever has not proved anything yet."""

_MAGIC = b"SQ"
_HEADER = struct.Struct(">2sBBQ")
_MESSAGE, _DATA = 0, 1
_MAX_VECTORS = 512


class Message(Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """One of those below."""


class Challenge(Message, frozen=True):
    nonce: bytes
    node: str


class Hello(Message, frozen=True):
    proof: bytes
    nonce: bytes
    node: str


class Welcome(Message, frozen=True):
    proof: bytes


class Refused(Message, frozen=True):
    """No, and it will stay no."""

    reason: str


class Open(Message, frozen=True):
    """`by_nixl`: NIXL is to fetch the bytes; `by_device`: they are for a device of this kind, which can map another one's."""

    region: str
    fingerprint: str
    by_nixl: bool = False
    by_device: str = ""


class Opened(Message, frozen=True):
    """`by_memory`: the region's descriptor came along, and bytes are not sent but read from it; `nixl`: by NIXL, from there;
    `lent`: they are copied from these devices. Whoever cannot map them opens the region again, not `by_device`."""

    num_bytes: int
    sums: dict[str, int]
    by_memory: bool
    nixl: NixlHeld | None = None
    lent: tuple[Lent, ...] = ()


class Read(Message, frozen=True):
    """`verified`: only what has matched its checksum; without it, a chunk that has just come in is passed on."""

    region: str
    segments: list[tuple[int, int]]
    verified: bool = False


class Wait(Message, frozen=True):
    """Not here yet; `path` names the nodes that it waits for, nearest first. Whoever finds itself there waits for itself."""

    path: list[str]


class Held(Message, frozen=True):
    """The bytes may be taken: from the region's descriptor, from a device, or by NIXL."""


class Failed(Message, frozen=True):
    """It will not come here any more."""

    reason: str


class Sum(Message, frozen=True):
    region: str
    section: str


class SumIs(Message, frozen=True):
    value: int


class Write(Message, frozen=True):
    region: str
    segments: list[tuple[int, int]]


class Notify(Message, frozen=True):
    payload: bytes


class Done(Message, frozen=True):
    """Taken in."""


AnyMessage = (
    Challenge | Hello | Welcome | Refused | Open | Opened | Read | Wait | Held | Failed | Sum | SumIs | Write | Notify | Done
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class MalformedFrame(PeerLost):
    """What came is not of this protocol."""


def proof(token: str, side: str, nonce: bytes) -> bytes:
    """What only somebody who knows the token can say to `nonce`. `side` keeps one's own proof from being sent back."""
    return hmac.digest(token.encode(), side.encode() + nonce, "sha256")


def proves(given: bytes, token: str, side: str, nonce: bytes) -> bool:
    return hmac.compare_digest(given, proof(token, side, nonce))


def nonce() -> bytes:
    return secrets.token_bytes(16)


# -- sending


def send(sock: socket.socket, message: AnyMessage, fd: int | None = None) -> None:
    """Raises OSError."""
    body = _encoder.encode(message)
    frame = _HEADER.pack(_MAGIC, VERSION, _MESSAGE, len(body)) + body
    if fd is None:
        sock.sendall(frame)
    else:
        sent = socket.send_fds(sock, [frame], [fd])
        sock.sendall(frame[sent:])


def send_data(sock: socket.socket, views: Sequence[memoryview], throttle: Throttle | None = None) -> None:
    """All of `views` as one frame. Raises OSError."""
    total = sum(map(len, views))
    sock.sendall(_HEADER.pack(_MAGIC, VERSION, _DATA, total))
    if throttle is None and len(views) == 1:
        sock.sendall(views[0])
        return
    left = list(views)
    while left:
        piece = _piece(left, PIECE if throttle is None else throttle.piece)
        if throttle is not None:
            throttle.take(sum(map(len, piece)))
        left = remainder(left, sock.sendmsg(piece)) if throttle is None else _all(sock, left, piece)


def _piece(views: list[memoryview], room: int) -> list[memoryview]:
    """The first `room` bytes, or as many as one call takes."""
    piece: list[memoryview] = []
    for view in views[:_MAX_VECTORS]:
        piece.append(view[:room])
        room -= len(piece[-1])
        if not room:
            break
    return piece


def _all(sock: socket.socket, views: list[memoryview], piece: list[memoryview]) -> list[memoryview]:
    total = sum(map(len, piece))
    while piece:
        piece = remainder(piece, sock.sendmsg(piece))
    return remainder(views, total)


# -- receiving


def receive(sock: socket.socket, most: int = MAX_MESSAGE) -> AnyMessage:
    """The next message, of `most` bytes.

    Raises:
        MalformedFrame: it is none. PeerLost: the connection has ended.
        OSError: TimeoutError above all.
    """
    return _message(sock, _exactly(sock, _HEADER.size), most)


def receive_with_fd(sock: socket.socket) -> tuple[AnyMessage, int | None]:
    """As `receive`, on a Unix socket, with the descriptor that came along. The caller closes it."""
    first, fds, _, _ = socket.recv_fds(sock, _HEADER.size, 4)
    for extra in fds[1:]:
        os.close(extra)
    fd = fds[0] if fds else None
    try:
        if not first:
            raise PeerLost("the peer ended the connection")
        return _message(sock, first + _exactly(sock, _HEADER.size - len(first))), fd
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise


def receive_data(sock: socket.socket, views: Sequence[memoryview]) -> Message | None:
    """Fill `views` from one frame of data. Returns the message that came instead, if one did. Raises as `receive`."""
    header = _exactly(sock, _HEADER.size)
    kind, length = _parse(header)
    if kind == _MESSAGE:
        return _message(sock, header)
    if length != (wanted := sum(map(len, views))):
        raise MalformedFrame(f"the peer sends {length} bytes where {wanted} were asked for")
    left = list(views)
    while left:
        done = sock.recv_into(left[0]) if len(left) == 1 else sock.recvmsg_into(left[:_MAX_VECTORS])[0]
        if not done:
            raise PeerLost("the peer ended the connection in the middle of its data")
        left = remainder(left, done)
    return None


def _message(sock: socket.socket, header: bytes, most: int = MAX_MESSAGE) -> AnyMessage:
    kind, length = _parse(header)
    if kind != _MESSAGE or length > most:
        raise MalformedFrame(f"the peer sends a frame of kind {kind} and {length} bytes where a message was due")
    try:
        return _decoder.decode(_exactly(sock, length))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"the peer sends a message that cannot be read: {error}") from None


def _parse(header: bytes) -> tuple[int, int]:
    magic, version, kind, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise MalformedFrame("the peer does not speak squall's transport")
    if version != VERSION:
        raise PeerRefused(
            f"the peer speaks version {version} of the transport, this is version {VERSION}; install the same squall"
        )
    return kind, length


def _exactly(sock: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while len(view):
        done = sock.recv_into(view)
        if not done:
            raise PeerLost("the peer ended the connection")
        view = view[done:]
    return bytes(buffer)
