"""Finds out about one configuration: bounds first, then one simulation at the rate that it must bear, then its capacity.

Deterministic: the same job gives the same result wherever and whenever it runs. Knows no strategy, no store and no process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from squall.core.metrics import RunRecord
from squall.core.types import SECOND, Nanos
from squall.errors import ConfigError, SquallError
from squall.search import bounds
from squall.search.capacity import highest, place_below, rate_at
from squall.search.curves import NEVER, Curves, curves
from squall.search.result import Job, Result, Status
from squall.search.setting import Setting, Workshop
from squall.search.spec import Limit, Search, quantile_of
from squall.search.watch import Decided, Verdict, Watch
from squall.sim.run import simulate

START = 0.6
"""Where capacity is looked for first, as a share of what no schedule can exceed."""

FAR = 64
"""Places of the grid, from where on a rate that is known to be borne says nothing of where capacity is."""

IDLE = 0.01
"""Where the limits do not hold at this share of it, they hold nowhere."""


def evaluate(workshop: Workshop, job: Job) -> Result:
    """What is to be known. Never raises for a configuration's sake: that it is invalid, or breaks something, is a result."""
    try:
        setting = workshop.setting(job)
    except ConfigError as error:
        return Result(number=job.number, choice=job.choice, status="invalid", reason=str(error))
    trial = Trial(workshop.search, job, setting)
    try:
        return trial.capacity() if workshop.search.steady else trial.as_it_is()
    except SquallError as error:
        return trial.result("failed", str(error))
    except Exception as error:  # whatever a policy of the user's own does, or a bug: one configuration, not the search
        return trial.result("failed", f"{type(error).__name__}: {error}")


class Trial:
    """The simulations of one configuration."""

    def __init__(self, search: Search, job: Job, setting: Setting) -> None:
        self._search = search
        self._job = job
        self._setting = setting
        self._probes = 0
        self._token_steps = 0
        self._played: Nanos = 0
        self._binding: dict[int, str] = {}  # of rates that failed, by place

    # -- a steady rate

    def capacity(self) -> Result:
        """The highest rate at which the limits hold; less where the job needs to know less."""
        setting, tolerance = self._setting, self._search.tolerance
        top = place_below(setting.highest_rps, tolerance)
        low = max(0, place_below(setting.highest_rps * IDLE, tolerance))
        if broken := bounds.impossible(setting.latency, setting.sample, setting.warm_up, setting.limits):
            return self._infeasible(low, broken)
        start = place_below(self._job.near_rps or setting.highest_rps * START, tolerance)
        if self._job.need is not None:
            worth = place_below(self._job.need * setting.least_gpus * setting.usd_per_gpu_hour, tolerance)
            first = (
                worth + 1 if setting.score_at_most(self._search, rate_at(max(worth, 0), tolerance)) <= self._job.need else worth
            )
            low = max(low, first)
            if low > top or not self._passes(low):
                beaten = rate_at(low - 1, tolerance) if low <= top else setting.highest_rps
                return self._outbid(beaten, self._binding.get(low, "no schedule reaches that rate"))
            start = low if start - low < FAR else start
        found = highest(self._passes, start, low, top)
        if found is None:
            return self._infeasible(low, self._binding.get(low, ""))
        return self._measured(found)

    def _passes(self, place: int) -> bool:
        if place in self._binding:
            return not self._binding[place]
        verdict, _ = self.play(rate_at(place, self._search.tolerance))
        self._binding[place] = verdict.binding
        return verdict.passed

    def _measured(self, place: int) -> Result:
        rate = rate_at(place, self._search.tolerance)
        _, record = self.play(rate, early=False)
        assert record is not None
        setting = self._setting
        held = setting.least_gpus if setting.is_fixed else record.gpu_nanos / max(1, record.ended_at)
        score = rate / (held * setting.usd_per_gpu_hour)
        binding = self._binding.get(place + 1) or "no schedule reaches a higher rate"
        return self.result(
            "done", score=score, score_at_most=score, num_gpus=held, capacity_rps=rate, at_most_rps=rate, binding=binding,
            **self._curves(record),
        )  # fmt: skip

    def _outbid(self, at_most_rps: float, binding: str) -> Result:
        return self.result(
            "outbid", f"cannot beat the best: at most {at_most_rps:.4g} req/s",
            score_at_most=self._setting.score_at_most(self._search, at_most_rps), at_most_rps=at_most_rps, binding=binding,
        )  # fmt: skip

    def _infeasible(self, place: int, binding: str) -> Result:
        """Nowhere; how near it comes is seen where there is next to no load."""
        _, record = self.play(rate_at(place, self._search.tolerance), early=False)
        return self.result("infeasible", f"{binding} is broken at any rate", binding=binding, **self._curves(record))

    # -- the workload as it is

    def as_it_is(self) -> Result:
        """Its cost, or its latency, if the limits hold."""
        setting = self._setting
        if self._job.need is not None and setting.score_at_most(self._search) <= self._job.need:
            return self.result("outbid", "cannot beat the best", score_at_most=setting.score_at_most(self._search))
        verdict, record = self.play(None, early=not self._job.thorough, to_the_end=True)
        if not verdict.passed or record is None:
            near = self._curves(record)
            return self.result("infeasible", f"{verdict.binding} is broken", binding=verdict.binding, **near)
        hours = record.gpu_nanos / SECOND / 3600
        measured = self._curves(record)
        score = (
            self._latency(measured["curves"])
            if self._search.objective == "latency"
            else -hours * setting.each_gpu_hour(self._search)
        )
        return self.result(
            "done", score=score, score_at_most=score, num_gpus=record.gpu_nanos / max(1, record.ended_at), gpu_hours=hours,
            cost_usd=hours * setting.usd_per_gpu_hour, energy_kwh=hours * setting.gpu.power_w / 1000, **measured,
        )  # fmt: skip

    def _latency(self, measured: Curves) -> float:
        """The smaller the latency, the larger the score."""
        value = measured.at(*quantile_of(self._search.latency_of))
        return -math.inf if value is None else -value

    # -- one simulation

    def play(self, rate_rps: float | None, *, early: bool = True, to_the_end: bool = False) -> tuple[Verdict, RunRecord | None]:
        """At that rate, or as it is. The record is missing where the simulation was ended.

        Args:
            to_the_end: not ended where all is well, because what it costs is wanted, too.
        """
        setting = self._setting
        sample = setting.sample
        requests = list(sample.requests) if rate_rps is None else sample.at(rate_rps)
        watch = Watch(setting.limits, setting.config.slo, sample, setting.warm_up, early=early, to_the_end=to_the_end)
        record = None
        with suppress(Decided):
            record = simulate(
                setting.config, requests, setting.latency, setting.num_blocks, ground=setting.stands_on, watch=watch
            )
        verdict = watch.verdict()
        self._probes += 1
        self._token_steps += verdict.token_steps
        self._played += verdict.ended_at
        return verdict, record

    def _curves(self, record: RunRecord | None) -> dict[str, Any]:
        if record is None:
            return {}
        setting = self._setting
        measured = curves(record, setting.warm_up, setting.sample.num_gaps)
        usage = {
            name: (value / (limit / SECOND) if math.isfinite(value) else NEVER)
            for name, metric, quantile, limit in self._shares()
            if (value := measured.at(metric, quantile)) is not None
        }
        return {"curves": measured, "usage": usage, "latency_source": record.latency_source}

    def _shares(self) -> Iterator[tuple[str, str, float, Nanos]]:
        """Limits by name, metric, quantile and value; those of `[slo]` that hold together, one by one."""
        slo = self._setting.config.slo
        for limit in self._setting.limits:
            if limit.metric != "slo":
                yield limit.name, limit.metric, limit.quantile, limit.limit
                continue
            for metric, seconds in (("ttft", slo.ttft_s), ("tpot", slo.tbt_s), ("e2e", slo.e2e_s)):
                if seconds is not None:
                    part = Limit(metric, limit.quantile, round(seconds * SECOND))
                    yield part.name, metric, part.quantile, part.limit

    def result(self, status: Status, reason: str = "", **known: Any) -> Result:
        setting = self._setting
        gpu_hours = self._played / SECOND / 3600 * setting.most_gpus
        facts: dict[str, Any] = {
            "gpu": setting.gpu.name, "num_gpus": setting.most_gpus, "usd_per_gpu_hour": setting.usd_per_gpu_hour,
            "watts": setting.gpu.power_w, "probes": self._probes, "token_steps": self._token_steps,
            "played_gpu_hours": gpu_hours,
        }  # fmt: skip
        return Result(number=self._job.number, choice=self._job.choice, status=status, reason=reason, **(facts | known))
