"""Watches a simulation and ends it as soon as it is certain whether the limits hold: enough has gone wrong, or enough well.

A request that has waited too long already is outside of a limit whatever comes; one that was refused or lost, or that is
unfinished at the end, is outside of all. Knows no configuration and no rate. `[slo]` is the limit named "slo", on requests that
keep all its objectives, in the words of docs/metrics.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from squall.config import Slo
from squall.core.actions import AnyAction
from squall.core.events import AnyEvent
from squall.core.metrics import UNSET, Outcome, RequestRow
from squall.core.types import SECOND, MachineId, Nanos
from squall.perf.latency import UNITS_PER_NANO
from squall.search.sample import Sample
from squall.search.spec import Limit
from squall.sim.seats import EventLog
from squall.sim.world import World

GOOD, BAD, OPEN = 1, -1, 0
EVERY = 256  # events between two looks; a look costs about as much as a few events

Judge = Callable[[RequestRow, Nanos], int]
"""What a request is with respect to a limit, at an instant: GOOD, BAD or, so far, OPEN."""


class Verdict(Struct, frozen=True):
    """What came of a simulation.

    Attributes:
        passed: whether all limits hold.
        binding: the name of the limit that was broken first; empty where all hold.
        token_steps: prompt tokens of requests that got a first token, and every further token.
        ended_at: when the simulation ended or was ended.
    """

    passed: bool
    binding: str
    token_steps: int
    ended_at: Nanos


class Decided(Exception):
    """Raised inside a simulation of which no more need be known."""


class Watch:
    """What `simulate` calls: first with the world, then after every event.

    Args:
        limits: all of which must hold.
        slo: what the limit named "slo" means.
        sample: what is played.
        warm_up: requests whose own latencies do not count.
        early: whether to end the simulation as soon as the verdict is certain;
        to_the_end: though not where all limits hold.
    """

    def __init__(
        self, limits: Sequence[Limit], slo: Slo, sample: Sample, warm_up: int, *, early: bool = True, to_the_end: bool = False
    ) -> None:
        self._early = early
        self._to_the_end = to_the_end
        self.now: Nanos = 0
        self._num_gaps = sample.num_gaps
        self._counted = [request.id for request in sample.requests[warm_up:]]
        self._timed = not sample.waits  # else nobody knows when requests arrive
        self._tallies = [_Tally(limit, _judge(limit, slo)) for limit in limits if limit.metric != "tbt"]
        self._gaps = [_Gaps(limit) for limit in limits if limit.metric == "tbt"]
        self._left = EVERY

    def __call__(self, world: World) -> EventLog:
        self._world = world
        rows = [world.rows[id] for id in self._counted]
        for tally in self._tallies:
            tally.open = rows
        return self._event

    def _event(self, now: Nanos, _id: MachineId, _event: AnyEvent, _actions: Sequence[AnyAction]) -> None:
        self._left -= 1
        self.now = now
        if self._left:
            return
        self._left = EVERY
        if self._early:
            found = self._look(now)
            if found or (found is not None and not self._to_the_end):
                raise Decided

    def verdict(self) -> Verdict:
        """After the end, whichever it was; what is still open when nothing can happen any more is outside."""
        found = self._look(self.now)
        if found is None:
            total = len(self._counted)
            broken = [tally.limit.name for tally in self._tallies if tally.good < tally.limit.needed(total)]
            broken += [gaps.limit.name for gaps in self._gaps if gaps.good < gaps.limit.needed(self._num_gaps)]
            found = broken[0] if broken else ""
        return Verdict(not found, found, token_steps(self._world), self.now)

    def _look(self, now: Nanos) -> str | None:
        """The name of a limit that is broken for certain; "" where all hold for certain; None while neither is."""
        total, sure = len(self._counted), True
        for tally in self._tallies:
            tally.advance(now, self._timed)
            if tally.bad > total - tally.limit.needed(total):
                return tally.limit.name
            sure = sure and tally.good >= tally.limit.needed(total)
        for gaps in self._gaps:
            gaps.advance(self._world.gaps)
            if gaps.bad > self._num_gaps - gaps.limit.needed(self._num_gaps):
                return gaps.limit.name
            sure = sure and gaps.good >= gaps.limit.needed(self._num_gaps)
        return "" if sure else None


class _Tally:
    """How many requests keep a limit and how many do not."""

    def __init__(self, limit: Limit, judge: Judge) -> None:
        self.limit = limit
        self.judge = judge
        self.good = self.bad = 0
        self.open: list[RequestRow] = []

    def advance(self, now: Nanos, timed: bool) -> None:
        """Ask again about those that were open. Where arrivals are known, who has not arrived need not be asked about."""
        still: list[RequestRow] = []
        for place, row in enumerate(self.open):
            if timed and row.arrived_at > now:
                still += self.open[place:]
                break
            found = self.judge(row, now if timed else row.arrived_at)
            if found == GOOD:
                self.good += 1
            elif found == BAD:
                self.bad += 1
            else:
                still.append(row)
        self.open = still


class _Gaps:
    """The same of the gaps between tokens, which come as runs in arithmetic progression."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.good = self.bad = 0
        self._seen = 0

    def advance(self, gaps: array[int]) -> None:
        new = np.array(gaps[self._seen :], dtype=np.int64).reshape(-1, 4)
        self._seen = len(gaps)
        if not len(new):
            return
        weight, count, first, increment = new.T
        most = (self.limit.limit + 1) * UNITS_PER_NANO - 1  # the longest gap that is rounded down to the limit or less
        room = most - first
        kept = np.where(room < 0, 0, np.where(increment > 0, room // np.maximum(increment, 1) + 1, count))
        good = int((weight * np.minimum(kept, count)).sum())
        self.good += good
        self.bad += int((weight * count).sum()) - good


def token_steps(world: World) -> int:
    """How much was simulated."""
    gaps = np.array(world.gaps, dtype=np.int64).reshape(-1, 4)
    prompts = sum(row.num_prompt_tokens for row in world.rows.values() if row.first_token_at != UNSET)
    return int((gaps[:, 0] * gaps[:, 1]).sum()) + prompts


def _judge(limit: Limit, slo: Slo) -> Judge:
    """How a limit looks at a request."""
    if limit.metric == "slo":
        return _joint(slo)
    if limit.metric == "tpot":
        return _tpot(limit.limit)
    instant = {"ttft": "first_token_at", "e2e": "finished_at", "queue": "scheduled_at"}[limit.metric]
    most = limit.limit

    def judge(row: RequestRow, now: Nanos) -> int:
        if _lost(row):
            return BAD
        at: Nanos = getattr(row, instant)
        if at != UNSET:
            return GOOD if at - row.arrived_at <= most else BAD
        return BAD if now - row.arrived_at > most else OPEN

    return judge


def _tpot(most: Nanos) -> Judge:
    def judge(row: RequestRow, _now: Nanos) -> int:
        if _lost(row):
            return BAD
        if row.finished_at == UNSET:
            return OPEN
        return GOOD if row.finished_at - row.first_token_at <= most * (row.num_output_tokens - 1) else BAD

    return judge


def _joint(slo: Slo) -> Judge:
    parts: list[Judge] = []
    if slo.ttft_s is not None:
        parts.append(_judge(Limit("ttft", 1.0, round(slo.ttft_s * SECOND)), slo))
    if slo.tbt_s is not None:
        parts.append(_tpot(round(slo.tbt_s * SECOND)))
    if slo.e2e_s is not None:
        parts.append(_judge(Limit("e2e", 1.0, round(slo.e2e_s * SECOND)), slo))

    def judge(row: RequestRow, now: Nanos) -> int:
        found = [part(row, now) for part in parts]
        if BAD in found:
            return BAD
        return GOOD if row.outcome is Outcome.COMPLETED and OPEN not in found else OPEN

    return judge


def _lost(row: RequestRow) -> bool:
    """It ended, and not well."""
    return row.outcome is not Outcome.COMPLETED and row.outcome is not Outcome.UNFINISHED
