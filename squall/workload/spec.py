"""What load to offer: the `[workload]` table. Knows no clock and no file beyond its path; `workload.build` makes requests of it.

Every table checks itself: a value that makes no sense raises ConfigError naming the key.
"""

import math

from msgspec import Struct

from squall.errors import ConfigError


def _above_zero(table: object, *keys: str) -> None:
    for key in keys:
        value = getattr(table, key)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{key} is {value}; it must be above 0")


def _not_negative(table: object, *keys: str) -> None:
    for key in keys:
        value = getattr(table, key)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{key} is {value}; it must be 0 or more")


def _ascending(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ConfigError(f"low is {low} and high is {high}; low must be at least 1 and at most high")


# -- arrivals


class FixedArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """One request every `1 / rate_rps` seconds."""

    rate_rps: float

    def __post_init__(self) -> None:
        _above_zero(self, "rate_rps")


class PoissonArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Exponential gaps."""

    rate_rps: float

    def __post_init__(self) -> None:
        _above_zero(self, "rate_rps")


class GammaArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gamma"):
    """Gamma gaps with coefficient of variation `cv` (1 is Poisson; above 1 is bursty)."""

    rate_rps: float
    cv: float = 2.0

    def __post_init__(self) -> None:
        _above_zero(self, "rate_rps", "cv")


class BurstArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="bursts"):
    """Poisson at `rate_rps`, and at `burst_rps` for `burst_s` seconds out of every `period_s` (the burst ends the period)."""

    rate_rps: float
    burst_rps: float
    burst_s: float
    period_s: float

    def __post_init__(self) -> None:
        _not_negative(self, "rate_rps")
        _above_zero(self, "burst_rps", "burst_s", "period_s")
        if self.burst_s > self.period_s:
            raise ConfigError(f"burst_s is {self.burst_s}; it must be at most period_s, which is {self.period_s}")


Arrivals = FixedArrivals | PoissonArrivals | GammaArrivals | BurstArrivals

# -- lengths, in tokens


class FixedLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    tokens: int

    def __post_init__(self) -> None:
        _above_zero(self, "tokens")


class UniformLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Integers from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _ascending(self.low, self.high)


class LogNormalLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Log-normal with this median and `sigma` of the logarithm, rounded and clipped to [low, high]."""

    median: float
    sigma: float
    low: int = 1
    high: int = 131_072

    def __post_init__(self) -> None:
        _above_zero(self, "median")
        _not_negative(self, "sigma")
        _ascending(self.low, self.high)


class EmpiricalLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """Drawn from a column of a CSV file, with replacement. `path` is relative to the configuration file."""

    path: str
    column: str


Length = FixedLength | UniformLength | LogNormalLength | EmpiricalLength


class TraceWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Requests from a recorded trace (`workload.traces` tells the formats).

    Attributes:
        path: the file; relative to the configuration file.
        format: "azure", "csv" or "auto" (told from the header).
        arrivals: given, replaces the trace's arrival times (lengths keep the trace's order).
        rate_scale: arrivals this many times faster; applied last.
        start_s: skip what arrives before this, in the trace's own time (the window then starts at 0).
        duration_s: keep what arrives within this after start_s, in the trace's own time; None keeps all.
        max_requests: keep the first so many; None keeps all.
    """

    path: str
    format: str = "auto"
    arrivals: Arrivals | None = None
    rate_scale: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    max_requests: int | None = None

    def __post_init__(self) -> None:
        _above_zero(self, "rate_scale", "duration_s", "max_requests")
        _not_negative(self, "start_s")
        if self.format not in ("auto", "azure", "csv"):
            raise ConfigError(f'format is {self.format!r}; it must be "auto", "azure" or "csv"')


class SyntheticWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="synthetic"):
    """Generated requests; `num_requests` or `duration_s` says how many (the first to be reached, where both are given)."""

    arrivals: Arrivals
    prompt: Length
    output: Length
    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        _above_zero(self, "num_requests", "duration_s")
        if self.num_requests is None and self.duration_s is None:
            raise ConfigError("num_requests and duration_s are both missing; give one of them")


Workload = TraceWorkload | SyntheticWorkload


class OfferedRequest(Struct, frozen=True, gc=False):
    """One request of a workload: when it arrives and how long it is. `arrived_at` in nanoseconds from the start."""

    id: int
    arrived_at: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    session: int = 0
