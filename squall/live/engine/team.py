"""The processes of a tensor-parallel replica besides rank 0, and what is said to them. Knows no tensors and imports no torch.

Rank 0 is the worker. It starts the others early, so that all import at once, and tells them over a socket what to compute; they
answer once when they are set up, and after that only when something is wrong. A rank ends when its socket does, so that none
outlives rank 0, however that ends; and rank 0 is told at once when one of them is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from squall.errors import ReplicaFailed
from squall.live.transport.device import Lent

TIMEOUT_S = 30.0
"""How long a rank may take for its part of a step, or not read what it is told."""

SETUP_S = 120.0
"""Importing torch from a cold, slow disk is the longest part."""

_END_S = 2.0
_MAX_FDS = 2
_HEADER = struct.Struct("<I")


class Setup(Struct, frozen=True, tag=True):
    """The first message. With it come descriptors: of the memory that the rank's weights arrive in, and on a CPU of all KV; none
    where both are lent.

    Attributes:
        rank, size: of the tensor-parallel replica.
        port: where rank 0 waits for the others.
        weights, kv: the rank's memory on its device, where rank 0 can lend it.
    """

    rank: int
    size: int
    port: int
    timeout_s: float
    folder: str
    device: str
    dtype: str
    threads: int
    native: bool
    max_model_len: int
    num_blocks: int
    block_size: int
    weights: Lent | None = None
    kv: Lent | None = None


class Embed(Struct, frozen=True, tag=True):
    """The residual stream before the first layer, of these tokens: int64."""

    tokens: bytes


class Packed(Struct, frozen=True):
    """A batch (see `Batch`) without its tokens: arrays as bytes; spans as start, stop, offset and blocks."""

    positions: bytes
    slots: bytes
    tables: bytes
    lengths: bytes
    longest: int
    spans: tuple[tuple[int, int, int, bytes], ...]


class Layers(Struct, frozen=True, tag=True):
    """Layers [first, last): of the batch before when `batch` is None, on what the rank has when `hidden` is."""

    first: int
    last: int
    batch: Packed | None = None
    hidden: bytes | None = None


class Logits(Struct, frozen=True, tag=True):
    """Scores of these rows (int64; all when None) of the residual stream after the last layer."""

    rows: bytes | None = None
    hidden: bytes | None = None


Told = Setup | Embed | Layers | Logits


class Ready(Struct, frozen=True, tag=True):
    """Set up, but for meeting the others."""


class Broken(Struct, frozen=True, tag=True):
    """It cannot go on, and ends."""

    reason: str


Said = Ready | Broken


def send(sock: socket.socket, message: Told | Said, fds: Sequence[int] = ()) -> None:
    """Raises OSError; TimeoutError where the other end does not read."""
    data = msgspec.msgpack.encode(message)
    header = _HEADER.pack(len(data))
    if not fds:
        sock.sendall(header + data)
    else:
        socket.send_fds(sock, [header], fds)
        sock.sendall(data)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, undecoded, and descriptors that came with it. Raises EOFError at the end, OSError."""
    header, fds, _, _ = socket.recv_fds(sock, _HEADER.size, _MAX_FDS)
    header += _exactly(sock, _HEADER.size - len(header))
    return _exactly(sock, _HEADER.unpack(header)[0]), list(fds)


def _decode_said(data: bytes) -> Said:
    said: Said = msgspec.msgpack.decode(data, type=Said)
    return said


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    done = 0
    while done < count:
        got = sock.recv_into(memoryview(data)[done:])
        if not got:
            raise EOFError
        done += got
    return bytes(data)


class Team:
    """Ranks 1 to `size` - 1 of one replica.

    Args:
        size: of the replica.
        timeout_s: see TIMEOUT_S.

    Attributes:
        on_lost: told once why the replica cannot go on, in a thread of the team; not after `close`.
        lost: why; None as long as it can.
    """

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.on_lost: Callable[[ReplicaFailed], None] = lambda _: None
        self.lost: ReplicaFailed | None = None
        self._members: list[_Member] = []
        self._changed = threading.Condition()
        self._closed = False

    def start(self) -> None:
        """Start the processes; returns at once."""
        for rank in range(1, self.size):
            member = _Member(rank)
            self._members.append(member)
            threading.Thread(target=self._watch, args=(member,), name=f"rank-{rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    def set_up(self, setups: Sequence[tuple[Setup, Sequence[int]]]) -> None:
        """Tell each rank, from 1 on, what it is, and hand it its memory."""
        for member, (setup, fds) in zip(self._members, setups, strict=True):
            self._send(member, setup, fds)

    def until_ready(self, timeout_s: float = SETUP_S) -> None:
        """Returns when all can be met. Raises ReplicaFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost or all(member.ready for member in self._members), timeout_s)
            if self.lost is not None:
                raise self.lost
            if late := [member.rank for member in self._members if not member.ready]:
                raise ReplicaFailed(f"rank {late[0]} of {self.size} was not ready within {timeout_s:g} s")

    def tell(self, message: Told) -> None:
        """All of them. Raises ReplicaFailed."""
        if self.lost is not None:
            raise self.lost
        for member in self._members:
            self._send(member, message)

    def explain(self, error: Exception, patience_s: float = 1.0) -> ReplicaFailed:
        """Why a call that all ranks make together has failed: a rank that is gone, if one is, else what the call said."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, patience_s)
        if self.lost is not None:
            return self.lost
        return ReplicaFailed(f"the ranks of the replica lost touch: {' '.join(str(error).split())}")

    def close(self) -> None:
        """End the processes. Idempotent."""
        with self._changed:
            self._closed = True
        for member in self._members:
            member.end()

    def _send(self, member: _Member, message: Told, fds: Sequence[int] = ()) -> None:
        try:
            member.sock.settimeout(self.timeout_s)
            send(member.sock, message, fds)
        except TimeoutError:
            raise ReplicaFailed(f"rank {member.rank} of {self.size} has not read for {self.timeout_s:g} s") from None
        except OSError as error:
            raise self.explain(error) from None

    def _watch(self, member: _Member) -> None:
        reason: str | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                said = _decode_said(receive(member.answers)[0])
                if isinstance(said, Broken):
                    reason = said.reason
                    continue
                with self._changed:
                    member.ready = True
                    self._changed.notify_all()
        self._lose(member, reason or member.fate())

    def _lose(self, member: _Member, reason: str) -> None:
        with self._changed:
            if self._closed or self.lost is not None:
                return
            self.lost = ReplicaFailed(f"rank {member.rank} of {self.size} {reason}")
            self._changed.notify_all()
        self.on_lost(self.lost)


class _Member:
    """One process, and our ends of its sockets: what is told has a deadline, what is answered has none."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ready = False
        self.sock, told = socket.socketpair()
        self.answers, said = socket.socketpair()
        with told, said:
            fds = told.fileno(), said.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "squall.live.engine.rank", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,  # our own standard output has a reader who expects one line
            )

    def fate(self) -> str:
        """How it ended; its socket has."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def end(self) -> None:
        """Its socket first: it ends by itself, unless it hangs."""
        for sock in (self.sock, self.answers):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def watch_leader(sock: socket.socket, put: Callable[[Told, list[int]], None]) -> None:
    """In a rank: hand on what it is told; end the process with rank 0, whatever it is in the middle of."""
    try:
        while True:
            data, fds = receive(sock)
            put(msgspec.msgpack.decode(data, type=Told), fds)
    except (EOFError, OSError):
        os._exit(0)
