"""The controller machine: how many replicas there should be, and the life of each.

Keeps apart what is desired (the scale policy's number), what is observed (each replica's phase) and what is in flight (a stop
that was asked for). Knows no requests: the router tells it when a withdrawn replica is empty. Does not know how a process is
started or how weights travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from squall.core.actions import AnyAction, LoadWeights, Send, StartReplica, StopReplica, WarmReplica
from squall.core.events import (
    AnyEvent,
    DrainWanted,
    Emptied,
    LayerArrived,
    LoadFailed,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet_view import ScalePolicy, Wanted
from squall.core.lifecycle import REPLICA, TRANSFER, Launched, Life, Phase, Revived, TransferPhase, Withdrawn
from squall.core.types import ROUTER, SECOND, Nanos, ReplicaId, Role
from squall.errors import IllegalTransition

FIRST_BACKOFF: Nanos = 1 * SECOND
LAST_BACKOFF: Nanos = 60 * SECOND
STABLE_AFTER: Nanos = 60 * SECOND
"""A replica that has served so long has proved itself: its earlier failures no longer count."""

ABOUT_A_REPLICA = (ReplicaStarted, LayerArrived, WeightsLoaded, LoadFailed, Warmed, Emptied, ReplicaLost, ReplicaStopped)
ABOUT_WEIGHTS = (LayerArrived, WeightsLoaded, LoadFailed, ReplicaLost, ReplicaStopped)


class Member:
    """One replica of the fleet.

    Attributes:
        life: its observed phase.
        transfer: its load of weights, while it goes on.
        layers_ready: layers that have arrived (they arrive in order).
        stopping: its process was asked to end and has not yet.
        announced: the router counts on it.
        num_failures: in a row; each doubles the wait before the next start.
        start_at: not before this instant.
    """

    __slots__ = ("announced", "block_size", "layers_ready", "life", "num_blocks", "num_failures", "ready_at", "replica",
                 "start_at", "stopping", "transfer")  # fmt: skip

    def __init__(self, replica: ReplicaId) -> None:
        self.replica = replica
        self.life = Life(f"replica {replica}", REPLICA, Phase.OFF)
        self.transfer: Life[TransferPhase] | None = None
        self.layers_ready = 0
        self.num_blocks = 0
        self.block_size = 0
        self.stopping = False
        self.announced = False
        self.num_failures = 0
        self.ready_at: Nanos = 0
        self.start_at: Nanos = 0


class Controller:
    """Brings replicas 0 to n-1 up and keeps them up; n is the scale policy's answer, and 0 once `DrainWanted` has come.

    Woken at 0 it starts the fleet. A replica that is lost, or whose weights cannot be loaded, is started again after 1, 2, 4, ...
    60 seconds. One that is not wanted any more is withdrawn: if it is ready it finishes what it has, otherwise it stops at once.

    The driver reports `ReplicaLost` only when the process can do no more harm (it has ended, or was killed), and nothing of a
    replica after that until it is started again. `DrainWanted` is for the controller; it passes it on to the router.
    """

    __slots__ = ("_draining", "_fleet", "_retrying", "_wanted", "num_replicas", "scale", "source", "wake_at")

    def __init__(self, num_replicas: int, scale: ScalePolicy, source: str = "disk") -> None:
        self.wake_at: Nanos | None = 0
        self.num_replicas = num_replicas
        self.scale = scale
        self.source = source
        self._draining = False
        self._fleet: dict[ReplicaId, Member] = {}
        self._retrying: set[ReplicaId] = set()  # failed, not started again yet
        self._wanted = 0

    @property
    def num_configured(self) -> int:
        return self.num_replicas

    @property
    def roles(self) -> Mapping[Role, Controller]:
        return {Role.BOTH: self}

    @property
    def initial(self) -> int:
        return self.num_replicas

    @property
    def num_ready(self) -> int:
        return sum(member.life.phase is Phase.READY for member in self._fleet.values())

    @property
    def fleet(self) -> Mapping[ReplicaId, Member]:
        """All replicas that ever were, to look at."""
        return self._fleet

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        actions: list[AnyAction] = []
        concerned: Iterable[Member] = self._fleet.values()
        match event:
            case Woke():
                pass
            case DrainWanted() if not self._draining:
                self._draining = True
                actions.append(Send(ROUTER, event))
            case DrainWanted():
                return []
            case _ if isinstance(event, ABOUT_A_REPLICA):
                member = self._member(event.replica)
                actions += self._observe(member, event, now)
                concerned = (member,)
            case _:
                raise IllegalTransition(f"the controller got {type(event).__name__}, which is not for it")
        actions += self._reconcile(concerned, now)
        # One that is due but was not concerned by this event is woken at this very instant.
        waiting = (member for replica in self._retrying if not (member := self._fleet[replica]).stopping)
        self.wake_at = min((max(member.start_at, now) for member in waiting), default=None)
        return actions

    # -- what is observed

    def _member(self, replica: ReplicaId) -> Member:
        member = self._fleet.get(replica)
        if member is None:
            raise IllegalTransition(f"replica {replica} is not of this fleet, which has {len(self._fleet)}")
        return member

    def _observe(self, member: Member, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        """Follow the tables; ask for what comes next in a replica's life."""
        after = member.life.on(event, now)
        self._observe_transfer(member, event, now)
        match event:
            case ReplicaStarted() if not member.stopping:
                member.transfer = Life(f"weights of replica {member.replica}", TRANSFER, TransferPhase.ASKED)
                return [LoadWeights(member.replica, self.source)]
            case WeightsLoaded() if not member.stopping:
                member.num_blocks, member.block_size = event.num_blocks, event.block_size
                return [WarmReplica(member.replica)]
            case Warmed() if not member.stopping:
                member.ready_at = now
                return [self._announce(member)]
            case Emptied() if after is Phase.IDLE:
                member.announced = False
            case LoadFailed():
                self._failed(member, now)
                return self._stop(member)
            case ReplicaLost() | ReplicaStopped():
                if not member.stopping:
                    self._failed(member, now)
                if isinstance(event, ReplicaStopped):
                    member.stopping = False
                return self._gone(member)
        return []

    def _observe_transfer(self, member: Member, event: AnyEvent, now: Nanos) -> None:
        transfer = member.transfer
        if transfer is None or not isinstance(event, ABOUT_WEIGHTS):
            return
        if transfer.on(event, now) in (TransferPhase.DONE, TransferPhase.FAILED):
            member.transfer = None
        if isinstance(event, LayerArrived):
            member.layers_ready = event.layer + 1

    def _announce(self, member: Member) -> Send:
        member.announced = True
        return Send(ROUTER, ReplicaUp(member.replica, member.num_blocks, member.block_size))

    def _failed(self, member: Member, now: Nanos) -> None:
        if member.announced and now - member.ready_at >= STABLE_AFTER:
            member.num_failures = 0
        member.start_at = now + min(FIRST_BACKOFF << min(member.num_failures, 6), LAST_BACKOFF)
        member.num_failures += 1
        self._retrying.add(member.replica)

    def _gone(self, member: Member) -> list[AnyAction]:
        """Its process has ended, asked to or not."""
        member.layers_ready = 0
        if not member.announced:
            return []
        member.announced = False
        return [Send(ROUTER, ReplicaDown(member.replica, lost=True))]

    # -- what is desired

    def _reconcile(self, concerned: Iterable[Member], now: Nanos) -> list[AnyAction]:
        """One step from what is observed towards what is desired: of those concerned, or of all when that has changed."""
        wanted = 0
        if not self._draining:
            answer = self.scale(self)  # type: ignore[arg-type]
            wanted = answer.counts[Role.BOTH] if isinstance(answer, Wanted) else answer
        if wanted != self._wanted:
            self._wanted = wanted
            for replica in range(len(self._fleet), wanted):
                self._fleet[replica] = Member(replica)
            concerned = self._fleet.values()
        actions: list[AnyAction] = []
        for member in concerned:
            if not member.stopping:
                actions += self._keep(member, now) if member.replica < wanted else self._withdraw(member, now)
        return actions

    def _keep(self, member: Member, now: Nanos) -> list[AnyAction]:
        """A replica that is wanted: started, or revived, where it is not on its way already."""
        phase = member.life.phase
        if phase in (Phase.OFF, Phase.FAILED) and now >= member.start_at:
            self._retrying.discard(member.replica)
            member.life.on(Launched(), now)
            return [StartReplica(member.replica)]
        if phase in (Phase.DRAINING, Phase.IDLE):
            member.life.on(Revived(), now)
            return [self._announce(member)]
        return []

    def _withdraw(self, member: Member, now: Nanos) -> list[AnyAction]:
        """A replica that is not wanted: drained first where it works, else stopped."""
        phase = member.life.phase
        self._retrying.discard(member.replica)
        if phase is Phase.READY:
            member.life.on(Withdrawn(), now)
            return [Send(ROUTER, ReplicaDown(member.replica, lost=False))]
        if phase in (Phase.STARTING, Phase.LOADING, Phase.WARMING, Phase.IDLE):
            return self._stop(member)
        if phase is Phase.FAILED:
            member.life.on(Withdrawn(), now)
        return []

    def _stop(self, member: Member) -> list[AnyAction]:
        if member.stopping:
            return []
        member.stopping = True
        return [StopReplica(member.replica)]
