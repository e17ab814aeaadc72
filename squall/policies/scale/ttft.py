"""By the objective itself: how long will a prompt that comes now wait for its first token, and how many replicas change that.

Knows throughputs and queues, not how prompts are batched; a prediction in arithmetic, not a simulation.
"""

from math import ceil
from typing import ClassVar

from msgspec import Struct

from squall.core.fleet_view import Capacity, RoleView, ScaleView, Wanted
from squall.core.types import SECOND, Nanos, Role
from squall.policies.scale.needs import (
    backlog_tokens,
    computing,
    for_tokens,
    is_known,
    kv_tokens,
    present,
    refuse_crossed,
    refuse_unless_positive,
    refuse_unless_share,
    stay,
)


class Ttft(Struct, frozen=True, tag_field="kind", tag="ttft", forbid_unknown_fields=True):
    """Queue wait, predicted service and residual load time against the objective.

    With n replicas ready, Q prompt tokens before their first token, A arriving a second and R computed a second by one, the
    backlog when the next replica can help, after h seconds (the rest of a load in progress, or a whole one), is

        Q' = max(0, Q + (A - n R) h),     and with N replicas then    TTFT = Q' / (N R) + service,

    service being the mean prompt of the backlog / R. The fleet grows to the N that brings this below `upper` times the
    objective and can take A for good, and it shrinks when fewer would stay below `lower` times it. A prompt that has itself
    waited longer than `upper` times the objective asks for one more, whatever the prediction says: then R was too high.
    While A is not known, the backlog is taken to stay as it is, and the fleet does not shrink.

    Attributes:
        ttft_s: the objective.
        lower, upper: shares of it.
        max_load: share of its prefill throughput that a replica may be given by steady arrivals.
        kv_lower, kv_upper: the same for the KV pools of the replicas that decode.
        window_s: over which arrivals are counted.
    """

    reactive: ClassVar[bool] = True

    ttft_s: float = 1.0
    lower: float = 0.3
    upper: float = 0.7
    max_load: float = 0.8
    kv_lower: float = 0.6
    kv_upper: float = 0.9
    window_s: float = 10.0

    def __post_init__(self) -> None:
        refuse_unless_positive("ttft_s", self.ttft_s)
        refuse_crossed("lower", self.lower, "upper", self.upper)
        refuse_crossed("kv_lower", self.kv_lower, "kv_upper", self.kv_upper)
        refuse_unless_share("kv_upper", self.kv_upper)
        refuse_unless_share("max_load", self.max_load)
        refuse_unless_positive("window_s", self.window_s)

    def __call__(self, view: ScaleView) -> Wanted:
        capacity = view.capacity
        if capacity is None or not is_known(capacity):
            return stay(view, "nobody knows what one replica can do")
        prefill = computing(view)
        (fewest, why), most = self._for_prompts(prefill, capacity, view.now), self._most_for_prompts(prefill, capacity)
        kv = kv_tokens(view)
        kv_fewest, kv_most = for_tokens(kv, capacity, self.kv_upper), for_tokens(kv, capacity, self.kv_lower)
        kv_why = f"KV promised: {kv} tokens"
        if Role.BOTH in view.roles:
            if kv_fewest > fewest:
                fewest, why = kv_fewest, kv_why
            most = None if most is None else max(most, kv_most)
            return Wanted({Role.BOTH: _between(present(prefill), fewest, most)}, why)
        decode = view.roles[Role.DECODE]
        counts = {
            Role.PREFILL: _between(present(prefill), fewest, most),
            Role.DECODE: _between(present(decode), kv_fewest, kv_most),
        }
        return Wanted(counts, {Role.PREFILL: why, Role.DECODE: kv_why})

    def _for_prompts(self, prefill: RoleView, capacity: Capacity, now: Nanos) -> tuple[int, str]:
        """The fewest replicas that keep the first token in time."""
        rate, ready = capacity.prefill_tokens_per_s, prefill.num_ready
        backlog, arriving = backlog_tokens(prefill), prefill.arrived_tokens_per_s
        after_s = capacity.load_s if prefill.next_ready_s is None else prefill.next_ready_s
        later = float(backlog) if arriving is None else max(0.0, backlog + (arriving - ready * rate) * after_s)
        if self._predicted(backlog, prefill, rate) <= self.upper * self.ttft_s:
            later = 0.0  # what is there now is in time; the steady rate still counts
        fewest = max(ceil(later / rate / self._spare(self.upper, prefill, rate)), ceil((arriving or 0) / rate / self.max_load))
        waited = 0.0 if prefill.oldest_queued_at is None else (now - prefill.oldest_queued_at) / SECOND
        if waited > self.upper * self.ttft_s and fewest <= present(prefill):
            return present(prefill) + 1, f"a prompt has waited {waited:.2f} s > {self.upper * self.ttft_s:.2f} s"
        rate_known = "nobody knows how many" if arriving is None else f"{arriving:.0f}"
        return fewest, f"{backlog} prompt tokens wait, {rate_known} arrive a second"

    def _most_for_prompts(self, prefill: RoleView, capacity: Capacity) -> int | None:
        """More than so many are not needed; None where the arrivals are not known, which is not the same as none."""
        arriving = prefill.arrived_tokens_per_s
        if arriving is None:
            return None
        rate = capacity.prefill_tokens_per_s
        for_backlog = ceil(backlog_tokens(prefill) / rate / self._spare(self.lower, prefill, rate))
        return max(for_backlog, ceil(arriving / rate / self.max_load * self.upper / self.lower))

    def _spare(self, share: float, prefill: RoleView, rate: float) -> float:
        """Seconds of the objective that waiting may take; a tenth of it at least, where one prompt alone takes longer."""
        number = prefill.num_queued + prefill.num_waiting
        service = backlog_tokens(prefill) / number / rate if number else 0.0
        return max(share * self.ttft_s - service, 0.1 * share * self.ttft_s)

    def _predicted(self, backlog: float, prefill: RoleView, rate: float) -> float:
        """Seconds until all that waits now has its first token, if nobody helps."""
        if not backlog:
            return 0.0
        return backlog / rate / prefill.num_ready if prefill.num_ready else float("inf")


def _between(count: int, fewest: int, most: int | None) -> int:
    if count < fewest:
        return fewest
    return count if most is None else max(min(count, most), fewest)
