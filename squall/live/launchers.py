"""Who starts the workers of the fleets of one head: its own machine, agents on hosts that all fleets share, or Ray.

Takes over what an earlier head has left. Knows no request, and not what workers compute.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from squall import config as configuration
from squall.config import Config
from squall.core.fleet_plan import FleetPlan, Slots
from squall.core.types import ReplicaId
from squall.errors import ConfigError
from squall.live.estate import Estate
from squall.live.folder import Say, logs_of
from squall.live.launch import FleetLauncher, LocalLauncher, Place
from squall.live.served import ServedModel
from squall.live.succession import estate_of, fleet_of, roster_of
from squall.quantities import counted
from squall.sharing import first_places


class Fleet(NamedTuple):
    """A model, and what serves it.

    Attributes:
        directory: its run directory.
        begin: where the replicas are that it begins with.
    """

    config: Config
    model: ServedModel
    plan: FleetPlan
    directory: Path
    begin: Sequence[ReplicaId]


def about(fleet: Fleet, fleets: Sequence[Fleet], say: Say) -> Say:
    """Says of which of several fleets something is said."""
    return say if len(fleets) == 1 else lambda line: say(f"{fleet.model.names[0]}: {line}")


@contextlib.contextmanager
def launchers_of(fleets: Sequence[Fleet], say: Say) -> Iterator[list[tuple[Fleet, FleetLauncher]]]:
    """Of each fleet, for as long as the block lasts. What an earlier head has left is taken over: several begin where that is."""
    kind = fleets[0].config.launcher.kind
    with contextlib.ExitStack() as held:
        if kind == "hosts":
            yield held.enter_context(_on_hosts(fleets, say))
        elif kind == "ray":
            yield [(fleet, _on_ray(fleet.config)) for fleet in fleets]
        else:
            yield held.enter_context(_here(fleets, say))


def _name_of(fleet: Fleet, fleets: Sequence[Fleet]) -> str:
    """Among several."""
    return fleet.directory.name if len(fleets) > 1 else ""


def _placed(fleets: Sequence[Fleet], kept: Sequence[Collection[ReplicaId]]) -> Sequence[Fleet]:
    """Several fleets begin where they have workers, as many of them as they begin with; else where they would without any."""
    if len(fleets) == 1 or not any(kept):
        return fleets
    shares = [fleet.plan.slots.shared for fleet in fleets]
    try:
        begin = first_places([fleet.config for fleet in fleets], [share for share in shares if share is not None], kept)
    except ConfigError:  # what is kept lies in the way of a larger one
        return fleets
    return [
        fleet._replace(begin=at, plan=replace(fleet.plan, slots=replace(fleet.plan.slots, first=tuple(at))))
        for fleet, at in zip(fleets, begin, strict=True)
    ]


@contextlib.contextmanager
def _on_hosts(fleets: Sequence[Fleet], say: Say) -> Iterator[list[tuple[Fleet, FleetLauncher]]]:
    """All fleets share the hosts, and what is left there."""
    from squall.live.host_launch import HostsLauncher
    from squall.live.remote import Model

    configs = [fleet.config for fleet in fleets]
    names = [_name_of(fleet, fleets) for fleet in fleets]
    models = [
        Model(configuration.dumps(config), _gpus_of(config), _is_shared(config), name, config.launcher.warm)
        for name, config in zip(names, configs, strict=True)
    ]
    with roster_of(configs[0], say) or contextlib.nullcontext() as roster:
        placed = fleets if roster is None else _placed(fleets, [roster.places.get(name, ()) for name in names])
        launcher = HostsLauncher(configs[0].launcher, models, say=say, fleet=fleet_of(*configs), roster=roster)
        try:
            yield list(zip(placed, launcher.fleets, strict=True))
        finally:
            launcher.kill_all()


def _on_ray(config: Config) -> FleetLauncher:
    from squall.live.ray_launch import RayLauncher

    on_gpu = not _is_shared(config) and config.serve.device != "cpu"
    return RayLauncher(config.launcher, configuration.dumps(config), _gpus_of(config), on_gpu=on_gpu)


@contextlib.contextmanager
def _here(fleets: Sequence[Fleet], say: Say) -> Iterator[list[tuple[Fleet, FleetLauncher]]]:
    """What is left of each fleet on this machine is its own; where there are several, only in the places where it begins."""
    with contextlib.ExitStack() as held:
        estates = [
            held.enter_context(estate_of(fleet.config, say, _name_of(fleet, fleets)) or contextlib.nullcontext())
            for fleet in fleets
        ]
        launchers: list[tuple[Fleet, FleetLauncher]] = []
        placed = _placed(fleets, [() if estate is None else estate.places for estate in estates])
        for fleet, estate in zip(placed, estates, strict=True):
            if estate is not None and len(fleets) > 1:
                estate.keep(fleet.begin)
        for fleet, estate in zip(placed, estates, strict=True):
            if estate is not None and estate.survivors:
                about(fleet, fleets, say)(f"taken over from an earlier head: {counted(len(estate.survivors), 'worker')}")
            launchers.append((fleet, _local(fleet, estate)))
        yield launchers


def _local(fleet: Fleet, estate: Estate | None) -> FleetLauncher:
    """A process for each replica that there may be. Emulated ones share one: they sleep nearly all the time."""
    config, replicas = fleet.config, range(fleet.plan.slots.num)
    groups = [tuple(replicas)] if _is_shared(config) else [(replica,) for replica in replicas]
    on_gpus = config.serve.engine == "torch" and config.serve.device == "cuda"
    places = own_gpus(fleet.plan.slots, _gpus_of(config)) if on_gpus else ()
    logs, warm = logs_of(fleet.directory), config.launcher.warm
    return LocalLauncher(fleet.directory / "config.toml", logs, groups, places=places, warm=warm, estate=estate)


def _is_shared(config: Config) -> bool:
    """All replicas of a machine are in one process."""
    return config.serve.engine == "emulated"


def own_gpus(slots: Slots, size: int) -> list[Place]:
    """Each replica's, of those that we may use; in order where the fleet is alone. One that is named is shared instead."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")

    def gpu(index: int) -> int | str:
        """Where there are not so many, its worker will say so."""
        if given is None:
            return index
        ours = [name.strip() for name in given.split(",")]
        return ours[index] if index < len(ours) else -1

    def indices(replica: ReplicaId) -> range:
        return range(replica * size, (replica + 1) * size) if slots.shared is None else slots.gpus(replica)

    return [Place(replica, devices=tuple(map(gpu, indices(replica)))) for replica in range(slots.num)]


def _gpus_of(config: Config) -> int:
    return config.replica.tp * config.replica.pp
