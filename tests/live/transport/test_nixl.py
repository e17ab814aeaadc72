"""The four verbs where NIXL moves the bytes, peers that stop in the middle, and workers that have no NIXL."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from squall.errors import ConfigError, PeerLost, PeerRefused
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Fetch, Source
from squall.live.transport.memory import SharedMemory
from squall.live.transport.region import Region
from tests.live.transport.conftest import NIXL, Node
from tests.live.transport.regions import TOKEN, fill, make_region, room, same


def pool(*, writable: bool = True) -> Region:
    memory = SharedMemory(10_000)
    memory.view[:] = bytes(index % 251 for index in range(10_000))
    return Region("pool", memory, writable=writable)


@NIXL
def test_scattered_bytes_are_read_and_written(node: Node) -> None:
    region = pool()
    server = node("server", [region], nixl=True)
    assert [address.partition("://")[0] for address in server.addresses] == ["shm", "nixl"]
    link = node("client", nixl=True).connect(server.addresses[-1])
    link.open("pool")
    segments = [(9_990, 10), (3, 4), (7, 1), (0, 5000)]
    into, at = room(5021), [(0, 10), (10, 4), (14, 1), (21, 5000)]
    link.read("pool", segments, into, at)
    assert [bytes(into.view(place)) for place in at] == [bytes(region.view(segment)) for segment in segments]
    link.write("pool", [(100, 3), (500, 2)], [memoryview(b"abc"), memoryview(b"de")])
    assert bytes(region.view((100, 3))) == b"abc"
    assert bytes(region.view((500, 2))) == b"de"
    link.close()


@NIXL
def test_what_may_not_be_is_refused_and_the_link_goes_on(node: Node) -> None:
    server = node("server", [pool(writable=False)], nixl=True)
    link = node("client", nixl=True).connect(server.addresses[-1])
    link.open("pool")
    with pytest.raises(PeerRefused, match="are not inside"):
        link.read("pool", [(9_999, 2)], room(2), [(0, 2)])
    with pytest.raises(PeerRefused, match="may only be read"):
        link.write("pool", [(0, 3)], [memoryview(b"abc")])
    into = room(3)
    link.read("pool", [(0, 3)], into)
    assert bytes(into.memory) == b"\0\1\2"
    link.close()


@NIXL
def test_a_region_comes_whole_from_a_peer_that_registers_it_later_and_from_one_that_comes_again(node: Node) -> None:
    there, here, again = fill(make_region()), make_region(), make_region()
    server, client = node("server", [pool()], nixl=True), node("client", [here], nixl=True)
    link = client.connect(server.addresses[-1])
    link.open("pool")
    link.close()
    server.register(there)
    result = Fetch(client, here, [Source(server.addresses[-1:])]).run()
    assert same(there, here)
    assert result.num_repaired == 0
    server.close()
    other = node("server", [there], nixl=True)
    Fetch(client, again, [Source(server.addresses[-1:]), Source(other.addresses[-1:], standby=True)]).run()
    assert same(there, again)


@contextmanager
def source() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A full peer in a process of its own, and its addresses in JSON."""
    command = [sys.executable, str(Path(__file__).with_name("peer.py")), "source", "full", "1000", "nixl"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        try:
            yield peer, peer.stdout.readline()
        finally:
            peer.kill()


LATE = """
import json, os, signal, sys, time
from squall.errors import PeerLost
from squall.live.transport.endpoint import Endpoint
from tests.live.transport.regions import TOKEN, fill, make_region
address, pid = json.loads(sys.argv[1])[-1], int(sys.argv[2])
here = make_region()
endpoint = Endpoint("reader", TOKEN, nixl=True, patience_s=1.0)
endpoint.register(here)
agent, link = endpoint._nixl, endpoint.connect(address)
link.open("weights", "a model")
link.read("weights", [(0, 4096)], here)
peer, begin = link._held["weights"]
here.memory[:] = bytes(len(here.memory))
os.kill(pid, signal.SIGSTOP)
try:
    agent.read(peer, [(begin, 100_000)], [here.view((0, 100_000))], lambda: None)
    print("read")
except PeerLost as error:
    print(error)
os.kill(pid, signal.SIGCONT)
time.sleep(1)
print("changed" if any(here.memory) else "as it was")
again = endpoint.connect(address)
again.open("weights", "a model")
again.read("weights", [(0, 4096)], here)
print(here.view((0, 4096)) == fill(make_region()).view((0, 4096)))
for each in (link, again):
    each.close()
"""


@NIXL
def test_a_read_that_was_given_up_changes_nothing_any_more_and_the_peer_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # without shared memory both processes take part in every read
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    with source() as (peer, addresses):
        command = [sys.executable, "-c", LATE, addresses, str(peer.pid)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.stdout.splitlines() == ["nothing was heard of it in time", "as it was", "True"], said.stderr


@NIXL
def test_a_peer_that_is_killed_is_lost_before_the_patience_is_over(node: Node) -> None:
    here = make_region()
    client = node("client", [here], nixl=True, patience_s=30.0)
    with source() as (peer, addresses):
        link = client.connect(json.loads(addresses)[-1])
        link.open("weights", "a model")
        link.read("weights", [(0, 4096)], here)
        os.kill(peer.pid, signal.SIGKILL)
        peer.wait()
        with pytest.raises(PeerLost, match=r"ended the connection|reset|DISCONNECT"):
            link.read("weights", [(0, 100_000)], here)
    link.close()


@NIXL
def test_an_interrupted_call_raises(node: Node) -> None:
    server = node("server", [make_region()], nixl=True)
    link = node("client", nixl=True).connect(server.addresses[-1])
    link.open("weights", "a model")
    timer = threading.Timer(0.1, link.interrupt)
    timer.start()
    with pytest.raises(PeerLost):
        link.read("weights", [(0, 10)], room(10))
    timer.join()
    link.close()


def test_without_nixl_it_is_named_with_the_extra_that_brings_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs NIXL here, too: pip install 'squall\[nixl\]', .* serve\.transport = \"nixl\""):
        node("client").connect("nixl://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"NIXL is not installed here \(.*\): pip install 'squall\[nixl\]', .* or take another"):
        Endpoint("server", TOKEN, nixl=True)


@NIXL
def test_a_server_without_it_says_so(node: Node) -> None:
    server = node("server", [pool()])
    link = node("client", nixl=True).connect(server.addresses[-1].replace("tcp://", "nixl://"))
    with pytest.raises(PeerRefused, match=r"server has no NIXL; give all workers the same serve\.transport"):
        link.open("pool")
    link.close()
