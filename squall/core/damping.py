"""What stands between a scale policy's answer and the fleet: bounds, the GPU budget, patience, and the question what would be if.

Sets the targets of the roles and says why they change. Knows no replica by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from squall.core.actions import Decided
from squall.core.fleet import RoleState
from squall.core.fleet_plan import Patience
from squall.core.fleet_view import Capacity, RoleView, ScalePolicy, ScaleView
from squall.core.types import Nanos, Role


def decide(
    states: Mapping[Role, RoleState], policy: ScalePolicy, view: ScaleView, patience: Patience, num_slots: int | None, now: Nanos
) -> list[Decided]:
    """Ask the policy about what was observed, move the targets as fast as patience allows, and say what has changed.

    Args:
        num_slots: slots that can be used; None of a policy that is asked only once: it gets what it wants, when there is a place.
    """
    answer = policy(view)
    wanted = {role: answer.counts.get(role) if state.manual is None else state.manual for role, state in states.items()}
    counts, whys = bounded(states, wanted)
    for role, state in states.items():
        state.asked = counts[role]
    if num_slots is not None:
        within(states, counts, num_slots, whys)
    decided: list[Decided] = []
    for role, state in states.items():
        before = state.target
        state.wanted = counts[role]
        state.highest.add(now, state.wanted)
        state.target = _aim(state, states, policy, view, patience, num_slots, now)
        if state.target > before:
            state.raised_at = now
        elif state.target < before:
            state.lowered_at = now
        if state.target != before:
            why = "; ".join(
                part for part in (answer.why_of(role) if state.manual is None else "asked for", whys.get(role)) if part
            )
            decided.append(Decided(role, before, state.target, why))
    return decided


def _aim(
    state: RoleState, states: Mapping[Role, RoleState], policy: ScalePolicy, view: ScaleView, patience: Patience,
    num_slots: int | None, now: Nanos,
) -> int:  # fmt: skip
    """The next target."""
    target, wanted = state.target, state.wanted
    if state.manual is not None or num_slots is None:
        return wanted
    if wanted > target:
        if state.raised_at is not None and now - state.raised_at < patience.up_interval:
            return target
        state.too_few.raised(target, now)
        return wanted
    if target > num_slots:
        return num_slots  # withdrawn: there is no place
    if wanted == target or (state.lowered_at is not None and now - state.lowered_at < patience.down_window):
        return target
    lowest = state.highest.over_window(now)
    if lowest is None:
        return target
    fewest = state.too_few.fewest
    if fewest > lowest and sum(other.target for other in states.values()) <= num_slots:  # else another role needs the place more
        lowest = fewest
    lower = lowered(policy, view, state, lowest) if lowest < target else target
    if lower < target and getattr(policy, "reactive", False):
        state.too_few.lowered()
    return lower


def next_look(states: Collection[RoleState], patience: Patience, now: Nanos, late_at: Nanos) -> Nanos:
    """When the policy is to be asked again, or a replica has been idle, or on its way, for too long: not before `late_at`."""
    settled = True
    times: list[Nanos] = []
    for state in states:
        settled = settled and state.wanted == state.target and state.is_quiet
        if state.idle:
            times += [at for member in state.idle.values() if (at := member.idle_at + patience.idle_ttl) > now]
    times.append(now + (patience.rest_interval if settled else patience.up_interval))
    soonest = min(times)
    if late_at >= soonest or patience.start_timeout is None:
        return soonest
    coming = [member for state in states for member in state.coming.values()]
    return min([soonest, *(member.launched_at + patience.start_timeout for member in coming)])


def bounded(states: Mapping[Role, RoleState], wanted: Mapping[Role, int | None]) -> tuple[dict[Role, int], dict[Role, str]]:
    """What may be had of what is wanted, for each role, and what that does to it in words.

    Args:
        wanted: None keeps the target: nobody knows better.
    """
    counts: dict[Role, int] = {}
    whys: dict[Role, str] = {}
    for role, state in states.items():
        number = wanted[role]
        count = state.target if number is None else number
        counts[role] = min(max(count, state.minimum), state.maximum)
    for role, state in states.items():
        if counts[role] or not state.maximum:
            continue
        busy = any(not state.is_quiet for state in states.values())
        if busy or any(counts.values()):
            counts[role] = 1
            whys[role] = "one must stay while there is work" if busy else "neither role without the other"
    return counts, whys


def within(states: Mapping[Role, RoleState], counts: dict[Role, int], num_slots: int, whys: dict[Role, str]) -> None:
    """Lower the counts until there is a slot for each replica: first of the role that is furthest above its minimum."""
    short = sum(counts.values()) - num_slots
    if short <= 0:
        return
    why = f"there is no place for {short} more"
    while short:
        role = max(counts, key=lambda role: (counts[role] - states[role].minimum, counts[role]))
        if not counts[role]:
            return
        others = [counts[other] - states[other].minimum for other in counts if other is not role]
        lead = counts[role] - states[role].minimum - max(others) if others else short
        fewer = min(max(lead, 1), short, counts[role])
        counts[role] -= fewer
        short -= fewer
        whys[role] = why


class SupposedRole:
    """A role as it would be with `count` ready replicas and none on its way: the others' load would be theirs."""

    def __init__(self, state: RoleState, count: int) -> None:
        self._state = state
        self.num_ready = count
        self.num_coming = 0
        self.num_draining = 0
        self.num_idle = 0
        self.next_ready_s = None
        self.num_blocks = state.num_blocks * count // max(1, state.num_ready)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class Supposing:
    """The fleet as it would be. Satisfies `ScaleView`."""

    def __init__(self, view: ScaleView, role: Role, supposed: SupposedRole) -> None:
        self.now: Nanos = view.now
        self.began_at: Nanos = view.began_at
        self.capacity: Capacity | None = view.capacity
        self.roles: Mapping[Role, RoleView] = {**view.roles, role: cast(RoleView, supposed)}


def lowered(policy: ScalePolicy, view: ScaleView, state: RoleState, lowest: int) -> int:
    """The smallest number of replicas, at least `lowest`, with which the policy would not want more; at most the target."""
    count = lowest
    while count < state.target:
        answer = policy(Supposing(view, state.role, SupposedRole(state, count))).counts.get(state.role)
        if answer is None or min(answer, state.maximum) <= count:
            return count
        count = min(max(answer, count + 1), state.target)
    return count
