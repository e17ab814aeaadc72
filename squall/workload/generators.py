"""Arrival times and lengths made up from distributions. Knows no requests and no clock.

Every purpose ("arrivals", "prompt", ...) draws from a stream of its own, and the n-th value of a stream is the same however many
are drawn: another rate, or more requests, leaves the lengths of the first ones as they were.
"""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from squall.core.types import SECOND, Nanos
from squall.errors import ConfigError, TraceError
from squall.workload.spec import (
    Arrivals,
    BurstArrivals,
    EmpiricalLength,
    FixedArrivals,
    FixedLength,
    GammaArrivals,
    Length,
    LogNormalLength,
    UniformLength,
)
from squall.workload.traces import parse_tokens

_BLOCK = 4096
_Floats = NDArray[np.float64]


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random numbers of one purpose. Raises ConfigError for a negative seed."""
    if seed < 0:
        raise ConfigError(f"run.seed is {seed}; it must be 0 or more")
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(purpose.encode())]))


# -- arrivals


def draw_arrivals(arrivals: Arrivals, seed: int, count: int | None, duration_s: float | None) -> list[Nanos]:
    """Ascending instants from 0: the first `count`, and of these what comes before `duration_s`. One of the two is given.

    A fixed rate begins at 0, the others with a gap.
    """
    limit = math.inf if duration_s is None else duration_s
    drawn: list[Nanos] = []
    for block in _instants(arrivals, seed):
        kept = block[block < limit]
        drawn.extend(np.rint(kept * SECOND).astype(np.int64).tolist())
        if len(kept) < len(block) or (count is not None and len(drawn) >= count):
            break
    return drawn[:count]


def _instants(arrivals: Arrivals, seed: int) -> Iterator[_Floats]:
    """All arrival times in seconds, a block at a time, without end."""
    if isinstance(arrivals, FixedArrivals):
        for block in range(0, 1 << 62, _BLOCK):
            yield np.arange(block, block + _BLOCK) / arrivals.rate_rps
    elapsed = 0.0
    gaps = stream(seed, "arrivals")
    while True:
        times = elapsed + np.cumsum(_gaps(arrivals, gaps))
        elapsed = float(times[-1])
        yield _between_bursts(arrivals, times) if isinstance(arrivals, BurstArrivals) else times


def _gaps(arrivals: Arrivals, gaps: np.random.Generator) -> _Floats:
    """Gaps in seconds; those of bursts have a mean of 1, to be stretched by `_between_bursts`."""
    if isinstance(arrivals, GammaArrivals):
        squared = arrivals.cv**2
        return gaps.standard_gamma(1 / squared, _BLOCK) * (squared / arrivals.rate_rps)
    rate = 1.0 if isinstance(arrivals, BurstArrivals) else arrivals.rate_rps
    return gaps.standard_exponential(_BLOCK) / rate


def _between_bursts(arrivals: BurstArrivals, expected: _Floats) -> _Floats:
    """The instants by which so many arrivals are expected: a Poisson process of changing rate, by inversion of its mean."""
    quiet_s = arrivals.period_s - arrivals.burst_s
    quiet = arrivals.rate_rps * quiet_s
    period, within = np.divmod(expected, quiet + arrivals.burst_rps * arrivals.burst_s)
    in_quiet = within / arrivals.rate_rps if arrivals.rate_rps else within
    in_burst = quiet_s + (within - quiet) / arrivals.burst_rps
    return period * arrivals.period_s + np.where(within < quiet, in_quiet, in_burst)


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
    else:
        column = np.array(_column(length, base_dir), dtype=np.int64)
        values = column[draws.integers(0, len(column), count)]
    drawn: list[int] = values.tolist()
    return drawn


def _column(length: EmpiricalLength, base_dir: Path) -> list[int]:
    """The whole numbers in a column of a CSV file."""
    path = base_dir / length.path
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if length.column not in (rows.fieldnames or ()):
                raise TraceError(
                    f"{path}: has no column {length.column!r}; it has {', '.join(rows.fieldnames or ()) or 'no header'}"
                )
            values = [_whole(row[length.column], path, rows.line_num, length.column) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    if not values:
        raise TraceError(f"{path}: has a header but no rows")
    return values


def _whole(text: str | None, path: Path, line: int, column: str) -> int:
    try:
        return parse_tokens(text or "", 1)
    except ValueError:
        raise TraceError(f"{path} line {line}: {column} is {text!r}; it must be a whole number of at least 1") from None
