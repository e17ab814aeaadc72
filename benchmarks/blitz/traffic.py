"""Five minutes of traffic: a window of a recorded trace, made denser; or a generated one with BurstGPT's statistics.

The paper scales its traces with a tool that keeps their shape (TraceUpscaler). `densified` is our reading of that: time stays as
it is, and each request comes several times. BurstGPT itself is not at hand, only what is said of it: prompts of 621 tokens and
answers of 126 on average, and a rate that grows fivefold within two seconds.
"""

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

from squall.core.types import SECOND
from squall.workload.build import build
from squall.workload.spec import LogNormalLength, MarkovArrivals, OfferedRequest, SyntheticWorkload, TraceWorkload

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("SQUALL_SHARED", ROOT.parent / "shared"))
TRACES = {name: SHARED / "data" / "traces" / f"azure2023_{name}.csv" for name in ("code", "conv")}

WINDOW_S = 300.0
BURST = 5.0
"""How much more arrives in a burst."""
QUIET_S, BURST_S = 30.0, 6.0
"""Mean length of both, ours: nothing is said of it."""
SIGMA = 1.0
"""Of the lengths' logarithms, ours: they spread like those of Azure's conversations."""


def recorded(name: str) -> list[OfferedRequest]:
    """All of a trace."""
    return build(TraceWorkload(str(TRACES[name])), 0, Path())


def busiest(requests: Sequence[OfferedRequest], seconds: float = WINDOW_S) -> list[OfferedRequest]:
    """The window with most requests, of those that begin at a whole minute; from 0."""
    length, minute = round(seconds * SECOND), 60 * SECOND
    last = max(request.arrived_at for request in requests)
    starts = range(0, max(1, last - length + 1), minute)

    def within(start: int) -> list[OfferedRequest]:
        return [request for request in requests if start <= request.arrived_at < start + length]

    start = max(starts, key=lambda start: len(within(start)))
    return [OfferedRequest(0, r.arrived_at - start, r.num_prompt_tokens, r.num_output_tokens) for r in within(start)]


def densified(requests: Sequence[OfferedRequest], factor: float, seed: int) -> list[OfferedRequest]:
    """Each request `factor` times on average, anywhere between itself and the next one; lengths are of its neighbours.

    Bursts stay as long and as steep as they are. A factor below 1 drops requests.
    """
    dice = random.Random(f"denser {seed}")
    ordered = sorted(requests, key=lambda request: request.arrived_at)
    drawn: list[tuple[int, int, int]] = []
    for place, request in enumerate(ordered):
        after = ordered[place + 1].arrived_at if place + 1 < len(ordered) else request.arrived_at
        for copy in range(math.floor(factor) + (dice.random() < factor % 1)):
            at = request.arrived_at + (round(dice.random() * (after - request.arrived_at)) if copy else 0)
            like = ordered[min(max(place + dice.randint(-8, 8), 0), len(ordered) - 1)] if copy else request
            drawn.append((at, like.num_prompt_tokens, like.num_output_tokens))
    return [OfferedRequest(id, *row) for id, row in enumerate(sorted(drawn))]


def bursty(rate_rps: float, seconds: float, seed: int) -> list[OfferedRequest]:
    """As BurstGPT, at this mean rate: Poisson arrivals that are five times denser at once, and for a few seconds.

    States change when they would at any rate, so that what the seed gave more or less of them is made up for.
    """

    def drawn(quiet_rps: float) -> list[OfferedRequest]:
        arrivals = MarkovArrivals((quiet_rps, BURST * quiet_rps), (QUIET_S, BURST_S))
        spread = math.exp(SIGMA * SIGMA / 2)  # mean / median
        prompt = LogNormalLength(621 / spread, SIGMA, 1, 8192)
        return build(
            SyntheticWorkload(arrivals, prompt, LogNormalLength(126 / spread, SIGMA, 1, 2048), None, seconds), seed, Path()
        )

    trial = drawn(rate_rps)
    return drawn(rate_rps * rate_rps * seconds / max(1, len(trial)))


def rate(requests: Sequence[OfferedRequest], seconds: float = WINDOW_S) -> float:
    return len(requests) / seconds


def means(requests: Sequence[OfferedRequest]) -> tuple[float, float]:
    """Tokens of a prompt, and of an answer."""
    return (
        sum(request.num_prompt_tokens for request in requests) / len(requests),
        sum(request.num_output_tokens for request in requests) / len(requests),
    )
