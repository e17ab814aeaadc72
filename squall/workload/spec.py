"""What load to offer: the `[workload]` table. Knows no clock and no file beyond its path; `workload.build` makes requests of it."""

from msgspec import Struct

# -- arrivals


class FixedArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """One request every `1 / rate_rps` seconds."""

    rate_rps: float


class PoissonArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Exponential gaps."""

    rate_rps: float


class GammaArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gamma"):
    """Gamma gaps with coefficient of variation `cv` (1 is Poisson; above 1 is bursty)."""

    rate_rps: float
    cv: float = 2.0


class BurstArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="bursts"):
    """Poisson at `rate_rps`, and at `burst_rps` for `burst_s` seconds out of every `period_s` (the burst ends the period)."""

    rate_rps: float
    burst_rps: float
    burst_s: float
    period_s: float


Arrivals = FixedArrivals | PoissonArrivals | GammaArrivals | BurstArrivals

# -- lengths, in tokens


class FixedLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    tokens: int


class UniformLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Integers from `low` to `high`, both included."""

    low: int
    high: int


class LogNormalLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Log-normal with this median and `sigma` of the logarithm, rounded and clipped to [low, high]."""

    median: float
    sigma: float
    low: int = 1
    high: int = 131_072


class EmpiricalLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """Drawn from a column of a CSV file, with replacement."""

    path: str
    column: str


Length = FixedLength | UniformLength | LogNormalLength | EmpiricalLength


class TraceWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Requests from a recorded trace.

    Attributes:
        path: the file; relative to the configuration file.
        format: "azure" or "auto" (told from the header).
        arrivals: given, replaces the trace's arrival times (lengths keep the trace's order).
        rate_scale: arrivals this many times faster.
        start_s: skip what arrives before this (the window then starts at 0).
        duration_s: keep what arrives within this after start_s; None keeps all.
        max_requests: keep the first so many; None keeps all.
    """

    path: str
    format: str = "auto"
    arrivals: Arrivals | None = None
    rate_scale: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    max_requests: int | None = None


class SyntheticWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="synthetic"):
    """Generated requests; `num_requests` or `duration_s` says how many (the first to be reached, where both are given)."""

    arrivals: Arrivals
    prompt: Length
    output: Length
    num_requests: int | None = None
    duration_s: float | None = None


Workload = TraceWorkload | SyntheticWorkload


class OfferedRequest(Struct, frozen=True, gc=False):
    """One request of a workload: when it arrives and how long it is. `arrived_at` in nanoseconds from the start."""

    id: int
    arrived_at: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    session: int = 0
