"""Weights that do not move, for engines that do not compute: a load takes as long as the same transfer is predicted to take.

The prediction is the simulator's for a transfer that nothing else disturbs: a GPU's shard over the slowest link of its path, and
in a chain a chunk more a hop. What several transfers do to each other on one link is the simulator's alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from squall.config import Config
from squall.core.fleet_plan import FleetPlan
from squall.core.fleet_view import Place, Transfer
from squall.core.types import ReplicaId
from squall.deployment import node_of
from squall.errors import TransferFailed
from squall.live.loading import Arrived, Brought, Order
from squall.live.transfers import givers
from squall.perf.hardware import Gpu
from squall.perf.topology import NICS

CHUNK = 16 << 20
"""Bytes that are forwarded at a time, as in the simulator."""


class Prices(NamedTuple):
    """What a cluster's links let through, in bytes a second of one GPU.

    Attributes:
        plan: the fleet's, with its weights and slots.
        gpus: of a replica; each gets its shard.
        domain, host, nic, ssd, store: of its NVLink, its link to the host, its share of a NIC, of the disks, and of the store.
    """

    plan: FleetPlan
    gpus: int
    domain: float
    host: float
    nic: float
    ssd: float
    store: float

    @classmethod
    def of(cls, config: Config, plan: FleetPlan, gpu: Gpu) -> Prices:
        """From the configuration's cluster, whose GPUs of one replica share what they hang on. Raises ConfigError."""
        node, gpus = node_of(config, gpu), config.replica.tp * config.replica.pp
        here = min(gpus, node.num_gpus)
        nics = min(node.num_nics, node.num_gpus)
        given = config.cluster.nic_gbps
        whole = NICS[node.nic].bandwidth * node.num_nics if given is None else given * 1e9 / 8 * node.num_gpus
        return cls(
            plan, gpus,
            domain=node.link_bandwidth if node.domain > 1 else 0.0,
            host=node.host_bandwidth / min(here, node.gpus_per_host_link),
            nic=whole / nics / min(here, -(-node.num_gpus // nics)),
            ssd=node.ssd_bandwidth / node.num_gpus,
            store=config.cluster.store_gbps * 1e9 / 8 / here,
        )  # fmt: skip

    def seconds(self, replica: ReplicaId, transfer: Transfer) -> float:
        """How long the weights of `replica` take, from the moment at which all of the path has been asked."""
        if transfer.kind == "mock":
            return transfer.seconds or 0.0
        shard = self.plan.weights.num_bytes / self.gpus
        if transfer.kind == "striped":
            return self._striped(replica, transfer, shard)
        hops = transfer.path[: transfer.path.index(replica) + 1]
        places = [transfer.source, *(Place("gpu", hop) for hop in hops[:-1])]
        rate = min(self._rate(place, hop) for place, hop in zip(places, hops, strict=True))
        return (shard + min(CHUNK, shard) * (len(hops) - 1)) / rate

    def _striped(self, replica: ReplicaId, transfer: Transfer, shard: float) -> float:
        """Its own stripes from their givers, the others inside its group; what comes over one link adds up."""
        sources = [place.id for place in (transfer.source, *transfer.more_sources)]
        over: dict[float, float] = {}
        for giver in givers(replica, sources, transfer.path, self.plan.slots):
            rate = self._rate(Place("gpu", giver), replica)
            over[rate] = over.get(rate, 0.0) + shard / len(sources)
        return max(num_bytes / rate for rate, num_bytes in over.items())

    def kv_seconds(self, source: ReplicaId, to: ReplicaId, num_bytes: int) -> float:
        """How long so many bytes take from each GPU of one replica to the GPU of the same rank of another."""
        return num_bytes / self._rate(Place("gpu", source), to)

    def _rate(self, source: Place, replica: ReplicaId) -> float:
        slots = self.plan.slots
        match source.kind:
            case "gpu" if self.domain and slots.domain(source.id) == slots.domain(replica):
                return self.domain
            case "gpu":
                return self.host if slots.node(source.id) == slots.node(replica) else min(self.nic, self.host)
            case "host":
                return self.host if source.id == slots.node(replica) else min(self.nic, self.host)
            case "ssd":
                return min(self.ssd, self.host)
        return min(self.store, self.host)


class PredictedWay:
    """See `Way`.

    Args:
        load: of the engine, which pretends.
        prices: of the cluster; None: weights are just there.
        time_dilation: seconds slept for each second predicted.
    """

    addresses: tuple[str, ...] = ()

    def __init__(self, load: Callable[[], None], prices: Prices | None, time_dilation: float = 1.0) -> None:
        self._load = load
        self._prices = prices
        self._time_dilation = time_dilation
        self._num_layers = 0  # that are here
        self._whole = prices is None

    def forget(self) -> None:
        self._num_layers = 0
        self._whole = self._prices is None

    def prepare(self) -> None:
        self._load()

    def bring(self, order: Order, over: threading.Event, arrived: Arrived) -> Brought:
        if self._whole or order.settled or self._prices is None:
            self._whole = True
            return Brought()
        began, weights = time.monotonic(), self._prices.plan.weights
        pieces = weights.num_layers + 1  # embedding and head together are taken to be one more, as in the simulator
        seconds = self._prices.seconds(order.replica, order.transfer) * self._time_dilation
        first = self._num_layers
        for piece in range(first, pieces):
            if over.wait(max(0.0, began + seconds * (piece + 1 - first) / pieces - time.monotonic())):
                raise TransferFailed("another order took its place")
            if piece < weights.num_layers:
                self._num_layers = piece + 1
                arrived(piece + 1)
        self._whole = True
        return Brought(weights.num_bytes * (pieces - first) // pieces, began)

    def cancel(self) -> None:
        """Whoever waits sees its event."""

    def close(self) -> None:
        """Nobody reads."""
