"""What a simulated fleet stands on: its plan, the delays of its phases, the network that weights travel on, and what goes wrong.

Knows which part makes what. Nothing in it changes; the parts that do are made anew for every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple, get_args

from msgspec import Struct
from msgspec.structs import replace

from squall.config import Config
from squall.core.fleet_plan import FleetPlan, Share
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.deployment import full_plan, node_of, plain_plan
from squall.fleet_tables import StartPhase
from squall.perf.dtypes import DTYPE_BYTES
from squall.perf.hardware import Gpu
from squall.perf.latency import LatencyModel
from squall.perf.spec import ModelSpec
from squall.sim.fabric import Fabric
from squall.sim.faults import Faults
from squall.sim.handoff import KvMoves, KvShape, Lanes
from squall.sim.loading import Delays, Roads
from squall.sim.network import Network
from squall.sim.shares import FlowId
from squall.sim.weights import WeightFlows


class Shard(Struct, frozen=True):
    """One GPU's part of the weights, in bytes: every layer, and what comes after the last."""

    layers: tuple[int, ...]
    rest: int


class Wires(NamedTuple):
    """A network, and numbers for flows that nobody else on it takes: of weights upwards, of KV downwards."""

    network: Network
    weights: Iterator[FlowId]
    kv: Iterator[FlowId]


class Ground(Struct, frozen=True):
    """See the module.

    Attributes:
        plan: the fleet's.
        delays: of the phases beside the weights.
        links: bytes a second of each link of the cluster; none where weights are just there.
        fabric: whose links these are.
        shard: of the weights, a GPU.
        num_gpus: of one replica.
        kv: what a token's KV weighs; `kv_delay`: a fixed time for every hand-off; `kv_transfers`: that a replica has at once.
    """

    plan: FleetPlan
    delays: Delays
    links: dict[str, float] = {}
    fabric: Fabric | None = None
    shard: Shard | None = None
    num_gpus: int = 1
    kv: KvShape = KvShape()
    kv_delay: Nanos | None = None
    kv_transfers: int = 4

    def gpus_of(self, replica: ReplicaId) -> Sequence[int]:
        """A replica's GPUs, in the order of its ranks."""
        assert self.fabric is not None
        slots, on_node = self.plan.slots, self.fabric.node.num_gpus
        first = slots.node(replica) * on_node + replica % slots.per_node * self.num_gpus
        return range(first, first + self.num_gpus)

    def wires(self, record: bool = False) -> Wires:
        """The network, empty; `record` as in `Network`."""
        return Wires(Network(self.links, record), count(), count(-1, -1))

    def roads(self, wires: Wires) -> Roads | None:
        """The weights' part of the network."""
        if self.fabric is None or self.shard is None:
            return None
        flows = WeightFlows(wires.network, self.fabric, self.gpus_of, self.shard.layers, self.shard.rest, wires.weights)
        return Roads(wires.network, flows)

    def kv_moves(self, wires: Wires) -> KvMoves:
        """Hand-offs, on the network where there is one."""
        if self.fabric is None or self.shard is None:
            return KvMoves(self.kv, delay=self.kv_delay)
        return KvMoves(
            self.kv, Lanes(wires.network, self.fabric, self.gpus_of, wires.kv), self.kv_delay, self.kv_transfers
        )  # fmt: skip

    def faults(self, config: Config) -> Faults | None:
        """What is to go wrong; None where nothing is."""
        if not (config.faults or config.hazards.may_strike):
            return None
        return Faults(config.faults, config.hazards, self.plan.slots, config.run.seed)


def bare_ground(config: Config) -> Ground:
    """A cluster of which only its size is known: weights are just there, and hand-offs take their fixed time, or none."""
    return Ground(plain_plan(config), _delays(config), kv_delay=_kv_delay(config))


def ground(
    config: Config, model: ModelSpec, gpu: Gpu, latency: LatencyModel, num_blocks: int, share: Share | None = None
) -> Ground:
    """The cluster of the configuration, with its links. A fixed fleet in which nothing breaks or is sent needs none of them.

    `share` is the fleet's place on it where there are others.
    """
    breaks = bool(config.faults) or config.hazards.may_strike
    sends = config.fleet.moves_kv and config.handoff.delay_s is None
    if share is None and not plain_plan(config).is_elastic and not breaks and not sends:
        return bare_ground(config)
    cluster, gpus = config.cluster, config.replica.tp * config.replica.pp
    fabric = Fabric(node_of(config, gpu), cluster.nodes, cluster.nodes_per_leaf or None, cluster.oversubscription)
    links = dict(fabric.links)
    nic = None if cluster.nic_gbps is None else cluster.nic_gbps * 1e9 / 8 * fabric.node.num_gpus / fabric.num_nics
    for name in links:
        if nic is not None and ".nic" in name:
            links[name] = nic
        elif nic is not None and name.startswith("leaf"):  # as wide as what is below it
            links[name] *= nic / fabric.nic_bytes_per_s
        elif name.endswith(".store"):
            links[name] = cluster.store_gbps * 1e9 / 8
    plan = full_plan(config, model, gpu, latency, num_blocks, share)
    whole = plan.weights.num_bytes // gpus
    layer = whole // (model.num_layers + 1)  # embedding and head together are taken to be one more
    shard = Shard((layer,) * model.num_layers, max(1, whole - layer * model.num_layers))
    dtype = config.replica.dtype if config.replica.kv_dtype == "auto" else config.replica.kv_dtype
    kv = KvShape(model.kv_bytes_per_token(model.dtypes(dtype)[0], config.replica.tp, pp=config.replica.pp), model.num_layers,
                 round(model.hidden_size * DTYPE_BYTES[model.dtypes(config.replica.dtype)[0]]))  # fmt: skip
    if config.replica.pp == 1:
        plan = replace(plan, live_layers=model.num_layers)
    return Ground(plan, _delays(config), links, fabric, shard, gpus, kv, _kv_delay(config), config.handoff.max_transfers)


def with_plan(ground: Ground, plan: FleetPlan) -> Ground:
    """The same with another plan."""
    return replace(ground, plan=plan)


def _delays(config: Config) -> Delays:
    startup = config.startup
    phases = {phase: round(startup.phase_s(phase) * SECOND) for phase in get_args(StartPhase)}
    return Delays(**phases, stop=round(startup.stop_s * SECOND))


def _kv_delay(config: Config) -> Nanos | None:
    delay = config.handoff.delay_s
    return None if delay is None else round(delay * SECOND)
