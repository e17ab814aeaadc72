"""What arrived a season ago, corrected by how today compares: replicas for what is about to come.

Knows no queueing; the controller remembers what has arrived, and shows it through the view.
"""

from math import ceil

from msgspec import Struct

from squall.core.fleet_view import RoleView, ScaleView, Wanted
from squall.core.types import Role
from squall.policies.scale.needs import (
    backlog_tokens,
    computing,
    for_tokens,
    is_known,
    kv_tokens,
    refuse_unless_positive,
    refuse_unless_share,
    stay,
)


class Predictive(Struct, frozen=True, tag_field="kind", tag="predictive", forbid_unknown_fields=True):
    """A seasonal forecast for the instant at which a replica that is started now will be ready.

    With a(t) the prompt tokens a second in the window that ends at t, S the season and h the time ahead, season k forecasts
    a(now + h - k S) * a(now) / a(now - k S): its shape, at today's level; the correction is held within `max_correction`
    either way, and the forecast is the mean of the seasons that are remembered. The fleet is made for that or for what arrives
    now, whichever is more, and for what waits to be gone within `drain_s`. Before a season has been seen it follows the present.
    Decode replicas follow the KV that is promised, times the same growth.

    Attributes:
        season_s: after so long things repeat (86400: a day); `num_seasons`: so many are averaged.
        ahead_s: h; what a replica takes to load when None.
        max_load: share of its prefill throughput that a replica is given; `max_kv`: of its KV pool.
        window_s: over which arrivals are counted; below `season_s`.
        drain_s, max_correction: see above.
    """

    season_s: float = 86_400.0
    num_seasons: int = 1
    ahead_s: float | None = None
    max_load: float = 0.7
    max_kv: float = 0.8
    window_s: float = 60.0
    drain_s: float = 10.0
    max_correction: float = 3.0

    def __post_init__(self) -> None:
        for key in ("season_s", "num_seasons", "window_s", "drain_s"):
            refuse_unless_positive(key, getattr(self, key))
        if self.window_s >= self.season_s:
            raise ValueError(f"window_s must be below season_s ({self.season_s}), not {self.window_s}")
        if self.ahead_s is not None and not 0 <= self.ahead_s < self.season_s:
            raise ValueError(f"ahead_s must be at least 0 and below season_s ({self.season_s}), not {self.ahead_s}")
        refuse_unless_share("max_load", self.max_load)
        refuse_unless_share("max_kv", self.max_kv)
        if not self.max_correction >= 1:
            raise ValueError(f"max_correction must be at least 1, not {self.max_correction}")

    @property
    def memory_s(self) -> float:
        return self.num_seasons * self.season_s

    def __call__(self, view: ScaleView) -> Wanted:
        capacity = view.capacity
        if capacity is None or not is_known(capacity):
            return stay(view, "nobody knows what one replica can do")
        prefill = computing(view)
        now = prefill.arrived_tokens_per_s
        if now is None:
            return stay(view, "no whole window of arrivals has been seen")
        forecast = self.forecast(prefill, capacity.load_s if self.ahead_s is None else self.ahead_s)
        expected = now if forecast is None else max(now, forecast)
        work = expected / self.max_load + backlog_tokens(prefill) / self.drain_s
        for_prompts = ceil(work / capacity.prefill_tokens_per_s)
        growth = min(expected / now, self.max_correction) if now else 1.0
        for_kv = for_tokens(kv_tokens(view) * growth, capacity, self.max_kv)
        why = f"{now:.0f} prompt tokens a second, " + ("no season seen yet" if forecast is None else f"{forecast:.0f} expected")
        if Role.BOTH in view.roles:
            return Wanted({Role.BOTH: max(for_prompts, for_kv)}, why)
        return Wanted({Role.PREFILL: for_prompts, Role.DECODE: for_kv}, why)

    def forecast(self, seen: RoleView, ahead_s: float) -> float | None:
        """Prompt tokens a second, `ahead_s` from now; None where no season is remembered."""
        ahead_s = min(ahead_s, self.season_s - self.window_s)
        forecasts, now = [], seen.arrived_tokens_per_s
        for season in range(1, self.num_seasons + 1):
            then, after = seen.past_tokens_per_s(season * self.season_s), seen.past_tokens_per_s(season * self.season_s - ahead_s)
            if now is None or then is None or after is None:
                continue
            level = now / then if then else self.max_correction if now else 1.0
            forecasts.append(after * min(max(level, 1 / self.max_correction), self.max_correction))
        return sum(forecasts) / len(forecasts) if forecasts else None
