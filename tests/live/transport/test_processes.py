"""Weights between real processes, of which some are killed in the middle."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from squall.live.transport.multicast import chains
from tests.live.disks import spoil
from tests.live.transport.conftest import NIXL
from tests.live.transport.regions import fill, make_region

GBPS = 0.05
"""Half a megabyte takes about 75 ms: long enough to be killed in the middle of."""


class Peer:
    def __init__(self, name: str, kind: str, way: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), name, kind, str(GBPS), way]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = name

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def fetch(self, sources: list[tuple[tuple[str, ...], bool]]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(sources) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["shm", "tcp", pytest.param("nixl", marks=NIXL)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fleet(backend: str) -> Iterator[dict[str, Peer]]:
    """A source and three receivers."""
    way = "nixl" if backend == "nixl" else "sockets"
    with ExitStack() as stack:
        peers = {name: Peer(name, "full" if name == "source" else "empty", way) for name in ("source", "a", "b", "c")}
        for peer in peers.values():
            stack.callback(peer.close)
        yield peers


def begin(fleet: dict[str, Peer], backend: str) -> None:
    told = {name: peer.line() for name, peer in fleet.items()}
    addresses = {name: tuple(each for each in said if each.startswith(backend)) for name, said in told.items()}
    plan = chains(["source"], [name for name in fleet if name != "source"], addresses)
    for name, sources in plan.items():
        fleet[name].fetch([(each.addresses, each.standby) for each in sources])


SUMS = fill(make_region()).sums


@pytest.fixture
def pair(backend: str) -> Iterator[dict[str, Peer]]:
    """Two sources and a receiver."""
    way = "nixl" if backend == "nixl" else "sockets"
    with ExitStack() as stack:
        peers = {name: Peer(name, "empty" if name == "a" else "full", way) for name in ("source", "other", "a")}
        for peer in peers.values():
            stack.callback(peer.close)
        yield peers


def begin_pair(pair: dict[str, Peer], backend: str, before: Callable[[], None] = lambda: None) -> None:
    told = {name: peer.line() for name, peer in pair.items()}
    before()
    at = {name: tuple(each for each in said if each.startswith(backend)) for name, said in told.items()}
    pair["a"].fetch([(at["source"], False), (at["other"], True)])


def test_what_a_source_holds_wrong_comes_from_another(pair: dict[str, Peer], backend: str) -> None:
    """A bit of its memory has turned since its checksum was taken."""
    region = make_region()
    begin_pair(pair, backend, lambda: spoil(pair["source"].process.pid, len(region.memory), region.sections[2].offset + 70_000))
    result = pair["a"].line()
    assert result["sums"] == SUMS
    assert result["repaired"] == 1
    assert result["from"]["other"] >= region.sections[2].num_bytes


def test_a_source_that_stands_still_is_left_for_another(pair: dict[str, Peer], backend: str) -> None:
    begin_pair(pair, backend)
    time.sleep(0.02)
    pair["source"].process.send_signal(signal.SIGSTOP)
    assert pair["a"].line()["sums"] == SUMS


def test_a_chain_of_three_processes(fleet: dict[str, Peer], backend: str) -> None:
    begin(fleet, backend)
    results = {name: fleet[name].line() for name in "abc"}
    assert [result["sums"] for result in results.values()] == [SUMS] * 3
    assert [list(result["from"]) for result in results.values()] == [["source"], ["a"], ["b"]]


@pytest.mark.parametrize("seed", range(2))
def test_the_middle_one_is_killed(fleet: dict[str, Peer], backend: str, seed: int) -> None:
    begin(fleet, backend)
    time.sleep(random.Random(seed).uniform(0, 0.1))
    fleet["a"].process.kill()
    assert [fleet[name].line().get("sums") for name in "bc"] == [SUMS] * 2


@pytest.mark.parametrize("seed", range(2))
def test_the_source_is_killed(fleet: dict[str, Peer], backend: str, seed: int) -> None:
    """Each receiver ends with all of it, or without and a reason; nobody waits for ever."""
    begin(fleet, backend)
    time.sleep(random.Random(seed).uniform(0, 0.1))
    fleet["source"].process.kill()
    for name in "abc":
        result = fleet[name].line()
        assert result.get("sums") == SUMS or "is held by no source that is left" in result["failed"]
