"""What a run remembers for its report: one row a request, and all gaps between tokens, run-length coded.

Filled by the simulator, the replay client and the head alike. Knows no files, no percentiles and no seconds.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Final

from msgspec import Struct, field

from squall.core.types import Nanos, ReplicaId, RequestId

UNSET: Final = -1
"""An instant that has not come."""


class Outcome(Enum):
    """How a request ended."""

    UNFINISHED = "unfinished"
    COMPLETED = "completed"
    FAILED = "failed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class RequestRow(Struct, gc=False):
    """The life of one request, as instants of one clock that starts at 0 with the run."""

    id: RequestId
    arrived_at: Nanos
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    replica: ReplicaId = -1
    scheduled_at: Nanos = UNSET  # start of the first step that worked on it
    first_token_at: Nanos = UNSET
    finished_at: Nanos = UNSET
    preemptions: int = 0
    outcome: Outcome = Outcome.UNFINISHED
    error: str = ""


class Gaps(Struct):
    """Gaps between tokens: entry i says that `weight[i]` requests each saw `count[i]` gaps of `first[i] + j * increment[i]`.

    `first` and `increment` are in sixteenths of a nanosecond (the unit of `perf.latency.Progression`); a gap is rounded down
    to whole nanoseconds.
    """

    weight: array[int] = field(default_factory=lambda: array("q"))
    count: array[int] = field(default_factory=lambda: array("q"))
    first: array[int] = field(default_factory=lambda: array("q"))
    increment: array[int] = field(default_factory=lambda: array("q"))

    def add(self, gap: Nanos, weight: int = 1) -> None:
        """One gap, seen by `weight` requests."""
        self.add_run(weight, 1, gap << 4, 0)

    def add_run(self, weight: int, count: int, first: int, increment: int) -> None:
        """`count` gaps in arithmetic progression, in sixteenths of a nanosecond."""
        self.weight.append(weight)
        self.count.append(count)
        self.first.append(first)
        self.increment.append(increment)


class RunRecord(Struct):
    """All that a run leaves behind for its report.

    Attributes:
        world: "simulated", "emulated" or "real".
        ended_at: the last instant of the run (makespan).
        gpu_nanos: accelerator time held, over all replicas.
        latency_source: where step times came from ("roofline", "profile", "measured by the client", ...).
        wall_s: how long the run took on the wall clock.
    """

    world: str
    requests: list[RequestRow]
    gaps: Gaps
    ended_at: Nanos = 0
    num_steps: int = 0
    num_events: int = 0
    scale_ups: int = 0
    scale_downs: int = 0
    gpu_nanos: Nanos = 0
    latency_source: str = ""
    wall_s: float = 0.0
