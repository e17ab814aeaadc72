"""Measures how long whole steps take on this machine, and fits the profile that `[latency] kind = "profile"` reads.

Knows processes and clocks. Each engine is measured in a process of its own, as a worker's is; several at once where a fleet
shares the machine, because they then share its memory bandwidth too.

Other work on the machine takes some steps a core away and others not, so that shapes cannot be compared by the wall's clock. One
thread's own clock tells how long a step is; what share of a core the engine had, on the whole, how much longer it then takes.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from statistics import fmean, median

from msgspec.structs import replace

from squall.config import Config
from squall.errors import ProfileError, SquallError
from squall.live.served import served_model
from squall.perf.profile import Point, Profile, fit
from squall.report.progress import Show
from squall.twin.sweep import sweep

ROUNDS = 5
"""Sweeps that a fast machine makes within its time; more would not make the medians better."""

ALONE = 0.9
"""An engine with this share of a core has it for itself, but for what every system does."""


def profile(config: Config, num_engines: int, budget_s: float, show: Show) -> Profile:
    """Measure the model of `config` on this machine, with `num_engines` at work at once, for at most about `budget_s` seconds.

    Loading the model comes on top. `show` is told how many of these seconds have passed.

    Raises:
        ModelError, ConfigError: the model cannot be had.
        ProfileError: an engine died, or there was too little time to measure anything.
    """
    served = served_model(config)
    measured, shares = _measured(config, num_engines, budget_s, show)
    share = fmean(shares)
    points = stretched(medians(measured), share)
    serve = config.serve
    machine = f"{serve.device} of {platform.machine()} with {os.cpu_count()} cores, {serve.compute_threads} thread(s) an engine"
    if num_engines > 1:
        machine += f", {num_engines} engines at once"
    dtype = config.replica.dtype if config.replica.dtype != "auto" else "fp32" if serve.device == "cpu" else "bf16"
    fitted = fit(points, model=served.spec.name, num_params=served.spec.num_params, machine=machine, dtype=dtype)
    return replace(fitted, tp=config.replica.tp, block_size=config.replica.block_size, share=share)


def num_sharing(config: Config) -> int:
    """How many engines of the fleet work at once on this machine's CPU, at most one a core; one where they have a GPU each."""
    return max(1, min(config.fleet.num_initial, os.cpu_count() or 1)) if config.serve.device == "cpu" else 1


def medians(points: Iterable[Point]) -> list[Point]:
    """One point for each shape."""
    times: dict[Point, list[float]] = defaultdict(list)
    for point in points:
        times[replace(point, seconds=0.0)].append(point.seconds)
    return [replace(shape, seconds=median(seconds)) for shape, seconds in times.items()]


def stretched(points: Iterable[Point], share: float) -> list[Point]:
    """The same steps where an engine has this share of a core."""
    return [replace(point, seconds=point.seconds / share) for point in points]


def busy(profile: Profile) -> str | None:
    """What to make of times that were measured beside other work; None where there was hardly any."""
    if profile.share is None or profile.share >= ALONE:
        return None
    return f"this machine had other work: engines had a core for {100 * profile.share:.0f} % of the time, and steps took longer"


def _measured(config: Config, num_engines: int, budget_s: float, show: Show) -> tuple[list[Point], list[float]]:
    """The points of all engines, and what share of a core each of them had."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit the parent's threads half-way
    ready = context.Barrier(num_engines)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    points: list[Point] = []
    shares: list[float] = []
    began = time.monotonic()
    try:
        for _ in range(num_engines):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=_measure, args=(config, budget_s, ready, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        for message in _received(pipes):
            if isinstance(message, float):
                shares.append(message)
                continue
            began = began if points else time.monotonic()
            points.append(message)
            show(time.monotonic() - began, f"{len(points)} steps measured")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return points, shares


def _received(pipes: list[Connection]) -> Iterator[Point | float]:
    """What the engines send, until each has said which share of a core it had."""
    while pipes:
        for pipe in wait(pipes):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                raise ProfileError("an engine died while it was measured; what it printed says why") from None
            if isinstance(message, SquallError):
                raise message
            if isinstance(message, float):
                pipes.remove(pipe)
            yield message


def _measure(config: Config, budget_s: float, ready: Barrier, pipe: Connection) -> None:
    """In a process of its own: sweep until the time is over, and send every point, then the share of a core that it had; or the
    error."""
    from squall.live.engine.build import engine_maker

    os.setsid()  # as a worker's: where Linux deals cores out by session both get as much; Ctrl-C is the parent's, which ends us
    try:
        engine = engine_maker(config, served_model(config))()
        engine.load()
        engine.warm()
    except SquallError as error:
        pipe.send(error)
        return
    clock = _clock(config)
    ready.wait()
    deadline = time.monotonic() + budget_s
    began, worked = time.perf_counter_ns(), clock()
    for point in chain.from_iterable(sweep(engine, clock=clock) for _ in range(ROUNDS)):
        pipe.send(point)
        if time.monotonic() > deadline:
            break
    pipe.send(min(1.0, (clock() - worked) / (time.perf_counter_ns() - began)))


def _clock(config: Config) -> Callable[[], int]:
    """Nanoseconds that the engine's only thread had a core; those of the wall where others compute, too."""
    serve = config.serve
    alone = serve.engine == "torch" and serve.device == "cpu" and serve.compute_threads == config.replica.tp == 1
    return time.thread_time_ns if alone else time.perf_counter_ns
