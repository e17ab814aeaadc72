"""What the fleet that is served stands on, the same for the head that plans and the workers that carry out. Imports no torch."""

from __future__ import annotations

from msgspec.structs import replace

from squall.config import Config
from squall.core.fleet_plan import FleetPlan, Share, Slots, Weights
from squall.deployment import node_of, plain_plan
from squall.errors import ConfigError
from squall.live.served import ServedModel
from squall.perf.hardware import resolve_gpu


def on_hosts(config: Config) -> Config:
    """The cluster is what the launcher's hosts are together, where it has a list of them."""
    hosts = config.launcher.hosts
    if config.launcher.kind != "hosts":
        return config
    return replace(config, cluster=replace(config.cluster, nodes=len(hosts), gpus_per_node=len(hosts[0].devices)))


def shared_plan(config: Config, model: ServedModel, share: Share) -> FleetPlan:
    """As `served_plan`, of a fleet that has `share` of the cluster: its slots are anywhere there. Raises ConfigError."""
    plan, place = served_plan(config, model), plain_plan(config, share).slots
    return replace(plan, slots=replace(plan.slots, num=place.num, per_node=place.per_node, shared=share))


def served_plan(config: Config, model: ServedModel) -> FleetPlan:
    """Bounds, slots and weights.

    Of an emulated fleet that changes its size, the links and the capacity are known, too, in the emulation's time. Of a real
    one they are not: nobody has measured them. Workers of one machine share its memory, which joins them as NVLink does GPUs.

    Raises ConfigError.
    """
    plan = plain_plan(config)
    if config.serve.engine == "emulated":
        if not plan.is_elastic:
            return replace(plan, slots=_on_hosts(config, plan.slots))
        from squall.live.engine.build import emulated_plan

        plan = emulated_plan(config, model)
        return replace(plan, slots=_on_hosts(config, plan.slots), live_layers=num_live_layers(config, model))
    gpus = config.replica.tp * config.replica.pp
    slots = _on_hosts(config, plan.slots)
    if config.cluster.gpu.lower() == "cpu":
        slots = replace(slots, per_domain=max(1, slots.per_node))
    else:
        slots = replace(slots, per_domain=max(1, node_of(config, resolve_gpu(config.cluster.gpu)).domain // gpus))
    spec = model.spec
    num_bytes = spec.weight_bytes(config.replica.tp, config.replica.dtype, pp=config.replica.pp) * gpus
    weights = Weights(config.model.name, num_bytes, spec.num_layers)
    return replace(plan, slots=slots, weights=weights, live_layers=num_live_layers(config, model))


def _on_hosts(config: Config, slots: Slots) -> Slots:
    """Where the launcher has a list of hosts, there are as many places as on these, and each host is a node."""
    if config.launcher.kind != "hosts":
        return slots
    per_host = config.launcher.slots_per_host(config.replica.tp * config.replica.pp)
    return replace(slots, num=per_host * len(config.launcher.hosts), per_node=per_host, nodes_per_slot=1)


def num_live_layers(config: Config, model: ServedModel) -> int:
    """Layers that a replica which loads runs one by one; 0 where nobody wants it to.

    Raises ConfigError where it cannot: NIXL moves none of the batches, whose memory comes and goes.
    """
    if not config.load.live or not plain_plan(config).is_elastic:
        return 0
    replica, serve = config.replica, config.serve
    needed: list[tuple[str, object, object]] = [("replica.pp", replica.pp, 1)]
    if serve.engine != "emulated" and serve.transport == "nixl":
        needed.append(("serve.transport", serve.transport, "tcp"))
    for key, given, right in needed:
        if given != right:
            raise ConfigError(
                f"load.live with {key} = {given!r}: served replicas work while they load with {key} = {right!r} "
                "only, so far; set that, or load.live = false"
            )
    return model.spec.num_layers
