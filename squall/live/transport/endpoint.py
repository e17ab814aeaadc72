"""The process's end of all its links over sockets: listens, answers peers, and dials them. Knows no weights and no KV.

A thread a connection, with blocking sockets: a bulk transfer is a few large system calls, which hold no interpreter lock. A
peer that does not read makes its own thread wait and nobody else; after the patience it is dropped.
"""

import contextlib
import logging
import secrets
import socket
import threading
from functools import partial

from squall.errors import ConfigError, PeerLost, PeerRefused, TransferFailed
from squall.live.transport import frames
from squall.live.transport.interface import OnNotify
from squall.live.transport.link import SocketLink, tune
from squall.live.transport.nixl import Held as NixlHeld
from squall.live.transport.nixl import NixlAgent
from squall.live.transport.region import Region
from squall.live.transport.throttle import Throttle

PATIENCE_S = 5.0
"""After how long a peer of which nothing is heard counts as lost."""

MAX_PEERS = 256
MAX_STRANGERS = 64
"""Connections that have not proved yet that they know the token. Whoever takes longest over it makes room for the next."""

_SIGN_OF_LIFE = 0.1
"""The part of the patience after which we say that what a peer waits for is still to come."""

_log = logging.getLogger(__name__)


class _Peer:
    """A connection, and the regions whose bytes it takes for itself (by descriptor, from a device or by NIXL), or maps."""

    def __init__(self, sock: socket.socket, node: str) -> None:
        self.sock = sock
        self.node = node
        self.takes: set[str] = set()
        self.maps: set[str] = set()


class Endpoint:
    """See `Transport`.

    Args:
        node: our name, the same to all peers and nobody else's.
        token: what all peers know and strangers do not.
        listen: "host:port" to be reached at from other machines, port 0 for any; None for this machine only.
        advertise: the host that peers are told; that of `listen` when None.
        local: reachable over shared memory by processes of this machine (and network namespace).
        nixl: NIXL moves the bytes of peers on `listen`, and ours, where they are to be reached by it, too.
        gbps: a limit on all that leaves here; None for none.
        patience_s: see PATIENCE_S.
        on_notify: told of peers' notifications.

    Raises ConfigError when it cannot listen there, and where NIXL is wanted but not installed.
    """

    def __init__(
        self,
        node: str,
        token: str,
        *,
        listen: str | None = "127.0.0.1:0",
        advertise: str | None = None,
        local: bool = True,
        nixl: bool = False,
        gbps: float | None = None,
        patience_s: float = PATIENCE_S,
        on_notify: OnNotify | None = None,
    ) -> None:
        self.node = node
        self.egress = None if gbps is None else Throttle(gbps)
        self._token = token
        self._patience_s = patience_s
        self._on_notify = on_notify
        self._regions: dict[str, Region] = {}
        self._nixl = NixlAgent(node, patience_s) if nixl else None
        self._connections: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listeners: list[socket.socket] = []
        addresses = []
        if local and hasattr(socket, "AF_UNIX"):
            name = f"squall-{secrets.token_hex(8)}"  # abstract: it goes with the process, however that ends
            addresses.append(f"shm://{name}")
            self._listen(socket.AF_UNIX, "\0" + name)
        if listen is not None:
            host, port = self._listen_tcp(listen)
            addresses.append(f"{'tcp' if self._nixl is None else 'nixl'}://{advertise or host}:{port}")
        self.addresses = tuple(addresses)

    # -- verbs

    def register(self, region: Region) -> None:
        if self._nixl is not None:
            self._nixl.register(region.memory)
        with self._lock:
            self._regions[region.name] = region

    def unregister(self, name: str) -> None:
        """See `Transport`. NIXL keeps what it was given until the end: not for memory that goes before."""
        with self._lock:
            self._regions.pop(name, None)

    def connect(self, address: str) -> SocketLink:
        link = SocketLink(address, self.node, self._token, self._patience_s, self._nixl)
        try:
            link.greet()
        except BaseException:
            link.close()
            raise
        return link

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            connections = [*self._connections, *self._strangers, *self._listeners]
            self._regions.clear()
        for sock in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it, which closes it
        if self._nixl is not None:
            self._nixl.close()

    # -- listening

    def _listen_tcp(self, listen: str) -> tuple[str, int]:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            if not port.isdigit():
                raise ValueError
            self._listen(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            for listener in self._listeners:
                listener.close()
            raise ConfigError(f"transport cannot listen on {listen!r} ({error}); expected host:port of this machine") from None
        return f"[{host}]" if ":" in host else host, self._listeners[-1].getsockname()[1]

    def _listen(self, family: int, address: str | tuple[str, int]) -> None:
        listener = socket.socket(family)
        try:
            listener.bind(address)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), name="transport-accept", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError:
                    self._closed.wait(0.05)  # or no descriptor is free: some may come back
                    continue
                with self._lock:
                    welcome = not self._closed.is_set() and len(self._connections) < MAX_PEERS
                    if welcome:
                        self._make_room()
                        self._strangers[sock] = None
                if welcome:
                    threading.Thread(target=self._serve, args=(sock,), name="transport-peer", daemon=True).start()
                else:
                    sock.close()

    def _make_room(self) -> None:
        while len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    # -- a connection

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(self._patience_s)
            tune(sock)
            peer = _Peer(sock, self._greet(sock))
            with self._lock:
                self._strangers.pop(sock, None)
                self._connections.add(sock)
            sock.settimeout(None)  # a peer may be silent for as long as it likes
            while not self._closed.is_set():
                self._answer(peer, frames.receive(sock))
        except frames.MalformedFrame as error:
            _log.warning("dropped a peer of %s: %s", self.node, error)
        except PeerRefused as error:
            _log.warning("%s refused a peer: %s", self.node, error)
        except (OSError, PeerLost) as error:
            _log.debug("a peer of %s is gone: %s", self.node, error)
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
                self._connections.discard(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> str:
        """Raises PeerRefused for a stranger, who has been told so."""
        nonce = frames.nonce()
        frames.send(sock, frames.Challenge(nonce, self.node))
        hello = frames.receive(sock, frames.MAX_GREETING)
        if not isinstance(hello, frames.Hello):
            raise frames.MalformedFrame(f"begins with {type(hello).__name__}")
        if not frames.proves(hello.proof, self._token, "client", nonce):
            frames.send(sock, frames.Refused("wrong token; every worker of a fleet is given the same one"))
            raise PeerRefused(f"{hello.node} does not know the token")
        frames.send(sock, frames.Welcome(frames.proof(self._token, "server", hello.nonce)))
        return hello.node

    def _answer(self, peer: _Peer, message: frames.AnyMessage) -> None:
        """A refusal ends a request, not the connection."""
        sock = peer.sock
        sock.settimeout(self._patience_s)
        try:
            match message:
                case frames.Open():
                    self._open(peer, message)
                case frames.Read():
                    self._read(peer, message)
                case frames.Sum():
                    self._sum(sock, message)
                case frames.Write():
                    self._write(peer, message)
                case frames.Notify(payload):
                    if self._on_notify is not None:
                        self._on_notify(peer.node, payload)
                    frames.send(sock, frames.Done())
                case _:
                    raise frames.MalformedFrame(f"says {type(message).__name__} out of turn")
        except PeerLost:
            raise
        except PeerRefused as error:
            _log.warning("%s refused %s: %s", self.node, peer.node, error)
            frames.send(sock, frames.Refused(str(error)))
        except TransferFailed as error:
            frames.send(sock, frames.Failed(str(error)))
        sock.settimeout(None)

    def _region(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            known = ", ".join(self._regions) or "none"
            raise PeerRefused(f"{self.node} has no region {name!r}; it has {known}")
        return region

    def _open(self, peer: _Peer, message: frames.Open) -> None:
        region = self._region(message.region)
        if message.fingerprint != region.fingerprint:
            raise PeerRefused(
                f"{self.node} holds {region.fingerprint or 'no weights'}; {peer.node} wants {message.fingerprint or 'none'}"
            )
        here = peer.sock.family == socket.AF_UNIX
        lent = region.device.lent if here and region.device is not None and region.device.kind == message.by_device else ()
        fd = region.fd if here and not lent else None
        held = self._held(region) if message.by_nixl else None
        for names, has in ((peer.takes, fd is not None or held is not None or bool(lent)), (peer.maps, bool(lent))):
            (names.add if has else names.discard)(message.region)
        frames.send(peer.sock, frames.Opened(len(region.memory), region.sums, fd is not None, held, lent), fd)

    def _held(self, region: Region) -> NixlHeld:
        if self._nixl is None:
            raise PeerRefused(f"{self.node} has no NIXL; give all workers the same serve.transport")
        return self._nixl.held(region.memory)

    def _read(self, peer: _Peer, message: frames.Read) -> None:
        sock, region = peer.sock, self._region(message.region)
        region.check(message.segments)
        while (absent := region.wait(message.segments, self._patience_s * _SIGN_OF_LIFE, verified=message.verified)) is not None:
            frames.send(sock, frames.Wait(list(region.upstream(absent))))
        views = [region.view(segment) for segment in message.segments]
        if message.region not in peer.maps:
            region.show(message.segments)
        if message.region in peer.takes:
            if self.egress is not None:  # nothing is sent meanwhile, but that we live
                sign_of_life = partial(frames.send, sock, frames.Wait([]))
                self.egress.take(sum(map(len, views)), sign_of_life, self._patience_s * _SIGN_OF_LIFE)
            frames.send(sock, frames.Held())
        else:
            frames.send_data(sock, views, self.egress)

    def _sum(self, sock: socket.socket, message: frames.Sum) -> None:
        value = self._region(message.region).wait_sum(message.section, self._patience_s * _SIGN_OF_LIFE)
        frames.send(sock, frames.Wait([]) if value is None else frames.SumIs(value))

    def _write(self, peer: _Peer, message: frames.Write) -> None:
        sock, by_memory = peer.sock, message.region in peer.takes
        try:
            region = self._region(message.region)
            region.check(message.segments)
            if not region.writable:
                raise PeerRefused(f"region {region.name} may only be read")
        except PeerRefused:
            if not by_memory:  # its bytes are on the way, and nobody has said how many may be thrown away
                frames.send(sock, frames.Refused(f"{self.node} does not let {message.region} be written so"))
                raise PeerLost("wrote where it may not") from None
            raise
        if by_memory:
            frames.send(sock, frames.Held())
            if not isinstance(frames.receive(sock), frames.Done):
                raise frames.MalformedFrame("did not say that its write was done")
        elif (said := frames.receive_data(sock, [region.view(segment) for segment in message.segments])) is not None:
            raise frames.MalformedFrame(f"says {type(said).__name__} where its data was due")
        frames.send(sock, frames.Done())
