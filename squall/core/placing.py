"""Which slot gets the next replica, and which replica goes first. Knows no policy and no instant."""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import nsmallest

from squall.core.fleet import Fleet, Member, RoleState
from squall.core.lifecycle import Phase
from squall.core.types import Nanos, ReplicaId, Role

FURTHEST_FROM_READY = {Phase.STARTING: 0, Phase.LOADING: 1, Phase.WARMING: 2, Phase.READY: 3}
HOPELESS_AFTER = 2
"""Failures in a row: who failed once mostly comes back."""


def free_slots(
    fleet: Fleet, count: int, now: Nanos, is_closed: Callable[[ReplicaId], bool], host_copies: Callable[[], frozenset[int]]
) -> list[ReplicaId]:
    """Up to `count` slots where a replica can be started now, those first that its weights reach soonest.

    Inside an NVLink domain that has them, then on a node whose DRAM has them; among equals, `Slots.first`, then the lowest.
    """
    free: list[ReplicaId] = []
    for replica in range(fleet.slots.num):
        member = fleet.members.get(replica)
        if (member is None or (member.is_free and member.start_at <= now)) and not is_closed(replica):
            free.append(replica)
    if len(free) <= count:
        return free
    slots = fleet.slots
    holders = [member for member in fleet.members.values() if member.has_weights]
    domains = {member.domain for member in holders} if slots.per_domain > 1 else set()
    hosts = host_copies()

    def farness(slot: ReplicaId) -> tuple[bool, bool, bool, ReplicaId]:
        return slots.domain(slot) not in domains, slots.node(slot) not in hosts, slot not in slots.first, slot

    return nsmallest(count, free, key=farness)


def least_disturbing(state: RoleState, count: int) -> list[Member]:
    """The `count` replicas of a role that go first, in ascending id: those furthest from being ready, then the least loaded."""

    def disturbance(member: Member) -> tuple[int, int, int, Nanos, ReplicaId]:
        phase = member.phase
        requests, tokens = (0, 0) if phase is not Phase.READY else member.outstanding
        return FURTHEST_FROM_READY[phase], requests, tokens, -member.launched_at, -member.replica

    victims = nsmallest(count, [*state.coming.values(), *state.ready.values()], key=disturbance)
    return sorted(victims, key=lambda member: member.replica)


def surplus_of(state: RoleState) -> int:
    """Replicas of a role that are there, or coming, beyond its target."""
    return state.num_here - state.target


def is_stranded(fleet: Fleet, state: RoleState, is_closed: Callable[[ReplicaId], bool]) -> bool:
    """Nobody serves the role, and wherever somebody comes or could be started for it, that has failed over and over."""
    if state.ready:
        return False
    slots = (replica for replica in range(fleet.slots.num) if not is_closed(replica))
    members = [fleet.members.get(replica) for replica in slots]
    hopes = [member for member in members if member is None or member.is_free or member.replica in state.coming]
    return bool(hopes) and all(member is not None and member.num_failures >= HOPELESS_AFTER for member in hopes)


def changing_role(
    states: Collection[RoleState], to: RoleState, count: int, is_paired: Callable[[Member], bool], *, lend: bool = False
) -> list[Member]:
    """Up to `count` replicas that other roles have too many of, and that can serve this one from now on.

    With `lend` a role gives one even where it lacks some itself, though not its last: neither is of use without the other.

    Ready ones first, of these the least loaded: a prefill replica finishes its prompts and decodes them itself. To prefill
    changes only who has nothing to decode. Then those on their way, whoever is furthest first. Nobody of a live pair: who
    relieves whom, and who stands aside in the router, is a matter of one role.
    """
    found: list[Member] = []
    for state in states:
        spare = max(surplus_of(state), min(1, state.num_ready - 1)) if lend else surplus_of(state)
        if state is to or spare <= 0:
            continue
        ready = [member for member in state.ready.values() if not is_paired(member)]
        ready.sort(key=lambda member: (*member.outstanding, member.replica))
        if to.role is not Role.DECODE:
            ready = [member for member in ready if not member.num_outstanding]
        coming = [member for member in state.coming.values() if not member.announced and not is_paired(member)]
        coming.sort(key=lambda member: (-FURTHEST_FROM_READY[member.phase], member.launched_at, member.replica))
        found += [*ready, *coming][:spare]
    return found[:count]
