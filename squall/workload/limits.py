"""What numbers of the `[workload]` tables may be, key by key. Knows no table: a key means the same wherever it stands.

A workload is drawn as a whole, and its instants are nanoseconds in 64 bits: beyond these bounds it fills memory, or overflows.
"""

import math
from typing import Final

from squall.errors import ConfigError

MOST_REQUESTS: Final = 20_000_000
MOST_TOKENS: Final = 1 << 32
"""Of one prompt, answer or conversation."""

MOST_HASHES: Final = 1 << 27
"""Of the blocks of all prompts and answers together."""

_RATE: Final = 1e9  # a request every nanosecond
_VARIED: Final = 1000.0  # more, and nearly all gaps are too short for a float, and one is too long
_SPREAD: Final = 100.0  # of logarithms and exponents; more, and all lengths are the shortest or the longest

MOST: Final[dict[str, float]] = {
    "rate_rps": _RATE, "burst_rps": _RATE, "rates_rps": _RATE, "rate_scale": _RATE,
    "cv": _VARIED, "think_cv": _VARIED, "sigma": _SPREAD, "theta": _SPREAD,
    "num_requests": MOST_REQUESTS, "num_sessions": MOST_REQUESTS, "max_requests": MOST_REQUESTS, "concurrency": MOST_REQUESTS,
    "tokens": MOST_TOKENS, "median": MOST_TOKENS, "high": MOST_TOKENS, "system_tokens": MOST_TOKENS,
    "max_context": MOST_TOKENS, "max_total_tokens": MOST_TOKENS, "trace_block_size": MOST_TOKENS,
}  # fmt: skip
LEAST: Final[dict[str, float]] = {"rate_scale": 1 / _RATE, "cv": 1 / _VARIED}


def above_zero(table: object, *keys: str) -> None:
    """Raises ConfigError unless these keys of the table, where they are given, are above 0 and within their bounds."""
    for key in keys:
        value = getattr(table, key)
        if value is None:
            continue
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{key} is {value}; it must be above 0")
        _within_bounds(key, value)


def not_negative(table: object, *keys: str) -> None:
    """As `above_zero`, with 0."""
    for key in keys:
        value = getattr(table, key)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{key} is {value}; it must be 0 or more")
        _within_bounds(key, value)


def ascending(low: int, high: int) -> None:
    """Raises ConfigError unless both are numbers of tokens."""
    if not 1 <= low <= high:
        raise ConfigError(f"low is {low} and high is {high}; low must be at least 1 and at most high")
    _within_bounds("high", high)


def rates(rates_rps: tuple[float, ...]) -> None:
    """Raises ConfigError unless something arrives."""
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates_rps) or not any(rates_rps):
        raise ConfigError(f"rates_rps is {list(rates_rps)[:8]}; rates must be 0 or more, and one of them above 0")
    _within_bounds("rates_rps", max(rates_rps))


def quantiles(at: tuple[float, ...], tokens: tuple[int, ...]) -> None:
    """Raises ConfigError unless they describe a distribution."""
    if len(at) != len(tokens) or len(at) < 2 or (at[0], at[-1]) != (0, 1):
        raise ConfigError(f"at is {list(at)}; it must begin with 0, end with 1 and have as many values as tokens")
    if list(at) != sorted(at) or list(tokens) != sorted(tokens) or tokens[0] < 1:
        raise ConfigError("at and tokens must ascend, and tokens begin with at least 1")
    _within_bounds("tokens", tokens[-1])


def _within_bounds(key: str, value: float) -> None:
    least, most = LEAST.get(key, 0.0), MOST.get(key, math.inf)
    if not least <= value <= most:
        bounds = f"from {least:g} to {most:.10g}" if least else f"at most {most:.10g}"
        raise ConfigError(f"{key} is {value}; it must be {bounds}")
