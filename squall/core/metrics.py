"""What a run remembers for its report: one row a request, all gaps between tokens, and, where it was observed, its steps.

Filled by the simulator, the replay client and the head alike. Knows no files, no percentiles and no seconds.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Final

from msgspec import Struct, field

from squall.core.fleet_view import Capacity, Transfer
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


STRETCH: Final = (
    "replica", "stage", "run", "started_at", "count", "first", "increment", "offset", "num_decodes", "decode_context",
    "num_prefills", "num_prefill_tokens", "prefill_context", "prefill_pairs", "num_logits", "kv_blocks", "growth", "reserved",
)  # fmt: skip
"""The columns of `Observed.stretches`. A stretch is some steps in a row, of one run at one pipeline stage:

- `started_at` its first step; step j lasts `(first + j * increment) // 16` nanoseconds; `count` steps in all;
- `offset`: steps of its run before it. All that follows is of the run's first step; over the steps `decode_context` grows by
  `num_decodes` a step, `prefill_context` (tokens before the chunks) by `num_prefill_tokens`, and `prefill_pairs` (pairs of a
  chunk's token and one that it attends to, itself included) by its square: such a run has one chunk at most;
- `num_prefills`: prompts that it works on; `num_logits`: tokens that it produces;
- `kv_blocks`: blocks that requests hold, before the step takes its own (with pipeline stages: after); `growth`: which row of
  `Observed.growths` says what the decodes take at each further step, or -1 in a run of one step; `reserved`: blocks that the
  one prompt of a longer run holds at least.
"""


class Decision(Struct, frozen=True, gc=False):
    """From `at` on `after` replicas of the role are wanted, where it were `before`, and why."""

    at: Nanos
    role: str
    before: int
    after: int
    why: str


class Delivery(Struct, frozen=True):
    """Weights, or the KV of a request, that have come to a replica.

    Attributes:
        what: "weights" or "kv".
        kind: how weights came: "disk", "host", "p2p", "chain", "striped" or "mock"; of KV "handoff".
        source: where they were before: "host 0", "gpu 1, gpu 2" (of these replicas).
        route: the replicas that get them in turn, this one among them.
        path: the links that they crossed, as far as these are known.
        num_bytes: of all GPUs together.
        began_at, took: from the first byte's start to the arrival of the last one.
        request: whose KV.
        layers_at: of weights, when each layer was complete on all GPUs, UNSET of those that were there before; empty where
            nobody looked.
    """

    what: str
    kind: str
    source: str
    replica: ReplicaId
    route: tuple[ReplicaId, ...]
    path: tuple[str, ...]
    num_bytes: int
    began_at: Nanos
    took: Nanos
    request: RequestId = UNSET
    layers_at: tuple[Nanos, ...] = ()


def weights_delivered(
    replica: ReplicaId, transfer: Transfer, num_bytes: int, began_at: Nanos, took: Nanos, path: tuple[str, ...] = (),
    layers_at: tuple[Nanos, ...] = (),
) -> Delivery:  # fmt: skip
    """A load that has ended, as a load policy had planned it."""
    return Delivery(
        "weights", transfer.kind, transfer.named_sources, replica, transfer.path, path, num_bytes, began_at, took,
        layers_at=layers_at,
    )  # fmt: skip


def kv_delivered(
    source: ReplicaId, to: ReplicaId, request: RequestId, path: tuple[str, ...], num_bytes: int, began_at: Nanos, took: Nanos
) -> Delivery:
    """A hand-off, whole or in part."""
    return Delivery("kv", "handoff", f"gpu {source}", to, (to,), path, num_bytes, began_at, took, request)


class LinkLevels(Struct, frozen=True):
    """What crossed one direction of a link: from each instant on so many bytes a second, of so many flows."""

    name: str
    bandwidth: int
    levels: list[tuple[Nanos, int, int]]


class Observed(Struct):
    """What was seen of a run's engines, besides its requests; the simulator fills it when asked.

    Attributes:
        block_size: tokens of a KV block; the width of a row of `growths`.
        num_stages: pipeline stages of a replica; the most of any.
        pools: KV blocks of each replica.
        stages: pipeline stages of replicas with fewer.
        stretches: one row after the other, of the columns of `STRETCH`.
        growths: blocks that a replica's decodes take at each of the next `block_size` steps, over and over.
        phases: when which replica entered which phase of `core.lifecycle.Phase`, in which `Role`, in order of time.
        execution: of each request, the time of the steps that worked on it.
        preempted: of each preempted request, the time between losing its KV and the next step that worked on it.
        regenerated: of each preempted request, the tokens that it had when it last lost its KV.
        handoffs: KV that has come to another replica, in the order of arrival.
    """

    block_size: int
    num_stages: int = 1
    pools: dict[ReplicaId, int] = field(default_factory=dict)
    stages: dict[ReplicaId, int] = field(default_factory=dict)
    stretches: array[int] = field(default_factory=lambda: array("q"))
    growths: array[int] = field(default_factory=lambda: array("q"))
    phases: list[tuple[Nanos, ReplicaId, str, str]] = field(default_factory=list)
    execution: dict[RequestId, Nanos] = field(default_factory=dict)
    preempted: dict[RequestId, Nanos] = field(default_factory=dict)
    regenerated: dict[RequestId, int] = field(default_factory=dict)
    handoffs: list[Delivery] = field(default_factory=list)


class RoleUse(Struct, frozen=True):
    """How many replicas of a role took requests: at the least, on average over the run, at the most."""

    role: str
    min: int
    mean: float
    max: int


class GpuLevel(Struct, frozen=True):
    """From `at` on, a fleet that shares its cluster had so many GPUs, and waited for so many more, which others had."""

    at: Nanos
    held: int
    awaited: int


class FleetUse(Struct, frozen=True):
    """What became of a fleet that may change.

    Attributes:
        ready_after: of each replica that came up, the time from its start to then.
        gpus: on a cluster that is shared, every change of what it had.
        capacity: what its scale policy was told that one replica can do; None where nobody knows.
        phases: of `ready_after`, the time in each phase of coming up, all of them together.
    """

    roles: tuple[RoleUse, ...]
    ready_after: tuple[Nanos, ...]
    gpus: tuple[GpuLevel, ...] = ()
    capacity: Capacity | None = None
    phases: dict[str, Nanos] = {}


class RunRecord(Struct):
    """All that a run leaves behind for its report.

    Attributes:
        world: "simulated", "emulated" or "real".
        ended_at: the last instant of the run (makespan).
        num_absent: requests of the workload that had not arrived when the run was ended; none of `requests`.
        gpu_nanos: accelerator time held, over all replicas.
        latency_source: where step times came from ("roofline", "profile", "measured by the client", ...).
        wall_s: how long the run took on the wall clock.
        observed: what its engines did; None where nobody looked.
        fleet: of an elastic fleet that was simulated.
        decisions: of its controller, and `weights` that came to its replicas, in order of time.
        links: of the network, where they were recorded.
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
    observed: Observed | None = None
    num_absent: int = 0
    fleet: FleetUse | None = None
    decisions: list[Decision] = field(default_factory=list)
    weights: list[Delivery] = field(default_factory=list)
    links: list[LinkLevels] = field(default_factory=list)
