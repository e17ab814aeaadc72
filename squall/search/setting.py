"""One configuration made ready: parsed, priced, counted, bounded, and refused where it cannot be run, before any simulation.

A `Workshop` keeps what configurations share (models, GPUs, prices, workloads), so that the thousandth costs a millisecond.
Knows no strategy and no store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from squall.config import Config, from_tree
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import Gpu, resolve_gpu
from squall.perf.latency import LatencyModel
from squall.perf.spec import ModelSpec
from squall.pools import refuse_pools
from squall.search import bounds
from squall.search.result import Job
from squall.search.sample import Sample, sample_of, steady
from squall.search.scaled import Scaled
from squall.search.spec import Limit, Price, Search
from squall.sim.ground import Ground, ground
from squall.sim.prepare import prepare
from squall.workload.build import build

_T = TypeVar("_T")


class Setting(Struct, frozen=True):
    """A configuration that can be run.

    Attributes:
        config: the configuration.
        latency, num_blocks: of every replica.
        stands_on: what the fleet stands on.
        sample: what it is tried with; `warm_up` of its requests do not count.
        limits: what must hold.
        model, gpu: what runs on what.
        usd_per_gpu_hour: of one.
        least_gpus, most_gpus: that the deployment holds; the same unless the fleet changes its size.
        highest_rps: no schedule serves more.
    """

    config: Config
    latency: LatencyModel
    num_blocks: int
    stands_on: Ground
    sample: Sample
    warm_up: int
    limits: tuple[Limit, ...]
    model: ModelSpec
    gpu: Gpu
    usd_per_gpu_hour: float
    least_gpus: int
    most_gpus: int
    highest_rps: float

    @property
    def is_fixed(self) -> bool:
        return self.least_gpus == self.most_gpus

    def score_at_most(self, search: Search, rate_rps: float | None = None) -> float:
        """What the objective cannot exceed; at that rate, where there is one. The smaller, the worse, also of costs."""
        if search.objective == "qps_per_usd":
            return (self.highest_rps if rate_rps is None else rate_rps) / (self.least_gpus * self.usd_per_gpu_hour)
        if search.objective == "latency":
            return 0.0
        return -self.least_gpus * self.sample.span_s / 3600 * self.each_gpu_hour(search)

    def each_gpu_hour(self, search: Search) -> float:
        """What the objective counts for it."""
        costs = {"usd": self.usd_per_gpu_hour, "energy_kwh": self.gpu.power_w / 1000, "gpu_hours": 1.0}
        return costs[search.objective]


class Workshop:
    """Makes settings.

    Args:
        search: the question.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self._models: dict[str, ModelSpec] = {}
        self._gpus: dict[str, Gpu] = {}
        self._latencies: dict[bytes, LatencyModel] = {}
        self._samples: dict[bytes, Sample] = {}

    def setting(self, job: Job) -> Setting:
        """The configuration of a job, ready to run.

        Raises:
            ConfigError: it cannot be run, or may not: why, in one line.
        """
        search = self.search
        config = from_tree("configuration", job.tree)
        refuse_pools(config, "squall search")
        if config.run.duration_s is not None:
            raise ConfigError("run.duration_s ends simulations; a search lets every sample come to its end: leave it out")
        gpu = self._gpu(config.cluster.gpu)
        per_replica = gpus_per_replica(config)
        least, most = (per_replica * count for count in fleet_size(config))
        usd = self._price(config, gpu)
        self._refuse(config, gpu, per_replica, most, usd)
        model = self._model(config.model.name)
        priced_by = msgspec.json.encode((config.model, config.cluster, config.replica, config.latency))
        latency, num_blocks = prepare(config, model, gpu, self._latencies.get(priced_by))
        self._latencies[priced_by] = latency
        stands_on = ground(config, model, gpu, latency, num_blocks)
        if job.factor != 1:
            latency = Scaled(latency, job.factor)
        sample = self.sample(config, job)
        limits = search.limits(config.slo)
        room = bounds.room(config.batching, num_blocks * config.replica.block_size)
        highest = bounds.highest_rate(latency, room, sample, most // per_replica)
        return Setting(
            config, latency, num_blocks, stands_on, sample, job.warm_up, limits, model, gpu, usd, least, most, highest
        )  # fmt: skip

    def sample(self, config: Config, job: Job) -> Sample:
        """The requests of the configuration's workload, as many of them as the job says; all where it says 0."""
        if config.workload is None:
            raise ConfigError("there is no [workload]: say what arrives, as examples/search.toml does, or use --trace")
        block_size = config.replica.block_size
        key = msgspec.json.encode((config.workload, config.run.seed, job.seed, block_size, job.num_requests, job.warm_up))
        found = self._samples.get(key)
        if found is None:
            requests = build(config.workload, config.run.seed + job.seed, Path(), block_size, honours_after=True)
            found = steady(requests, job.num_requests, job.warm_up) if job.num_requests else sample_of(requests)
            self._samples[key] = found
        return found

    def _model(self, name: str) -> ModelSpec:
        if name not in self._models:
            self._models[name] = resolve_model(name)
        return self._models[name]

    def _gpu(self, name: str) -> Gpu:
        if name not in self._gpus:
            self._gpus[name] = resolve_gpu(name)
        return self._gpus[name]

    def _price(self, config: Config, gpu: Gpu) -> float:
        """Of an hour of one GPU, as the question says, else the configuration, else the catalogue; 0 where nobody knows."""
        own = self._own_price(config.cluster.gpu, gpu)
        listed = config.cluster.usd_per_gpu_hour if config.cluster.usd_per_gpu_hour is not None else gpu.usd_per_hour
        asked: float | None = getattr(own, self.search.pricing)
        if asked is not None:
            return asked
        if self.search.pricing != "on_demand" and own.on_demand is None:
            raise ConfigError(
                f"{gpu.name}: no {self.search.pricing} price is known; give search.prices.{gpu.name}.{self.search.pricing}"
            )
        return own.on_demand if own.on_demand is not None else listed

    def _own_price(self, name: str, gpu: Gpu) -> Price:
        return named(self.search.prices, name, gpu) or Price()

    def _refuse(self, config: Config, gpu: Gpu, per_replica: int, most: int, usd: float) -> None:
        """What may not be tried. Raises ConfigError."""
        search = self.search
        if search.max_gpus_per_replica is not None and per_replica > search.max_gpus_per_replica:
            raise ConfigError(
                f"a replica of {per_replica} GPUs is larger than max_gpus_per_replica ({search.max_gpus_per_replica})"
            )
        if search.max_gpus is not None and most > search.max_gpus:
            raise ConfigError(f"{most} GPUs are more than max_gpus ({search.max_gpus})")
        if config.replica.tp > config.cluster.gpus_per_node:
            raise ConfigError(f"replica.tp = {config.replica.tp} is larger than a node of {config.cluster.gpus_per_node} GPUs")
        there = named(search.available, config.cluster.gpu, gpu)
        if there is not None and most > there:
            raise ConfigError(f"{most} x {gpu.name} are more than can be had ({there})")
        if search.budget_usd_per_hour is not None and most * usd > search.budget_usd_per_hour:
            raise ConfigError(f"{most * usd:.2f} USD an hour is above the budget of {search.budget_usd_per_hour:.2f}")
        if search.objective in ("qps_per_usd", "usd") and usd == 0:
            raise ConfigError(f"{gpu.name}: no price is known; give search.prices.{gpu.name}.on_demand, or ask for gpu_hours")
        if search.objective == "energy_kwh" and gpu.power_w == 0:
            raise ConfigError(f"{gpu.name}: its power is not known; describe it in a TOML file with power_w, or ask for usd")


def named(table: Mapping[str, _T], name: str, gpu: Gpu) -> _T | None:
    """What a table says of a GPU, by the name that the configuration uses or the catalogue's."""
    return table.get(name, table.get(gpu.name))


def gpus_per_replica(config: Config) -> int:
    """GPUs of one replica; experts dealt out over more GPUs than share a layer need that many."""
    replica = config.replica
    return max(replica.tp, getattr(replica, "ep", 1)) * replica.pp


def fleet_size(config: Config) -> tuple[int, int]:
    """Replicas that the fleet holds at least and at most. A role, or all, may be a number or a table with `min` and `max`."""
    fleet = msgspec.to_builtins(config.fleet)
    roles = ("prefill", "decode") if fleet.get("mode") == "disaggregated" else ("replicas",)
    least, most = (sum(_bound(fleet.get(role), name) for role in roles) for name in ("min", "max"))
    fixed = type(config.scale).__struct_config__.tag == "fixed"
    return (least, least) if fixed and not any(isinstance(fleet.get(role), dict) for role in roles) else (least, max(least, most))


def _bound(size: Any, name: str) -> int:
    if isinstance(size, dict):
        value = size.get(name)
        return int(value if value is not None else size.get("min", 1))
    return 1 if size is None else int(size)
