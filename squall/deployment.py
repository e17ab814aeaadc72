"""From a configuration to what its fleet stands on: slots on nodes, links, weights, patience, and what one replica can do.

Knows which key means what and which figure the catalogue has. The same for the simulator and for the live head.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from squall.config import Config
from squall.core.actions import Chunk
from squall.core.disaggregated import DisaggregatedRouter
from squall.core.fleet_plan import FleetPlan, Patience, Share, Slots, Weights
from squall.core.fleet_view import Capacity
from squall.core.handoff_router import HandoffRouter
from squall.core.router import Router
from squall.core.types import SECOND, Nanos
from squall.fleet_tables import num_slots
from squall.perf.hardware import Gpu
from squall.perf.latency import LatencyModel
from squall.perf.progressions import total
from squall.perf.spec import ModelSpec
from squall.perf.topology import NODES, Node, nic_bandwidth_per_gpu, resolve_node
from squall.policies.load import Auto, Chain, Host, Mock, P2p, Striped

_GBIT = 1e9 / 8


class Batch(Struct, frozen=True):
    """A step of the replica whose capacity is asked for. Satisfies `BatchShape`."""

    num_decodes: int
    decode_context: int
    chunks: Sequence[Chunk] = ()


def plain_plan(config: Config, share: Share | None = None) -> FleetPlan:
    """The fleet's bounds and patience, on a cluster of which nothing else is known: weights are just there.

    `share` is its place there where it is not alone: all GPUs of the cluster may be its own then, and even a CPU's are counted.
    """
    fleet, replica = config.fleet, config.replica
    elastic = any(bounds.minimum < bounds.maximum for bounds in fleet.bounds.values())
    num = per_node = fleet.num_maximum  # a fixed fleet has its GPUs, and no others
    if share is not None or config.cluster.gpu.lower() != "cpu":
        num = num_slots(config.cluster, replica) if elastic or share is not None else num
        per_node = max(1, config.cluster.gpus_per_node // (replica.tp * replica.pp))
    patience = Patience(
        up_interval=_nanos(fleet.up_interval_s),
        rest_interval=max(SECOND, _nanos(fleet.up_interval_s)),
        down_window=_nanos(fleet.down_window_s),
        idle_ttl=_nanos(fleet.idle_ttl_s),
        start_timeout=_nanos(fleet.start_timeout_s),
    )
    return FleetPlan(fleet.bounds, Slots(num, per_node, nodes_per_slot(config), shared=share), patience=patience)


def full_plan(
    config: Config, model: ModelSpec, gpu: Gpu, latency: LatencyModel, num_blocks: int, share: Share | None = None
) -> FleetPlan:
    """As `plain_plan`, with the cluster's links, the model's weights and one replica's capacity. Raises ConfigError."""
    plain = plain_plan(config, share)
    node = node_of(config, gpu)
    gpus, cluster = config.replica.tp * config.replica.pp, config.cluster
    slots = replace(
        plain.slots,
        per_domain=max(1, node.domain // gpus),
        nodes_per_leaf=cluster.nodes_per_leaf,
        nic_bytes_per_s=nic_bytes_per_s(config, node) * gpus,
        link_bytes_per_s=node.link_bandwidth * gpus,
        shared=None if share is None else replace(share, host_bytes=node.host_memory),
    )
    weights = Weights(
        model=config.model.name,
        num_bytes=model.weight_bytes(config.replica.tp, config.replica.dtype, pp=config.replica.pp) * gpus,
        num_layers=model.num_layers,
        host_bytes_per_s=node.host_bandwidth * gpus,
        ssd_bytes_per_s=min(node.ssd_bandwidth, node.ssd_bandwidth / node.num_gpus * gpus),
        store_bytes_per_s=cluster.store_gbps * _GBIT,
        on_ssd=node.ssd_bandwidth > 0,
    )
    return replace(plain, slots=slots, weights=weights, capacity=capacity(config, model, latency, num_blocks, weights, node))


def router_of(config: Config, elastic: bool) -> Router:
    """The router that a fleet of this mode needs."""
    queue, longest = config.queue, config.replica.max_model_len
    common = config.route, queue.max_requests, queue.max_tokens, queue.max_retries, elastic
    moves = config.fleet.drain == "move"
    rules = config.handoff.max_share, config.handoff.max_ratio, moves, longest
    if config.fleet.mode == "disaggregated":
        return DisaggregatedRouter(*common, config.decode_route, *rules)
    return HandoffRouter(*common, *rules) if moves else Router(*common, longest)


def nic_bytes_per_s(config: Config, node: Node) -> float:
    """Of each GPU, a direction."""
    given = config.cluster.nic_gbps
    return nic_bandwidth_per_gpu(node) if given is None else given * _GBIT


def nodes_per_slot(config: Config) -> int:
    """Nodes that one replica spans."""
    return max(1, -(-config.replica.tp * config.replica.pp // config.cluster.gpus_per_node))


def node_of(config: Config, gpu: Gpu) -> Node:
    """The machine of the cluster: the one that is named, or the catalogue's largest with this GPU; as overridden."""
    cluster = config.cluster
    if cluster.node is not None:
        node = resolve_node(cluster.node)
    else:
        known = [node for node in NODES.values() if node.gpu == gpu.name]
        node = max(known, key=lambda node: node.num_gpus) if known else _unknown_node(gpu)
    domain = node.domain if node.domain > node.num_gpus else min(node.domain, cluster.gpus_per_node)
    changed = replace(node, num_gpus=cluster.gpus_per_node, domain=max(1, domain), gpus_per_host_link=1)
    if node.gpus_per_host_link > 1 and cluster.host_gbps is None:
        changed = replace(changed, gpus_per_host_link=min(node.gpus_per_host_link, cluster.gpus_per_node))
    changed = replace(changed, num_nics=max(1, node.num_nics * cluster.gpus_per_node // node.num_gpus))
    if cluster.host_gbps is not None:
        changed = replace(changed, host_bandwidth=cluster.host_gbps * _GBIT)
    if cluster.ssd_gbps is not None:
        changed = replace(changed, ssd_bandwidth=cluster.ssd_gbps * _GBIT)
    return changed


def _unknown_node(gpu: Gpu) -> Node:
    """A GPU that no machine of the catalogue has: its own links, a 25GbE card and an NVMe disk."""
    joined = gpu.link != "pcie" and gpu.kind != "cpu"
    domain = 8 if joined else 1
    pcie = gpu.pcie_bandwidth or 16e9
    return Node("unknown", gpu.name, 8, domain, gpu.link_bandwidth, 1, pcie, "ethernet-25g", 1, 256 << 30, 3.5e9, "")


def capacity(config: Config, model: ModelSpec, latency: LatencyModel, num_blocks: int, weights: Weights, node: Node) -> Capacity:
    """What one replica can do: what [capacity] gives, the rest worked out.

    Prompts: the tokens of a full step of one prompt, over its time. Answers: a full batch of sequences whose contexts are half of
    what the KV pool holds, over the time of a step. Hand-offs: KV over the replica's NICs. Loads: weights as `_load_s` says, and
    the phases before and after.
    """
    given = config.capacity
    batch, size = config.batching, config.replica.block_size
    tokens, seqs = getattr(batch, "max_num_batched_tokens", 2048), getattr(batch, "max_num_seqs", 256)
    context = max(seqs, num_blocks * size // 2)
    kv_bytes = model.kv_bytes_per_token(model.dtypes(config.replica.dtype)[0], config.replica.tp, pp=config.replica.pp)
    gpus = config.replica.tp * config.replica.pp
    startup = config.startup
    derived = {
        "prefill_tokens_per_s": tokens * SECOND / _step(latency, Batch(0, 0, (Chunk(0, 0, tokens, 0, True),))),
        "decode_tokens_per_s": seqs * SECOND / _step(latency, Batch(seqs, context)),
        "transfer_tokens_per_s": nic_bytes_per_s(config, node) * gpus / max(1, kv_bytes * gpus),
        "load_s": startup.before_weights_s + _load_s(config, weights, node) + startup.after_weights_s,
    }
    values = {name: getattr(given, name) for name in derived}
    missing = tuple(name for name, value in values.items() if value is None)
    known = {name: derived[name] if value is None else value for name, value in values.items()}
    return Capacity(num_blocks=num_blocks, block_size=size, derived=(*missing, "num_blocks"), **known)


def _load_s(config: Config, weights: Weights, node: Node) -> float:
    """Seconds that weights need by the slowest way that [load] may have to take, when nothing else moves.

    Peers send over NICs, unless the fleet may be empty and nobody there to send.
    """
    load = config.load
    if isinstance(load, Mock):
        return load.load_s
    stored = weights.ssd_bytes_per_s if weights.on_ssd else weights.store_bytes_per_s
    rate = stored
    if isinstance(load, Host) and load.cache == "all_hit":
        rate = weights.host_bytes_per_s
    elif isinstance(load, P2p | Chain | Striped | Auto) and all(bounds.minimum for bounds in config.fleet.bounds.values()):
        rate = nic_bytes_per_s(config, node) * config.replica.tp * config.replica.pp
    return weights.num_bytes / max(1.0, rate)


def _step(latency: LatencyModel, batch: Batch) -> Nanos:
    return max(1, sum(total(price, price.count) for price in latency.run(batch, 1)))


def _nanos(seconds: float) -> Nanos:
    return round(seconds * SECOND)
