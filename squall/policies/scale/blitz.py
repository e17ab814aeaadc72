"""BlitzScale's planner: three equations, each of which gives a fewest and a most for the replicas of a role.

Written from a description of the published planner (its release of 2025) and of the paper (OSDI 2025). With `original` it
answers as that planner does, misprints included. Knows no bounds on the fleet and no time.
"""

from math import ceil
from typing import ClassVar

from msgspec import Struct

from squall.core.fleet_view import Capacity, ScaleView, Wanted
from squall.core.types import Role
from squall.policies.scale.needs import (
    backlog_tokens,
    computing,
    is_known,
    keeping,
    kv_tokens,
    present,
    refuse_crossed,
    refuse_unless_positive,
    stay,
)
from squall.policies.scale.targets import Target, between, both, one_by_one


class Demand(Struct, frozen=True):
    """What the equations are about.

    Attributes:
        prompt_tokens: W, wait for their prefill.
        used_blocks: B, KV blocks promised to the requests at all replicas.
        leaving_tokens: K, KV that has still to go from prefill to decode replicas.
    """

    prompt_tokens: int
    used_blocks: int
    leaving_tokens: int


class Blitz(Struct, frozen=True, tag_field="kind", tag="blitz", forbid_unknown_fields=True):
    """Replicas by prefill throughput, decode memory and KV bandwidth.

    With R prompt tokens a second, M blocks and X transferred tokens a second of one replica:

        prefill rate   W / (upper R) .. W / (lower R)      upper and lower in seconds of work that waits
        decode memory  B / (upper M) .. B / (lower M)      shares of the KV pools
        KV bandwidth   K / (upper X) .. K / (lower X)      seconds of KV to transfer

    Prefill replicas must satisfy the first and the last, decode replicas the last two, colocated ones the first two.

    Below the fewest the answer is the middle between both, above the most it is the most. What waits says nothing of a fleet that
    keeps up, and would say the same of a smaller one: so the replicas that compute prompts are never fewer than the prompts of
    the latest `window_s` need, nor fewer than there are while nobody knows how many these are.

    Attributes:
        window_s: over which arrivals are counted.
        prefill_lower_s, prefill_upper_s, decode_lower, decode_upper, migration_lower_s, migration_upper_s: the thresholds.
        original: as published. The KV term divides by X times the number of decode replicas *now*, although it asks for that
            number, so that the answer swings; the prefill replicas' most takes the upper threshold for the lower; K is all
            that prefill replicas have promised, instead of the prompts whose KV leaves; arrivals do not matter, and a fleet
            above its most gives up one replica a decision.
    """

    reactive: ClassVar[bool] = True

    prefill_lower_s: float = 0.5
    prefill_upper_s: float = 0.8
    decode_lower: float = 0.75
    decode_upper: float = 0.95
    migration_lower_s: float = 0.2
    migration_upper_s: float = 0.4
    window_s: float = 4.0
    original: bool = False

    def __post_init__(self) -> None:
        refuse_crossed("prefill_lower_s", self.prefill_lower_s, "prefill_upper_s", self.prefill_upper_s)
        refuse_crossed("decode_lower", self.decode_lower, "decode_upper", self.decode_upper)
        refuse_crossed("migration_lower_s", self.migration_lower_s, "migration_upper_s", self.migration_upper_s)
        refuse_unless_positive("window_s", self.window_s)
        if self.decode_upper > 1:
            raise ValueError(f"decode_upper is a share of the KV pools: it must be at most 1, not {self.decode_upper}")

    def __call__(self, view: ScaleView) -> Wanted:
        capacity = view.capacity
        if capacity is None or not is_known(capacity):
            return stay(view, "nobody knows what one replica can do")
        seen = self.demand(view, capacity)
        if Role.BOTH in view.roles:
            counted = present(view.roles[Role.BOTH])
            target = both(self._prefill_rate(seen, capacity), self._decode_memory(seen, capacity))
            target = one_by_one(target) if self.original else self._kept(target, view, capacity)
            return Wanted({Role.BOTH: counted + target.step(counted)}, target.why)
        if capacity.transfer_tokens_per_s <= 0:
            return stay(view, "nobody knows how fast KV leaves a replica")
        prefills, decodes = present(view.roles[Role.PREFILL]), present(view.roles[Role.DECODE])
        prefill, decode = self.targets(seen, capacity, decodes)
        prefill = self._kept(prefill, view, capacity)
        counts = {Role.PREFILL: prefills + prefill.step(prefills), Role.DECODE: decodes + decode.step(decodes)}
        return Wanted(counts, {Role.PREFILL: prefill.why, Role.DECODE: decode.why})

    def _kept(self, target: Target, view: ScaleView, capacity: Capacity) -> Target:
        """The same, but for replicas that the prompts which keep coming need; as published, these do not matter."""
        if self.original:
            return target
        role = computing(view)
        arriving, here = role.arrived_tokens_per_s, present(role)
        needed = here if arriving is None else min(ceil(arriving / capacity.prefill_tokens_per_s), here)
        if needed <= target.most:
            return target
        known = "nobody knows how many" if arriving is None else f"{arriving:.0f}"
        return Target(target.fewest, needed, f"{target.why}; {known} tokens arrive a second")

    def demand(self, view: ScaleView, capacity: Capacity) -> Demand:
        """What there is to do, in the units of the equations."""
        prefill = computing(view)
        if self.original:
            leaving = prefill.num_promised_tokens
        else:
            leaving = prefill.num_waiting_tokens + keeping(view).num_queued_tokens
        return Demand(backlog_tokens(prefill), -(-kv_tokens(view) // capacity.block_size), leaving)

    def targets(self, seen: Demand, capacity: Capacity, num_decodes: int) -> tuple[Target, Target]:
        """The targets for prefill and for decode replicas of a disaggregated fleet."""
        leaves = capacity.transfer_tokens_per_s * (max(num_decodes, 1) if self.original else 1)
        why = f"KV to transfer: {seen.leaving_tokens} tokens"
        kv = between(seen.leaving_tokens, leaves, self.migration_lower_s, self.migration_upper_s, why)
        prefill_kv = Target(kv.fewest, kv.fewest, why) if self.original else kv
        prefill, decode = both(self._prefill_rate(seen, capacity), prefill_kv), both(self._decode_memory(seen, capacity), kv)
        if self.original:
            return one_by_one(prefill), one_by_one(decode)
        return prefill, decode

    def _prefill_rate(self, seen: Demand, capacity: Capacity) -> Target:
        why = f"prompts that wait: {seen.prompt_tokens} tokens"
        return between(seen.prompt_tokens, capacity.prefill_tokens_per_s, self.prefill_lower_s, self.prefill_upper_s, why)

    def _decode_memory(self, seen: Demand, capacity: Capacity) -> Target:
        why = f"KV promised: {seen.used_blocks} blocks"
        return between(seen.used_blocks, capacity.num_blocks, self.decode_lower, self.decode_upper, why)
