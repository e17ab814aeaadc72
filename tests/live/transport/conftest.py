"""Endpoints and regions of one test, and a wire between them that can be spoilt."""

import contextlib
import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from squall.live.transport.endpoint import Endpoint
from squall.live.transport.region import Region
from tests.live.transport.regions import TOKEN

Node = Callable[..., Endpoint]

NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (pip install 'squall[nixl]')")


@pytest.fixture
def node() -> Iterator[Node]:
    """Endpoints by name, closed at the end: node("a", gbps=1)."""
    made: list[Endpoint] = []

    def make(name: str, regions: Sequence[Region] = (), token: str = TOKEN, **more: object) -> Endpoint:
        made.append(Endpoint(name, token, **{"patience_s": 1.0, **more}))  # type: ignore[arg-type]
        for region in regions:
            made[-1].register(region)
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


class Wire:
    """Carries connections to a TCP address, and spoils what comes back.

    Args:
        flips: positions in what the server has sent over all connections, at which a bit is turned.
        breaks: positions at which the connection is cut.
        hangs: a position after which nothing comes any more, on no connection.
    """

    def __init__(self, address: str, flips: Sequence[int] = (), breaks: Sequence[int] = (), hangs: int | None = None) -> None:
        self.num_connections = 0
        self._target = address.removeprefix("tcp://").rpartition(":")
        self._flips, self._breaks, self._hangs = sorted(flips), sorted(breaks), hangs
        self._at = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_bytes(self) -> int:
        """What the server has sent so far."""
        return self._at

    def close(self) -> None:
        self._closed.set()
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self._target[0], int(self._target[2])))
            except OSError:
                near.close()
                continue
            self.num_connections += 1
            self._open += [near, far]
            threading.Thread(target=self._carry, args=(near, far, lambda data: data), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, self._spoil), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes | None]) -> None:
        try:
            while (data := source.recv(65536)) and (changed := change(data)) is not None:
                sink.sendall(changed)
        except OSError:
            pass
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _spoil(self, data: bytes) -> bytes | None:
        with self._lock:
            begin, self._at = self._at, self._at + len(data)
            if self._hangs is not None and self._at > self._hangs:
                self._closed.wait(30)
            changed = bytearray(data)
            while self._flips and self._flips[0] < self._at:
                changed[max(0, self._flips.pop(0) - begin)] ^= 1
            if self._breaks and self._breaks[0] < self._at:
                self._breaks.pop(0)
                return None
            return bytes(changed)


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []

    def make(endpoint: Endpoint, **how: object) -> Wire:
        made.append(Wire(endpoint.addresses[-1], **how))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
