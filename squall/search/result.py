"""What is asked about one configuration, and what is known of it afterwards. Knows no simulation and no file."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from squall.search.curves import Curves

Status = Literal["done", "outbid", "infeasible", "invalid", "failed"]


class Job(Struct, frozen=True):
    """One configuration to look into.

    Attributes:
        number: its place in the space.
        choice: the dotted keys that make it.
        tree: the whole configuration.
        need: what its score must exceed to be of interest; None wants to know it in any case.
        num_requests, warm_up: of the sample, all of the workload where it is 0.
        span_s: that the sample lasts at least, at any rate that the configuration might bear: where it does not, it is longer.
        seed: of the workload, above the configuration's own.
        factor: by which step times are stretched.
        near_rps: where its capacity may be.
        thorough: whether a workload as it is is played to the end although a limit is broken, to know how near it came.
    """

    number: int
    choice: dict[str, Any]
    tree: dict[str, Any]
    need: float | None = None
    num_requests: int = 0
    warm_up: int = 0
    span_s: float = 0.0
    seed: int = 0
    factor: float = 1.0
    near_rps: float | None = None
    thorough: bool = False


class Result(Struct, frozen=True, kw_only=True):
    """What is known.

    Attributes:
        status: "done": measured to the end; "outbid": not good enough, and no more is known than by how much; "infeasible": its
            limits hold at no rate (or do not hold for the workload as it is); "invalid": it cannot be run at all; "failed": it
            was to be run, and something broke.
        reason: for a person; empty where it is done.
        score: larger is better; None unless it is done.
        score_at_most: larger it cannot be; None where it cannot be run.
        num_gpus: of the deployment.
        usd_per_gpu_hour, watts: of one of them.
        capacity_rps: the highest rate at which the limits hold, if the rate was searched for.
        at_most_rps: what it cannot exceed.
        binding: the limit that breaks beyond, or that is broken.
        usage: how much of each limit is used up, at capacity or at the least rate that was tried.
        cost_usd, gpu_hours, energy_kwh: of the workload as it is.
        curves: quantiles at capacity, or of the workload as it is.
        probes: simulations begun.
        token_steps: how much of them was simulated.
        played_gpu_hours: that they would have taken on the GPUs themselves.
    """

    number: int
    choice: dict[str, Any]
    status: Status
    reason: str = ""
    score: float | None = None
    score_at_most: float | None = None
    gpu: str = ""
    num_gpus: float = 0
    usd_per_gpu_hour: float = 0.0
    watts: float = 0.0
    capacity_rps: float | None = None
    at_most_rps: float | None = None
    binding: str = ""
    usage: dict[str, float] = {}
    cost_usd: float | None = None
    gpu_hours: float | None = None
    energy_kwh: float | None = None
    curves: Curves | None = None
    latency_source: str = ""
    probes: int = 0
    token_steps: int = 0
    played_gpu_hours: float = 0.0

    @property
    def usd_per_hour(self) -> float:
        return self.num_gpus * self.usd_per_gpu_hour
