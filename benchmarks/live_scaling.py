"""What a replica that works while it loads brings: first tokens of a burst, and how much of a second replica is there, and when.

    python benchmarks/live_scaling.py [--smoke]

One replica meets a burst of prompts, and a second is asked for at once. Replicas are emulated (an H100 a node, 100 Gbps, Llama
3.1 8B, stretched in time so that our own work does not count), and real where the embedded model is here (SmolLM2 on a link of 1
Gbit/s). All figures come from the clients' side and from the event log. Throughput is counted in layers times tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from squall import config as configuration
from squall.core.actions import RunLayers, RunSteps
from squall.core.events import LayerArrived, LayersDone, LivePaired, Progressed, StepsDone, WeightsLoaded
from squall.core.types import SECOND, Nanos, Role
from squall.errors import ModelError
from squall.eventlog import open_log, read_merged
from squall.live.engine.interface import Sampling
from squall.live.head import Head
from squall.live.launch import LocalLauncher
from squall.live.models import find
from squall.live.plan import served_plan
from squall.live.served import served_model

EMULATED = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "cluster.nodes=2",
            "cluster.gpus_per_node=1", "cluster.nic_gbps=100", "batching.max_num_batched_tokens=2048")  # fmt: skip
REAL = ("model.name=smollm2", "cluster.gpus_per_node=2", "serve.link_gbps=1", "replica.num_blocks=2048",
        "replica.max_model_len=1024", "batching.max_num_batched_tokens=512")  # fmt: skip
COMMON = ("fleet.replicas={min=1, max=2}", "fleet.down_window_s=600", "batching.prefix_cache=false")
LOADS = {
    "live": "load={kind='chain', live=true}",
    "stop the world, from a peer": "load={kind='chain', live=false}",
    "from a host copy": "load={kind='host', cache='all_hit', live=false}",
    "from disk": "load={kind='disk', live=false}",
}


class Burst(NamedTuple):
    """So many prompts of so many tokens, evenly within so many seconds."""

    prompts: int
    tokens: int
    seconds: float


class Work(NamedTuple):
    """Layers times tokens that `machine` did between two instants."""

    machine: int
    began_at: Nanos
    ended_at: Nanos
    amount: int

    def within(self, began_at: Nanos, ended_at: Nanos) -> float:
        """What of it fell into this time."""
        overlap = max(0, min(self.ended_at, ended_at) - max(self.began_at, began_at))
        return self.amount * overlap / max(1, self.ended_at - self.began_at)


@asynccontextmanager
async def fleet(folder: Path, settings: Sequence[str]) -> AsyncIterator[Head]:
    """One replica, ready; the process of a second one is warm."""
    config = configuration.load(None, settings)
    folder.mkdir()
    path = folder / "config.toml"
    path.write_text(configuration.dumps(config), encoding="utf-8")
    groups = [(0, 1)] if config.serve.engine == "emulated" else [(0,), (1,)]
    launcher, model = LocalLauncher(path, folder, groups), served_model(config)
    async with AsyncExitStack() as stack:
        log = stack.enter_context(open_log(folder / "events-head.jsonl.zst"))
        plan = served_plan(config, model)
        head = Head(config, model.names, model.tokenizer(), model.max_model_len, launcher, log, plan=plan)
        launcher.prepare(range(2))
        stack.callback(launcher.kill_all)
        stack.push_async_callback(head.close)
        head.start()
        await head.until_ready()
        yield head


async def first_tokens(head: Head, burst: Burst) -> list[float]:
    """Of each prompt, the seconds until its first token."""

    async def ask(number: int) -> float:
        await asyncio.sleep(burst.seconds * number / burst.prompts)
        began = time.monotonic()
        prompt = [(number * 31 + at) % 250 for at in range(burst.tokens)]
        async for _ in head.submit(prompt, Sampling(max_tokens=1, temperature=0, ignore_eos=True)):
            return time.monotonic() - began
        raise RuntimeError("an answer without a token")

    return await asyncio.gather(*map(ask, range(burst.prompts)))


async def measure(folder: Path, settings: Sequence[str], burst: Burst, *, again: bool) -> tuple[list[float], float]:
    """First tokens of a burst with which a second replica comes; and how long it takes two that are ready (0: not asked)."""
    async with fleet(folder, (*settings, *COMMON)) as head:
        asking = asyncio.create_task(first_tokens(head, burst))
        await asyncio.sleep(burst.seconds / burst.prompts)  # there is somebody to relieve
        head.want(Role.BOTH, 2)
        times = await asking
        if not again:
            return times, 0.0
        while [replica.phase for replica in head.stats().replicas] != ["ready"] * 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # the log has all by then
        began = time.monotonic()
        await first_tokens(head, burst._replace(seconds=0.0))
        return times, time.monotonic() - began


def works(folder: Path, num_layers: int) -> tuple[list[Work], list[tuple[Nanos, float]], list[float]]:
    """What both replicas did, when how much of the weights had arrived, and how much had at each first token that the loading
    one had helped with."""
    done: list[Work] = []
    arrived: list[tuple[Nanos, float]] = []
    helped: list[float] = []
    running: dict[int, tuple[Nanos, int, bool]] = {}
    fraction, paired = 0.0, False
    for record in read_merged(sorted(folder.glob("events-*.zst"))):
        event, machine = record.event, record.machine
        if isinstance(event, LivePaired):
            paired = True
        if paired and machine == -2 and isinstance(event, LayerArrived | WeightsLoaded):
            fraction = 1.0 if isinstance(event, WeightsLoaded) else (event.layer + 1) / (num_layers + 1)
            arrived.append((record.now, fraction))
        if machine >= 0 and isinstance(event, LayersDone | StepsDone) and machine in running:
            began, amount, shared = running.pop(machine)
            done.append(Work(machine, began, record.now, amount))
            if shared and any(isinstance(getattr(action, "event", None), Progressed) for action in record.actions):
                helped.append(fraction)
        for action in record.actions if machine >= 0 else ():
            if isinstance(action, RunLayers):
                tokens = sum(chunk.num_tokens for chunk in action.chunks)
                shared = machine == 0 and action.first_layer > 0
                running[machine] = record.now, tokens * (action.last_layer - action.first_layer), shared
            elif isinstance(action, RunSteps):
                tokens = sum(chunk.num_tokens for chunk in action.chunks)
                running[machine] = record.now, tokens * num_layers, False
    return done, arrived, helped


def rates(done: Sequence[Work], arrived: Sequence[tuple[Nanos, float]]) -> dict[str, float]:
    """Layers times tokens a second of the pair, in each quarter of the weights' arrival during which there was work."""
    found = {}
    busy_until = max((work.ended_at for work in done if work.began_at < arrived[-1][0]), default=0)
    for quarter in range(4):
        inside = [now for now, fraction in arrived if quarter / 4 <= fraction < (quarter + 1) / 4]
        if len(inside) > 1 and inside[-1] <= busy_until:
            began, ended = inside[0], inside[-1]
            amount = sum(work.within(began, ended) for work in done)
            found[f"{quarter * 25} to {quarter * 25 + 25} %"] = amount / ((ended - began) / SECOND)
    return found


def compare(
    place: Path, title: str, settings: Sequence[str], burst: Burst, num_layers: int, loads: Sequence[str], out: Console
) -> None:
    times = Table(title=f"{title}: first token of {burst.prompts} prompts of {burst.tokens} tokens within {burst.seconds:g} s")
    for column in ("weights come", "mean, s", "p50, s", "p99, s"):
        times.add_column(column, justify="left" if column == "weights come" else "right")
    for name in loads:
        folder = place / f"{title} {name}".replace(" ", "-")
        taken, together = asyncio.run(measure(folder, (*settings, LOADS[name]), burst, again=name == "live"))
        cuts = statistics.quantiles(taken, n=100, method="inclusive")
        times.add_row(name, f"{statistics.mean(taken):.2f}", f"{cuts[49]:.2f}", f"{cuts[98]:.2f}")
        if name == "live":
            pair(folder, title, burst, num_layers, together, out)
    out.print(times)


def pair(folder: Path, title: str, burst: Burst, num_layers: int, together: float, out: Console) -> None:
    """How much of two replicas side by side the pair was, by how much of the weights had arrived."""
    done, arrived, helped = works(folder, num_layers)
    both = burst.prompts * burst.tokens * num_layers / together
    table = Table(
        title=f"{title}: throughput of the pair, of two ready replicas side by side ({both / 1e6:.2f} M layer-tokens/s)"
    )
    table.add_column("weights there")
    table.add_column("of two", justify="right")
    table.add_column("of one", justify="right")
    for name, rate in rates(done, arrived).items():
        table.add_row(name, f"{rate / both:.0%}", f"{2 * rate / both:.2f}x")
    out.print(table)
    first = f"{min(helped):.0%}" if helped else "none"
    out.print(f"weights there at the first token that the loading replica had helped with: {first}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="just enough to see that it runs")
    smoke: bool = parser.parse_args().smoke
    out = Console(width=120)
    with tempfile.TemporaryDirectory() as place:
        dilation, burst = (1, Burst(16, 2000, 0.3)) if smoke else (8, Burst(64, 2000, 8.0))
        settings = (*EMULATED, f"serve.time_dilation={dilation}")
        compare(Path(place), "emulated", settings, burst, 32, list(LOADS)[: 1 if smoke else 4], out)
        if smoke:
            return
        try:
            find("smollm2")
        except ModelError as error:
            out.print(f"no real replicas: {error}")
            return
        compare(Path(place), "real", REAL, Burst(40, 500, 4.0), 30, ["live", "stop the world, from a peer", "from disk"], out)


if __name__ == "__main__":
    main()
