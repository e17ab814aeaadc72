"""The calling end of a connection: over TCP bytes come in frames, over a Unix socket they are read from the peer's memory, its
device's where both ends have one of a kind that maps another's.

With NIXL a TCP connection carries the questions, and NIXL the bytes. Knows the protocol, not what regions are for.
"""

import contextlib
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from squall.errors import ConfigError, PeerLost, PeerRefused, TransferFailed
from squall.live.transport import frames
from squall.live.transport.device import DeviceMemory, Lent, Mapped, Segment, Unreachable
from squall.live.transport.frames import AnyMessage, Message
from squall.live.transport.memory import read_into, write_from
from squall.live.transport.nixl import INSTALL, NixlAgent
from squall.live.transport.region import Region

BUFFER = 4 << 20
"""Bytes that the system keeps for a socket."""

QUIET_S = 30
"""After so much silence the system asks whether the peer's machine is still there, and after three questions in vain says so:
whoever goes without a word would otherwise keep its connection, of which there are not many, for ever."""

T = TypeVar("T")


def dial(address: str, patience_s: float) -> socket.socket:
    """A connection to "tcp://host:port", "nixl://host:port" or "shm://name" (this machine). Raises PeerLost, ConfigError."""
    kind, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        if kind in ("tcp", "nixl") and host and port.isdigit():
            sock = socket.create_connection((host.strip("[]"), int(port)), patience_s)
        elif kind == "shm" and rest:
            sock = _dial_here("\0" + rest, patience_s)
        else:
            raise ConfigError(f"peer address {address!r}: expected tcp://host:port, nixl://host:port or shm://name")
    except (OSError, OverflowError) as error:
        raise PeerLost(f"{address}: cannot be reached ({_said(error)})") from None
    tune(sock)
    return sock


def _dial_here(name: str, patience_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(patience_s)
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """As bulk transfers want it: large buffers, no small frame waits for company, and a peer that has vanished is noticed."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", QUIET_S), ("TCP_KEEPINTVL", QUIET_S), ("TCP_KEEPCNT", 3)):
            if (which := getattr(socket, name, None)) is not None:  # a system may have other names for them
                sock.setsockopt(socket.IPPROTO_TCP, which, value)


class SocketLink:
    """See `Link`.

    Args:
        address: of the peer.
        node, token: who we are, and what both must know.
        patience_s: of hearing nothing, after which the peer is lost.
        nixl: ours, where there is one.

    Raises PeerLost; ConfigError for an address of no kind that it knows, and for one that needs NIXL where there is none.
    """

    def __init__(self, address: str, node: str, token: str, patience_s: float, nixl: NixlAgent | None = None) -> None:
        self.peer = ""
        self._address = address
        self._node = node
        self._token = token
        self._fds: dict[str, int] = {}
        self._nixl = nixl if address.startswith("nixl://") else None
        self._mapped: dict[str, tuple[DeviceMemory, Mapped]] = {}  # ours, and the peer's
        self._held: dict[str, tuple[str, int]] = {}  # the peer's agent, and where the region begins there
        self._interrupted = False
        if self._nixl is None and address.startswith("nixl://"):
            raise ConfigError(f'peer address {address!r}: needs NIXL here, too: {INSTALL}, and serve.transport = "nixl"')
        self._sock = dial(address, patience_s)

    def greet(self) -> None:
        """Prove to each other that both know the token. Raises PeerLost, PeerRefused."""
        challenge = self._expect(frames.Challenge)
        mine = frames.nonce()
        self._say(frames.Hello(frames.proof(self._token, "client", challenge.nonce), mine, self._node))
        welcome = self._expect(frames.Welcome)
        if not frames.proves(welcome.proof, self._token, "server", mine):
            raise PeerRefused(f"{self._address}: does not know this fleet's token; another program may have its address")
        self.peer = challenge.node

    def open(self, region: str, fingerprint: str = "", into: Region | None = None) -> dict[str, int]:
        device = None if into is None or self._sock.family != socket.AF_UNIX else into.device
        opened = self._open(region, fingerprint, "" if device is None else device.kind)
        if device is not None and opened.lent and not self._map(region, device, opened.lent):
            opened = self._open(region, fingerprint)
        return opened.sums

    def _map(self, region: str, device: DeviceMemory, lent: Sequence[Lent]) -> bool:
        """Whether the peer's device can be reached from ours."""
        try:
            mapped = device.open(lent)
        except Unreachable:
            return False
        if region in self._mapped:
            self._mapped.pop(region)[1].close()
        self._mapped[region] = device, mapped
        return True

    def _open(self, region: str, fingerprint: str, by_device: str = "") -> frames.Opened:
        self._say(frames.Open(region, fingerprint, by_nixl=self._nixl is not None, by_device=by_device))
        if self._sock.family != socket.AF_UNIX:
            opened = self._expect(frames.Opened)
            if self._nixl is not None and (held := opened.nixl) is not None:
                self._held[region] = self._nixl.meet(held), held.address
            return opened
        answer, fd = self._guard(lambda: frames.receive_with_fd(self._sock))
        if fd is not None:
            if (old := self._fds.pop(region, None)) is not None:
                os.close(old)
            self._fds[region] = fd
        return self._checked(answer, frames.Opened)

    def read(
        self, region: str, segments: Sequence[Segment], into: Region, at: Sequence[Segment] | None = None,
        *, verified: bool = False,
    ) -> None:  # fmt: skip
        self.ask(region, segments, verified=verified)
        while self.take(region, segments, into, at) is not None:
            pass

    def ask(self, region: str, segments: Sequence[Segment], *, verified: bool = False) -> None:
        self._say(frames.Read(region, list(segments), verified))

    def take(
        self, region: str, segments: Sequence[Segment], into: Region, at: Sequence[Segment] | None = None
    ) -> tuple[str, ...] | None:
        at = segments if at is None else at
        views = [into.view(segment) for segment in at]
        match self._guard(lambda: frames.receive_data(self._sock, views)):
            case None:
                into.settle(at)
                return None
            case frames.Held() if region in self._mapped:
                self._guard(lambda: self._copy(region, segments, at))
                return None
            case frames.Held() if region in self._fds or region in self._held:
                self._guard(lambda: self._fetch(region, segments, views))
                into.settle(at)
                return None
            case frames.Wait(path):
                return tuple(path)
            case answer:
                self._checked(answer, frames.Held)
                raise self._nonsense(answer)

    def checksum(self, region: str, section: str) -> int | None:
        self._say(frames.Sum(region, section))
        answer = self._guard(lambda: frames.receive(self._sock))
        return None if isinstance(answer, frames.Wait) else self._checked(answer, frames.SumIs).value

    def write(self, region: str, segments: Sequence[Segment], data: Sequence[memoryview]) -> None:
        self._say(frames.Write(region, list(segments)))
        if region in self._fds or region in self._held:
            self._expect(frames.Held)  # the peer allows it before a byte of its memory changes
            self._guard(lambda: self._put(region, segments, data))
            self._say(frames.Done())
        else:
            self._guard(lambda: frames.send_data(self._sock, data))
        self._expect(frames.Done)

    def notify(self, payload: bytes) -> None:
        self._say(frames.Notify(payload))
        self._expect(frames.Done)

    def _fetch(self, region: str, segments: Sequence[Segment], into: Sequence[memoryview]) -> None:
        if region in self._fds:
            read_into(self._fds[region], segments, into)
        elif self._nixl is not None:
            peer, begin = self._held[region]
            self._nixl.read(peer, [(begin + offset, length) for offset, length in segments], into, self._see_that_it_lives)

    def _copy(self, region: str, segments: Sequence[Segment], at: Sequence[Segment]) -> None:
        """From a device whose process lives: what is left of another's memory there nobody vouches for."""
        said = select.poll()
        said.register(self._sock, getattr(select, "POLLRDHUP", select.POLLHUP))
        if said.poll(0):
            raise PeerLost("the peer ended the connection")
        device, mapped = self._mapped[region]
        device.copy(mapped, segments, at)

    def _put(self, region: str, segments: Sequence[Segment], data: Sequence[memoryview]) -> None:
        if region in self._fds:
            write_from(self._fds[region], segments, data)
        elif self._nixl is not None:
            peer, begin = self._held[region]
            self._nixl.write(peer, [(begin + offset, length) for offset, length in segments], data, self._see_that_it_lives)

    def _see_that_it_lives(self) -> None:
        """While NIXL moves bytes: the peer's process holds the other end of our connection for as long as it lives."""
        if self._interrupted:
            raise PeerLost("the call was interrupted")
        said = select.poll()
        said.register(self._sock, select.POLLIN)
        if said.poll(0) and not self._sock.recv(1, socket.MSG_PEEK):
            raise PeerLost("the peer ended the connection")

    def interrupt(self) -> None:
        self._interrupted = True
        with contextlib.suppress(OSError):  # it is closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        for _, mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()
        self._held.clear()

    # -- one message

    def _say(self, message: AnyMessage) -> None:
        self._guard(lambda: frames.send(self._sock, message))

    def _expect(self, kind: type[T]) -> T:
        return self._checked(self._guard(lambda: frames.receive(self._sock)), kind)

    def _checked(self, answer: Message, kind: type[T]) -> T:
        match answer:
            case frames.Refused(reason):
                raise PeerRefused(f"{self._address}: {reason}")
            case frames.Failed(reason):
                raise TransferFailed(f"{self._address}: {reason}")
        if not isinstance(answer, kind):
            raise self._nonsense(answer)
        return answer

    def _nonsense(self, answer: object) -> PeerLost:
        return PeerLost(f"{self._address}: answered {type(answer).__name__} out of turn")

    def _guard(self, call: Callable[[], T]) -> T:
        """What the system says about a connection, in our words."""
        try:
            return call()
        except (PeerLost, PeerRefused) as error:
            raise type(error)(f"{self._address}: {error}") from None
        except OSError as error:
            raise PeerLost(f"{self._address}: {_said(error)}") from None


def _said(error: Exception) -> str:
    return (
        "nothing was heard of it in time" if isinstance(error, TimeoutError) else str(getattr(error, "strerror", None) or error)
    )
