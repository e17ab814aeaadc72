"""The lives of a replica, of a transfer and of a request, as tables.

Knows which phase may follow which happening. Does not know why anything happened, how long it took, or what else there is.
The diagrams of docs/lifecycle.md are drawn from `REPLICA`, `TRANSFER` and `REQUEST`.
"""

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, Literal, TypeVar

from msgspec import Struct

from squall.core.events import (
    AnyEvent,
    Emptied,
    LayerArrived,
    LoadFailed,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Warmed,
    WeightsLoaded,
)
from squall.core.types import SECOND, Nanos
from squall.errors import IllegalTransition

# -- what the controller decides about a replica; like an event, but nobody sends it


class Launched(Struct, frozen=True):
    """A process was asked for."""


class Withdrawn(Struct, frozen=True):
    """No new work is wanted there."""


class Revived(Struct, frozen=True):
    """The replica is wanted back before it was switched off."""


class Redirected(Struct, frozen=True):
    """The weights come from elsewhere: their source is gone."""


# -- a replica


class Phase(StrEnum):
    """What a replica can do. Its role and its transfers are separate."""

    OFF = "off"  # no process, no weights
    STARTING = "starting"  # a process was asked for
    LOADING = "loading"  # the process answers, weights arrive; it may already run the layers it has
    WARMING = "warming"  # weights complete; kernels and graphs are prepared
    READY = "ready"  # takes work
    DRAINING = "draining"  # finishes what it has
    IDLE = "idle"  # weights resident, no work; revived for free
    FAILED = "failed"  # lost, or its weights could not be loaded


Decision = Launched | Withdrawn | Revived | Redirected
Happening = type[AnyEvent] | type[Decision]

_GONE: Mapping[Happening, Phase] = {ReplicaLost: Phase.FAILED, ReplicaStopped: Phase.OFF}
"""Whatever has a process can lose it, and can be stopped; it keeps its phase until it has stopped."""

# `Emptied` changes nothing where the router's word crossed with the controller's (a revival) or the world's (a loss)
REPLICA: Mapping[Phase, Mapping[Happening, Phase]] = {
    Phase.OFF: {Launched: Phase.STARTING, Emptied: Phase.OFF},
    Phase.STARTING: {ReplicaStarted: Phase.LOADING, **_GONE},
    Phase.LOADING: {
        LayerArrived: Phase.LOADING,
        WeightsLoaded: Phase.WARMING,
        LoadFailed: Phase.FAILED,
        Emptied: Phase.LOADING,  # of a replica that worked already, in a pair that was lost
        **_GONE,
    },
    Phase.WARMING: {Warmed: Phase.READY, Emptied: Phase.WARMING, **_GONE},
    Phase.READY: {Withdrawn: Phase.DRAINING, Emptied: Phase.READY, **_GONE},
    Phase.DRAINING: {Emptied: Phase.IDLE, Revived: Phase.READY, **_GONE},
    Phase.IDLE: {Revived: Phase.READY, **_GONE},
    Phase.FAILED: {Launched: Phase.STARTING, Withdrawn: Phase.OFF, Emptied: Phase.FAILED, **_GONE},
}

# -- a transfer of weights


class TransferPhase(StrEnum):
    """How far the weights are."""

    ASKED = "asked"
    MOVING = "moving"  # at least one layer is in
    DONE = "done"
    FAILED = "failed"  # given up, or one end of it is gone


_ENDS: Mapping[Happening, TransferPhase] = {
    LayerArrived: TransferPhase.MOVING,
    WeightsLoaded: TransferPhase.DONE,
    LoadFailed: TransferPhase.FAILED,
    ReplicaLost: TransferPhase.FAILED,
    ReplicaStopped: TransferPhase.FAILED,
    Redirected: TransferPhase.ASKED,
}

TRANSFER: Mapping[TransferPhase, Mapping[Happening, TransferPhase]] = {
    TransferPhase.ASKED: _ENDS,
    TransferPhase.MOVING: _ENDS,
    TransferPhase.DONE: {},
    TransferPhase.FAILED: {},
}

# -- a request, as the router sees it


class RequestPhase(StrEnum):
    """Where a request is. One that a dead replica had is QUEUED again."""

    QUEUED = "queued"  # at the router, bound to no replica
    WAITING = "waiting"  # at a replica, without a token from there
    RUNNING = "running"  # has a token from there
    PREEMPTED = "preempted"  # had one, lost its KV, waits at the replica
    HELD = "held"  # has one; its KV waits there for a replica that decodes it
    MOVING = "moving"  # promised to that one, which has blocks for it or waits for them
    CANCELLING = "cancelling"  # nobody wants it; the replica has not let go of it yet
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


RequestHappening = Literal[
    "sent", "first token", "preempted", "held", "offered", "adopted", "taken back", "kept", "finished", "cancelled",
    "replica lost", "rejected",
]  # fmt: skip

_AT_REPLICA: Mapping[RequestHappening, RequestPhase] = {
    "finished": RequestPhase.FINISHED,
    "cancelled": RequestPhase.CANCELLING,
    "replica lost": RequestPhase.QUEUED,
}

REQUEST: Mapping[RequestPhase, Mapping[RequestHappening, RequestPhase]] = {
    RequestPhase.QUEUED: {"sent": RequestPhase.WAITING, "cancelled": RequestPhase.CANCELLED, "rejected": RequestPhase.REJECTED},
    RequestPhase.WAITING: {"first token": RequestPhase.RUNNING, "preempted": RequestPhase.WAITING, **_AT_REPLICA},
    RequestPhase.RUNNING: {"preempted": RequestPhase.PREEMPTED, "held": RequestPhase.HELD, **_AT_REPLICA},
    RequestPhase.PREEMPTED: {
        "first token": RequestPhase.RUNNING,
        "preempted": RequestPhase.PREEMPTED,
        "held": RequestPhase.HELD,
        **_AT_REPLICA,
    },
    RequestPhase.HELD: {"offered": RequestPhase.MOVING, "kept": RequestPhase.RUNNING, **_AT_REPLICA},
    RequestPhase.MOVING: {
        "adopted": RequestPhase.RUNNING,
        "taken back": RequestPhase.HELD,
        "kept": RequestPhase.RUNNING,
        **_AT_REPLICA,
    },
    RequestPhase.CANCELLING: {
        "first token": RequestPhase.CANCELLING,
        "preempted": RequestPhase.CANCELLING,
        "held": RequestPhase.CANCELLING,
        "adopted": RequestPhase.CANCELLING,
        "taken back": RequestPhase.CANCELLING,
        "kept": RequestPhase.CANCELLING,
        "cancelled": RequestPhase.CANCELLING,
        "finished": RequestPhase.CANCELLED,
        "replica lost": RequestPhase.CANCELLED,
    },
    RequestPhase.FINISHED: {},
    RequestPhase.CANCELLED: {},
    RequestPhase.REJECTED: {},
}

# -- applying them

P = TypeVar("P", bound=StrEnum)


class Life(Generic[P]):
    """One object's phase and how it came to it.

    Args:
        name: who, for the story: "replica 3".
        table: one of the tables above.
        phase: the first phase.

    Attributes:
        phase: the current phase.
    """

    __slots__ = ("_name", "_story", "_table", "phase")

    def __init__(self, name: str, table: Mapping[P, Mapping[Happening, P]], phase: P) -> None:
        self.phase = phase
        self._name = name
        self._table = table
        self._story: deque[tuple[Nanos, str, P]] = deque(maxlen=32)

    def on(self, event: AnyEvent | Decision, now: Nanos) -> P:
        """Move to the phase that `event` leads to.

        Raises:
            IllegalTransition: nothing has changed then.
        """
        after = self._table[self.phase].get(type(event))
        name = type(event).__name__
        if after is None:
            raise IllegalTransition(f"{self._name} got {name} while {self.phase}: {self.story()}")
        if after is not self.phase:
            self._story.append((now, name, after))
            self.phase = after
        return after

    def story(self) -> str:
        """The latest changes of phase, oldest first, on one line."""
        return " > ".join(f"{now / SECOND:.3f}s {name} {phase}" for now, name, phase in self._story) or "nothing yet"
