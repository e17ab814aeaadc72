"""Arrival times and lengths made up from distributions. Knows no requests and no clock.

Every purpose ("arrivals", "prompt", ...) draws from a stream of its own, and the n-th value of a stream is the same however many
are drawn: another rate, or more requests, leaves the lengths of the first ones as they were.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from squall.core.types import SECOND, Nanos
from squall.errors import TraceError
from squall.workload.limits import MOST_REQUESTS
from squall.workload.parsing import parse_number, parse_tokens, tokens_wanted
from squall.workload.rows import open_rows
from squall.workload.spec import (
    AllAtOnce,
    BurstArrivals,
    EmpiricalLength,
    FixedArrivals,
    FixedLength,
    GammaArrivals,
    Length,
    LogNormalLength,
    MarkovArrivals,
    OpenArrivals,
    QuantileLength,
    RateSeries,
    TraceArrivals,
    UniformLength,
    ZipfLength,
)
from squall.workload.streams import stream
from squall.workload.traces import read_trace

LATEST_S = 9_000_000_000
"""Instants are nanoseconds in 64 bits; later ones would come out negative."""

MOST_CHANGES = 2_000_000
"""Of state in Markov-modulated arrivals; where more are needed, hardly anything arrives in any of them."""

_BLOCK = 4096
_Floats = NDArray[np.float64]


# -- arrivals


def draw_arrivals(
    arrivals: OpenArrivals, seed: int, count: int | None, duration_s: float | None, base_dir: Path = Path()
) -> list[Nanos]:
    """Ascending instants from 0: the first `count`, and of these what comes before `duration_s`.

    One of the two is given where the arrivals have no end of their own. A fixed rate begins at 0, the others with a gap. A
    relative path starts at `base_dir`. Raises TraceError for a bad file, and for arrivals that are too late for any clock,
    too many, or so rare that drawing them would take for ever.
    """
    drawn: list[Nanos] = []
    with np.errstate(over="ignore"):  # what is infinitely late is too late
        for block in _instants(arrivals, seed, count, duration_s, base_dir):
            block = block[: None if count is None else count - len(drawn)]
            kept = block if duration_s is None else block[block < duration_s]
            if kept.max(initial=0.0) > LATEST_S:
                raise TraceError(f"workload.arrivals: one comes after more than {LATEST_S} seconds, 285 years; raise the rate")
            drawn.extend(np.rint(kept * SECOND).astype(np.int64).tolist())
            if len(drawn) > MOST_REQUESTS:
                raise TraceError(f"workload.arrivals: more than {MOST_REQUESTS:,} come; lower the rate, or the duration")
            if len(kept) < len(block) or (count is not None and len(drawn) >= count):
                break
    return drawn


def _instants(
    arrivals: OpenArrivals, seed: int, count: int | None, duration_s: float | None, base_dir: Path
) -> Iterator[_Floats]:
    """Arrival times in seconds, a block at a time: all, or at least the first `count` and what comes before `duration_s`."""
    if isinstance(arrivals, AllAtOnce):
        yield from cycle([np.zeros(_BLOCK)])
    elif isinstance(arrivals, FixedArrivals):
        for block in range(0, 1 << 62, _BLOCK):
            yield np.arange(block, block + _BLOCK) / arrivals.rate_rps
    elif isinstance(arrivals, TraceArrivals):
        yield _recorded(arrivals, base_dir)
    elif isinstance(arrivals, RateSeries):
        yield from _at_changing_rates(_operational(seed, arrivals.cv), _series(arrivals, base_dir))
    elif isinstance(arrivals, MarkovArrivals):
        yield from _at_changing_rates(_first(count, _operational(seed, 1.0)), _states(arrivals, seed, duration_s))
    elif isinstance(arrivals, BurstArrivals):
        yield from (_between_bursts(arrivals, expected) for expected in _operational(seed, 1.0))
    else:
        cv = arrivals.cv if isinstance(arrivals, GammaArrivals) else 1.0
        yield from (expected / arrivals.rate_rps for expected in _operational(seed, cv))


def _first(count: int | None, blocks: Iterator[_Floats]) -> Iterator[_Floats]:
    """The first `count` of blocks without end."""
    for block in blocks:
        yield block[:count]
        if count is not None and (count := count - len(block)) <= 0:
            return


def _operational(seed: int, cv: float) -> Iterator[_Floats]:
    """Arrivals at a rate of 1, without end: so many are expected until then in whatever time they are stretched to."""
    gaps = stream(seed, "arrivals")
    elapsed = 0.0
    while True:
        block = gaps.standard_exponential(_BLOCK) if cv == 1 else gaps.standard_gamma(1 / cv**2, _BLOCK) * cv**2
        times = elapsed + np.cumsum(block)
        elapsed = float(times[-1])
        yield times


def _between_bursts(arrivals: BurstArrivals, expected: _Floats) -> _Floats:
    """The instants by which so many arrivals are expected: a Poisson process of changing rate, by inversion of its mean."""
    quiet_s = arrivals.period_s - arrivals.burst_s
    quiet = arrivals.rate_rps * quiet_s
    period, within = np.divmod(expected, quiet + arrivals.burst_rps * arrivals.burst_s)
    in_quiet = within / arrivals.rate_rps if arrivals.rate_rps else within
    in_burst = quiet_s + (within - quiet) / arrivals.burst_rps
    return period * arrivals.period_s + np.where(within < quiet, in_quiet, in_burst)


def _at_changing_rates(operational: Iterator[_Floats], pieces: Iterator[tuple[float, float]]) -> Iterator[_Floats]:
    """Likewise for any sequence of (rate, duration in seconds), until it ends."""
    times, means = [0.0], [0.0]  # at the ends of the pieces, and expected arrivals until then
    for expected in operational:
        for rate, duration_s in pieces:
            times.append(times[-1] + duration_s)
            means.append(means[-1] + rate * duration_s)
            if means[-1] > expected[-1]:
                break
        yield np.interp(expected[expected < means[-1]], means, times)
        if means[-1] <= expected[-1]:
            return
        times, means = _from(expected[-1], times, means)


def _from(mean: float, times: list[float], means: list[float]) -> tuple[list[float], list[float]]:
    """What is left of the pieces after so many expected arrivals."""
    first = next(place for place in range(len(means) - 1, -1, -1) if means[place] <= mean)
    return times[first:], means[first:]


def _states(arrivals: MarkovArrivals, seed: int, duration_s: float | None) -> Iterator[tuple[float, float]]:
    """As many as somebody asks for, until `duration_s` has passed."""
    stays = stream(seed, "arrivals: stays")
    turns = stream(seed, "arrivals: states")
    state, others = 0, len(arrivals.rates_rps) - 1
    elapsed_s = 0.0
    for _ in range(MOST_CHANGES // _BLOCK):
        drawn = zip(stays.standard_exponential(_BLOCK).tolist(), turns.integers(0, others, _BLOCK).tolist(), strict=True)
        for stay, turn in drawn:
            stay_s = stay * arrivals.mean_stay_s[state]
            yield arrivals.rates_rps[state], stay_s
            elapsed_s += stay_s
            if duration_s is not None and elapsed_s > duration_s:
                return
            state = (state + 1 + turn) % (others + 1)
    raise TraceError(
        f"workload.arrivals: {MOST_CHANGES:,} changes of state would not bring all requests; raise rates_rps or mean_stay_s"
    )


def _series(arrivals: RateSeries, base_dir: Path) -> Iterator[tuple[float, float]]:
    rates: list[float] = list(arrivals.rates_rps)
    if arrivals.path is not None and arrivals.column is not None:
        rates = _column(base_dir / arrivals.path, arrivals.column, _rate, "a number of 0 or more")
    return ((rate * arrivals.rate_scale, arrivals.step_s) for rate in rates)


def _rate(value: Any) -> float:
    rate = parse_number(value)
    if not 0 <= rate < math.inf:
        raise ValueError(value)
    return float(rate)


def _recorded(arrivals: TraceArrivals, base_dir: Path) -> _Floats:
    path = base_dir / arrivals.path
    times = read_trace(path, arrivals.format).arrived_at
    if times is None:
        raise TraceError(f"{path}: has no arrival times")
    return np.array(times, dtype=np.float64) / (SECOND * arrivals.rate_scale)


# -- lengths


def draw_lengths(length: Length, seed: int, purpose: str, count: int, base_dir: Path) -> list[int]:
    """`count` lengths in tokens, each at least 1. A relative path starts at `base_dir`. Raises TraceError for a bad file."""
    if isinstance(length, FixedLength):
        return [length.tokens] * count
    draws = stream(seed, purpose)
    values: NDArray[np.int64]
    if isinstance(length, UniformLength):
        values = draws.integers(length.low, length.high + 1, count)
    elif isinstance(length, LogNormalLength):
        exact = length.median * np.exp(length.sigma * draws.standard_normal(count))
        values = np.clip(np.rint(exact), length.low, length.high).astype(np.int64)
    elif isinstance(length, QuantileLength):
        logarithms = np.interp(draws.random(count), length.at, np.log(length.tokens))
        values = np.rint(np.exp(logarithms)).astype(np.int64)
    elif isinstance(length, ZipfLength):
        shares = np.cumsum(np.arange(1, length.high - length.low + 2, dtype=np.float64) ** -length.theta)
        values = length.low + np.searchsorted(shares, draws.random(count) * shares[-1], side="right")
    else:
        column = np.array(_lengths(length, base_dir), dtype=np.int64)
        values = column[draws.integers(0, len(column), count)]
    drawn: list[int] = values.tolist()
    return drawn


def _lengths(length: EmpiricalLength, base_dir: Path) -> list[float]:
    path = base_dir / length.path
    return _column(path, length.column, lambda value: parse_tokens(value, 1), tokens_wanted(1))


def _column(path: Path, name: str, parse: Callable[[Any], float], right: str) -> list[float]:
    """The numbers in a column of a file of any kind that `open_rows` knows."""
    rows = open_rows(path)
    if name not in rows.columns:
        raise TraceError(f"{path}: has no column {name!r}; it has {', '.join(rows.columns)}")
    key = rows.key(name)
    values: list[float] = []
    for row in rows:
        value = None
        with suppress(LookupError):  # a row may be too short
            value = row[key]
        try:
            values.append(parse(value))
        except (ValueError, TypeError):
            raise TraceError(f"{rows.place(rows.line)}: {name} is {value!r}; it must be {right}") from None
    if not values:
        raise TraceError(f"{path}: has a header but no rows")
    return values
