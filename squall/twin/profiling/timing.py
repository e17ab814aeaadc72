"""How long a call takes on a device: with a clock on a CPU, with events on a GPU, one by one or captured in a graph.

Knows no operator.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

Call = Callable[[], object]

ENOUGH_S = 0.04
"""Calls are repeated for so long, and at least `FEWEST` times."""

FEWEST = 5
_SLOW_S = 0.1
"""A call that takes longer than this is repeated half as often: no short interruption changes much."""


class Timer(Protocol):
    """Times calls."""

    def seconds(self, call: Call) -> float:
        """The median of several; the first ones are not counted."""
        ...


def cpu_clock(threads: int) -> Callable[[], int]:
    """Nanoseconds for what is computed with so many threads.

    With one, those that the calling thread had a processor: what else runs on the machine does not count. Several threads
    have no such clock, and wait for each other.
    """
    return time.thread_time_ns if threads == 1 else time.perf_counter_ns


class CpuTimer:
    """By a clock: the median of single calls, so that a few that were interrupted do not count."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock

    def seconds(self, call: Call) -> float:
        """See `Timer`."""
        call()
        taken: list[float] = []
        total = 0.0
        fewest = FEWEST
        while len(taken) < fewest or total < ENOUGH_S:
            began = self._clock()
            call()
            taken.append(max(1, self._clock() - began) / 1e9)
            total += taken[-1]
            fewest = FEWEST // 2 if taken[0] > _SLOW_S else FEWEST
        return median(taken)


class CudaTimer:
    """By events around bursts of calls on the current stream, each launched by itself as the engine does."""

    def seconds(self, call: Call) -> float:
        """See `Timer`."""
        call()
        count = max(1, int(ENOUGH_S / FEWEST / max(burst(call, 3), 1e-6)))
        return median(burst(call, count) for _ in range(FEWEST))


def burst(call: Call, count: int) -> float:
    """Seconds of one of so many calls on this GPU's current stream, one behind the other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


class GraphTimer(CudaTimer):
    """The same, captured: `CALLS` calls are one graph, which is replayed. The call must not wait for the GPU."""

    CALLS = 16

    def seconds(self, call: Call) -> float:
        """See `Timer`."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # capture wants what is captured to have run on a stream that is not the default one
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.CALLS):
                call()
        return super().seconds(graph.replay) / self.CALLS
