"""How fast bulk bytes move between processes: shared memory, TCP and NIXL, slow links, and a chain against one transfer.

    python benchmarks/transport.py [--smoke]

Each peer is a process of its own. Throttled rows give each peer's way out one rate, as a network card would, so that the
network and not the CPU is measured: a chain should take what one transfer takes, n transfers from one source n times that.
"Grows by" is the memory that a receiver takes while it receives, in sizes of what it receives: 1 is what it keeps. Rows
across namespaces leave the network to the kernel: each peer is in a network namespace of its own, and `tc` shapes what leaves
it (root on Linux, with `ip` and `tc`; left out elsewhere, with the reason).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Fetch, Source
from squall.live.transport.memory import SharedMemory
from squall.live.transport.multicast import chains
from squall.live.transport.region import Region, Section

SECTIONS = 32
TOKEN = "benchmark"
Plan = list[tuple[list[str], bool]]
SUBNET = "10.203.7"
BURST = "256kb"
"""What `tc` lets through at once: a few of the 64 kB packets that the kernel hands over whole."""


class Absent(Exception):
    """What a row needs is not here."""


class Place(NamedTuple):
    """Where a peer runs: a command before its own, and where it listens."""

    enter: tuple[str, ...] = ()
    host: str = "127.0.0.1"


HERE = Place()


@contextmanager
def namespaces(names: Sequence[str], mbps: float) -> Iterator[dict[str, Place]]:
    """A network namespace for each name, all at one switch (in one more), what leaves each shaped to a rate.

    Raises Absent where they cannot be made.
    """
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        raise Absent("network namespaces need root on Linux, ip and tc (package iproute2)")
    tag = f"sq{secrets.token_hex(2)}"
    hub, spaces = f"{tag}hub", {name: f"{tag}n{index}" for index, name in enumerate(names, 1)}
    with ExitStack() as stack:
        for space in (hub, *spaces.values()):
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
        _ip("-n", hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", hub, "link", "set", "switch", "up")
        for index, space in enumerate(spaces.values(), 1):
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{index}", "netns", hub)
            _ip("-n", hub, "link", "set", f"port{index}", "master", "switch", "up")
            _ip("-n", space, "addr", "add", f"{SUBNET}.{index}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf",
                 "rate", f"{mbps:g}mbit", "burst", BURST, "latency", "50ms")  # fmt: skip
        at = enumerate(spaces.items(), 1)
        yield {name: Place(("ip", "netns", "exec", space), f"{SUBNET}.{index}") for index, (name, space) in at}


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise Absent(f"{' '.join(command)}: {done.stderr.strip()}")


def peer(name: str, num_bytes: int, gbps: float | None, host: str, *, full: bool, nixl: bool, cold: bool) -> None:
    """A peer's process: says its addresses, is told its sources, says how long it took."""
    size = num_bytes // SECTIONS
    memory = SharedMemory(num_bytes)
    if not cold:
        memory.view[:] = bytes(num_bytes)  # pages are there before the clock runs, as a warm worker's are
    region = Region("weights", memory, sections=[Section(f"layer {at}", at * size, size) for at in range(SECTIONS)])
    endpoint = Endpoint(name, TOKEN, listen=f"{host}:0", gbps=gbps, nixl=nixl)
    endpoint.register(region)
    if full:
        for index in range(SECTIONS):
            region.publish(index)
    print(json.dumps(endpoint.addresses), flush=True)
    for line in sys.stdin:
        sources = [Source(tuple(addresses), standby=standby) for addresses, standby in json.loads(line)]
        began, cpu, before = time.perf_counter(), time.process_time(), kilobytes("VmRSS")
        if sources:
            Fetch(endpoint, region, sources).run()
        else:  # begin again; by then nobody is fetching from us
            for index in range(SECTIONS):
                region.discard(index)
        growth = 1024 * (kilobytes("VmHWM") - before) / num_bytes
        print(json.dumps([time.perf_counter() - began, time.process_time() - cpu, growth]), flush=True)


def kilobytes(field: str) -> int:
    """Of memory that this process has, or has had at most; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


class Peer:
    def __init__(
        self, name: str, num_bytes: int, gbps: float | None, place: Place, *, full: bool = False, nixl: bool = False,
        cold: bool = False,
    ) -> None:  # fmt: skip
        arguments = [
            "--peer",
            name,
            "--bytes",
            str(num_bytes),
            "--host",
            place.host,
            *(["--full"] if full else []),
            *(["--nixl"] if nixl else []),
            *(["--cold"] if cold else []),
            *(["--gbps", str(gbps)] if gbps else []),
        ]
        self.process = subprocess.Popen(
            [*place.enter, sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addresses: list[str] = self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, plan: Plan) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(plan) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.communicate()


def measure(
    num_bytes: int, gbps: float | None, backend: str, receivers: int, *, chain: bool, repeats: int,
    places: Mapping[str, Place] | None = None, cold: bool = False,
) -> tuple[float, float, float]:  # fmt: skip
    """Median seconds until the last receiver has all, CPU seconds of the busiest receiver, and by how much one grew at most.

    The latter in sizes of what it received, and only where it is `cold`: has no page of it before.
    """
    names = [f"r{index}" for index in range(receivers)]
    places = places or {}
    with ExitStack() as stack:
        peers = {}
        for name in ("source", *names):
            place = places.get(name, HERE)
            full = name == "source"
            peers[name] = Peer(name, num_bytes, gbps, place, full=full, nixl=backend == "nixl", cold=cold and not full)
            stack.callback(peers[name].close)
        addresses = {name: tuple(at for at in each.addresses if at.startswith(backend)) for name, each in peers.items()}
        plans = chains(["source"], names, addresses) if chain else {name: [Source(addresses["source"])] for name in names}
        times = []
        for _ in range(repeats):
            for name in () if cold else names:
                peers[name].tell([])
                peers[name].hear()
            for name, plan in plans.items():
                peers[name].tell([(list(each.addresses), each.standby) for each in plan])
            times.append(tuple(map(max, zip(*(peers[name].hear() for name in names), strict=True))))
    seconds, cpu, growth = (statistics.median(column) for column in zip(*times, strict=True))
    return seconds, cpu, growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="just enough to see that it runs")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gbps", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--host", default=HERE.host, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nixl", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        peer(given.peer, given.bytes, given.gbps, given.host, full=given.full, nixl=given.nixl, cold=given.cold)
        return
    Report(smoke=given.smoke).run()


class Report:
    """The table, row by row, and what is left out of it."""

    def __init__(self, *, smoke: bool) -> None:
        self._smoke = smoke
        self._size, self._repeats = (16 << 20, 1) if smoke else (256 << 20, 5)
        self._table = Table(title=f"{self._size >> 20} MiB, {self._repeats} runs, median; every byte checked")
        for column in ("path", "receivers", "s", "GB/s a receiver", "of the link", "CPU s", "grows by"):
            self._table.add_column(column, justify="left" if column == "path" else "right")
        self._left_out: list[str] = []

    def run(self) -> None:
        self._row("shared memory", None, "shm", 1)
        self._row("TCP, loopback", None, "tcp", 1)
        for backend in ("shm", "tcp"):
            self._row(f"{backend}, memory not there before", None, backend, 1, cold=True)
        if importlib.util.find_spec("nixl") is not None:
            self._row("NIXL", None, "nixl", 1)
        else:
            self._left_out.append("NIXL: not installed (pip install 'squall[nixl]')")
        for gbps in (1.0,) if self._smoke else (1.0, 4.0):
            self._row(f"TCP, {gbps:g} Gbit/s", gbps, "tcp", 1)
        for receivers in (3,) if self._smoke else (3, 7):
            self._row("chain, 1 Gbit/s", 1.0, "tcp", receivers)
        self._row("all from one source, 1 Gbit/s", 1.0, "tcp", 3, chain=False)
        self._namespaces(0.1 if self._smoke else 0.5)
        console = Console(width=110)
        console.print(self._table)
        for line in self._left_out:
            console.print(f"left out: {line}", highlight=False, markup=False)

    def _namespaces(self, gbps: float) -> None:
        try:
            with namespaces(("source", "r0", "r1", "r2"), 1e3 * gbps) as places:
                self._row(f"across namespaces, {gbps:g} Gbit/s", None, "tcp", 1, places=places, link=gbps)
                self._row(f"chain across namespaces, {gbps:g} Gbit/s", None, "tcp", 3, places=places, link=gbps)
        except Absent as reason:
            self._left_out.append(str(reason))

    def _row(
        self, path: str, gbps: float | None, backend: str, receivers: int, *, chain: bool = True,
        places: Mapping[str, Place] | None = None, link: float | None = None, cold: bool = False,
    ) -> None:  # fmt: skip
        size, link, repeats = self._size, link or gbps, 1 if cold else self._repeats
        seconds, cpu, growth = measure(size, gbps, backend, receivers, chain=chain, repeats=repeats, places=places, cold=cold)
        share = f"{size * 8 / 1e9 / link / seconds:.0%}" if link else ""
        grows = f"{growth:.2f}x" if cold else ""
        self._table.add_row(path, str(receivers), f"{seconds:.3f}", f"{size / 1e9 / seconds:.2f}", share, f"{cpu:.2f}", grows)


if __name__ == "__main__":
    main()
