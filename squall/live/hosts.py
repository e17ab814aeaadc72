"""From the configuration to what a worker hosts: engines, and how their weights come. Imports torch only where it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from squall.config import Config
from squall.core.types import ReplicaId
from squall.eventlog import EventLog
from squall.live.activations import ActivationsWay, PricedActivations, PulledActivations
from squall.live.engine.build import accelerator, emulated_plan, engine_maker
from squall.live.engine.interface import Engine
from squall.live.host import Host
from squall.live.kv_way import KvWay
from squall.live.loading import Way
from squall.live.plan import num_live_layers, served_plan
from squall.live.served import ServedModel
from squall.live.transport.segment import HostCopies
from squall.policies.load import Host as FromHost

if TYPE_CHECKING:
    from squall.live.transport.interface import OnNotify

DEFAULT_TTL_S = 300.0
"""How long a machine keeps a copy that nobody uses, where the load policy says nothing of it."""

Ways = Callable[[ReplicaId, Engine], tuple[Way, KvWay | None, ActivationsWay | None]]
"""How the weights of an engine come, how its KV moves where it does, and its batches where replicas work while they load."""

MakeHost = Callable[[ReplicaId, EventLog | None], Host]


def host_maker(config: Config, model: ServedModel, token: str, listen: str, nics: Sequence[str] = ()) -> MakeHost:
    """Makes a replica's place a call.

    Args:
        token: what all workers of the fleet know.
        listen: "host:port" of the worker; its peers reach it at the same host, another port.
        nics: addresses of this machine that the weights of each rank leave by; `listen` for all when empty.

    Raises as `engine_maker`.
    """
    engine = engine_maker(config, model)
    ways = _predicted(config, model) if config.serve.engine == "emulated" else _arena(config, model, token, listen, nics)

    def make(replica: ReplicaId, log: EventLog | None) -> Host:
        made = engine()
        host = Host(replica, made, config.batching, log, *ways(replica, made))
        if (team := getattr(made, "team", None)) is not None:
            team.on_lost = host.lose
        return host

    return make


def _predicted(config: Config, model: ServedModel) -> Ways:
    """A fixed fleet has its weights, as in a simulation."""
    from squall.live.engine.emulated import EmulatedEngine
    from squall.live.kv_way import PricedKv
    from squall.live.predicted_way import PredictedWay, Prices

    is_elastic = served_plan(config, model).is_elastic
    shares = num_live_layers(config, model) > 0
    moves = config.fleet.moves_kv or shares
    prices = Prices.of(config, emulated_plan(config, model), accelerator(config)) if is_elastic or moves else None

    def make(replica: ReplicaId, engine: Engine) -> tuple[Way, KvWay | None, ActivationsWay | None]:
        assert isinstance(engine, EmulatedEngine)
        way = PredictedWay(engine.load, prices if is_elastic else None, config.serve.time_dilation)
        if not moves or prices is None:
            return way, None, None
        shared = PricedActivations(replica, engine, prices, config, model.spec) if shares else None
        return way, PricedKv(replica, engine, prices, config, model.spec), shared

    return make


def _arena(config: Config, model: ServedModel, token: str, listen: str, nics: Sequence[str]) -> Ways:
    from squall.live.arena_way import ArenaWay, Filled
    from squall.live.engine.torch_engine import TorchEngine
    from squall.live.parallel_way import ParallelWay, Rank
    from squall.live.pulled_kv import PulledKv
    from squall.live.transport.endpoint import Endpoint

    serve, load = config.serve, config.load
    ttl_s = getattr(load, "host_ttl_s", DEFAULT_TTL_S)
    keep_copy = isinstance(load, FromHost) and load.cache != "all_miss"
    slots = served_plan(config, model).slots
    host = listen.rpartition(":")[0]
    gbps = config.cluster.nic_gbps if serve.link_gbps is None else serve.link_gbps

    shares = num_live_layers(config, model) > 0

    def make(replica: ReplicaId, engine: Engine) -> tuple[Way, KvWay | None, ActivationsWay | None]:
        assert isinstance(engine, TorchEngine)
        shared = PulledActivations(replica, engine) if shares else None
        first, local, nixl = nics[0] if nics else host, serve.transport == "auto", serve.transport == "nixl"
        connect = partial(Endpoint, f"replica {replica}", token, listen=f"{first}:0", gbps=gbps, local=local, nixl=nixl)
        kv = None
        if config.fleet.moves_kv or shares:
            hear = partial(_hear, shared)
            kv = PulledKv(replica, engine, lambda told: connect(on_notify=hear(told)), config.handoff.max_transfers)
        endpoint = connect() if kv is None else kv.endpoint
        if shared is not None:
            shared.endpoint = endpoint

        def way(filled: Filled, endpoint: Endpoint) -> ArenaWay:
            copies = HostCopies(math.inf if ttl_s is None else ttl_s)
            return ArenaWay(filled, endpoint, copies, slots, keep_copy=keep_copy, reading=serve.reading)

        if (team := engine.team) is None:
            return way(engine, endpoint), kv, shared
        cards = [endpoint, *(connect(listen=f"{nic}:0", local=False, nixl=False) for nic in nics[1 : team.size])]
        ways = [way(Rank(engine, rank), cards[rank % len(cards)]) for rank in range(team.size)]
        return ParallelWay(engine, ways, cards, moves_kv=kv is not None), kv, shared

    return make


def _hear(shared: PulledActivations | None, kv: OnNotify) -> OnNotify:
    """What peers say is for KV or for activations, and passed over by what it is not for."""
    if shared is None:
        return kv
    activations = shared.on_notify

    def hear(node: str, payload: bytes) -> None:
        kv(node, payload)
        activations(node, payload)

    return hear
