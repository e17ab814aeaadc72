"""What load to offer: the `[workload]` table. Knows no clock and no file beyond its path; `workload.build` makes requests of it.

Every table checks itself: a value that makes no sense raises ConfigError naming the key.
"""

import math
from typing import Literal

from msgspec import Struct

from squall.errors import ConfigError
from squall.workload.formats import FORMATS
from squall.workload.limits import above_zero, ascending, not_negative, quantiles, rates

TRACE_FORMATS = ("auto", "servegen", *(form.name for form in FORMATS))
"""What `format` may be."""


def _known_format(name: str) -> None:
    if name not in TRACE_FORMATS:
        raise ConfigError(f"format is {name!r}; it must be one of {', '.join(TRACE_FORMATS)}")


def _bounded(arrivals: "Arrivals", count: int | None, duration_s: float | None, key: str) -> None:
    """A generated workload must end."""
    if isinstance(arrivals, RateSeries | TraceArrivals) or count is not None:
        return
    if isinstance(arrivals, AllAtOnce | ClosedLoop):
        raise ConfigError(f"{key} is missing; these arrivals have no end of their own")
    if duration_s is None:
        raise ConfigError(f"{key} and duration_s are both missing; give one of them")


# -- arrivals


class FixedArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """One request every `1 / rate_rps` seconds."""

    rate_rps: float

    def __post_init__(self) -> None:
        above_zero(self, "rate_rps")


class PoissonArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Exponential gaps."""

    rate_rps: float

    def __post_init__(self) -> None:
        above_zero(self, "rate_rps")


class GammaArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gamma"):
    """Gamma gaps with coefficient of variation `cv` (1 is Poisson; above 1 is bursty)."""

    rate_rps: float
    cv: float = 2.0

    def __post_init__(self) -> None:
        above_zero(self, "rate_rps", "cv")


class BurstArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="bursts"):
    """Poisson at `rate_rps`, and at `burst_rps` for `burst_s` seconds out of every `period_s` (the burst ends the period)."""

    rate_rps: float
    burst_rps: float
    burst_s: float
    period_s: float

    def __post_init__(self) -> None:
        not_negative(self, "rate_rps")
        above_zero(self, "burst_rps", "burst_s", "period_s")
        if self.burst_s > self.period_s:
            raise ConfigError(f"burst_s is {self.burst_s}; it must be at most period_s, which is {self.period_s}")


class MarkovArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mmpp"):
    """Poisson at the rate of a hidden state. States last exponentially long, `mean_stay_s` on average; the next one is any other,
    all equally likely. The first state comes first."""

    rates_rps: tuple[float, ...]
    mean_stay_s: tuple[float, ...]

    def __post_init__(self) -> None:
        rates(self.rates_rps)
        if len(self.rates_rps) != len(self.mean_stay_s) or len(self.rates_rps) < 2:
            raise ConfigError(
                f"rates_rps has {len(self.rates_rps)} values and mean_stay_s {len(self.mean_stay_s)}; each state has one of both,"
                " and there are at least two"
            )
        if not all(math.isfinite(stay) and stay > 0 for stay in self.mean_stay_s):
            raise ConfigError(f"mean_stay_s is {list(self.mean_stay_s)}; every stay must be above 0")


class RateSeries(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rate_series"):
    """Poisson at rates that change every `step_s`; after the last one nothing arrives. A rate of 0 is a pause.

    Attributes:
        rates_rps: the rates; or
        path, column: a CSV file and its column that holds them. `path` is relative to the configuration file.
        rate_scale: multiplies all of them.
        cv: of the gaps, as in gamma arrivals, as far as the rate stays the same.
    """

    rates_rps: tuple[float, ...] = ()
    path: str | None = None
    column: str | None = None
    step_s: float = 60.0
    rate_scale: float = 1.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        above_zero(self, "step_s", "rate_scale", "cv")
        if bool(self.rates_rps) == (self.path is not None) or (self.path is None) != (self.column is None):
            raise ConfigError("rates come from rates_rps, or from path and column; give one of them")
        if self.rates_rps:
            rates(self.rates_rps)


class TraceArrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """A trace's arrival times alone, `rate_scale` times faster. `path` is relative to the configuration file."""

    path: str
    format: str = "auto"
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        above_zero(self, "rate_scale")
        _known_format(self.format)


class AllAtOnce(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="all_at_once"):
    """Everything arrives at 0."""


class ClosedLoop(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="closed_loop"):
    """`concurrency` clients, each of which sends its next request `think_s` after the answer to its last one."""

    concurrency: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        above_zero(self, "concurrency")
        not_negative(self, "think_s")


OpenArrivals = (
    FixedArrivals | PoissonArrivals | GammaArrivals | BurstArrivals | MarkovArrivals | RateSeries | TraceArrivals | AllAtOnce
)
"""Arrivals that do not wait for answers."""

Arrivals = OpenArrivals | ClosedLoop

# -- lengths, in tokens


class FixedLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    tokens: int

    def __post_init__(self) -> None:
        above_zero(self, "tokens")


class UniformLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Integers from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        ascending(self.low, self.high)


class LogNormalLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Log-normal with this median and `sigma` of the logarithm, rounded and clipped to [low, high]."""

    median: float
    sigma: float
    low: int = 1
    high: int = 131_072

    def __post_init__(self) -> None:
        above_zero(self, "median")
        not_negative(self, "sigma")
        ascending(self.low, self.high)


class EmpiricalLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """Drawn from a column of a CSV file, with replacement. `path` is relative to the configuration file."""

    path: str
    column: str


class ZipfLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="zipf"):
    """From `low` to `high`; the k-th smallest is k ** -theta times as likely as the smallest. `theta` may be 0 (uniform) or 1."""

    low: int
    high: int
    theta: float = 0.6

    def __post_init__(self) -> None:
        ascending(self.low, self.high)
        not_negative(self, "theta")
        if self.high - self.low >= 1 << 24:
            raise ConfigError(f"low is {self.low} and high is {self.high}; they must be less than {1 << 24} apart")


class QuantileLength(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="quantiles"):
    """What published percentiles say: the share `at[i]` of all lengths is at most `tokens[i]`.

    Between two of them the logarithm is spread evenly. `at` begins with 0 and ends with 1.
    """

    at: tuple[float, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        quantiles(self.at, self.tokens)


Length = FixedLength | UniformLength | LogNormalLength | EmpiricalLength | ZipfLength | QuantileLength

# -- workloads


class TraceWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Requests from a recorded trace.

    Attributes:
        path: the file; relative to the configuration file.
        format: one of `TRACE_FORMATS`; "auto" tells it from the columns.
        arrivals: given, replaces the trace's arrival times (lengths keep the trace's order).
        rate_scale: arrivals this many times faster; applied last.
        start_s: skip what arrives before this, in the trace's own time (the window then starts at 0).
        duration_s: keep what arrives within this after start_s, in the trace's own time; None keeps all.
        max_requests: keep the first so many; None keeps all.
        time_unit: what arrival times count in, where it is not what the format says: "s", "ms", "us" or "ns".
        trace_block_size: tokens in a block of the trace, where it is not what the format says.
        turns: how the turns of a conversation follow each other: "recorded", as they arrived; or "wait", after the answer to the
            turn before and as long as its reader took, which is the recorded gap less `recorded_tbt_s` for every token of it.
        recorded_tbt_s: the time between tokens when the trace was recorded.
    """

    path: str
    format: str = "auto"
    arrivals: Arrivals | None = None
    rate_scale: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    max_requests: int | None = None
    time_unit: Literal["auto", "s", "ms", "us", "ns"] = "auto"
    trace_block_size: int | None = None
    turns: Literal["recorded", "wait"] = "recorded"
    recorded_tbt_s: float = 0.0

    def __post_init__(self) -> None:
        above_zero(self, "rate_scale", "duration_s", "max_requests", "trace_block_size")
        not_negative(self, "start_s", "recorded_tbt_s")
        _known_format(self.format)
        if self.turns == "wait" and self.arrivals is not None:
            raise ConfigError('turns = "wait" needs the arrival times of the trace; leave out arrivals')


class SyntheticWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="synthetic"):
    """Generated requests; `num_requests` or `duration_s` says how many (the first to be reached, where both are given).

    Attributes:
        max_total_tokens: a request whose prompt and output are longer together has a shorter prompt (and output, if need be).
    """

    arrivals: Arrivals
    prompt: Length
    output: Length
    num_requests: int | None = None
    duration_s: float | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        above_zero(self, "num_requests", "duration_s", "max_total_tokens")
        _bounded(self.arrivals, self.num_requests, self.duration_s, "num_requests")
        if self.max_total_tokens == 1:
            raise ConfigError("max_total_tokens is 1; it must be at least 2, a token of prompt and one of output")


class SessionsWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sessions"):
    """Conversations. The prompt of every turn is the whole conversation so far, answers included, and something new.

    Attributes:
        arrivals: of the conversations, that is of their first turns.
        turns: how many turns one has.
        prompt, output: the new tokens of a turn, and its answer.
        num_sessions, duration_s: how many begin (the first to be reached, where both are given).
        system_tokens: with so many tokens all conversations begin alike, before the first turn's own.
        think_s, think_cv: how long a client takes from an answer to the next turn, on average, and how much it varies (gamma;
            0 is always the same, 1 exponential).
        waits: the next turn waits for the answer. False sends it `think_s` after the turn before, answered or not.
        max_context: a conversation ends before a turn whose prompt and output would be longer together.
    """

    arrivals: Arrivals
    turns: Length
    prompt: Length
    output: Length
    num_sessions: int | None = None
    duration_s: float | None = None
    system_tokens: int = 0
    think_s: float = 0.0
    think_cv: float = 1.0
    waits: bool = True
    max_context: int | None = None

    def __post_init__(self) -> None:
        above_zero(self, "num_sessions", "duration_s", "max_context")
        not_negative(self, "system_tokens", "think_s", "think_cv")
        _bounded(self.arrivals, self.num_sessions, self.duration_s, "num_sessions")


class NamedWorkload(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="named"):
    """A well-known workload; `workload.named` has the names and what is behind them.

    Attributes:
        path: the file that it is taken from; None generates requests with its statistics instead, and the run says so.
        arrivals: for workloads of lengths alone, and instead of the times of the others.
        num_requests, duration_s: at most so much of it.
        rate_scale: arrivals this many times faster.
    """

    name: str
    path: str | None = None
    arrivals: Arrivals | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        above_zero(self, "num_requests", "duration_s", "rate_scale")


Workload = TraceWorkload | SyntheticWorkload | SessionsWorkload | NamedWorkload


class OfferedRequest(Struct, frozen=True, gc=False):
    """One request of a workload: when it arrives and how long it is.

    A request with `after` belongs to a client who waits. It arrives `think` after the end of that other request, whichever end
    that is (all tokens, a refusal, a cancellation, a lost replica), as seen by the client. Its `arrived_at` is then only the
    earliest instant at which this can be, if the answers took no time at all: whoever plays the workload puts the real one in its
    place. `after` always names a smaller id, and requests are in order of `arrived_at`.

    Attributes:
        id: its place in the workload, from 0.
        arrived_at: nanoseconds from the start.
        block_hashes: one a full block of the prompt, of the block size that `build` was given; empty where nothing is known.
        session: requests of one conversation have the same one, from 1 on; 0 means none.
        after: the request whose end releases this one; -1 where none does.
        think: nanoseconds from that end to the arrival.
        output_hashes: go on where `block_hashes` end: one for each block that the answer fills. Answers are known content, since
            the next turn's prompt repeats them; only whoever plays the engine may look, for they tell how long an answer will be.
    """

    id: int
    arrived_at: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    session: int = 0
    after: int = -1
    think: int = 0
    output_hashes: tuple[int, ...] = ()
