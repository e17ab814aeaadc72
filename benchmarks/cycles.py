"""Does anything wear out? A served fleet grows and shrinks under load, over and over, while workers are killed at random.

    python benchmarks/cycles.py [--cycles 500] [--seed 0] [--smoke]     emulated engines, in one worker process
    python benchmarks/cycles.py --real [--cycles 20]                    the embedded model, a process a replica

Clients stream without a pause and compare every answer with what it must be, to the letter: an answer may come late, but neither
fail nor end early. Afterwards nothing may be left: no block of KV in use, no process, no listening port, no segment of shared
memory (but the one copy of real weights on this machine, as long as there is a fleet), and no memory that grows with the number
of cycles. What dies again within a minute is started ever later, up to a minute: that is where the time goes, and why emulated
workers, which all die at once, are killed less often. With --real also how much slower tokens come from a replica that sends its
weights. Exits with 1 where something failed, differs or is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from squall.errors import ConfigError, ModelError
from squall.live.admin import fleet_of
from squall.live.engine.emulated import pseudo_token
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.models import find

SHARED = Path("/dev/shm")
DEADLINE_S = 120.0
"""Of every wait: a fleet that has not done by then what it was asked for hangs."""

ANYWAY = ("serve.port=0", "fleet.down_window_s=600", "fleet.idle_ttl_s=0.05", "queue.max_retries=50", "serve.event_log=false")
EMULATED = (
    "serve.engine=emulated",
    "model.name=llama-3.1-8b",
    "cluster.gpu=h100-sxm",
    "serve.time_dilation=0.5",
    "load={kind='mock', load_s=0.05}",
)
REAL = ("model.name=smollm2", "cluster.gpu=cpu", "load.kind=p2p", "serve.link_gbps=2", "replica.num_blocks=256")
PROMPTS = ("Why is the sky blue?", "Name three rivers.", "Write one line about rain.", "What is a heap?")
FIELD = re.compile(r"^squall_replica_kv_blocks_used\{[^}]*\} ([0-9.e+]+)$", re.M)

Answer = Callable[[int], tuple[dict[str, object], str]]
"""Of the n-th request: what to ask, and the text that must come."""


class Tally(Struct):
    """What clients have seen."""

    requests: int = 0
    failed: int = 0
    differing: int = 0
    first: str = ""

    def wrong(self, what: str) -> None:
        self.first = self.first or what


class Held(Struct):
    """What a service holds at one moment."""

    processes: int
    rss: int
    ports: int
    segments: int
    files: int


class Service:
    """A deployment in a process of its own.

    Attributes:
        url: of its endpoint.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self._process = process

    def workers(self) -> list[int]:
        pid = self._process.pid
        with contextlib.suppress(FileNotFoundError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def held(self) -> Held:
        pids = [self._process.pid, *self.workers()]
        inodes = [name.removeprefix("socket:[").removesuffix("]") for pid in pids for name in _opened(pid)]
        return Held(
            processes=len(pids),
            rss=sum(_rss(pid) for pid in pids),
            ports=len(_listening().intersection(inodes)),
            segments=len(_segments(pids)),
            files=len(list(Path(f"/proc/{self._process.pid}/fd").iterdir())),
        )

    def phases(self) -> list[str]:
        return [replica["phase"] for replica in fleet_of(self.url, None)["replicas"]]

    def scale(self, count: int) -> None:
        fleet_of(self.url, None, {"replicas": count})

    async def until_ready(self, count: int) -> None:
        """So many serve, and the others are gone."""
        until = time.monotonic() + DEADLINE_S
        while True:
            phases = await asyncio.to_thread(self.phases)
            if phases.count("ready") == count and set(phases) <= {"ready", "off"}:
                return
            if time.monotonic() > until:
                raise SystemExit(f"it hangs: {count} replicas are wanted, but after {DEADLINE_S:g} s they are {phases}")
            await asyncio.sleep(0.02)

    def kill_one(self, dice: random.Random) -> bool:
        workers = self.workers()
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(workers), signal.SIGKILL)
        return bool(workers)


@contextmanager
def served(folder: Path, *settings: str) -> Iterator[Service]:
    """Up and ready; on leaving it is asked to end, and what it leaves behind is an error."""
    arguments = [part for setting in (*ANYWAY, *settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "squall", "serve", *arguments, "--out", str(folder)]
    before = _segments(())
    with (
        (folder.parent / "serve.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            if line.startswith("listening on "):
                url = line.removeprefix("listening on ").partition(";")[0]
            if line.startswith("ready"):
                break
        if not url:
            raise SystemExit(f"squall serve did not come up: {(folder.parent / 'serve.log').read_text()}")
        service = Service(process, url)
        try:
            yield service
            workers = service.workers()
            process.terminate()
            process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    if process.returncode or left or _segments(()) - before:
        raise SystemExit(f"it ended with {process.returncode}, and left processes {left} or segments of shared memory")


def _rss(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _opened(pid: int) -> list[str]:
    """What a process has open: paths, and what the system calls the rest."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(path))
    return found


def _segments(ours: Collection[int]) -> set[Path]:
    """Host copies of weights, but for those that processes of another service use."""
    others = [int(path.name) for path in Path("/proc").glob("[0-9]*") if int(path.name) not in ours]
    used = {path for pid in others for path in _opened(pid) if path.startswith(str(SHARED))}
    return {path for path in SHARED.glob("squall-*") if str(path) not in used}


def _listening() -> set[str]:
    """Inodes of the TCP sockets that listen on this machine."""
    lines = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if fields[3] == "0A"}


# -- clients


async def texts(client: httpx.AsyncClient, order: dict[str, object]) -> AsyncIterator[str]:
    """Piece by piece. Raises RuntimeError for an error in the middle of the stream."""
    async with client.stream("POST", "/v1/completions", json={**order, "stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:200]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            for choice in chunk["choices"]:
                yield choice["text"]


async def keep_asking(
    client: httpx.AsyncClient, answer: Answer, numbers: Iterator[int], tally: Tally, over: asyncio.Event
) -> None:
    while not over.is_set():
        number = next(numbers)
        order, expected = answer(number)
        tally.requests += 1
        try:
            said = "".join([text async for text in texts(client, order)])
        except (RuntimeError, httpx.HTTPError) as error:
            tally.failed += 1
            tally.wrong(f"request {number}: {type(error).__name__}: {error}")
            continue
        if said != expected:
            tally.differing += 1
            tally.wrong(f"request {number}: {len(said)} characters of {len(expected)}: {said[-40:]!r}, not {expected[-40:]!r}")


def emulated_answers(seed: int) -> Answer:
    """An engine that pretends says the same for the same seed."""
    tokenizer = ByteTokenizer()

    def answer(number: int) -> tuple[dict[str, object], str]:
        count = random.Random(f"{seed}:{number}").randint(1, 120)
        text = tokenizer.decode([pseudo_token(tokenizer, number, position) for position in range(count)])
        return {"model": "llama-3.1-8b", "prompt": "hello", "max_tokens": count, "seed": number}, text

    return answer


async def real_answers(client: httpx.AsyncClient, num_tokens: int) -> Answer:
    """Greedy: what the fleet said before anything happened to it."""
    orders = [{"model": "smollm2", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True} for prompt in PROMPTS]  # fmt: skip  # noqa: E501
    alone = ["".join([text async for text in texts(client, order)]) for order in orders]
    return lambda number: (orders[number % len(orders)], alone[number % len(orders)])


# -- cycles


class Cycles:
    """Grows and shrinks a service.

    Args:
        most: replicas, of which one stays.
        kills: the share of cycles in which a worker is killed.

    Attributes:
        num_kills: so far.
    """

    def __init__(self, service: Service, most: int, kills: float, dice: random.Random) -> None:
        self.num_kills = 0
        self._service = service
        self._most = most
        self._kills = kills
        self._dice = dice

    async def run(self, count: int) -> None:
        dice, service = self._dice, self._service
        for _ in range(count):
            service.scale(dice.randint(2, self._most))
            await asyncio.sleep(dice.uniform(0, 0.3))
            if dice.random() < self._kills:
                self.num_kills += service.kill_one(dice)
            if dice.random() < 0.7:  # else it shrinks before it has grown
                service.scale(self._most)
                await service.until_ready(self._most)
            service.scale(1)
            await service.until_ready(1)


async def at_rest(client: httpx.AsyncClient) -> int:
    """Blocks of KV in use once nobody asks for anything, or for long enough."""
    used = -1
    until = time.monotonic() + 20
    while used and time.monotonic() < until:
        await asyncio.sleep(0.6)  # replicas say how they are twice a second
        used = sum(int(float(value)) for value in FIELD.findall((await client.get("/metrics")).text))
    return used


async def slowdown(service: Service, client: httpx.AsyncClient, num_tokens: int) -> tuple[float, float, int]:
    """Median seconds between tokens of a stream: alone, and while its replica sends its weights; how many gaps that was."""
    order = {"model": "smollm2", "prompt": PROMPTS[0], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    gaps: tuple[list[float], list[float]] = ([], [])
    for sending in (False, True):
        latest, loading = 0.0, not sending
        if sending:
            service.scale(2)
        async for _ in texts(client, order):
            now = time.perf_counter()
            if sending:
                loading = "loading" in service.phases()
                now = time.perf_counter()
            if latest and loading:
                gaps[sending].append(now - latest)
            latest = time.perf_counter()
    await service.until_ready(2)
    service.scale(1)
    await service.until_ready(1)
    return statistics.median(gaps[0]), statistics.median(gaps[1] or [float("nan")]), len(gaps[1])


async def exercise(service: Service, given: argparse.Namespace) -> bool:
    """Prints what happened. Returns whether all is well."""
    console, tally, over = Console(width=110), Tally(), asyncio.Event()
    async with httpx.AsyncClient(base_url=service.url, timeout=DEADLINE_S) as client:
        fresh = service.held()
        answer = await real_answers(client, 24) if given.real else emulated_answers(given.seed)
        kills = 1.0 if given.smoke else 0.3 if given.real else 0.06
        cycles = Cycles(service, 3 if given.real else 8, kills, random.Random(given.seed))
        numbers = iter(range(1, 1 << 62))
        clients = [asyncio.create_task(keep_asking(client, answer, numbers, tally, over)) for _ in range(4 if given.real else 8)]
        warm = max(1, given.cycles // 5)
        await cycles.run(warm)
        warm_held, began = service.held(), time.monotonic()
        await cycles.run(given.cycles - warm)
        seconds = time.monotonic() - began
        over.set()
        await asyncio.wait_for(asyncio.gather(*clients), DEADLINE_S)
        used = await at_rest(client)
        after = service.held()
        print_table(
            console, given.cycles, cycles.num_kills, tally, (fresh, warm_held, after), used, seconds / max(1, given.cycles - warm)
        )
        if given.real:
            alone, sending, count = await slowdown(service, client, 160)
            console.print(
                f"median TBT of a source: {alone * 1e3:.1f} ms alone, {sending * 1e3:.1f} ms while it sends ({count} gaps)"
            )
    if tally.first:
        console.print(f"the first that was wrong: {tally.first}", markup=False)
    kept = (after.processes, after.ports) == (fresh.processes, fresh.ports)
    kept = kept and after.segments <= fresh.segments + given.real  # real workers share one copy once nobody had weights to give
    return not tally.failed and not tally.differing and not used and kept


def print_table(
    console: Console, cycles: int, kills: int, tally: Tally, held: tuple[Held, Held, Held], used: int, seconds: float
) -> None:
    table = Table(title=f"{cycles} cycles, {kills} workers killed, {seconds:.2f} s a cycle")
    for column in ("", "fresh", "after a fifth", "after all"):
        table.add_column(column, justify="right" if column else "left")
    for label, number in (("requests", tally.requests), ("failed", tally.failed), ("truncated or differing", tally.differing)):
        table.add_row(label, "", "", str(number))
    table.add_row("KV blocks in use", "", "", str(used))
    table.add_row("RSS of all processes, MB", *(f"{each.rss / 1e6:.0f}" for each in held))
    table.add_row("processes", *(str(each.processes) for each in held))
    table.add_row("listening ports", *(str(each.ports) for each in held))
    table.add_row("segments in /dev/shm", *(str(each.segments) for each in held))
    table.add_row("open files of the head", *(str(each.files) for each in held))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, help="500; 20 with --real")
    parser.add_argument("--seed", type=int, default=0, help="of when what happens")
    parser.add_argument("--real", action="store_true", help="the embedded model instead of emulated engines")
    parser.add_argument("--smoke", action="store_true", help="just enough to see that it runs")
    given = parser.parse_args()
    given.cycles = given.cycles or (2 if given.smoke else 20 if given.real else 500)
    if given.real:
        try:
            find("smollm2")
        except ModelError as error:
            sys.exit(str(error))
    most = 3 if given.real else 8
    settings = (*(REAL if given.real else EMULATED), f"fleet.replicas={{min=1, max={most}}}", f"cluster.gpus_per_node={most}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with served(Path(folder) / "run", *settings) as service:
                well = asyncio.run(exercise(service, given))
        except ConfigError as error:
            sys.exit(str(error))
    sys.exit(not well)


if __name__ == "__main__":
    main()
