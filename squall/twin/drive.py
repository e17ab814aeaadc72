"""From configurations to replayed runs: the workload of each against the endpoint that it describes, or against any other.

Knows which part makes what, and shows how far it has come. Writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from squall.config import Config
from squall.core.types import SECOND
from squall.errors import ConfigError
from squall.live.loop import run
from squall.live.replay import Progress, ReplayRecord, play
from squall.pools import refuse_pools
from squall.quantities import counted
from squall.report.progress import Show, progress
from squall.twin.rehearse import offered
from squall.workload.spec import OfferedRequest


def drive(config: Config, url: str | None = None, model: str | None = None, **options: Any) -> ReplayRecord:
    """As `drive_together`, of one."""
    (record,) = drive_together([config], url, model, **options)
    return record


def drive_together(
    configs: Sequence[Config],
    url: str | None = None,
    model: str | None = None,
    *,
    api_key: str | None = None,
    tokenizer: Path | None = None,
    timeout_s: float = 600.0,
    max_in_flight: int | None = None,
) -> list[ReplayRecord]:
    """Replay the workloads of all `configs`, beginning together, against `url`; None is the fleet that each describes itself.

    That fleet's accelerators count for the whole run, if it keeps its size; what a fleet holds that follows its load, or another
    endpoint, a client does not know.

    Raises:
        ConfigError: there is no workload, or nobody answers at the endpoint.
    """
    for config in configs:
        if config.run.duration_s is not None:
            raise ConfigError("run.duration_s ends simulations; a replay ends with its workload: say workload.duration_s")
        refuse_pools(config, "squall replay")
    workloads = [offered(config) for config in configs]
    seconds = max(
        requests[-1].arrived_at / SECOND * _dilation(config, url) for config, requests in zip(configs, workloads, strict=True)
    )
    total = sum(map(len, workloads))
    with progress(f"replaying {counted(total, 'request')} over {seconds:.0f} s", total) as show:
        told = _added_up(len(configs), show)
        options = {"api_key": api_key, "tokenizer": tokenizer, "timeout_s": timeout_s, "max_in_flight": max_in_flight}
        records = run(_play(configs, workloads, url, model, told, options))
    for config, record in zip(configs, records, strict=True):
        if url is None and all(bounds.minimum == bounds.maximum for bounds in config.fleet.bounds.values()):
            record.gpu_nanos = record.ended_at * config.fleet.num_initial * config.replica.tp * config.replica.pp
    return records


def _dilation(config: Config, url: str | None) -> float:
    """Of what the fleet that the configuration describes pretends to be."""
    return config.serve.time_dilation if url is None and config.serve.engine == "emulated" else 1.0


async def _play(
    configs: Sequence[Config], workloads: Sequence[Sequence[OfferedRequest]], url: str | None, model: str | None,
    told: Sequence[Progress], options: dict[str, Any],
) -> list[ReplayRecord]:  # fmt: skip
    together = asyncio.Barrier(len(configs))
    plays = []
    for config, requests, progressed in zip(configs, workloads, told, strict=True):
        serve = config.serve
        own = {"api_key": options["api_key"] or next(iter(serve.api_keys if url is None else ()), None)}
        play_one = play(
            url or f"http://{'127.0.0.1' if serve.host == '0.0.0.0' else serve.host}:{serve.port}",
            model or (config.model.served_as or (config.model.name,))[0],
            requests,
            world="emulated" if url is None and serve.engine == "emulated" else "real",
            time_dilation=_dilation(config, url),
            seed=config.run.seed,
            block_size=config.replica.block_size,
            progress=progressed,
            ready=together.wait,
            **options | own,
        )
        plays.append(play_one)
    return await _all(plays)


async def _all(plays: Sequence[Coroutine[Any, Any, ReplayRecord]]) -> list[ReplayRecord]:
    """Of each, though all be broken off: then they keep what is done. Where one fails the others end, too."""
    tasks = [asyncio.create_task(each) for each in plays]
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in sorted(tasks, key=asyncio.Task.cancelled):  # why others were, first
        task.result()
    return [task.result() for task in tasks]


def _added_up(count: int, show: Show) -> list[Progress]:
    """What each of so many tells, shown in one."""
    counts = [(0, 0, 0)] * count

    def told(number: int) -> Progress:
        def tell(done: int, flying: int, failed: int) -> None:
            counts[number] = done, flying, failed
            all_done, all_flying, all_failed = (sum(of_all) for of_all in zip(*counts, strict=True))
            show(all_done, f"{all_done} done, {all_flying} in flight, {all_failed} failed")

        return tell

    return [told(number) for number in range(count)]
