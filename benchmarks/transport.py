"""How fast bulk bytes move between processes: shared memory and TCP, throttled links, and a chain against one transfer.

    python benchmarks/transport.py [--smoke]

Each peer is a process of its own. Throttled rows give each peer's way out one rate, as a network card would, so that the
network and not the CPU is measured: a chain should take what one transfer takes, n transfers from one source n times that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

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


def peer(name: str, num_bytes: int, gbps: float | None, *, full: bool) -> None:
    """A peer's process: says its addresses, is told its sources, says how long it took."""
    size = num_bytes // SECTIONS
    memory = SharedMemory(num_bytes)
    memory.view[:] = bytes(num_bytes)  # pages are there before the clock runs, as a warm worker's are
    region = Region("weights", memory, sections=[Section(f"layer {at}", at * size, size) for at in range(SECTIONS)])
    endpoint = Endpoint(name, TOKEN, gbps=gbps)
    endpoint.register(region)
    if full:
        for index in range(SECTIONS):
            region.publish(index)
    print(json.dumps(endpoint.addresses), flush=True)
    for line in sys.stdin:
        sources = [Source(tuple(addresses), standby=standby) for addresses, standby in json.loads(line)]
        began, cpu = time.perf_counter(), time.process_time()
        if sources:
            Fetch(endpoint, region, sources).run()
        else:  # begin again; by then nobody is fetching from us
            for index in range(SECTIONS):
                region.discard(index)
        print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]), flush=True)


class Peer:
    def __init__(self, name: str, num_bytes: int, gbps: float | None, *, full: bool = False) -> None:
        arguments = [
            "--peer",
            name,
            "--bytes",
            str(num_bytes),
            *(["--full"] if full else []),
            *(["--gbps", str(gbps)] if gbps else []),
        ]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
    num_bytes: int, gbps: float | None, backend: int, receivers: int, *, chain: bool, repeats: int
) -> tuple[float, float]:
    """Median seconds until the last receiver has all, and the CPU seconds of the slowest receiver."""
    names = [f"r{index}" for index in range(receivers)]
    with ExitStack() as stack:
        peers = {name: Peer(name, num_bytes, gbps, full=name == "source") for name in ("source", *names)}
        for each in peers.values():
            stack.callback(each.close)
        addresses = {name: (each.addresses[backend],) for name, each in peers.items()}
        plans = chains(["source"], names, addresses) if chain else {name: [Source(addresses["source"])] for name in names}
        times = []
        for _ in range(repeats):
            for name in names:
                peers[name].tell([])
                peers[name].hear()
            for name, plan in plans.items():
                peers[name].tell([(list(each.addresses), each.standby) for each in plan])
            times.append(tuple(map(max, zip(*(peers[name].hear() for name in names), strict=True))))
    return statistics.median(time for time, _ in times), statistics.median(cpu for _, cpu in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="just enough to see that it runs")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gbps", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        peer(given.peer, given.bytes, given.gbps, full=given.full)
        return
    size, repeats = (16 << 20, 1) if given.smoke else (256 << 20, 5)
    table = Table(title=f"{size >> 20} MiB, {repeats} runs, median; every byte checked")
    for column in ("path", "receivers", "s", "GB/s a receiver", "of the link", "CPU s"):
        table.add_column(column, justify="left" if column == "path" else "right")

    def row(path: str, gbps: float | None, backend: int, receivers: int, *, chain: bool) -> None:
        seconds, cpu = measure(size, gbps, backend, receivers, chain=chain, repeats=repeats)
        share = f"{size * 8 / 1e9 / gbps / seconds:.0%}" if gbps else ""
        table.add_row(path, str(receivers), f"{seconds:.3f}", f"{size / 1e9 / seconds:.2f}", share, f"{cpu:.2f}")

    row("shared memory", None, 0, 1, chain=True)
    row("TCP, loopback", None, -1, 1, chain=True)
    for gbps in (1.0,) if given.smoke else (1.0, 4.0):
        row(f"TCP, {gbps:g} Gbit/s", gbps, -1, 1, chain=True)
    for receivers in (3,) if given.smoke else (3, 7):
        row("chain, 1 Gbit/s", 1.0, -1, receivers, chain=True)
    row("all from one source, 1 Gbit/s", 1.0, -1, 3, chain=False)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
