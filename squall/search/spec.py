"""The `[search]` table: what is asked, of which space, against which objectives. Knows no simulation.

`[search.slo]` names limits by metric and quantile, as `[slo]` does: `ttft_p90_s = 2` says that 90 % of the requests have their
first token within two seconds. Here any quantile will do; `p999` is 99.9 %. Metrics are ttft, tbt (all gaps of all requests,
pooled), tpot, e2e and queue (until the first step). A request that is refused, lost or never ends is outside of every limit.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from squall.config import Slo
from squall.core.types import SECOND, Nanos
from squall.errors import ConfigError
from squall.mistakes import explain, extreme, shown, strange
from squall.quantities import Amount, Gpus
from squall.workload.limits import MOST_REQUESTS

METRICS = ("ttft", "tbt", "tpot", "e2e", "queue")

Many = Annotated[int, Meta(ge=1, le=1_000_000)]

Objective = Literal["qps_per_usd", "usd", "gpu_hours", "energy_kwh", "latency"]


class Limit(Struct, frozen=True):
    """`quantile` of `metric` is at most `limit`: at least that share of all requests (gaps) keeps it."""

    metric: str
    quantile: float
    limit: Nanos

    @property
    def name(self) -> str:
        return f"{self.metric}_p{f'{100 * self.quantile:.10g}'.replace('.', '')}"

    def needed(self, total: int) -> int:
        """How many of `total` must keep the limit."""
        return math.ceil(self.quantile * total - 1e-9)


class Price(Struct, frozen=True, forbid_unknown_fields=True):
    """USD for an hour of one GPU. What is missing is taken from `on_demand`, and that from the catalogue."""

    on_demand: Amount | None = None
    reserved: Amount | None = None
    spot: Amount | None = None


class Search(Struct, frozen=True, forbid_unknown_fields=True):
    """What `squall search` is asked.

    Attributes:
        objective: qps_per_usd is the highest steady rate for a dollar an hour; usd, gpu_hours and energy_kwh (board power times
            time held) are those of the workload as it is; latency is the least `latency_of` of the workload as it is.
        criterion: "slo" is `slo` below and `[slo]`; "vidur" is Vidur's: P99 of the time in the queue within 5 s, no more.
        slo: limits beside those of `[slo]`, as `{ttft_p999_s = 2.0}`.
        space: dotted keys of the configuration, and what each may be; see `space`.
        exclude: combinations that are not wanted: each a table of keys and values (a list means any of them).
        latency_of: what "latency" minimises.
        budget_usd_per_hour: what a deployment may cost at most.
        max_gpus_per_replica, max_gpus: limits on a replica, and on a deployment.
        available: GPUs that can be had, by name.
        pricing, prices: which price counts, and prices that replace the catalogue's.
        num_requests: of the workload, that a steady rate is tried with, at least.
        span_s: that these last at least, at the highest rate that a configuration might bear; fast ones are tried with more.
        warm_up: of `num_requests`, the first, whose own latencies do not count (the gaps of all requests do); of more, more.
        tolerance: capacity is found on a grid of rates whose steps are this far apart.
        seeds: with which the best are measured again, for an interval.
        top: how many of the best are measured to the end; the others only need to be known to be worse.
        round: configurations between two looks at what the best so far is. Part of the question: workers change nothing.
        strategy: "exhaustive" rejects by bounds what it need not simulate, "halving" begins with short samples, "sampler" is
            optuna's, for spaces too large for the others.
        trials: of the sampler.
        uncertainty: how far step times may be off, for the question whether the winner stays the winner; None takes it from the
            sources of each configuration's step times, as if all of its operators erred in the same direction.
        workloads: others, by name: what the best for one costs under another.
    """

    objective: Objective = "qps_per_usd"
    criterion: Literal["slo", "vidur"] = "slo"
    slo: dict[str, float] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    exclude: tuple[dict[str, Any], ...] = ()
    latency_of: str = "ttft_p90"
    budget_usd_per_hour: Amount | None = None
    max_gpus_per_replica: Gpus | None = None
    max_gpus: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    available: dict[str, Annotated[int, Meta(ge=0)]] = field(default_factory=dict)
    pricing: Literal["on_demand", "reserved", "spot"] = "on_demand"
    prices: dict[str, Price] = field(default_factory=dict)
    num_requests: Annotated[int, Meta(ge=1, le=MOST_REQUESTS)] = 800
    span_s: Amount = 100.0
    warm_up: Annotated[int, Meta(ge=0)] = 80
    tolerance: Annotated[float, Meta(ge=0.001, le=0.5)] = 0.01
    seeds: Annotated[int, Meta(ge=1, le=1000)] = 3
    top: Many = 5
    round: Many = 32
    strategy: Literal["exhaustive", "halving", "sampler"] = "exhaustive"
    trials: Many = 200
    uncertainty: Annotated[float, Meta(gt=0, lt=1)] | None = None
    workloads: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.warm_up >= self.num_requests:
            raise ValueError(f"warm_up is {self.warm_up}; it must be below num_requests, which is {self.num_requests}")
        quantile_of(self.latency_of)
        for name, seconds in self.slo.items():
            limit(name, seconds)

    @property
    def steady(self) -> bool:
        """Whether the rate is what is looked for; otherwise the workload is played as it is."""
        return self.objective == "qps_per_usd"

    def limits(self, slo: Slo) -> tuple[Limit, ...]:
        """What must hold. Those of `[slo]` that name no quantile are one limit together: on requests that keep all of them."""
        if self.criterion == "vidur":
            return (Limit("queue", 0.99, 5 * SECOND),)
        quantiles = {name: getattr(slo, name) for name in slo.__struct_fields__ if re.fullmatch(r"[a-z0-9]+_p\d+_s", name)}
        asked = {name: seconds for name, seconds in quantiles.items() if seconds is not None} | self.slo
        own = [limit(name, seconds) for name, seconds in asked.items()]
        if any(bound is not None for bound in (slo.ttft_s, slo.tbt_s, slo.e2e_s)):
            own.append(Limit("slo", slo.attainment, 1))
        return tuple(own)


class _Tree(Struct):
    """What the table is read in, so that its keys are called `search.key`."""

    search: Search


def read_search(where: str, table: Any) -> Search:
    """The `[search]` table as it was read. Raises ConfigError naming the key."""
    tree = {"search": table if table is not None else {}}
    if isinstance(table, Mapping):
        for complaint in _wrong_entries(table):
            raise ConfigError(f"{where}: {complaint}")
    if (mistake := strange(tree)) is not None:
        raise ConfigError(f"{where}: {mistake}")
    try:
        search = msgspec.convert(tree, _Tree).search
    except msgspec.ValidationError as error:
        message = str(error)
        what, _, at = message.partition(" - at `$.")
        if what.startswith(("Invalid", "Object")):  # and not what `Search` itself finds wrong
            raise ConfigError(f"{where}: {explain(message, tree, _Tree)}") from None
        raise ConfigError(f"{where}: {at.rstrip('`')}: {what[0].lower()}{what[1:]}") from None
    if (mistake := extreme(tree)) is not None:
        raise ConfigError(f"{where}: {mistake}")
    return search


def _wrong_entries(table: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with entries that have names of the user's own, of which msgspec only says that there are some."""
    for gpu, prices in _entries(table, "prices"):
        key = f"search.prices.{gpu}"
        if not isinstance(prices, Mapping):
            yield f"{key} = {shown(prices)}: expected a table of {', '.join(Price.__struct_fields__)}, such as {key}.on_demand"
            continue
        for name, usd in prices.items():
            if name not in Price.__struct_fields__:
                close = difflib.get_close_matches(name, Price.__struct_fields__, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(Price.__struct_fields__)}"
                yield f"[{key}] has no key {name!r}; {hint}"
            elif not _is_number(usd) or usd < 0:
                yield f"{key}.{name} = {shown(usd)}: expected USD an hour, 0 or more"
    for gpu, count in _entries(table, "available"):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            yield f"search.available.{gpu} = {shown(count)}: expected how many there are, 0 or more"
    for name, seconds in _entries(table, "slo"):
        if not _is_number(seconds):
            yield f"search.slo.{name} = {shown(seconds)}: expected a number of seconds above 0"


def _entries(table: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    entries = table.get(name)
    return entries.items() if isinstance(entries, Mapping) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def limit(name: str, seconds: float) -> Limit:
    """`ttft_p90_s` and its value. Raises ConfigError where it is no such name, or no time above 0."""
    metric, quantile = quantile_of(name.removesuffix("_s"))
    if not name.endswith("_s"):
        raise ConfigError(f"slo has no key {name!r}; limits are in seconds, as {name}_s")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"slo.{name} is {seconds}; it must be a number of seconds above 0")
    return Limit(metric, quantile, max(1, round(seconds * SECOND)))


def quantile_of(name: str) -> tuple[str, float]:
    """("ttft", 0.9) of `ttft_p90`. Raises ConfigError."""
    match = re.fullmatch(rf"({'|'.join(METRICS)})_p(\d{{1,6}})", name)
    if match is None or match[2] == "0":
        raise ConfigError(f"{name!r} is no metric and quantile; such are ttft_p90, tbt_p99, e2e_p999 (of {', '.join(METRICS)})")
    digits = match[2]
    return match[1], 1.0 if digits == "100" else float(f"0.{digits.zfill(2)}")
