"""What stands between a scale policy's answer and the fleet: bounds, the GPU budget, and the question what would be if.

Arithmetic; the controller keeps the instants. Knows no replica by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from squall.core.fleet import RoleState
from squall.core.fleet_view import Capacity, RoleView, ScalePolicy, ScaleView
from squall.core.types import Nanos, Role


def bounded(
    states: Mapping[Role, RoleState], wanted: Mapping[Role, int | None], num_slots: int | None
) -> tuple[dict[Role, int], dict[Role, str]]:
    """What can be had of what is wanted, for each role, and what that does to it in words.

    Args:
        wanted: None keeps the target: nobody knows better.
        num_slots: slots that can be used; None where it does not matter.
    """
    counts: dict[Role, int] = {}
    whys: dict[Role, str] = {}
    for role, state in states.items():
        number = wanted[role]
        count = state.target if number is None else number
        counts[role] = min(max(count, state.minimum), state.maximum)
    busy = any(not state.is_quiet for state in states.values())
    for role, state in states.items():
        if not counts[role] and state.maximum and (busy or any(counts.values())):
            counts[role] = 1
            whys[role] = "one must stay while there is work" if busy else "neither role without the other"
    if num_slots is not None:
        _within(states, counts, num_slots, whys)
    return counts, whys


def _within(states: Mapping[Role, RoleState], counts: dict[Role, int], num_slots: int, whys: dict[Role, str]) -> None:
    """Lower the counts until there is a slot for each replica: first of the role that is furthest above its minimum."""
    short = sum(counts.values()) - num_slots
    for _ in range(short):
        role = max(counts, key=lambda role: (counts[role] - states[role].minimum, counts[role]))
        if not counts[role]:
            return
        counts[role] -= 1
        whys[role] = f"there is no place for {short} more"


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
