"""Where whole weights are, and the load policy's window on it: which replicas, hosts and disks could send them to whom.

Satisfies `LoadView`. Keeps the map of host copies; a copy comes to be when weights pass through a node's DRAM. Moves no bytes and
does not know how long a transfer takes. Who was waited for in vain is not named for a while: a link may be dead though both ends
are well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from squall.core.fleet import Fleet, Member, sender, senders
from squall.core.fleet_plan import FleetPlan
from squall.core.fleet_view import STORE, LoadPolicy, Place, SourceView, Transfer
from squall.core.lifecycle import Phase
from squall.core.neighbours import Neighbours
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.errors import ConfigError

SHUNNED_FOR: Nanos = 60 * SECOND
"""So long at least nobody loads from where a load did not come: longer where it was waited for longer, and doubled each time."""
MOST_DOUBLINGS = 6
GETS_WEIGHTS = (Phase.STARTING, Phase.LOADING)


class Sources:
    """See `LoadView`.

    Args:
        plan: the fleet's.
        fleet: its replicas.
        policy: plans transfers; None reads every replica's weights from the node's SSD, or from the store.
        can_be_relieved: whether a ready replica may share its work with one that loads.
        neighbours: whose copies take the memory of nodes, too; None where the fleet is alone.
    """

    def __init__(
        self,
        plan: FleetPlan,
        fleet: Fleet,
        policy: LoadPolicy | None,
        can_be_relieved: Callable[[Member], bool] = lambda _: True,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.now: Nanos = 0
        self.targets: Sequence[Member] = ()
        self._weights = plan.weights
        self._fleet = fleet
        self._policy = policy
        self._can_be_relieved = can_be_relieved
        ttl_s: float | None = getattr(policy, "host_ttl_s", None)
        self._host_ttl = None if ttl_s is None else round(ttl_s * SECOND)
        self._pinned = bool(getattr(policy, "pinned", False))
        self._keeps_copies = self._pinned or hasattr(policy, "host_ttl_s")
        self._neighbours = neighbours
        self._host_bytes = 0 if plan.slots.shared is None else plan.slots.shared.host_bytes
        self._gone: set[int] = set()  # nodes
        self._shunned: dict[Place, tuple[int, Nanos]] = {}  # how often in a row nothing came from there, and until when
        self._used: dict[int, Nanos] = {}
        nodes = (plan.slots.num // plan.slots.per_node + bool(plan.slots.num % plan.slots.per_node)) * plan.slots.nodes_per_slot
        self._on_ssd = frozenset(range(nodes)) if plan.weights.on_ssd else frozenset()

    # -- the policy's window

    @property
    def model(self) -> str:
        return self._weights.model

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def num_layers(self) -> int:
        return self._weights.num_layers

    @property
    def sources(self) -> Sequence[SourceView]:
        members = self._fleet.members
        there = (members[id] for id in sorted(members) if members[id].has_weights and members[id].leaves_at is None)
        return [member for member in there if not self._is_shunned(Place("gpu", member.replica))]

    @property
    def overloaded(self) -> Sequence[ReplicaId]:
        ready = (member for state in self._fleet.states.values() for member in state.ready.values())
        found = [member for member in ready if member.num_outstanding and self._can_be_relieved(member)]
        return [member.replica for member in sorted(found, key=lambda member: (-member.num_outstanding, member.replica))]

    @property
    def host_copies(self) -> Mapping[int, Nanos]:
        kept = self._kept(self.now)
        return {node: kept[node] for node in sorted(kept) if not self._is_shunned(Place("host", node))}

    @property
    def ssd_copies(self) -> frozenset[int]:
        return self._on_ssd - self._gone

    @property
    def host_bytes_per_s(self) -> float:
        return self._weights.host_bytes_per_s

    @property
    def ssd_bytes_per_s(self) -> float:
        return self._weights.ssd_bytes_per_s

    @property
    def store_bytes_per_s(self) -> float:
        return self._weights.store_bytes_per_s

    def _kept(self, now: Nanos) -> Mapping[int, Nanos]:
        """Nodes whose DRAM holds the weights: used there now, or not long ago."""
        in_use = {member.node for member in self._fleet.members.values() if member.has_weights}
        ttl = self._host_ttl
        return {
            node: now if node in in_use else used
            for node, used in self._used.items()
            if ttl is None or node in in_use or now - used <= ttl
        }

    @property
    def copies(self) -> Sequence[int]:
        """Nodes whose DRAM has the weights and cannot give it to other fleets: they are used there, or it is the last copy."""
        if not self._keeps_copies:
            return ()
        if self._pinned and len(self._used) == 1:
            return tuple(self._used)
        in_use = {member.node for member in self._fleet.members.values() if member.has_weights}
        return sorted(in_use & self._used.keys())

    def give_way(self) -> None:
        """Copies that nobody uses go where other fleets need the memory."""
        fixed = self.copies
        for node in [node for node in self._used if node not in fixed and not self._has_room(node)]:
            del self._used[node]

    def _has_room(self, node: int) -> bool:
        """Whether a copy fits there beside those that other fleets use."""
        if self._neighbours is None or not (self._keeps_copies and self._host_bytes):
            return True
        return self._neighbours.copy_bytes(node) + self._weights.num_bytes <= self._host_bytes

    def _keep_one(self, now: Nanos) -> None:
        """Where no copy is left, the node of the first replica that stays makes one of what the replica has."""
        if self._pinned and not self._used:
            members = self._fleet.members
            there = (members[id].node for id in sorted(members) if members[id].has_weights and members[id].leaves_at is None)
            node = next((node for node in there if node not in self._gone and self._has_room(node)), None)
            if node is not None:
                self._used[node] = now

    # -- what the controller asks and tells

    def plan(self, targets: Sequence[Member], now: Nanos) -> None:
        """Give each of `targets` (in ascending id) its transfer, by the policy.

        Raises:
            ConfigError: the policy's answer names a replica twice, one that is no target, or a source without the weights.
        """
        self.now = now
        self.targets = targets
        planned: dict[ReplicaId, Transfer] = {}
        wanted = {member.replica for member in targets}
        for transfer in self._policy(self) if self._policy is not None else ():
            for replica in transfer.path:
                if replica not in wanted or replica in planned:
                    policy = type(self._policy).__name__
                    raise ConfigError(f"load policy {policy}: replica {replica} is no target, or twice, in {transfer}")
                planned[replica] = transfer
        for member in targets:
            member.source = planned.get(member.replica) or self._from_disk(member)

    def _from_disk(self, member: Member) -> Transfer:
        place = Place("ssd", member.node) if member.node in self._on_ssd else STORE
        return Transfer(self._weights.model, place, (member.replica,), "disk")

    def is_sound(self, member: Member) -> bool:
        """What was planned for it can still be done: whoever sends to it has the weights, or gets them."""
        return self._is_sound(member, {})

    def unsound(self, members: Iterable[Member]) -> list[Member]:
        """Those of whom that cannot be said."""
        known: dict[ReplicaId, bool] = {}  # whoever comes later in a chain asks those before
        return [member for member in members if not self._is_sound(member, known)]

    def _is_sound(self, member: Member, known: dict[ReplicaId, bool]) -> bool:
        found = known.get(member.replica)
        if found is None:
            found = known[member.replica] = self._can_be_done(member, known)
        return found

    def _can_be_done(self, member: Member, known: dict[ReplicaId, bool]) -> bool:
        transfer = member.source
        if transfer is None:
            return False
        members = self._fleet.members
        place = transfer.path.index(member.replica)
        if place and transfer.kind == "chain":
            before = members[transfer.path[place - 1]]
            gets_them = not before.stopping and before.life.phase in GETS_WEIGHTS and before.source is transfer
            return before.has_weights or (gets_them and self._is_sound(before, known))
        return all(self._is_there(place) for place in (transfer.source, *transfer.more_sources))

    def _is_there(self, place: Place) -> bool:
        if place.kind == "gpu":
            source = self._fleet.members.get(place.id)
            return source is not None and source.has_weights
        return place.kind == "store" or place.id not in self._gone

    def loaded(self, member: Member, now: Nanos) -> None:
        """The replica has its weights; where they came through its node's DRAM, they are there, too."""
        for place in senders(member):
            self._shunned.pop(place, None)
        if member.source is not None and member.source.kind in ("disk", "host"):
            for node in self._fleet.slots.nodes(member.replica):
                if self._has_room(node):
                    self._used[node] = now
        self._keep_one(now)

    def released(self, member: Member, now: Nanos) -> None:
        """The replica is gone: its node used the weights until now. Another one in its place is another one."""
        self._shunned.pop(Place("gpu", member.replica), None)
        for node in self._fleet.slots.nodes(member.replica):
            if node in self._used:
                self._used[node] = now

    def shun(self, member: Member, now: Nanos) -> None:
        """Its weights did not come, whoever's fault that is: for a while others load from others, in the end from disk."""
        waited = max(SHUNNED_FOR, now - member.launched_at)
        for place in senders(member):
            times, _ = self._shunned.get(place, (0, 0))
            self._shunned[place] = times + 1, now + (waited << min(times, MOST_DOUBLINGS))

    def _is_shunned(self, place: Place) -> bool:
        return bool(self._shunned) and self._shunned.get(place, (0, 0))[1] > self.now

    def node_gone(self, node: int, now: Nanos) -> None:
        """With its DRAM, and its disk for as long."""
        self._used.pop(node, None)
        self._shunned.pop(Place("host", node), None)
        self._gone.add(node)
        self._keep_one(now)

    def node_back(self, node: int) -> None:
        self._gone.discard(node)

    def depends_on(self, replica: ReplicaId) -> bool:
        """Somebody gets weights from the replica now."""
        coming = (member for state in self._fleet.states.values() for member in state.coming.values())
        return any(member.transfer is not None and sender(member) == replica for member in coming)
