"""BlitzScale's planner: three equations, each of which gives a fewest and a most for the replicas of a role.

Written from a description of the published planner (its release of 2025) and of the paper (OSDI 2025). With `original` it
answers as that planner does, misprints included. Knows no bounds on the fleet and no time.
"""

from typing import ClassVar

from msgspec import Struct

from squall.core.fleet_view import Capacity, ScaleView, Wanted
from squall.policies.scale.equations import Demand, Target, targets, wanted
from squall.policies.scale.needs import refuse_crossed, refuse_unless_positive


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
        return wanted(self, view)

    def targets(self, seen: Demand, capacity: Capacity, num_decodes: int) -> tuple[Target, Target]:
        """The targets for prefill and for decode replicas of a disaggregated fleet."""
        return targets(self, seen, capacity, num_decodes)
