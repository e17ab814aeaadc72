"""The replicas of a fleet as the controller observes them, filed by role and by what can be had of them.

Satisfies the windows of scale and load policies (`RoleView`, `SourceView`). Follows the lifecycle tables; decides nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from squall.core.demand import Demand
from squall.core.events import AnyEvent
from squall.core.fleet_plan import Bounds, FleetPlan, Slots
from squall.core.fleet_view import DemandView, Place, ScalePolicy, Transfer
from squall.core.lifecycle import REPLICA, Decision, Life, Phase, TransferPhase
from squall.core.rates import Growth, Highest, Mean, TooFew
from squall.core.types import SECOND, Nanos, ReplicaId, Role

SAMPLES_A_WINDOW = 20
HOLDS_NOTHING = (Phase.OFF, Phase.FAILED)
HOLDS_WEIGHTS = (Phase.WARMING, Phase.READY, Phase.DRAINING, Phase.IDLE)


class Traffic(Protocol):
    """The router, as the controller sees it."""

    def demand(self, role: Role, /) -> DemandView:
        """What is asked of the replicas of that role, now."""
        ...

    def outstanding(self, replica: ReplicaId, /) -> tuple[int, int]:
        """Unfinished requests of a replica, and their prompt tokens; (0, 0) of one that has none."""
        ...


class NoTraffic:
    """Nobody asks for anything: for a fleet whose size does not depend on it."""

    def demand(self, _role: Role) -> DemandView:
        return Demand()

    def outstanding(self, _replica: ReplicaId) -> tuple[int, int]:
        return 0, 0


class Member:
    """One slot, and the replica that is or was there. Satisfies `SourceView`.

    Attributes:
        life: its observed phase.
        role: what it serves, or served last.
        transfer: its load of weights, while it goes on; `source`: what was asked for, as long as the replica is there.
        batch: those that were started with it, who may share a transfer.
        layers_ready: layers that have arrived (they arrive in order).
        stopping: its process was asked to end and has not yet.
        announced: the router counts on it; `emptied`: it did, and has nothing of this process any more.
        leaves_at: its node goes then; until `withdraw_at` it may serve on.
        num_failures: in a row; each doubles the wait before the next start.
        start_at: not before this instant.
    """

    __slots__ = ("_fleet", "announced", "batch", "block_size", "domain", "drawer", "emptied", "idle_at", "launched_at",
                 "layers_ready", "leaf", "leaves_at", "life", "num_blocks", "num_failures", "ready_at", "replica", "role",
                 "source", "start_at", "state", "stopping", "transfer", "withdraw_at")  # fmt: skip

    def __init__(self, replica: ReplicaId, state: RoleState, fleet: Fleet) -> None:
        self._fleet = fleet
        self.replica = replica
        self.state = state
        self.role = state.role
        self.domain = fleet.slots.domain(replica)
        self.leaf = fleet.slots.leaf(replica)
        self.life = Life(f"replica {replica}", REPLICA, Phase.OFF)
        self.transfer: Life[TransferPhase] | None = None
        self.source: Transfer | None = None
        self.batch: tuple[Member, ...] = ()
        self.drawer: dict[ReplicaId, Member] | None = None
        self.layers_ready = 0
        self.num_blocks = 0
        self.block_size = 0
        self.stopping = False
        self.announced = False
        self.emptied = False
        self.leaves_at: Nanos | None = None
        self.withdraw_at: Nanos = 0
        self.num_failures = 0
        self.launched_at: Nanos = 0
        self.ready_at: Nanos = 0
        self.idle_at: Nanos = 0
        self.start_at: Nanos = 0

    @property
    def phase(self) -> Phase:
        return self.life.phase

    @property
    def node(self) -> int:
        return self._fleet.slots.node(self.replica)

    @property
    def nic_bytes_per_s(self) -> float:
        return self._fleet.slots.nic_bytes_per_s

    @property
    def link_bytes_per_s(self) -> float:
        return self._fleet.slots.link_bytes_per_s

    @property
    def sends_kv(self) -> bool:
        return self.role is Role.PREFILL

    @property
    def num_sending(self) -> int:
        return self._fleet.num_sending(self.replica)

    @property
    def num_outstanding(self) -> int:
        return self.outstanding[0]

    @property
    def outstanding(self) -> tuple[int, int]:
        """Unfinished requests that it has, and their prompt tokens."""
        return self._fleet.traffic.outstanding(self.replica)

    @property
    def is_free(self) -> bool:
        """Nothing is there: a replica can be started, once `start_at` has come."""
        return self.life.phase in HOLDS_NOTHING and not self.stopping and self.leaves_at is None

    @property
    def awaits_weights(self) -> bool:
        """They are not on their way yet."""
        starting = self.life.phase is Phase.STARTING or (self.life.phase is Phase.LOADING and self.transfer is None)
        return starting and not self.stopping

    @property
    def has_weights(self) -> bool:
        return self.life.phase in HOLDS_WEIGHTS and not self.stopping


class Memory(NamedTuple):
    """How far back a scale policy looks; nanoseconds.

    Attributes:
        window: of arrival rates.
        season: how long before that window another one may lie.
        concurrency: the longest window of `mean_unfinished`.
        spacing: observations that are closer together count as one.
    """

    window: Nanos
    season: Nanos
    concurrency: Nanos
    spacing: Nanos

    @classmethod
    def of(cls, policy: ScalePolicy) -> Memory:
        """As the policy says."""
        window, season, concurrency = (
            round(getattr(policy, name, default) * SECOND)
            for name, default in (("window_s", 10.0), ("memory_s", 0.0), ("concurrency_s", 10.0))
        )
        return cls(max(1, window), season, max(1, concurrency), max(1, window // SAMPLES_A_WINDOW))


class RoleState:
    """The replicas of one role, and what the controller remembers of it. Satisfies `RoleView`.

    Attributes:
        coming, ready, draining, idle: those that are in these phases and are not being stopped.
        leaving: of the ready and the coming, those whose node goes: they do not count any more.
        target: how many there should be.
        manual: how many somebody said there should be, whatever the policy says.
        asked: the policy's latest answer, within bounds; `wanted`: as much of it as there is place for.
        highest: of the answers.
        too_few: which size has turned out to be that.
        raised_at, lowered_at: when the target went up and down last.
    """

    def __init__(self, role: Role, bounds: Bounds, plan: FleetPlan, memory: Memory) -> None:
        self.role = role
        self.minimum = bounds.minimum
        self.maximum = bounds.maximum
        self.initial = bounds.initial
        self.coming: dict[ReplicaId, Member] = {}
        self.ready: dict[ReplicaId, Member] = {}
        self.draining: dict[ReplicaId, Member] = {}
        self.idle: dict[ReplicaId, Member] = {}
        self.leaving: dict[ReplicaId, Member] = {}
        self.target = bounds.initial
        self.manual: int | None = None
        self.asked = bounds.initial
        self.wanted = bounds.initial
        self.highest = Highest(plan.patience.down_window)
        self.raised_at: Nanos | None = None
        self.lowered_at: Nanos | None = None
        self._memory = memory
        window = max(memory.window, plan.patience.down_window)
        self._requests = Growth(window, memory.spacing)
        self._tokens = Growth(max(window, memory.window + memory.season), memory.spacing)
        self.too_few = TooFew(window, self._requests, self._tokens)
        self._unfinished = Mean(memory.concurrency, memory.spacing)
        self.demand: DemandView = Demand()
        self.now: Nanos = 0
        self.load_s = None if plan.capacity is None else plan.capacity.load_s  # expected, until one has been seen

    def observe(self, demand: DemandView, now: Nanos) -> None:
        """See what is asked now; remember what has arrived, and what there is."""
        self.now = now
        self.demand = demand
        self._requests.observe(now, demand.num_arrived)
        self._tokens.observe(now, demand.num_arrived_tokens)
        self._unfinished.observe(now, demand.num_queued + demand.num_waiting + demand.num_running)
        self.too_few.observe(now)

    @property
    def num_here(self) -> int:
        """Replicas that count towards the target."""
        return len(self.coming) + len(self.ready)

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    @property
    def num_coming(self) -> int:
        return len(self.coming)

    @property
    def num_draining(self) -> int:
        return len(self.draining)

    @property
    def num_idle(self) -> int:
        return len(self.idle)

    @property
    def next_ready_s(self) -> float | None:
        if not self.coming or self.load_s is None:
            return None
        first = min(member.launched_at for member in self.coming.values())
        return max(0.0, self.load_s - (self.now - first) / SECOND)

    @property
    def is_quiet(self) -> bool:
        """Nobody wants anything of the role."""
        demand = self.demand
        return not (demand.num_queued or demand.num_waiting or demand.num_running)

    @property
    def num_queued(self) -> int:
        return self.demand.num_queued

    @property
    def num_queued_tokens(self) -> int:
        return self.demand.num_queued_tokens

    @property
    def oldest_queued_at(self) -> Nanos | None:
        return self.demand.oldest_queued_at

    @property
    def num_waiting(self) -> int:
        return self.demand.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self.demand.num_waiting_tokens

    @property
    def num_running(self) -> int:
        return self.demand.num_running

    @property
    def num_promised_tokens(self) -> int:
        return self.demand.num_promised_tokens

    @property
    def num_blocks(self) -> int:
        return sum(member.num_blocks for member in self.ready.values())

    @property
    def block_size(self) -> int:
        return next((member.block_size for member in self.ready.values()), 0)

    @property
    def arrived_per_s(self) -> float | None:
        return self._requests.per_s(self._memory.window)

    @property
    def arrived_tokens_per_s(self) -> float | None:
        return self._tokens.per_s(self._memory.window)

    def past_tokens_per_s(self, ago_s: float) -> float | None:
        return self._tokens.per_s(self._memory.window, round(ago_s * SECOND))

    def mean_unfinished(self, window_s: float) -> float | None:
        return self._unfinished.over(round(window_s * SECOND))


class Fleet:
    """All slots. `members` has those in which a replica was wanted at least once."""

    def __init__(self, slots: Slots, states: dict[Role, RoleState], traffic: Traffic) -> None:
        self.slots = slots
        self.states = states
        self.traffic = traffic
        self.members: dict[ReplicaId, Member] = {}

    def member(self, replica: ReplicaId) -> Member:
        """The slot's record, made when it is wanted for the first time."""
        member = self.members.get(replica)
        if member is None:
            member = self.members[replica] = Member(replica, next(iter(self.states.values())), self)
        return member

    def move(self, member: Member, event: AnyEvent | Decision, now: Nanos) -> Phase:
        """Follow the table, and file the member anew. Raises IllegalTransition."""
        after = member.life.on(event, now)
        self.file(member)
        return after

    def assign(self, member: Member, state: RoleState) -> None:
        """It serves another role from now on."""
        if member.drawer is not None:
            del member.drawer[member.replica]
            member.drawer = None
        member.state = state
        member.role = state.role
        self.file(member)

    def file(self, member: Member) -> None:
        """Where it belongs, after anything about it has changed."""
        drawer = None if member.stopping else self._drawer(member)
        if drawer is not member.drawer:
            if member.drawer is not None:
                del member.drawer[member.replica]
            if drawer is not None:
                drawer[member.replica] = member
            member.drawer = drawer

    def _drawer(self, member: Member) -> dict[ReplicaId, Member] | None:
        state = member.state
        match member.life.phase:
            case Phase.STARTING | Phase.LOADING | Phase.WARMING:
                return state.coming if member.leaves_at is None else state.leaving
            case Phase.READY:
                return state.ready if member.leaves_at is None else state.leaving
            case Phase.DRAINING:
                return state.draining if member.leaves_at is None else state.leaving
            case Phase.IDLE:
                return state.idle if member.leaves_at is None else state.leaving
        return None

    def num_sending(self, replica: ReplicaId) -> int:
        """Transfers of weights that leave the replica now."""
        coming = (member for state in self.states.values() for member in state.coming.values())
        return sum(member.transfer is not None and sender(member) == replica for member in coming)


def sender(member: Member) -> ReplicaId | None:
    """The replica that a loading one gets its weights from; None where it is no replica."""
    transfer = member.source
    if transfer is None:
        return None
    place = transfer.path.index(member.replica)
    if place:
        return transfer.path[place - 1]
    return transfer.source.id if transfer.source.kind == "gpu" else None


def senders(member: Member) -> tuple[Place, ...]:
    """All replicas and copies in host memory that a loading one gets its weights from."""
    transfer = member.source
    if transfer is None:
        return ()
    place = transfer.path.index(member.replica)
    if place and transfer.kind != "striped":
        return (Place("gpu", transfer.path[place - 1]),)
    return tuple(place for place in (transfer.source, *transfer.more_sources) if place.kind in ("gpu", "host"))
