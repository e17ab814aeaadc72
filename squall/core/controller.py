"""The controller machine: how many replicas there should be, and the life of each.

Keeps apart what is desired (a target for each role), what is observed (each replica's phase) and what is in flight (a load, or
a stop that was asked for). Damping is here, once, around any scale policy: see `Controller`. Knows no requests, only the router's
counts of them; the router tells it when a withdrawn replica is empty. Does not know how a process starts or how weights travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from squall.core.actions import AnyAction, LoadWeights, Send, StartReplica, StopReplica, WarmReplica
from squall.core.damping import decide, next_look
from squall.core.events import (
    AnyEvent,
    DrainWanted,
    Emptied,
    GpusHeld,
    LayerArrived,
    LoadFailed,
    NodeDown,
    NodeUp,
    NoticeGiven,
    ReplicaDown,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    ReplicaUp,
    RoleChanged,
    ScaleWanted,
    Stirred,
    Unpaired,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.fleet import Fleet, Member, Memory, NoTraffic, RoleState, Traffic
from squall.core.fleet_plan import FleetPlan
from squall.core.fleet_view import Capacity, LoadPolicy, RoleView, ScalePolicy
from squall.core.lifecycle import TRANSFER, Launched, Life, Phase, Redirected, Revived, TransferPhase, Withdrawn
from squall.core.live_pairs import LivePairs
from squall.core.nodes import Nodes
from squall.core.placing import changing_role, free_slots, is_stranded, least_disturbing, surplus_of
from squall.core.sources import Sources
from squall.core.types import FOREVER, ROUTER, SECOND, Nanos, ReplicaId, Role
from squall.errors import IllegalTransition

FIRST_BACKOFF: Nanos = 1 * SECOND
LAST_BACKOFF: Nanos = 60 * SECOND
STABLE_AFTER: Nanos = 60 * SECOND
"""A replica that has served so long has proved itself: its earlier failures no longer count."""

ABOUT_A_REPLICA = (ReplicaStarted, ReplicaStopped, Emptied, WeightsLoaded, Warmed, LoadFailed, ReplicaLost, LayerArrived)
ABOUT_WEIGHTS = (LayerArrived, WeightsLoaded, LoadFailed, ReplicaLost, ReplicaStopped)


class Controller:
    """Keeps as many replicas of each role up as its target says, and none once `DrainWanted` has come.

    The target follows the scale policy's answers, with damping:

    - bounds, and never more than there are slots for (a replica that cannot be placed is not waited for);
    - upwards at once, but not twice within `patience.up_interval`; loads on their way never hold up a decision;
    - downwards to the highest answer of the latest `patience.down_window`, once a window, and never so far that the policy
      would want more if it saw the load on those who are left (its view is asked with so many replicas ready);
    - never to zero while anybody waits or is served, and never one role without the other.

    Whom to add: a replica that drains, one that is idle, one that the other role has too many of, then a free slot. Whom to take
    away: whoever is furthest from being ready, then who has the fewest requests; it finishes what it has, keeps its weights for
    `patience.idle_ttl`, then stops.

    A replica that is lost, or whose weights cannot be loaded, is replaced: in another slot at once where there is one, otherwise
    in the same one after 1, 2, 4, ... 60 seconds. Where the source of a load is lost, the load goes on from another one. A role
    that nobody serves, and that gets nobody up wherever it tries, is lent a replica by the other one.

    A policy that needs no more than one answer (`constant`) is asked once, and the controller sleeps. Any other is asked at every
    event, every `up_interval` while there is work, and every `rest_interval` while there is none.

    The driver reports `ReplicaLost` only when the process can do no more harm (it has ended, or was killed), and nothing of a
    replica after that until it is started again. `DrainWanted` is for the controller; it passes it on to the router.

    Attributes:
        traffic: the router; to be set before the first event.
        roles, capacity: see `ScaleView`.
    """

    def __init__(self, plan: FleetPlan, scale: ScalePolicy, load: LoadPolicy | None = None) -> None:
        self.wake_at: Nanos | None = 0
        self.plan = plan
        self.scale = scale
        self.load = load
        self.now: Nanos = 0
        self.began_at: Nanos = 0
        self._begun = False
        self._draining = False
        self._undecided = True  # a constant policy was not asked since something changed
        self._failing: set[ReplicaId] = set()  # whoever failed and has not been started again since
        self._late_at: Nanos = FOREVER  # before that nobody who is coming is late
        self._constant = bool(getattr(scale, "constant", False)) or not plan.is_elastic
        memory = Memory.of(scale)
        self._states = {role: RoleState(role, bounds, plan, memory) for role, bounds in plan.bounds.items()}
        self.roles = cast(Mapping[Role, RoleView], self._states)
        self.capacity: Capacity | None = plan.capacity
        self._fleet = Fleet(plan.slots, self._states, NoTraffic())
        self._nodes = Nodes(self._fleet)
        self._pairs = LivePairs(self._fleet, plan.live_layers)
        self._sources = Sources(plan, self._fleet, load, self._pairs.can_be_relieved, self._nodes.neighbours)

    # -- windows

    @property
    def traffic(self) -> Traffic:
        return self._fleet.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._fleet.traffic = traffic

    @property
    def states(self) -> Mapping[Role, RoleState]:
        """What is desired of each role, to look at."""
        return self._states

    @property
    def num_ready(self) -> int:
        return sum(len(state.ready) for state in self._states.values())

    @property
    def gpus(self) -> tuple[int, int]:
        """On a cluster that is shared: how many the fleet has, and how many more it would have were there no other fleets."""
        nodes, share = self._nodes, self.plan.slots.shared
        if nodes.neighbours is None or share is None:
            raise ValueError("the fleet is alone on its cluster")
        asked = 0 if self._draining else min(sum(state.asked for state in self._states.values()), nodes.num_up)
        return len(nodes.neighbours.ours) * share.gpus_per_slot, max(0, asked - nodes.num_usable) * share.gpus_per_slot

    @property
    def fleet(self) -> Mapping[ReplicaId, Member]:
        """All replicas that ever were, to look at."""
        return self._fleet.members

    # -- events

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        self.now = now
        if not self._begun:
            self._begun = True
            self.began_at = now
        actions: list[AnyAction] = []
        match event:
            case LayerArrived():
                self._observe(self._member(event.replica), event, now)
                return self._pairs.tell(event)
            case Woke() | Stirred():
                pass
            case _ if isinstance(event, ABOUT_A_REPLICA):  # nearly all that is left; patterns are tried one by one
                actions += self._observe(self._member(event.replica), event, now)
            case Unpaired():
                return self._pairs.end(event)
            case DrainWanted() if not self._draining:
                self._draining = True
                actions.append(Send(ROUTER, event))
            case DrainWanted():
                return []
            case ScaleWanted(role, count):
                self._state(role).manual = count
                self._undecided = True
            case NodeDown(node, at):
                self._nodes.goes(node, at, now)
                if at <= now:
                    self._sources.node_gone(node, now)
                actions += self._redirect(now)
            case NoticeGiven(replica, notice):
                self._nodes.ends(self._member(replica).replica, now + notice, now)
                actions += self._redirect(now)
            case NodeUp(node):
                self._nodes.comes(node)
                self._sources.node_back(node)
            case GpusHeld() if self._nodes.neighbours is not None:
                freed = self._nodes.hear(event)
                self._sources.give_way()
                if freed:
                    self.wake_at = now  # and nothing is decided before all others have heard, too
                return []
            case _:
                raise IllegalTransition(f"the controller got {type(event).__name__}, which is not for it")
        self._give_up_late(actions, now)
        self._decide(actions, now)
        self._reconcile(actions, now)
        self.wake_at = self._next_wake(now)
        if self._nodes.neighbours is not None:
            actions += self._nodes.neighbours.news(self._sources.copies, self.plan.weights.num_bytes)
        return actions

    # -- what is observed

    def _member(self, replica: ReplicaId) -> Member:
        member = self._fleet.members.get(replica)
        if member is None:
            raise IllegalTransition(f"replica {replica} is not of this fleet, which has {len(self._fleet.members)}")
        return member

    def _state(self, role: Role) -> RoleState:
        state = self._states.get(role)
        if state is None:
            known = ", ".join(role.value for role in self._states)
            raise IllegalTransition(f"the fleet has no role {role.value!r}; it has {known}")
        return state

    def _observe(self, member: Member, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        """Follow the tables; ask for what comes next in a replica's life."""
        after = self._fleet.move(member, event, now)
        self._observe_transfer(member, event, now)
        match event:
            case ReplicaStarted() if not member.stopping:
                return [self._load(member, now), *self._pairs.begin(member)]
            case WeightsLoaded() if not member.stopping:
                member.num_blocks, member.block_size = event.num_blocks, event.block_size
                self._sources.loaded(member, now)
                return [WarmReplica(member.replica), *self._pairs.tell(event)]
            case Warmed() if not member.stopping:
                member.ready_at = now
                member.state.load_s = (now - member.launched_at) / SECOND
                if member.announced:
                    return self._pairs.tell(event)
                return [] if self._pairs.is_alone(member) else self._announce(member)
            case Emptied() if after is Phase.IDLE:
                member.announced = False
                member.emptied = True
                member.idle_at = now
            case LoadFailed():
                self._sources.shun(member, now)
                self._failed(member, now)
                return self._stop(member)
            case ReplicaLost() | ReplicaStopped():
                if not member.stopping:
                    self._failed(member, now)
                if isinstance(event, ReplicaStopped):
                    member.stopping = False
                return self._gone(member, now)
        return []

    def _observe_transfer(self, member: Member, event: AnyEvent, now: Nanos) -> None:
        transfer = member.transfer
        if transfer is None or not isinstance(event, ABOUT_WEIGHTS):
            return
        if transfer.on(event, now) in (TransferPhase.DONE, TransferPhase.FAILED):
            member.transfer = None
        if isinstance(event, LayerArrived):
            member.layers_ready = event.layer + 1

    def _load(self, member: Member, now: Nanos) -> LoadWeights:
        """Weights for a replica whose process is up; those that were started with it are planned for together."""
        if not self._sources.is_sound(member):
            batch = [other for other in member.batch if other.awaits_weights]
            self._sources.plan(sorted(batch, key=_id), now)
        member.transfer = Life(f"weights of replica {member.replica}", TRANSFER, TransferPhase.ASKED)
        assert member.source is not None
        return LoadWeights(member.replica, member.source)

    def _announce(self, member: Member) -> list[AnyAction]:
        """It takes requests from now on. A replica alone serves whole requests, until it is told otherwise."""
        member.announced = True
        told = Send(ROUTER, ReplicaUp(member.replica, member.num_blocks, member.block_size, member.role))
        return [told] if member.role is Role.BOTH else [Send(member.replica, RoleChanged(member.replica, member.role)), told]

    def _failed(self, member: Member, now: Nanos) -> None:
        if member.announced and now - member.ready_at >= STABLE_AFTER:
            member.num_failures = 0
        member.start_at = now + min(FIRST_BACKOFF << min(member.num_failures, 6), LAST_BACKOFF)
        member.num_failures += 1
        self._failing.add(member.replica)

    def _gone(self, member: Member, now: Nanos) -> list[AnyAction]:
        """Its process has ended, asked to or not."""
        self._sources.released(member, now)
        member.layers_ready = 0
        member.source = None
        self._nodes.ended(member.replica)
        self._fleet.file(member)
        actions = self._pairs.lose(member, asked=False)
        if member.announced or member.emptied:  # of the latter KV may have been on its way that was of no use any more
            member.announced = member.emptied = False
            actions.append(Send(ROUTER, ReplicaDown(member.replica, lost=True)))
        return actions + self._redirect(now)

    def _redirect(self, now: Nanos) -> list[AnyAction]:
        """Loads whose source is gone go on from another one."""
        coming = (member for state in self._states.values() for member in state.coming.values())
        orphans = self._sources.unsound([member for member in coming if member.transfer is not None])
        if not orphans:
            return []
        orphans.sort(key=_id)
        self._sources.plan(orphans, now)
        for member in orphans:
            assert member.transfer is not None
            member.transfer.on(Redirected(), now)
        return [LoadWeights(member.replica, member.source) for member in orphans if member.source is not None]

    # -- what is desired

    def _decide(self, actions: list[AnyAction], now: Nanos) -> None:
        """Set the targets, and say why where they change."""
        if self._draining:
            for state in self._states.values():
                state.target = 0
        elif not self._constant or self._undecided:
            self._undecided = False
            for role, state in self._states.items():
                state.observe(self._fleet.traffic.demand(role), now)
            usable = None if self._constant else self._nodes.num_usable
            actions += decide(self._states, self.scale, self, self.plan.patience, usable, now)

    # -- from what is observed to what is desired

    def _reconcile(self, actions: list[AnyAction], now: Nanos) -> None:
        launched: list[Member] = []
        stopped = False
        for state in sorted(self._states.values(), key=surplus_of):  # who lacks replicas may get them from who has too many
            surplus = surplus_of(state)
            if surplus < 0:
                launched += self._add(actions, state, -surplus, now)
            elif surplus > 0:
                stopped |= self._remove(actions, state, surplus, now)
            if state.leaving:
                stopped |= self._leave(actions, state, now)
            if state.idle:
                stopped |= self._stop_idle(actions, state, now)
        if launched:
            batch = tuple(launched)
            for member in batch:
                member.batch = batch
                member.source = None
        if stopped:
            actions += self._redirect(now)
        if self._failing:
            self._let_failed_be(now)

    def _add(self, actions: list[AnyAction], state: RoleState, count: int, now: Nanos) -> list[Member]:
        """Bring up so many more, the cheapest first. Returns those that were started from nothing."""
        idle = [member for other in self._states.values() for member in other.idle.values() if other is not state]
        for member in [*state.draining.values(), *state.idle.values(), *idle][:count]:
            if member.state is not state:
                self._fleet.assign(member, state)
            self._fleet.move(member, Revived(), now)
            actions += self._announce(member)
            count -= 1
        lend = is_stranded(self._fleet, state, self._nodes.is_closed)
        for member in changing_role(self._states.values(), state, count, self._pairs.concerns, lend=lend):
            self._fleet.assign(member, state)
            if member.announced:
                changed = RoleChanged(member.replica, state.role)
                actions += [Send(ROUTER, changed), Send(member.replica, changed)]
            count -= 1
        count = min(count, self._nodes.room) if count else 0
        if not count:
            return []
        self._sources.now = now
        launched: list[Member] = []
        for replica in free_slots(self._fleet, count, now, self._nodes.is_closed, lambda: frozenset(self._sources.host_copies)):
            self._nodes.began(replica)
            member = self._fleet.member(replica)
            self._fleet.assign(member, state)
            self._fleet.move(member, Launched(), now)
            member.launched_at = now
            launched.append(member)
            actions.append(StartReplica(replica))
        if launched:
            self._late_at = min(self._late_at, now + (self.plan.patience.start_timeout or FOREVER))
        return launched

    def _remove(self, actions: list[AnyAction], state: RoleState, count: int, now: Nanos) -> bool:
        """Take away so many, those first that disturb least. Whether any process was asked to end."""
        stopped = False
        for member in least_disturbing(state, count):
            if member.phase is Phase.READY:
                actions.append(self._withdraw(member, now))
            else:
                actions += self._stop(member)
                stopped = True
        return stopped

    def _withdraw(self, member: Member, now: Nanos) -> Send:
        self._fleet.move(member, Withdrawn(), now)
        return Send(ROUTER, ReplicaDown(member.replica, lost=False))

    def _leave(self, actions: list[AnyAction], state: RoleState, now: Nanos) -> bool:
        """Those whose node goes: who works does so until there is another one, or half of the notice has passed."""
        stopped = False
        for member in list(state.leaving.values()):
            if member.phase is Phase.READY:
                if state.num_ready >= state.target or now >= member.withdraw_at:
                    actions.append(self._withdraw(member, now))
            elif member.phase is not Phase.DRAINING:
                actions += self._stop(member)
                stopped = True
        return stopped

    def _stop_idle(self, actions: list[AnyAction], state: RoleState, now: Nanos) -> bool:
        """Weights that nobody has wanted for long, and that nobody copies now, are given up."""
        ttl = 0 if self._draining or self._constant else self.plan.patience.idle_ttl
        late = [m for m in state.idle.values() if now >= m.idle_at + ttl and not self._sources.depends_on(m.replica)]
        for member in sorted(late, key=_id):
            actions += self._stop(member)
        return bool(late)

    def _stop(self, member: Member) -> list[AnyAction]:
        if member.stopping:
            return []
        member.stopping = True
        self._fleet.file(member)
        return [StopReplica(member.replica), *self._pairs.lose(member, asked=True)]

    def _give_up_late(self, actions: list[AnyAction], now: Nanos) -> None:
        """A replica that does not come up in time is withdrawn; another slot gets its chance."""
        timeout = self.plan.patience.start_timeout
        if self._constant or timeout is None or now < self._late_at:
            return
        coming = [member for state in self._states.values() for member in state.coming.values()]
        self._late_at = min((at for member in coming if (at := member.launched_at + timeout) > now), default=FOREVER)
        for state in self._states.values():
            for member in [member for member in state.coming.values() if now >= member.launched_at + timeout]:
                if member.transfer is not None:
                    self._sources.shun(member, now)
                self._failed(member, now)
                actions += self._stop(member)

    def _let_failed_be(self, now: Nanos) -> None:
        """Whoever failed and is not wanted any more is off; its wait before the next start stays."""
        for replica in sorted(self._failing):
            member = self._fleet.members[replica]
            if member.phase is Phase.FAILED and not member.stopping and member.state.num_here >= member.state.target:
                self._fleet.move(member, Withdrawn(), now)
            if member.start_at <= now and member.phase is not Phase.FAILED:
                self._failing.discard(replica)

    # -- when to look again

    def _next_wake(self, now: Nanos) -> Nanos | None:
        times: list[Nanos] = []
        states = self._states.values()
        if self._failing and any(state.num_here < state.target for state in states):
            members = [self._fleet.members[replica] for replica in self._failing]
            times += [member.start_at for member in members if member.is_free and member.start_at > now]
        for state in states:
            if state.leaving:
                times += [m.withdraw_at for m in state.leaving.values() if m.phase is Phase.READY and m.withdraw_at > now]
        if not self._constant and not self._draining:
            times.append(next_look(states, self.plan.patience, now, self._late_at))
        return min(times, default=None)


def _id(member: Member) -> ReplicaId:
    return member.replica
