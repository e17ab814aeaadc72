"""The four verbs over both backends, and everybody who is turned away."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.errors import ConfigError, PeerLost, PeerRefused
from squall.live.transport.endpoint import MAX_PEERS
from squall.live.transport.frames import MAX_GREETING, VERSION, Challenge, receive
from squall.live.transport.interface import Link
from squall.live.transport.memory import SharedMemory
from squall.live.transport.region import Region
from tests.live.transport.conftest import Node
from tests.live.transport.regions import TOKEN, fill, make_region, room


def has_ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # it ended before all that we sent was read
        return True


BACKENDS = pytest.mark.parametrize("backend", [0, -1], ids=["shm", "tcp"])


def pool(name: str = "pool", size: int = 10_000, *, writable: bool = True, shared: bool = True) -> Region:
    memory = SharedMemory(size)
    memory.view[:] = bytes(index % 251 for index in range(size))
    return Region(name, memory if shared else memory.view, writable=writable)


def raw(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), 5)


@BACKENDS
@pytest.mark.parametrize("shared", [True, False])
def test_scattered_bytes_are_read_and_written(node: Node, backend: int, shared: bool) -> None:
    region = pool(shared=shared)
    server = node("server", [region])
    link: Link = node("client").connect(server.addresses[backend])
    assert link.peer == "server"
    link.open("pool")
    segments = [(9_990, 10), (3, 4), (7, 1), (0, 5000)]
    into, at = room(5021), [(0, 10), (10, 4), (14, 1), (21, 5000)]
    link.read("pool", segments, into, at)
    assert [bytes(into.view(place)) for place in at] == [bytes(region.view(segment)) for segment in segments]
    link.write("pool", [(100, 3), (500, 2)], [memoryview(b"abc"), memoryview(b"de")])
    assert bytes(region.view((100, 3))) == b"abc"
    assert bytes(region.view((500, 2))) == b"de"
    link.close()


@BACKENDS
def test_a_notification_has_been_seen_when_the_call_returns(node: Node, backend: int) -> None:
    seen: list[tuple[str, bytes]] = []
    server = node("server", on_notify=lambda peer, payload: seen.append((peer, payload)))
    link = node("client").connect(server.addresses[backend])
    link.notify(b"hello")
    assert seen == [("client", b"hello")]
    link.close()


@BACKENDS
def test_what_may_not_be_is_refused_and_the_link_goes_on(node: Node, backend: int) -> None:
    server = node("server", [pool(), pool("fixed", writable=False)])
    link = node("client").connect(server.addresses[backend])
    with pytest.raises(PeerRefused, match="server has no region 'weights'; it has pool, fixed"):
        link.open("weights")
    with pytest.raises(PeerRefused, match="server holds no weights; client wants a Llama"):
        link.open("pool", "a Llama")
    link.open("pool")
    for segment in ((9_999, 2), (-1, 2), (0, 0), (2**63, 1)):
        with pytest.raises(PeerRefused, match="are not inside"):
            link.read("pool", [segment], room(2), [(0, 2)])
    link.read("pool", [(0, 2)], room(2))
    link.close()


@BACKENDS
def test_a_region_that_may_only_be_read_is_not_written(node: Node, backend: int) -> None:
    region = pool("fixed", writable=False)
    link = node("client").connect(node("server", [region]).addresses[backend])
    link.open("fixed")
    with pytest.raises((PeerRefused, PeerLost)):
        link.write("fixed", [(0, 3)], [memoryview(b"abc")])
    assert bytes(region.view((0, 3))) == b"\0\1\2"
    link.close()


@BACKENDS
def test_a_stranger_is_refused_before_it_can_ask_anything(node: Node, backend: int) -> None:
    server, stranger = node("server", [pool()]), node("stranger", token="guess")
    with pytest.raises(PeerRefused, match="wrong token"):
        stranger.connect(server.addresses[backend])
    with pytest.raises(PeerRefused, match=r"wrong token|does not know"):
        node("client").connect(stranger.addresses[backend])


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=1, max_size=64))
def test_bytes_that_are_no_frame_end_the_connection_and_nothing_else(garbage: bytes) -> None:
    from squall.live.transport.endpoint import Endpoint

    server = Endpoint("server", TOKEN)
    try:
        with raw(server.addresses[-1]) as sock:
            assert isinstance(receive(sock), Challenge)
            sock.sendall(garbage)
            with contextlib.suppress(OSError):  # it may have hung up already
                sock.shutdown(socket.SHUT_WR)
            assert has_ended(sock)
        server.connect(server.addresses[-1]).close()
    finally:
        server.close()


@pytest.mark.parametrize("length", [2**60, MAX_GREETING + 1])
def test_a_length_that_no_stranger_can_mean_is_refused_unread(length: int, node: Node) -> None:
    server = node("server")
    with raw(server.addresses[-1]) as sock:
        receive(sock)
        sock.sendall(b"SQ" + bytes([VERSION, 0]) + length.to_bytes(8, "big"))
        assert has_ended(sock)


def test_strangers_who_say_nothing_keep_no_peer_out(node: Node) -> None:
    server = node("server", [pool()], patience_s=60.0)
    with contextlib.ExitStack() as held:
        first = held.enter_context(raw(server.addresses[-1]))
        assert isinstance(receive(first), Challenge)
        others = [held.enter_context(raw(server.addresses[-1])) for _ in range(MAX_PEERS)]
        link = node("client").connect(server.addresses[-1])
        link.open("pool")
        link.close()
        assert has_ended(first)
        assert isinstance(receive(others[-1]), Challenge)


def test_another_version_is_said_on_both_sides(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    server = node("server")
    with raw(server.addresses[-1]) as sock:
        receive(sock)
        sock.sendall(b"SQ" + bytes([VERSION + 1, 0]) + (0).to_bytes(8, "big"))
        assert has_ended(sock)
    assert f"the peer speaks version {VERSION + 1} of the transport, this is version {VERSION}" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def answer() -> None:
            with fake.accept()[0] as sock:
                sock.sendall(b"SQ" + bytes([VERSION + 1, 0]) + bytes(8))

        other = threading.Thread(target=answer)
        other.start()
        with pytest.raises(PeerRefused, match="install the same squall"):
            node("client").connect(f"tcp://127.0.0.1:{fake.getsockname()[1]}")
        other.join()


@BACKENDS
def test_a_peer_that_stands_still_is_lost_after_the_patience(node: Node, backend: int) -> None:
    script = (
        "import sys; from squall.live.transport.endpoint import Endpoint;"
        f"e = Endpoint('p', {TOKEN!r}); print(*e.addresses, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        address = peer.stdout.readline().split()[backend]
        client = node("client")
        link = client.connect(address)
        os.kill(peer.pid, signal.SIGSTOP)
        os.waitpid(peer.pid, os.WUNTRACED)
        try:
            with pytest.raises(PeerLost, match="nothing was heard of it in time"):
                link.notify(b"are you there?")
            with pytest.raises(PeerLost, match="nothing was heard of it in time"):
                node("hasty", patience_s=0.1).connect(address)
        finally:
            peer.kill()
        link.close()


def test_who_is_not_there_or_nowhere_is_said(node: Node) -> None:
    client = node("client")
    with pytest.raises(PeerLost, match=r"tcp://127\.0\.0\.1:1: cannot be reached"):
        client.connect("tcp://127.0.0.1:1")
    with pytest.raises(PeerLost, match="shm://nobody: cannot be reached"):
        client.connect("shm://nobody")
    for nonsense in ("rdma://a:1", "tcp://a", "tcp://:1", "shm://", ""):
        with pytest.raises(ConfigError, match=r"expected tcp://host:port, nixl://host:port or shm://name"):
            client.connect(nonsense)
    with pytest.raises(ConfigError, match="cannot listen on 'nonsense'"):
        node("other", listen="nonsense")


def test_a_closed_endpoint_ends_its_links_and_listens_no_more(node: Node) -> None:
    server = node("server", [pool()])
    link = node("client").connect(server.addresses[-1])
    server.close()
    with pytest.raises(PeerLost):
        link.notify(b"x")
    link.close()
    with pytest.raises(PeerLost):
        node("late").connect(server.addresses[-1])


def test_an_interrupted_call_raises(node: Node) -> None:
    server = node("server", [make_region()])
    link = node("client").connect(server.addresses[-1])
    link.open("weights", "a model")
    threading.Timer(0.05, link.interrupt).start()
    with pytest.raises(PeerLost):
        link.read("weights", [(0, 10)], room(10))  # which will never arrive there
    link.close()


@BACKENDS
def test_many_read_at_once_and_each_gets_its_own(node: Node, backend: int) -> None:
    region = fill(make_region())
    server, client = node("server", [region]), node("client")
    wrong: list[int] = []

    def read(index: int) -> None:
        link = client.connect(server.addresses[backend])
        link.open("weights", "a model")
        segment = (index * 777, 20_000)
        into = room(segment[1])
        link.read("weights", [segment], into, [(0, segment[1])])
        if into.memory != region.view(segment):
            wrong.append(index)
        link.close()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("gbps", [None, 2.0])
def test_a_throttle_changes_no_byte(node: Node, gbps: float | None) -> None:
    region = pool(size=1_000_000)
    link = node("client").connect(node("server", [region], gbps=gbps).addresses[-1])
    link.open("pool")
    into = room(1_000_000)
    link.read("pool", [(1, 400_000), (400_001, 599_999)], into)
    assert into.memory[1:] == region.memory[1:]
    link.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a connection vanish")
def test_a_peer_that_vanishes_without_a_word_makes_room(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squall.live.transport.link.QUIET_S", 1)
    server = node("server", [pool()])
    link = node("client").connect(server.addresses[-1])
    link.open("pool")
    (connection,) = server._connections
    while any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))):  # what is not acknowledged is said again, and told in vain
        time.sleep(0.01)
    try:
        link._sock.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR: closing it sends nothing
    except PermissionError:
        pytest.skip("only who administers the network can vanish")
    link.close()
    deadline = time.monotonic() + 30
    while server._connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@BACKENDS
def test_a_link_that_takes_longer_than_the_patience_is_waited_for(node: Node, backend: int) -> None:
    """Half a second. Where bytes are read from memory, none are sent that would say that the peer lives; elsewhere in pieces."""
    region = pool(size=50_000)
    server, client = node("server", [region], gbps=0.0008, patience_s=0.1), node("client", patience_s=0.1)
    link = client.connect(server.addresses[backend])
    link.open("pool")
    into = room(50_000)
    link.read("pool", [(0, 50_000)], into)
    assert into.memory == region.memory
    link.close()
