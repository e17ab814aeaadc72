"""What head, RPC and HTTP add to an answer's first byte: emulated engines, so that the cores are free; 16 streams at a time.

    python benchmarks/head.py [--smoke]

Each client asks for one streamed completion after the other. From the time until its first token's bytes we subtract the time
that the replica had the request before the step with its first token was done (its event log says): that is the engine's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from squall.core.actions import Send
from squall.core.events import Progressed, StepsDone, Submitted
from squall.eventlog import read

SETTINGS = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "fleet.replicas=2", "serve.port=0")
GOAL_MS = 5.0
FIRST_LENGTH = 64
"""Prompts differ in length, and are told apart in the log by it."""


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, int]]:
    """A deployment of its own; yields host and port. Its event log is complete when the block is left."""
    arguments = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "squall", "serve", *arguments, "--out", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, port = "", 0
        for line in process.stdout:
            if line.startswith("listening on http://"):
                host, _, rest = line.removeprefix("listening on http://").partition(":")
                port = int(rest.partition(";")[0])
            if line.startswith("ready"):
                break
        if not port:
            sys.exit("squall serve did not come up")
        try:
            yield host, port
        finally:
            process.terminate()
            process.communicate()


async def first_bytes(host: str, port: int, prompts: Iterator[int], num_tokens: int) -> dict[int, float]:
    """One client's answers, one after the other: for each length of prompt the seconds until the first token's bytes.

    Answers are `num_tokens` long or up to twice that, lest all clients keep step.
    """
    taken = {}
    reader, writer = await asyncio.open_connection(host, port)
    for length in prompts:
        order = {
            "model": "llama-3.1-8b",
            "prompt": [1] * length,
            "max_tokens": num_tokens + 7 * length % num_tokens,
            "stream": True,
            "seed": length,
        }
        body = json.dumps(order).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        began = time.perf_counter()
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        await reader.readuntil(b"data: ")
        taken[length] = time.perf_counter() - began
        await reader.readuntil(b"data: [DONE]\n\n")
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return taken


def engine_times(log: Path) -> dict[int, float]:
    """For each length of prompt, how many seconds its replica had it until the step with its first token was done."""
    began: dict[int, tuple[int, int]] = {}
    taken = {}
    for record in read(log):
        match record.event:
            case Submitted(request) if record.machine >= 0:
                began[request.id] = (request.num_prompt_tokens, record.now)
            case StepsDone():
                for action in record.actions:
                    if isinstance(action, Send) and isinstance(action.event, Progressed):
                        for id in action.event.first:
                            length, since = began[id]
                            taken[length] = (record.now - since) / 1e9
    return taken


async def measure(host: str, port: int, num_clients: int, num_requests: int, num_tokens: int) -> dict[int, float]:
    lengths = iter(range(FIRST_LENGTH, FIRST_LENGTH + num_requests))
    clients = [first_bytes(host, port, lengths, num_tokens) for _ in range(num_clients)]
    return {length: taken for answers in await asyncio.gather(*clients) for length, taken in answers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="just enough to see that it runs")
    smoke = parser.parse_args().smoke
    num_clients, num_requests, num_tokens = (4, 8, 4) if smoke else (16, 640, 24)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "run"
        with served(directory) as (host, port):
            seen = asyncio.run(measure(host, port, num_clients, num_requests, num_tokens))
        own = engine_times(directory / "events.jsonl.zst")
    added = [1e3 * (seen[length] - own[length]) for length in seen]
    median = statistics.median(added)
    table = Table(title=f"first byte over the engine's own time, {num_clients} streams, {len(added)} requests")
    for column in ("", "median", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, values in (("first byte, ms", [1e3 * t for t in seen.values()]), ("added, ms", added)):
        cuts = statistics.quantiles(values, n=100)
        table.add_row(name, f"{statistics.median(values):.2f}", f"{cuts[89]:.2f}", f"{cuts[98]:.2f}")
    Console().print(table)
    if not smoke:
        print(f"goal: median added under {GOAL_MS:g} ms: {'met' if median < GOAL_MS else 'missed'}")


if __name__ == "__main__":
    main()
