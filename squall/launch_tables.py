"""The table of the configuration that says where workers run and who starts them. Knows no process and no network."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from squall.quantities import Count, NotNegative, Seconds, counted


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine that workers run on.

    Attributes:
        hostname: as ssh knows it.
        address: where the head and other machines reach its workers; the hostname when None.
        devices: numbers of its GPUs that may be used, or, on "cpu", of as many cores: each replica takes replica.tp of them.
        nics: for each device the address of the network card that its weights should leave by; `address` where empty.
    """

    hostname: str
    address: str | None = None
    devices: Annotated[tuple[NotNegative, ...], Meta(min_length=1)] = (0,)
    nics: tuple[str, ...] = ()

    @property
    def reached_at(self) -> str:
        return self.address or self.hostname


class Launcher(Struct, frozen=True, forbid_unknown_fields=True):
    """Who starts workers: this machine, agents on a list of hosts, or a Ray cluster.

    Attributes:
        launch: of "hosts": by ssh, or a person runs the command that is printed for each.
        hosts: of "hosts"; all with as many devices.
        listen: of "hosts": "host:port" where the head waits for their agents; port 0 for any.
        advertise: of "hosts": the address of this machine that they dial; that of `listen` when None.
        python: of "hosts": the interpreter there, which has squall installed; as here when None.
        address: of "ray": of the cluster; Ray looks for one when None.
        warm: processes of replicas that are off which stand ready (of "hosts": on each): libraries imported, engine built, no
            weights. One that a replica leaves is kept. Not of "ray".
        state: not of "ray": a folder of this head alone. Workers then outlive a head that is killed, and the next head of the
            same configuration takes them over with the weights that they have; agents of "hosts" dial it again. On Linux.
        outlive_s: how long they wait for it.
    """

    kind: Literal["local", "hosts", "ray"] = "local"
    launch: Literal["ssh", "print"] = "ssh"
    hosts: tuple[Machine, ...] = ()
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    python: str | None = None
    address: str | None = None
    warm: NotNegative = 0
    state: str | None = None
    outlive_s: Seconds = 60.0

    def slots_per_host(self, gpus: Count) -> int:
        """Replicas of so many devices that each host has place for."""
        return len(self.hosts[0].devices) // gpus if self.hosts else 0


class _Fleet(Protocol):
    @property
    def num_maximum(self) -> int: ...


def launcher_mistake(launcher: Launcher, fleet: _Fleet, gpus: int) -> str | None:
    """What cannot be meant: the key, what is wrong and what would be right. `gpus` is what a replica takes."""
    if launcher.kind == "ray" and launcher.state is not None:
        return 'launcher.state means nothing where launcher.kind = "ray": Ray ends its actors with the head that made them'
    if launcher.kind == "ray" and launcher.warm:
        return 'launcher.warm means nothing where launcher.kind = "ray": an actor that waits would hold its resources'
    if launcher.kind != "hosts":
        if launcher.hosts:
            return f'launcher.hosts means nothing where launcher.kind = {launcher.kind!r}; set it to "hosts", or leave them out'
        return None
    if not launcher.hosts:
        return 'launcher.kind = "hosts" needs [[launcher.hosts]], each with a hostname'
    if launcher.advertise is None and re.match(r"(0\.0\.0\.0|\[::\])?:", launcher.listen):
        return f"launcher.listen = {launcher.listen!r} is no address to dial; set launcher.advertise to that of this machine"
    if launcher.state is not None and re.search(r":0+$", launcher.listen):
        return (
            f"launcher.listen = {launcher.listen!r} gives every head another port, and agents that outlive one (launcher.state) "
            "dial the same again; give it a port, such as :7000, or leave launcher.state out"
        )
    names = [host.hostname for host in launcher.hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"launcher.hosts has {twice!r} twice; give all its devices in one entry"
    strange = next((name for name in names if not re.fullmatch(r"[^\s-]\S*", name)), None)
    if strange is not None:
        return f"launcher.hosts: hostname = {strange!r} is no name of a host; give one that ssh knows, such as node-a"
    first = launcher.hosts[0]
    devices, per_host = len(first.devices), launcher.slots_per_host(gpus)
    for host in launcher.hosts:
        if len(host.devices) != devices:
            have = counted(len(host.devices), "device")
            return f"launcher.hosts: {host.hostname} has {have}, {first.hostname} {devices}; use as many"
        if len(set(host.devices)) != devices:
            return f"launcher.hosts: {host.hostname} has a device twice in {list(host.devices)}; give each once"
        if host.nics and len(host.nics) != devices:
            nics = f"{counted(len(host.nics), 'nic')} for {counted(devices, 'device')}"
            return f"launcher.hosts: {host.hostname} has {nics}; give one each, or none"
    if not per_host:
        have = counted(devices, "device")
        return f"launcher.hosts: {first.hostname} has {have}, and a replica takes {gpus}, all of one host; add devices"
    if fleet.num_maximum > per_host * len(launcher.hosts):
        hosts, most = counted(len(launcher.hosts), "host"), counted(fleet.num_maximum, "replica")
        have = f"there is place for {per_host * len(launcher.hosts)} on {hosts} of {counted(devices, 'device')}"
        return f"[fleet] may grow to {most} of {gpus}, and {have}; add hosts, or lower the most replicas"
    return None
