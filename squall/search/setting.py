"""One configuration made ready: parsed, priced, counted, bounded, and refused where it cannot be run, before any simulation.

A `Workshop` keeps what configurations share (models, GPUs, prices, workloads), so that the thousandth costs a millisecond.
Knows no strategy and no store.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from squall.config import Config, from_tree
from squall.core.actions import Chunk, RunSteps
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.composed import interval_of
from squall.perf.hardware import Gpu, resolve_gpu
from squall.perf.latency import LatencyModel
from squall.perf.spec import ModelSpec
from squall.pools import refuse_pools
from squall.search import bounds
from squall.search.prices import named
from squall.search.result import Job
from squall.search.sample import Sample, lasting, longer, sample_of, steady
from squall.search.scaled import Scaled
from squall.search.spec import Limit, Price, Search
from squall.sim.ground import Ground, ground
from squall.sim.prepare import prepare
from squall.sim.swap import with_copies
from squall.workload.build import build

DECODES, CHUNK = 32, 256
"""Of the step whose uncertainty stands for that of all: how many decode, and how much of a prompt is computed beside them."""


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

    def uncertainty(self, search: Search) -> tuple[float, float]:
        """What step times must be multiplied with, to be as short and as long as they may be: as the question says, else as the
        sources of a busy step's operators say, else (whole steps, measured) by a tenth."""
        explain = getattr(self.latency, "explain", None)
        if search.uncertainty is None and explain is not None:
            mean = self.sample.context // max(1, self.sample.num_gaps)
            chunk = Chunk(0, 0, CHUNK, 0, False)
            seconds, low, high = interval_of(explain(RunSteps(0, 1, DECODES, DECODES * mean, (chunk,))))
            return low / seconds, high / seconds
        off = search.uncertainty or 0.1
        return 1 - off, 1 + off

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
        self._prices: dict[tuple[bytes, float], bounds.Prices] = {}
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
        least_gpus, most = (per_replica * count for count in fleet_size(config))
        usd = self._price(config, gpu)
        self._refuse(config, gpu, per_replica, most, usd)
        model = self._model(config.model.name)
        priced_by = msgspec.json.encode((config.model, config.cluster, config.replica, config.latency))
        latency, num_blocks = prepare(config, model, gpu, self._latencies.get(priced_by))
        self._latencies[priced_by] = latency
        stands_on = ground(config, model, gpu, latency, num_blocks)
        latency = with_copies(config, model, gpu, latency)
        if job.factor != 1:
            latency = Scaled(latency, job.factor)
        room = bounds.room(config.batching, num_blocks * config.replica.block_size, config.replica.pp)
        prices = self._prices.setdefault(
            (priced_by, job.factor), bounds.Prices(latency, speculative=config.latency.speculation is not None)
        )
        least = prices.least(room)
        sample, warm_up, highest = self._sized(config, job, least, room, most // per_replica)
        limits = search.limits(config.slo)
        return Setting(
            config, latency, num_blocks, stands_on, sample, warm_up, limits, model, gpu, usd, least_gpus, most, highest
        )  # fmt: skip

    def _sized(
        self, config: Config, job: Job, least: bounds.Least, room: bounds.Room, replicas: int
    ) -> tuple[Sample, int, float]:
        """The sample, how many of its requests do not count, and the rate that no schedule exceeds. A replica that may be so
        fast that the sample would be over at once gets a longer one."""
        sample = self.sample(config, job, job.num_requests)
        highest = bounds.highest_rate(least, room, sample, replicas)
        wanted = lasting(job.num_requests, job.span_s * highest)
        if wanted <= job.num_requests:
            return sample, job.warm_up, highest
        sample = self.sample(config, job, wanted)
        warm_up = job.warm_up * len(sample.requests) // job.num_requests
        return sample, warm_up, bounds.highest_rate(least, room, sample, replicas)

    def sample(self, config: Config, job: Job, count: int) -> Sample:
        """`count` requests of the configuration's workload; all where it is 0. What is generated may be made longer for it."""
        if config.workload is None:
            raise ConfigError("there is no [workload]: say what arrives, as examples/search.toml does, or use --trace")
        block_size = config.replica.block_size
        workload = longer(config.workload, count) if count > job.num_requests else config.workload
        key = msgspec.json.encode((workload, config.run.seed, job.seed, block_size, count, job.warm_up))
        found = self._samples.get(key)
        if found is None:
            requests = build(workload, config.run.seed + job.seed, Path(), block_size, honours_after=True)
            found = steady(requests, count, job.warm_up) if count else sample_of(requests)
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
        return named(self.search.prices, name, gpu.name) or Price()

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
        there = named(search.available, config.cluster.gpu, gpu.name)
        if there is not None and most > there:
            raise ConfigError(f"{most} x {gpu.name} are more than can be had ({there})")
        if search.budget_usd_per_hour is not None and most * usd > search.budget_usd_per_hour:
            raise ConfigError(f"{most * usd:.2f} USD an hour is above the budget of {search.budget_usd_per_hour:.2f}")
        if search.objective in ("qps_per_usd", "usd") and usd == 0:
            raise ConfigError(f"{gpu.name}: no price is known; give search.prices.{gpu.name}.on_demand, or ask for gpu_hours")
        if search.objective == "energy_kwh" and gpu.power_w == 0:
            raise ConfigError(f"{gpu.name}: its power is not known; describe it in a TOML file with power_w, or ask for usd")


def gpus_per_replica(config: Config) -> int:
    """GPUs of one replica; experts dealt out over more GPUs than share a layer need that many."""
    replica = config.replica
    return max(replica.tp, getattr(replica, "ep", 1)) * replica.pp


def fleet_size(config: Config) -> tuple[int, int]:
    """Replicas that the fleet holds at least and at most, of all roles together."""
    bounds_of = config.fleet.bounds.values()
    return sum(one.minimum for one in bounds_of), sum(one.maximum for one in bounds_of)
