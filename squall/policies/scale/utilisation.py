"""How much of what they could do replicas do. The rule of Kubernetes' horizontal pod autoscaler.

Knows no queues and no objectives; what others are measured by.
"""

from math import ceil
from typing import ClassVar

from msgspec import Struct

from squall.core.fleet_view import Capacity, RoleView, ScaleView, Wanted
from squall.core.types import Role
from squall.policies.scale.needs import is_known, kv_tokens, present, refuse_unless_positive, refuse_unless_share, stay


class Utilisation(Struct, frozen=True, tag_field="kind", tag="utilisation", forbid_unknown_fields=True):
    """Replicas * utilisation / target, rounded up, unless the two are within `tolerance` of each other.

    The utilisation of replicas that prefill is prompt tokens arriving a second / what they could compute; of those that
    decode, the share of their KV pools that is promised. Colocated replicas take what asks for more. A metric that is missing
    leaves the number as it is.

    Attributes:
        target_compute, target_kv: the shares aimed at.
        tolerance: no change while the ratio of utilisation to target is within 1 +- this; below 1.
        window_s: over which arrivals are counted.
    """

    reactive: ClassVar[bool] = True

    target_compute: float = 0.7
    target_kv: float = 0.7
    tolerance: float = 0.1
    window_s: float = 15.0

    def __post_init__(self) -> None:
        refuse_unless_share("target_compute", self.target_compute)
        refuse_unless_share("target_kv", self.target_kv)
        refuse_unless_positive("window_s", self.window_s)
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, not {self.tolerance}")

    def __call__(self, view: ScaleView) -> Wanted:
        capacity = view.capacity
        if capacity is None or not is_known(capacity):
            return stay(view, "nobody knows what one replica can do")
        kv = kv_tokens(view) / capacity.num_blocks / capacity.block_size
        counts, whys = {}, {}
        for role, seen in view.roles.items():
            asked = []
            if role is not Role.DECODE:
                asked.append(self._asked(seen, self._compute(seen, capacity), self.target_compute, "compute"))
            if role is not Role.PREFILL:
                asked.append(self._asked(seen, kv, self.target_kv, "KV"))
            counts[role], whys[role] = max(asked)
        return Wanted(counts, whys)

    def _compute(self, seen: RoleView, capacity: Capacity) -> float | None:
        arriving = seen.arrived_tokens_per_s
        return None if arriving is None else arriving / capacity.prefill_tokens_per_s

    def _asked(self, seen: RoleView, busy: float | None, target: float, what: str) -> tuple[int, str]:
        """`busy`: replicas' worth of work."""
        count = present(seen)
        if busy is None:
            return count, f"{what} unknown"
        if not count:
            return ceil(busy / target), f"{what} for {busy:.2f} replicas, and none there"
        ratio = busy / count / target
        wanted = count if abs(ratio - 1) <= self.tolerance else ceil(busy / target)
        return wanted, f"{what} {busy / count:.0%}, target {target:.0%}"
