"""A fleet whose replicas are not alike, as several fleets whose replicas are: a configuration for each of `[[fleet.pools]]`.

Everything that asks what one replica is (prices of steps, KV pool, GPUs, dollars) asks the configuration of its pool. Replicas
are numbered in the order of the pools. Knows keys, and of the hardware its price.
"""

from __future__ import annotations

from msgspec.structs import replace

from squall.config import Config
from squall.errors import ConfigError
from squall.fleet_tables import Fleet, Pool
from squall.perf.hardware import resolve_gpu


def alike(config: Config) -> list[Config]:
    """A configuration for each pool, with a fleet of as many replicas; the configuration itself where there are no pools."""
    return [_alone(config, pool) for pool in config.fleet.pools] or [config]


def _alone(config: Config, pool: Pool) -> Config:
    cluster, replica = config.cluster, config.replica
    if pool.gpu is not None and pool.gpu != cluster.gpu:
        cluster = replace(cluster, gpu=pool.gpu, node=None, usd_per_gpu_hour=None)
    for key in ("node", "usd_per_gpu_hour"):
        if (value := getattr(pool, key)) is not None:
            cluster = replace(cluster, **{key: value})
    for key in ("tp", "pp", "ep", "num_blocks", "gpu_memory_utilization"):
        if (value := getattr(pool, key)) is not None:
            replica = replace(replica, **{key: value})
    if pool.num_blocks is None and (pool.gpu, pool.tp, pool.pp, pool.gpu_memory_utilization) != (None, None, None, None):
        replica = replace(replica, num_blocks=None)  # those of another shape say nothing of this one
    batching = config.batching if pool.batching is None else pool.batching
    return replace(config, cluster=cluster, replica=replica, batching=batching, fleet=Fleet(replicas=pool.replicas))


def num_gpus(config: Config) -> int:
    """GPUs of all replicas of a fixed fleet whose replicas are alike."""
    return config.fleet.num_initial * config.replica.tp * config.replica.pp


def price_of(config: Config) -> float | None:
    """US dollars that a GPU hour costs: the configuration's word, else the catalogue's; None for this machine's CPU."""
    if config.cluster.usd_per_gpu_hour is not None:
        return config.cluster.usd_per_gpu_hour
    return None if config.cluster.gpu.lower() == "cpu" else resolve_gpu(config.cluster.gpu).usd_per_hour


def refuse_pools(config: Config, what: str) -> None:
    """Raises ConfigError where replicas are not alike: `what` wants them to be."""
    if config.fleet.pools:
        raise ConfigError(f"[[fleet.pools]] are for simulations: {what} wants replicas that are alike; say fleet.replicas")
