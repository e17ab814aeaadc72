"""What the results mean: the best, frontiers, and answers to other questions that need no further simulation, or say what does.

Everything rests on two facts about a result: its score where it was measured, and what the score cannot exceed where it was not.
A question whose answer those leave open is answered with the configurations that would have to run. Knows no simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from msgspec import Struct
from msgspec.structs import replace

from squall.search.result import Result
from squall.search.spec import Limit, Search
from squall.search.strategy import ranked

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""97.5 % quantiles of Student's t distribution, from one degree of freedom on."""


class Finalist(Struct, frozen=True):
    """One of the best, measured again with other seeds.

    Attributes:
        result: with the first seed.
        capacities: with each; None where the limits hold at no rate.
        slower, faster: its capacity were all steps slower, and faster, by the latency model's uncertainty; None where unknown.
        off: what step times are multiplied with for `faster` and for `slower`.
    """

    result: Result
    capacities: tuple[float | None, ...] = ()
    slower: float | None = None
    faster: float | None = None
    off: tuple[float, float] = (1.0, 1.0)

    @property
    def capacity(self) -> float:
        """The mean over the seeds; 0 where one of them knows no rate."""
        known = [rate for rate in self.capacities if rate is not None]
        return mean(known) if known and len(known) == len(self.capacities) else 0.0

    def interval(self) -> tuple[float, float] | None:
        """Around the mean, with 95 % confidence; None for a single seed."""
        known = [rate for rate in self.capacities if rate is not None]
        if len(known) < 2:
            return None
        off = STUDENT[min(len(known) - 2, len(STUDENT) - 1)] * stdev(known) / math.sqrt(len(known))
        return max(0.0, mean(known) - off), mean(known) + off

    def score_at(self, rate_rps: float) -> float:
        return rate_rps / self.result.usd_per_hour


def order(finalists: Sequence[Finalist]) -> list[Finalist]:
    """The best first, by the mean of all seeds."""
    return sorted(finalists, key=lambda one: (-one.score_at(one.capacity), one.result.number))


def robustness(finalists: Sequence[Finalist]) -> list[str]:
    """Whether the first of them stays the first while step times are uncertain, in words."""
    if len(finalists) < 2 or any(one.slower is None or one.faster is None for one in finalists):
        return []
    first, others = finalists[0], finalists[1:]
    lines = []
    for what, side in (("slower", "slower"), ("faster", "faster")):
        ahead = [one for one in others if one.score_at(getattr(one, side)) > first.score_at(getattr(first, side))]
        verdict = "the winner stays the winner" if not ahead else f"number {ahead[0].result.number} would win"
        lines.append(f"all steps {what} alike: {verdict}")
    worst = first.score_at(first.slower or 0.0)
    rivals = [one for one in others if one.score_at(one.faster or 0.0) > worst and one.result.gpu != first.result.gpu]
    if rivals:
        named = ", ".join(f"number {one.result.number} ({one.result.gpu})" for one in rivals)
        lines.append(f"the winner's GPU slower and another's faster: {named} could win")
    else:
        lines.append("the winner's GPU slower and another's faster: the winner stays the winner")
    return lines


# -- frontiers


def usd_per_thousand(result: Result) -> float | None:
    """What a thousand requests cost; None where no rate or cost was measured."""
    if result.capacity_rps:
        return result.usd_per_hour / 3600 / result.capacity_rps * 1000
    return None


def frontier(results: Sequence[Result], search: Search) -> list[tuple[Result, tuple[float, float, float]]]:
    """Measured configurations that no other beats in cost, TTFT (P90) and TBT (P99) at once, by cost.

    Cost is that of a thousand requests, or of the workload as it is.
    """
    points: list[tuple[Result, tuple[float, float, float]]] = []
    for result in results:
        cost = usd_per_thousand(result) if search.steady else result.cost_usd
        if result.status == "done" and result.curves is not None and cost is not None:
            ttft, tbt = result.curves.at("ttft", 0.9), result.curves.at("tbt", 0.99)
            if ttft is not None:
                points.append((result, (cost, ttft, tbt if tbt is not None else 0.0)))
    kept = [(result, point) for result, point in points if not any(_beats(other, point) for _, other in points)]
    first = {point: result for result, point in reversed(kept)}  # of equals, the first in the space
    return sorted(((result, point) for point, result in first.items()), key=lambda pair: pair[1])


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def nearest_misses(results: Sequence[Result], count: int = 3) -> list[Result]:
    """Infeasible configurations that came nearest: by the limit that each exceeds most."""
    missed = [result for result in results if result.status == "infeasible" and result.usage and min(result.usage.values()) >= 0]
    return sorted(missed, key=lambda result: (max(result.usage.values()), result.number))[:count]


# -- what if


class WhatIf(Struct, frozen=True):
    """Another question to the same results.

    Attributes:
        best: the best of those of whose score we are certain; None where there is none.
        score: its score under the question.
        open: those that might be better: they would have to run.
    """

    best: Result | None
    score: float | None
    open: tuple[Result, ...]


def what_if(
    results: Sequence[Result], search: Search, *, prices: Mapping[str, float] | None = None, limits: Sequence[Limit] = ()
) -> WhatIf:
    """The best with other prices (of a GPU, in USD an hour) and tighter limits.

    A stricter limit that a configuration keeps at its capacity changes nothing for it; one that it does not keep lowers its
    capacity, nobody knows how far, but never raises it. Costs of a given workload are what they are.
    """
    certain: list[tuple[float, Result]] = []
    bounded: list[tuple[float, Result]] = []
    for result in results:
        priced = repriced(result, search, prices or {})
        if priced.score_at_most is None or result.status in ("infeasible", "invalid", "failed"):
            continue
        if priced.score is not None and all(_keeps(priced, limit) for limit in limits):
            certain.append((priced.score, priced))
        else:
            bounded.append((priced.score_at_most, priced))
    best = max(certain, key=lambda pair: (pair[0], -pair[1].number), default=None)
    if best is None:
        return WhatIf(None, None, tuple(result for _, result in bounded if search.steady or result.score is None))
    return WhatIf(best[1], best[0], tuple(result for ceiling, result in bounded if ceiling > best[0]))


def _keeps(result: Result, limit: Limit) -> bool:
    value = result.curves.at(limit.metric, limit.quantile) if result.curves is not None else None
    return value is None or value * 1e9 <= limit.limit


def repriced(result: Result, search: Search, prices: Mapping[str, float]) -> Result:
    """The result, were an hour of its GPU that dear."""
    usd = prices.get(result.gpu)
    if usd is None or result.usd_per_gpu_hour == 0 or usd == 0:
        return result
    ratio = {"qps_per_usd": result.usd_per_gpu_hour / usd, "usd": usd / result.usd_per_gpu_hour}.get(search.objective, 1.0)
    return replace(
        result,
        usd_per_gpu_hour=usd,
        cost_usd=None if result.cost_usd is None else result.cost_usd * usd / result.usd_per_gpu_hour,
        score=None if result.score is None else result.score * ratio,
        score_at_most=None if result.score_at_most is None else result.score_at_most * ratio,
    )


class Fleet(Struct, frozen=True):
    """Copies of a deployment that bear a rate together."""

    result: Result
    copies: int
    usd_per_hour: float


def for_rate(results: Sequence[Result], rate_rps: float) -> list[Fleet]:
    """The cheapest fleets for a rate, of copies that share it evenly, from what one copy bears; the cheapest first."""
    fleets = []
    for result in results:
        if result.capacity_rps:
            copies = math.ceil(rate_rps / result.capacity_rps - 1e-9)
            fleets.append(Fleet(result, copies, copies * result.usd_per_hour))
    return sorted(fleets, key=lambda fleet: (fleet.usd_per_hour, fleet.result.number))


# -- across workloads


def losses(scores: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """How many times as dear it is to serve one workload (column) with the best configuration for another (row).

    Args:
        scores: of the best configuration for each workload (row) under each (column); None where its limits do not hold.
    """
    return {
        row: {
            column: None if score is None or scores[column][column] is None else _times(scores[column][column], score)
            for column, score in columns.items()
        }
        for row, columns in scores.items()
    }


def _times(best: float | None, score: float) -> float:
    """Scores of rates are gains, those of costs are below zero."""
    assert best is not None
    return best / score if score > 0 else score / best if best else 1.0


def summary_line(results: Sequence[Result]) -> str:
    """How many configurations ended how."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.status] = counts.get(result.status, 0) + 1
    words = {
        "done": "measured", "outbid": "rejected as worse", "infeasible": "break a limit at any rate", "invalid": "cannot be run",
        "failed": "broke",
    }  # fmt: skip
    return ", ".join(f"{counts[status]:,} {word}" for status, word in words.items() if status in counts)


def best(results: Sequence[Result]) -> Result | None:
    found = ranked(results)
    return found[0] if found else None
