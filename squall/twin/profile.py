"""Measures how long whole steps take on this machine, and fits the profile that `[latency] kind = "profile"` reads.

Knows processes and clocks. Each engine is measured in a process of its own, as a worker's is; several at once where a fleet
shares the machine, because they then share its memory bandwidth too.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from statistics import median

from msgspec.structs import replace

from squall.config import Config
from squall.errors import ProfileError, SquallError
from squall.live.served import served_model
from squall.perf.profile import Point, Profile, fit
from squall.report.progress import Show
from squall.twin.sweep import sweep

ROUNDS = 5
"""Sweeps that a fast machine makes within its time; more would not make the medians better."""


def profile(config: Config, num_engines: int, budget_s: float, show: Show) -> Profile:
    """Measure the model of `config` on this machine, with `num_engines` at work at once, for at most about `budget_s` seconds.

    Loading the model comes on top. `show` is told how many of these seconds have passed.

    Raises:
        ModelError, ConfigError: the model cannot be had.
        ProfileError: an engine died, or there was too little time to measure anything.
    """
    served = served_model(config)
    points = medians(_measured(config, num_engines, budget_s, show))
    serve = config.serve
    machine = f"{serve.device} of {platform.machine()} with {os.cpu_count()} cores, {serve.compute_threads} thread(s) an engine"
    if num_engines > 1:
        machine += f", {num_engines} engines at once"
    dtype = config.replica.dtype if config.replica.dtype != "auto" else "fp32" if serve.device == "cpu" else "bf16"
    fitted = fit(points, model=served.spec.name, num_params=served.spec.num_params, machine=machine, dtype=dtype)
    return replace(fitted, tp=config.replica.tp, block_size=config.replica.block_size)


def num_sharing(config: Config) -> int:
    """How many engines of the fleet work at once on this machine's CPU, at most one a core; one where they have a GPU each."""
    return max(1, min(config.fleet.num_initial, os.cpu_count() or 1)) if config.serve.device == "cpu" else 1


def medians(points: Iterable[Point]) -> list[Point]:
    """One point for each shape."""
    times: dict[Point, list[float]] = defaultdict(list)
    for point in points:
        times[replace(point, seconds=0.0)].append(point.seconds)
    return [replace(shape, seconds=median(seconds)) for shape, seconds in times.items()]


def _measured(config: Config, num_engines: int, budget_s: float, show: Show) -> Iterator[Point]:
    """The points of all engines, as they come."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit the parent's threads half-way
    ready = context.Barrier(num_engines)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    began, count = time.monotonic(), 0
    try:
        for _ in range(num_engines):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=_measure, args=(config, budget_s, ready, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        for point in _received(pipes):
            began = time.monotonic() if not count else began
            count += 1
            show(time.monotonic() - began, f"{count} steps measured")
            yield point
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(pipes: list[Connection]) -> Iterator[Point]:
    """What the engines send until each has said that it is done."""
    while pipes:
        for pipe in wait(pipes):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                raise ProfileError("an engine died while it was measured; what it printed says why") from None
            if isinstance(message, SquallError):
                raise message
            if message is None:
                pipes.remove(pipe)
            else:
                yield message


def _measure(config: Config, budget_s: float, ready: Barrier, pipe: Connection) -> None:
    """In a process of its own: sweep until the time is over, and send every point, then None; or the error."""
    from squall.live.engine.build import engine_maker

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    try:
        engine = engine_maker(config, served_model(config))()
        engine.load()
        engine.warm()
    except SquallError as error:
        pipe.send(error)
        return
    ready.wait()
    deadline = time.monotonic() + budget_s
    for point in chain.from_iterable(sweep(engine) for _ in range(ROUNDS)):
        pipe.send(point)
        if time.monotonic() > deadline:
            break
    pipe.send(None)
