"""The equations of BlitzScale's planner (`blitz` says what they mean): from what there is to do to how many replicas are enough.

Knows no bounds on the fleet and no time. Apart from the policy, which is a configuration, as every decision passes it.
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

from squall.core.fleet_view import Capacity, ScaleView, Wanted
from squall.policies.scale.needs import (
    BOTH,
    DECODE,
    PREFILL,
    backlog_tokens,
    computing,
    is_known,
    keeping,
    kv_tokens,
    present,
    stay,
)


class Thresholds(Protocol):
    """As of `Blitz`."""

    @property
    def prefill_lower_s(self) -> float: ...
    @property
    def prefill_upper_s(self) -> float: ...
    @property
    def decode_lower(self) -> float: ...
    @property
    def decode_upper(self) -> float: ...
    @property
    def migration_lower_s(self) -> float: ...
    @property
    def migration_upper_s(self) -> float: ...
    @property
    def original(self) -> bool: ...


class Demand:
    """What the equations are about.

    Attributes:
        prompt_tokens: W, wait for their prefill.
        used_blocks: B, KV blocks promised to the requests at all replicas.
        leaving_tokens: K, KV that has still to go from prefill to decode replicas.
    """

    __slots__ = ("leaving_tokens", "prompt_tokens", "used_blocks")

    def __init__(self, prompt_tokens: int, used_blocks: int, leaving_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.used_blocks = used_blocks
        self.leaving_tokens = leaving_tokens


class Target:
    """A number of replicas between these two needs no change.

    Attributes:
        why: names the equation that asks for most.
        one_by_one: a decision gives up one replica.
    """

    __slots__ = ("fewest", "most", "one_by_one", "why")

    def __init__(self, fewest: int, most: int, why: str = "", one_by_one: bool = False) -> None:
        self.fewest = fewest
        self.most = most
        self.why = why
        self.one_by_one = one_by_one

    def step(self, count: int) -> int:
        """What is to be added to `count`: into the middle of the target where it is below, down to its most where it is above."""
        if count < self.fewest:
            return (self.fewest + self.most + 1) // 2 - count
        if count <= self.most:
            return 0
        return max(self.most - count, 1 - count, -1 if self.one_by_one else -count)


def wanted(by: Thresholds, view: ScaleView) -> Wanted:
    """The answer of the policy."""
    capacity = view.capacity
    if capacity is None or not is_known(capacity):
        return stay(view, "nobody knows what one replica can do")
    seen = demand(by, view, capacity)
    roles = view.roles
    if BOTH in roles:
        counted = present(roles[BOTH])
        target = both(_prefill_rate(by, seen, capacity), _decode_memory(by, seen, capacity))
        target = one_by_one(target) if by.original else _kept(target, view, capacity)
        return Wanted({BOTH: counted + target.step(counted)}, target.why)
    if capacity.transfer_tokens_per_s <= 0:
        return stay(view, "nobody knows how fast KV leaves a replica")
    prefills, decodes = present(roles[PREFILL]), present(roles[DECODE])
    prefill, decode = targets(by, seen, capacity, decodes)
    if not by.original:
        prefill = _kept(prefill, view, capacity)
    counts = {PREFILL: prefills + prefill.step(prefills), DECODE: decodes + decode.step(decodes)}
    return Wanted(counts, {PREFILL: prefill.why, DECODE: decode.why})


def _kept(target: Target, view: ScaleView, capacity: Capacity) -> Target:
    """The same, but for replicas that the prompts which keep coming need."""
    role = computing(view)
    arriving, here = role.arrived_tokens_per_s, present(role)
    needed = here if arriving is None else min(ceil(arriving / capacity.prefill_tokens_per_s), here)
    if needed <= target.most:
        return target
    known = "nobody knows how many" if arriving is None else f"{arriving:.0f}"
    return Target(target.fewest, needed, f"{target.why}; {known} tokens arrive a second")


def demand(by: Thresholds, view: ScaleView, capacity: Capacity) -> Demand:
    """What there is to do, in the units of the equations."""
    prefill = computing(view)
    leaving = prefill.num_promised_tokens if by.original else prefill.num_waiting_tokens + keeping(view).num_queued_tokens
    return Demand(backlog_tokens(prefill), -(-kv_tokens(view) // capacity.block_size), leaving)


def targets(by: Thresholds, seen: Demand, capacity: Capacity, num_decodes: int) -> tuple[Target, Target]:
    """The targets for prefill and for decode replicas of a disaggregated fleet."""
    leaves = capacity.transfer_tokens_per_s * (max(num_decodes, 1) if by.original else 1)
    why = f"KV to transfer: {seen.leaving_tokens} tokens"
    kv = _between(seen.leaving_tokens, leaves, by.migration_lower_s, by.migration_upper_s, why)
    prefill_kv = Target(kv.fewest, kv.fewest, why) if by.original else kv
    prefill, decode = both(_prefill_rate(by, seen, capacity), prefill_kv), both(_decode_memory(by, seen, capacity), kv)
    return (one_by_one(prefill), one_by_one(decode)) if by.original else (prefill, decode)


def _prefill_rate(by: Thresholds, seen: Demand, capacity: Capacity) -> Target:
    why = f"prompts that wait: {seen.prompt_tokens} tokens"
    return _between(seen.prompt_tokens, capacity.prefill_tokens_per_s, by.prefill_lower_s, by.prefill_upper_s, why)


def _decode_memory(by: Thresholds, seen: Demand, capacity: Capacity) -> Target:
    why = f"KV promised: {seen.used_blocks} blocks"
    return _between(seen.used_blocks, capacity.num_blocks, by.decode_lower, by.decode_upper, why)


def _between(amount: int, of_one: float, lower: float, upper: float, why: str) -> Target:
    """So many that each of them has between `lower` and `upper` times what one replica is good for."""
    return Target(ceil(amount / upper / of_one), ceil(amount / lower / of_one), why)


def both(one: Target, other: Target) -> Target:
    """What satisfies both."""
    asks_more = one if (one.fewest, one.most) >= (other.fewest, other.most) else other
    fewest = asks_more.fewest
    most = max(one.most, other.most, fewest)
    return Target(fewest, most, f"{asks_more.why}, {fewest} to {most} wanted")


def one_by_one(target: Target) -> Target:
    """The same, but that a decision gives up one replica."""
    return Target(target.fewest, target.most, target.why, one_by_one=True)
