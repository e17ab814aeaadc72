"""From the configuration to what a worker hosts: engines, and how their weights come. Imports torch only where it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable

from squall.config import Config
from squall.core.types import ReplicaId
from squall.eventlog import EventLog
from squall.live.engine.build import accelerator, engine_maker
from squall.live.engine.interface import Engine
from squall.live.loading import Way
from squall.live.plan import served_plan
from squall.live.served import ServedModel
from squall.live.session import Host
from squall.live.transport.segment import HostCopies
from squall.policies.load import Host as FromHost

DEFAULT_TTL_S = 300.0
"""How long a machine keeps a copy that nobody uses, where the load policy says nothing of it."""

MakeHost = Callable[[ReplicaId, EventLog | None], Host]


def host_maker(config: Config, model: ServedModel, token: str, listen: str) -> MakeHost:
    """Makes a replica's place a call.

    Args:
        token: what all workers of the fleet know.
        listen: "host:port" of the worker; its peers reach it at the same host, another port.

    Raises as `engine_maker`.
    """
    engine = engine_maker(config, model)
    way = _predicted(config, model) if config.serve.engine == "emulated" else _arena(config, model, token, listen)

    def make(replica: ReplicaId, log: EventLog | None) -> Host:
        made = engine()
        return Host(replica, made, config.batching, log, way(replica, made))

    return make


def _predicted(config: Config, model: ServedModel) -> Callable[[ReplicaId, Engine], Way]:
    """A fixed fleet has its weights, as in a simulation."""
    from squall.live.predicted_way import PredictedWay, Prices

    plan = served_plan(config, model)
    prices = Prices.of(config, plan, accelerator(config)) if plan.is_elastic else None
    return lambda _, engine: PredictedWay(engine.load, prices, config.serve.time_dilation)


def _arena(config: Config, model: ServedModel, token: str, listen: str) -> Callable[[ReplicaId, Engine], Way]:
    from squall.live.arena_way import ArenaWay
    from squall.live.engine.torch_engine import TorchEngine
    from squall.live.transport.endpoint import Endpoint

    serve, load = config.serve, config.load
    ttl_s = getattr(load, "host_ttl_s", DEFAULT_TTL_S)
    keep_copy = isinstance(load, FromHost) and load.cache != "all_miss"
    slots = served_plan(config, model).slots
    host = listen.rpartition(":")[0]
    gbps = config.cluster.nic_gbps if serve.link_gbps is None else serve.link_gbps

    def make(replica: ReplicaId, engine: Engine) -> Way:
        assert isinstance(engine, TorchEngine)
        endpoint = Endpoint(f"replica {replica}", token, listen=f"{host}:0", gbps=gbps)
        copies = HostCopies(math.inf if ttl_s is None else ttl_s)
        return ArenaWay(engine, endpoint, copies, slots, keep_copy=keep_copy, reading=serve.reading)

    return make
