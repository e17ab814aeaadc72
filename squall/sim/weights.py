"""Weights on their way to replicas: what a load policy has planned, as flows of the network, and the layers as they come.

Every GPU of a replica gets its own shard, layer after layer: from the same GPU of the replica before it on the path, from host
memory, or from a disk. A replica of a chain forwards what it gets, one chunk later, whether or not that makes up a layer. In a
striped transfer each source sends a share of every layer to its own target in the next NVLink domain, and the targets there
exchange shares. Knows no policy, no KV and no replica's life.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from squall.core.fleet_view import Place, Transfer
from squall.core.metrics import UNSET, Delivery, weights_delivered
from squall.core.types import Nanos, ReplicaId
from squall.sim.fabric import Fabric, Path
from squall.sim.network import Arrived, Network
from squall.sim.shares import NANO, FlowId, Progress

CHUNK = 16 << 20
"""Bytes that are forwarded at a time: a millisecond at 100 Gbps, so that a hop costs about that."""


class LayerIn(NamedTuple):
    """Layer `layer` is complete at the replica, on all its GPUs; None: everything is."""

    at: Nanos
    replica: ReplicaId
    layer: int | None


class Moved(NamedTuple):
    """A load that has ended: bytes of all GPUs together, between which instants they came, and over which links.

    `layers_at` as in `core.metrics.Delivery`.
    """

    replica: ReplicaId
    transfer: Transfer
    num_bytes: int
    began_at: Nanos
    ended_at: Nanos
    links: tuple[str, ...] = ()
    layers_at: tuple[Nanos, ...] = ()

    def delivered(self) -> Delivery:
        """For the record of a run."""
        took = self.ended_at - self.began_at
        return weights_delivered(self.replica, self.transfer, self.num_bytes, self.began_at, took, self.links, self.layers_at)


class Load:
    """One replica's weights.

    Attributes:
        flows: by GPU of the replica and lane (0 where nothing is striped); empty while it waits for the replica before it.
        first: layers that it had when the flows began; `missing`: pieces that still lack of each layer after these, and of all.
        layers: whether single layers are reported.
        links: that the flows cross; `progress`: of each, after how many bytes it has its share of each layer, and how far it was.
    """

    __slots__ = ("began_at", "first", "flows", "layers", "links", "missing", "num_bytes", "progress", "reached", "replica",
                 "transfer")  # fmt: skip

    def __init__(self, replica: ReplicaId, transfer: Transfer, now: Nanos, layers: bool) -> None:
        self.replica = replica
        self.transfer = transfer
        self.began_at = now
        self.layers = layers
        self.first = 0
        self.num_bytes = 0
        self.flows: dict[tuple[int, int], FlowId] = {}
        self.missing: list[int] = []
        self.reached: dict[FlowId, int] = {}  # of its targets
        self.links: dict[str, None] = {}
        self.progress: list[tuple[list[int], Progress]] = []


class WeightFlows:
    """All loads of one model.

    Args:
        network: shared with everything else that moves.
        fabric: whose links the network has.
        gpus_of: the GPUs of a replica, in the order of its ranks; all replicas have as many.
        layer_bytes: of one GPU's shard, layer by layer; the embedding counts with the first.
        rest_bytes: of one GPU's shard, after the last layer (norm and head).
        ids: numbers for flows, that nobody else on the network takes.
        chunk: bytes forwarded at a time.

    Attributes:
        ended: loads that are complete, in this order.
    """

    def __init__(
        self, network: Network, fabric: Fabric, gpus_of: Callable[[ReplicaId], Sequence[int]], layer_bytes: Sequence[int],
        rest_bytes: int, ids: Iterator[FlowId], chunk: int = CHUNK,
    ) -> None:  # fmt: skip
        self.ended: list[Moved] = []
        self._network = network
        self._fabric = fabric
        self._gpus_of = gpus_of
        self._bounds = [sum(layer_bytes[: layer + 1]) for layer in range(len(layer_bytes))]
        self._total = self._bounds[-1] + rest_bytes
        self._ids = ids
        self._chunk = chunk
        self._loads: dict[ReplicaId, Load] = {}
        self._had: dict[ReplicaId, int] = {}  # layers, of loads that were given up
        self._whole: set[ReplicaId] = set()
        self._of_flow: dict[FlowId, Load] = {}

    @property
    def loading(self) -> Mapping[ReplicaId, Load]:
        return self._loads

    def load(self, replica: ReplicaId, transfer: Transfer, now: Nanos, layers: bool = True) -> None:
        """Bring the weights to `replica`, which is one of `transfer.path`; layers that it has got stay.

        It begins when there is somebody to get them from: a replica of a chain that has been asked, too, or all of a striped
        transfer. Mock transfers are not for here. Without `layers` only the whole is reported.
        """
        if transfer.kind == "mock" or replica not in transfer.path:
            raise ValueError(f"replica {replica}: nothing to move for it in {transfer}")
        if replica in self._loads:
            self._stop(self._loads[replica], now)
        self._whole.discard(replica)
        self._loads[replica] = Load(replica, transfer, now, layers)
        self._begin_waiting(now)

    def lose(self, place: Place, now: Nanos) -> list[ReplicaId]:
        """What lies there is lost; a replica's own load is given up.

        Returns the replicas that were loading from there, or in a striped transfer with it: they stand still until `load` gives
        them another source. Those further down a chain wait for them, and go on by themselves.
        """
        stranded = [load for load in self._loads.values() if place != Place("gpu", load.replica) and _needs(load, place)]
        if place.kind == "gpu":
            if place.id in self._loads:
                self._stop(self._loads.pop(place.id), now)
            self._whole.discard(place.id)
            self._had.pop(place.id, None)
        for load in stranded:
            self._stop(load, now)
            del self._loads[load.replica]
        return [load.replica for load in stranded]

    def on(self, arrived: Iterable[Arrived], now: Nanos) -> list[LayerIn]:
        """What the network has reported, in the words of weights; flows of others are passed over."""
        found: list[LayerIn] = []
        whole = False
        for event in arrived:
            load = self._of_flow.get(event.flow)
            if load is None:
                continue
            at = load.reached[event.flow]
            load.reached[event.flow] += 1
            load.missing[at] -= 1
            if event.ended:
                del self._of_flow[event.flow]
            if load.missing[at]:
                continue
            last = at == len(load.missing) - 1
            found.append(LayerIn(event.at, load.replica, None if last else load.first + at))
            if last:
                self._end(load, event.at)
                whole = True
            else:
                self._had[load.replica] = load.first + at + 1
        if whole:
            self._begin_waiting(now)
        return found

    # -- beginning

    def _begin_waiting(self, now: Nanos) -> None:
        """Begin what can; whoever has begun lets the next one of its chain begin."""
        begun = True
        while begun:
            begun = False
            for load in list(self._loads.values()):
                if not load.flows and self._can_begin(load):
                    self._begin(load, now)
                    begun = True

    def _can_begin(self, load: Load) -> bool:
        path = load.transfer.path
        if load.transfer.kind == "striped":
            return all(self._is_with(other, load.transfer) for other in path)
        at = path.index(load.replica)
        return at == 0 or path[at - 1] in self._whole or (path[at - 1] in self._loads and bool(self._loads[path[at - 1]].flows))

    def _is_with(self, replica: ReplicaId, transfer: Transfer) -> bool:
        return replica in self._loads and self._loads[replica].transfer == transfer

    def _begin(self, load: Load, now: Nanos) -> None:
        if load.transfer.kind == "striped":
            self._begin_striped(load.transfer, now)
            return
        self._prepare(load, now, 1, self._had.get(load.replica, 0))
        at = load.transfer.path.index(load.replica)
        giver = load.transfer.path[at - 1] if at else None
        self._start(load.replica, 0, load.transfer.source if giver is None else Place("gpu", giver), giver, now)

    def _begin_striped(self, transfer: Transfer, now: Nanos) -> None:
        """Rows of lanes down the domains; in each domain whoever gets a lane passes it on to the others there."""
        sources = (transfer.source, *transfer.more_sources)
        first = min(self._had.get(replica, 0) for replica in transfer.path)
        before: Sequence[ReplicaId] = ()
        for group in self._domains(transfer.path):
            for replica in group:
                self._prepare(self._loads[replica], now, len(sources), first)
            for lane, source in enumerate(sources):
                owner = group[lane % len(group)]
                giver = before[lane % len(before)] if before else None
                if giver is None:
                    self._start(owner, lane, source, None, now)
                else:
                    self._start(owner, lane, Place("gpu", giver), giver, now)
                for other in group:
                    if other != owner:
                        self._start(other, lane, Place("gpu", owner), owner, now)
            before = group

    def _domains(self, path: Sequence[ReplicaId]) -> Iterator[Sequence[ReplicaId]]:
        """The path in pieces that NVLink joins."""
        for _, group in groupby(path, key=lambda replica: self._fabric.domain_of(self._gpus_of(replica)[0])):
            yield tuple(group)

    def _prepare(self, load: Load, now: Nanos, num_lanes: int, first: int) -> None:
        gpus = len(self._gpus_of(load.replica))
        load.began_at = now
        load.first = first
        load.missing = [gpus * num_lanes] * (len(self._bounds) - first + 1 if load.layers else 1)
        load.num_bytes = (self._total - self._offset(load)) * gpus
        load.links = {}
        load.progress = []

    def _offset(self, load: Load) -> int:
        """Of one GPU's shard, bytes that were there when the flows began."""
        return self._bounds[load.first - 1] if load.first else 0

    def _start(self, replica: ReplicaId, lane: int, source: Place, giver: ReplicaId | None, now: Nanos) -> None:
        """One lane to all GPUs of a replica, from the first layer that is missing; after what `giver` gets of it itself."""
        load = self._loads[replica]
        size = self._lane_bytes(load, lane)
        network = self._network
        marks = self._marks(load, size) if load.layers or network.records else []
        upstream = self._loads.get(giver) if giver is not None else None
        behind = self._chunk + self._offset(load) - self._offset(upstream) if upstream is not None else 0
        for rank, gpu in enumerate(self._gpus_of(replica)):
            flow = load.flows[rank, lane] = next(self._ids)
            load.reached[flow] = 0
            self._of_flow[flow] = load
            after = upstream.flows[rank, lane] if upstream is not None else None
            path = self._path(source, rank, gpu)
            network.start(flow, path, size, now, marks=marks if load.layers else (), after=after, chunk=behind)
            load.links.update(dict.fromkeys(path))
            if network.records:
                load.progress.append((marks, network.progress(flow)))

    def _lane_bytes(self, load: Load, lane: int) -> int:
        """Of one GPU's shard, from the first layer that is missing, what comes on that lane."""
        left, lanes = self._total - self._offset(load), len(load.transfer.more_sources) + 1
        return max(left * (lane + 1) // lanes - left * lane // lanes, 1)

    def _marks(self, load: Load, size: int) -> list[int]:
        """After how many of the `size` bytes of a lane its share of each missing layer is there."""
        offset = self._offset(load)
        return [min(max((bound - offset) * size // (self._total - offset), 1), size) for bound in self._bounds[load.first :]]

    def _path(self, source: Place, rank: int, gpu: int) -> Path:
        match source.kind:
            case "gpu":
                return self._fabric.gpu_to_gpu(self._gpus_of(source.id)[rank], gpu)
            case "host":
                return self._fabric.host_to_gpu(source.id, gpu)
            case "ssd":
                return self._fabric.ssd_to_gpu(gpu)
            case "store":
                return self._fabric.store_to_gpu(gpu)

    # -- ending

    def _end(self, load: Load, now: Nanos) -> None:
        del self._loads[load.replica]
        self._had.pop(load.replica, None)
        self._whole.add(load.replica)
        layers_at = _layers_at(load) if load.progress else ()
        self.ended.append(Moved(load.replica, load.transfer, load.num_bytes, load.began_at, now, tuple(load.links), layers_at))

    def _stop(self, load: Load, now: Nanos, ended: Mapping[FlowId, int] = {}) -> None:
        """Its flows end, and those that follow them: these loads wait, then, for this one to begin again.

        `ended` are flows of its that have been cancelled already, and the bytes that each has brought.
        """
        flows, load.flows, load.reached = load.flows, {}, {}
        brought = dict(ended)
        for flow in flows.values():
            brought |= self._network.cancel(flow, now)
        if flows and not load.layers:
            self._keep(load, flows, brought)
        followers = [self._of_flow.pop(flow, None) for flow in brought]
        for follower in dict.fromkeys(followers):
            if follower is not None and follower is not load:
                self._stop(follower, now, brought)

    def _keep(self, load: Load, flows: Mapping[tuple[int, int], FlowId], brought: Mapping[FlowId, int]) -> None:
        """Nobody was told of its layers: which of them are complete, on all GPUs. A flow that was not cancelled had ended."""
        had = len(self._bounds)
        for (_, lane), flow in flows.items():
            if flow in brought:
                marks = self._marks(load, self._lane_bytes(load, lane))
                had = min(had, load.first + bisect_right(marks, brought[flow]))
        self._had[load.replica] = had


def _needs(load: Load, place: Place) -> bool:
    """Whether what lies there is, or will be, a source of the load."""
    transfer = load.transfer
    if transfer.kind == "striped":
        others = place.kind == "gpu" and place.id in transfer.path
        return others or place == transfer.source or place in transfer.more_sources
    at = transfer.path.index(load.replica)
    return place == (Place("gpu", transfer.path[at - 1]) if at else transfer.source)


def _layers_at(load: Load) -> tuple[Nanos, ...]:
    """When each layer was complete on all GPUs: once the last of the flows had brought its share."""
    shares = [[_reached_at(progress, mark) for mark in marks] for marks, progress in load.progress]
    return (UNSET,) * load.first + tuple(map(max, zip(*shares, strict=True)))


def _reached_at(progress: Progress, num_bytes: int) -> Nanos:
    """When the flow had brought so many bytes."""
    target = num_bytes * NANO
    at, moved, rate = progress[bisect_left(progress, target, key=itemgetter(1)) - 1]
    return at - (moved - target) // rate
