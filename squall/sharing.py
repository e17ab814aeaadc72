"""Several models on one cluster: a configuration for each, of which all name the same `[cluster]`.

Says whether they can be together, and which share each fleet has. Each keeps its own router and controller; GPUs, links, host
memory and nodes are everybody's. Knows keys, and nothing of how fleets run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from squall.config import Config
from squall.core.fleet_plan import Share
from squall.core.types import ReplicaId
from squall.deployment import plain_plan
from squall.errors import ConfigError
from squall.fleet_tables import Fault, num_slots
from squall.mistakes import shown

OF_NODES = ("node", "link")
"""Faults that are not of one fleet."""

OF_NODES_BY_CHANCE = ("node_per_hour", "link_lost_per_hour", "link_per_hour")

LONGEST_NAME = 100
"""A folder's name, with what is put around it while it is written."""

FILES = ("cluster.json", "gpus.parquet", "report.html")
"""What lies beside the folders of the models (`report.cluster`), so that none can have its name."""


def name_of(config: Config) -> str:
    """What a fleet is called among others, in reports and in the names of folders; none is longer than a disk takes."""
    name = config.model.served_as[0] if config.model.served_as else Path(config.model.name).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:LONGEST_NAME].strip(".-") or "model"


@contextmanager
def said_of(file: str) -> Iterator[None]:
    """What is wrong with one of several configurations is said of its file."""
    try:
        yield
    except ConfigError as error:
        raise error if str(error).startswith(f"{file}: ") else type(error)(f"{file}: {error}") from None


def shares(configs: Sequence[Config], files: Sequence[str]) -> list[Share]:
    """The share of each fleet on the cluster; `files` are what errors call the configurations.

    Raises:
        ConfigError: they cannot share one: the first reason, with its key.
    """
    check_names(configs, files)
    for config, file in zip(configs, files, strict=True):
        if config.fleet.pools:
            raise ConfigError(f"{file}: [[fleet.pools]] bring their own machines, and can share none; say fleet.replicas")
        _check_same(configs[0], config, files[0], file)
        _check_size(config, file)
    minima = tuple(_gpus(config) * sum(bounds.minimum for bounds in config.fleet.bounds.values()) for config in configs)
    cluster = configs[0].cluster
    found = [
        Share(fleet, minima, cluster.nodes * cluster.gpus_per_node, cluster.gpus_per_node, _gpus(config))
        for fleet, config in enumerate(configs)
    ]
    first_places(configs, found)
    return found


def with_faults_dealt_out(configs: Sequence[Config]) -> list[Config]:
    """Every node and link that breaks, does so in the first configuration, once; replicas break in their own."""
    common: dict[Fault, None] = {}
    for config in configs:
        common.update(dict.fromkeys(fault for fault in config.faults if fault.kind in OF_NODES))
    dealt = []
    for number, config in enumerate(configs):
        own = tuple(fault for fault in config.faults if fault.kind not in OF_NODES)
        hazards = config.hazards if not number else replace(config.hazards, **dict.fromkeys(OF_NODES_BY_CHANCE, 0.0))
        run = replace(config.run, seed=config.run.seed + number)  # whose replica breaks is not the same for all
        dealt.append(replace(config, faults=own if number else (*common, *own), hazards=hazards, run=run))
    return dealt


def _gpus(config: Config) -> int:
    return config.replica.tp * config.replica.pp


def check_names(configs: Sequence[Config], files: Sequence[str]) -> None:
    """Each model must have a name, and a folder, of its own. Raises ConfigError."""
    seen: dict[str, str] = {}
    for config, file in zip(configs, files, strict=True):
        name = name_of(config)
        if (other := seen.get(name)) is not None:
            raise ConfigError(f"{other} and {file} both serve {name!r}; give one of them another name with model.served_as")
        if name in FILES:
            raise ConfigError(
                f"{file}: a file beside its folder is called {name!r}; give the model another name with model.served_as"
            )
        seen[name] = file


def _check_same(first: Config, config: Config, file: str, other: str) -> None:
    """What is the cluster's, or the run's, must be said alike."""
    for table, keys in (
        ("cluster", first.cluster.__struct_fields__),
        ("hazards", (*OF_NODES_BY_CHANCE, "node_back_s", "notice_s", "link_lost_s", "link_s", "link_factor")),
        ("run", ("duration_s", "out")),
    ):
        here, there = getattr(first, table), getattr(config, table)
        for key in keys:
            if getattr(here, key) != getattr(there, key):
                values = f"{_said(here, key)} in {file}, and {_said(there, key)} in {other}"
                raise ConfigError(f"models on one cluster need the same {table}.{key}: it is {values}")


def _said(table: Struct, key: str) -> str:
    value: Any = getattr(table, key)
    return "not set" if value is None else shown(value)


def _check_size(config: Config, file: str) -> None:
    """As for a fleet alone, which on a CPU needs no place."""
    slots, most = num_slots(config.cluster, config.replica), max(bounds.maximum for bounds in config.fleet.bounds.values())
    if most > slots:
        have = f"{config.cluster.nodes} x {config.cluster.gpus_per_node} GPUs have place for {slots}"
        raise ConfigError(
            f"{file}: [fleet] may grow to {most} replicas, and {have}; raise cluster.nodes, or lower the most replicas"
        )


def first_places(
    configs: Sequence[Config], found: Sequence[Share], kept: Sequence[Collection[ReplicaId]] = ()
) -> list[list[ReplicaId]]:
    """Where the fleets begin, one after the other, each in the lowest places that are left. Raises ConfigError: too few are.

    `kept` are places where each fleet has something already: it takes these first, and those of others last.
    """
    of_all = [plain_plan(config, share).slots for config, share in zip(configs, found, strict=True)]
    there = [
        {replica: frozenset(slots.gpus(replica)) for replica in each if replica < slots.num}
        for each, slots in zip(kept or [()] * len(of_all), of_all, strict=True)
    ]
    taken: set[int] = set()
    begin: list[list[ReplicaId]] = []
    for config, slots, own in zip(configs, of_all, there, strict=True):
        theirs = {gpu for each in there if each is not own for gpus in each.values() for gpu in gpus}
        free = [replica for replica in range(slots.num) if taken.isdisjoint(slots.gpus(replica))]
        free.sort(key=lambda replica: (replica not in own, not theirs.isdisjoint(slots.gpus(replica))))
        places = sorted(free[: config.fleet.num_initial])
        if len(places) < config.fleet.num_initial:
            wanted = ", ".join(f"{name_of(each)} {each.fleet.num_initial} x {_gpus(each)}" for each in configs)
            raise ConfigError(
                f"the fleets cannot begin together on {config.cluster.nodes} x {config.cluster.gpus_per_node} GPUs: {wanted} "
                f"leave no place for all of {name_of(config)}; raise cluster.nodes, or lower min and initial"
            )
        taken.update(gpu for replica in places for gpu in slots.gpus(replica))
        begin.append(places)
    return begin
