"""Starts and ends workers on a list of hosts, each of which has an agent. Knows hosts and agents, not what workers compute.

The agents dial us: started over ssh, or by a person with the command that we print. An agent that is gone takes its workers with
it; the next replica that is wanted there starts another one over ssh, or waits for the person. A host that ssh brings no agent
from is out of the fleet, and dialled at longer and longer intervals until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

from squall.core.types import ReplicaId
from squall.errors import ConfigError, HostLost, PeerLost, ReplicaFailed
from squall.launch_tables import Launcher, Machine
from squall.live.agents import MAX_LINE, SILENCE_S, Answer, Welcome, Wire, Wish, meet_agent
from squall.live.launch import START_TIMEOUT_S, Place
from squall.live.ssh import SshCommand
from squall.live.transport.frames import proof

STOP_S = 15.0
"""A worker may take a while to end, and its host to be heard."""

REMIND_S = 30.0
"""How often a person is told that a host has no agent yet."""

FIRST_RETRY_S = 2.0
LAST_RETRY_S = 300.0
"""A host that is out is dialled again after the first, then after twice as long, and so on up to the last."""

TRIES = 5
"""Where no host has come after so many, a minute after the first, something is wrong that time does not mend."""


class Watch(Protocol):
    """Who wants to know which hosts there are. Hosts are numbered as in the table; so are their nodes in the fleet's plan."""

    def host_out(self, host: int) -> None: ...
    def host_back(self, host: int) -> None: ...
    def no_host(self, why: str) -> None:
        """None has ever come, however often it was tried."""
        ...


class HostsLauncher:
    """See `FleetLauncher`.

    Args:
        table: [launcher].
        config: the resolved configuration, as text.
        gpus: devices of one replica.
        shared: all replicas of a host in one process.
        say: tells a person what to run, one line a host.

    Attributes:
        watch: hears of hosts that go and come; nobody by default.
        address: "host:port" where agents reach us.
        token: what all agents and workers of the fleet know.

    Raises ConfigError where we cannot listen there.
    """

    def __init__(self, table: Launcher, config: str, gpus: int, *, shared: bool, say: Callable[[str], None]) -> None:
        self._table = table
        self._config = config
        self._shared = shared
        self._say = say
        self.token = secrets.token_hex(32)
        self._listener = _listen(table.listen)
        port = self._listener.getsockname()[1]
        self.address = f"{table.advertise or table.listen.rpartition(':')[0]}:{port}"
        per_host = table.slots_per_host(gpus)
        hosts = [_Host(at, machine, places_of(machine, at, per_host, gpus)) for at, machine in enumerate(table.hosts)]
        self._hosts = {host.machine.hostname: host for host in hosts}
        self._at = {place.replica: host for host in self._hosts.values() for place in host.places}
        self.watch: Watch | None = None
        self._server: asyncio.Task[None] | None = None
        self._meeting: set[asyncio.Task[None]] = set()
        self._dialling: set[asyncio.Task[None]] = set()  # hosts that are out

    def prepare(self, replicas: Iterable[ReplicaId]) -> None:
        """Start the agents of these hosts; their processes come up as soon as the agents are heard."""
        far = next((host.machine.hostname for host in self._hosts.values() if not _is_here(host.machine.reached_at)), None)
        if far is not None and _is_here(self.address.rpartition(":")[0]):
            self._say(
                f"{far} cannot dial {self.address}: set launcher.listen or launcher.advertise to what it calls this machine"
            )
        for replica in replicas:
            self._at[replica].wanted.append(replica)
        for host in self._hosts.values():
            self._call(host)

    def attend(self) -> None:
        if self._server is None:
            self._server = asyncio.create_task(self._listen_for_agents())

    async def start(self, replica: ReplicaId) -> str:
        self.attend()
        host = self._at[replica]
        self._call(host)
        agent = await (self._reached(host) if self._table.launch == "ssh" else self._until_called(host))
        return await agent.ask("start", replica, timeout_s=START_TIMEOUT_S + SILENCE_S)

    async def stop(self, replica: ReplicaId) -> None:
        await self._tell(self._at[replica], "stop", replica)

    async def kill(self, address: str) -> None:
        for host in self._hosts.values():
            if address in host.addresses:
                await self._tell(host, "kill", address=address)

    async def close(self) -> None:
        """The agents see the end of their connections, and end with their workers."""
        tasks = [task for task in (self._server, *self._meeting, *self._dialling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        await asyncio.gather(*(asyncio.to_thread(host.end, STOP_S) for host in self._hosts.values()))

    def kill_all(self) -> None:
        self._listener.close()
        for host in self._hosts.values():
            host.end(0.0)

    # -- agents

    def _call(self, host: _Host) -> None:
        """Start its agent, or have it started, unless that has been done."""
        if host.called and not (self._table.launch == "ssh" and host.is_gone):
            return
        host.called = True
        command = [
            self._table.python or sys.executable,
            "-m",
            "squall.live.agent",
            "--head",
            self.address,
            "--host",
            host.machine.hostname,
        ]
        if self._table.launch == "print":
            self._say(f"on {host.machine.hostname}: SQUALL_TOKEN={self.token} {shlex.join(command)}")
            return
        host.end(0.0)
        name = host.machine.hostname
        host.command = SshCommand(name, [*command, "--stdin"], self.token, lambda line: self._say(f"{name}: {line}"))

    async def _reached(self, host: _Host) -> _Agent:
        """Raises HostLost where there is no agent, and from then on there is no such host, until there is."""
        if host.is_out:
            raise HostLost(f"{host.machine.hostname} cannot be reached")
        try:
            return await host.agent(START_TIMEOUT_S)
        except ReplicaFailed as error:
            if not host.is_out:
                host.num_tries = 1
                self._say(f"{error}; it is left out, and dialled again, until then")
                if self.watch is not None:
                    self.watch.host_out(host.number)
                task = asyncio.create_task(self._redial(host))
                self._dialling.add(task)
                task.add_done_callback(self._dialling.discard)
            raise HostLost(str(error)) from None

    async def _redial(self, host: _Host) -> None:
        """Until it is back."""
        wait_s = FIRST_RETRY_S
        while True:
            host.end(0.0)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_RETRY_S)
            self._call(host)
            try:
                await host.agent(START_TIMEOUT_S)
            except ReplicaFailed as error:
                host.num_tries += 1
                if all(each.num_tries >= TRIES for each in self._hosts.values()) and self.watch is not None:
                    self.watch.no_host(str(error))
                continue
            host.num_tries = 0
            self._say(f"{host.machine.hostname} is back")
            if self.watch is not None:
                self.watch.host_back(host.number)
            return

    async def _until_called(self, host: _Host) -> _Agent:
        """A person has to start it, and is told again that nobody has."""
        while True:
            try:
                return await asyncio.wait_for(host.agent(None), REMIND_S)
            except TimeoutError:
                self._say(f"{host.machine.hostname} has no agent yet; run the command above there")

    async def _listen_for_agents(self) -> None:
        def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._live(Wire(reader, writer)))
            self._meeting.add(task)
            task.add_done_callback(self._meeting.discard)

        server = await asyncio.start_server(met, sock=self._listener, limit=MAX_LINE)
        async with server:
            await server.serve_forever()

    async def _live(self, wire: Wire) -> None:
        """From an agent's first word to its loss."""
        agent = None
        try:
            hello = await meet_agent(wire, self.token)
            host = self._hosts.get(hello.host)
            if host is None or host.present is not None:
                raise PeerLost(f"an agent of {hello.host!r} is not expected")
            groups = [tuple(place.replica for place in host.places)] if self._shared else [(p.replica,) for p in host.places]
            ours = proof(self.token, "server", hello.nonce)
            wire.say(Welcome(ours, self._config, tuple(host.places), tuple(groups), self._table.warm))
            agent = _Agent(wire, host)
            host.meet(agent)
            await agent.listen()
        except PeerLost as error:
            if agent is not None:
                self._say(f"the agent of {agent.host.machine.hostname} is gone: {error}")
        finally:
            if agent is not None:
                agent.lose()
            wire.close()

    async def _tell(self, host: _Host, verb: str, replica: ReplicaId = 0, address: str = "") -> None:
        """To an agent that is gone, nothing: so are its workers."""
        if (agent := host.present) is not None:
            with contextlib.suppress(ReplicaFailed):
                await agent.ask(verb, replica, address, timeout_s=STOP_S)


class _Host:
    """A host, and its agent, if there is one.

    Attributes:
        num_tries: in vain and in a row; 0 where it is not out.
        command: that was to bring the agent, over ssh.
    """

    def __init__(self, number: int, machine: Machine, places: Sequence[Place]) -> None:
        self.number = number
        self.machine = machine
        self.places = tuple(places)
        self.called = False
        self.wanted: list[ReplicaId] = []
        self.num_tries = 0
        self.command: SshCommand | None = None
        self.present: _Agent | None = None
        self.addresses: set[str] = set()
        self._met = asyncio.Event()
        self._lost = False

    @property
    def is_gone(self) -> bool:
        """It was started, and has ended, or was here and is lost: one that hangs does not end by itself."""
        return self.command is not None and self.present is None and (self._lost or self.command.has_ended)

    @property
    def is_out(self) -> bool:
        return self.num_tries > 0

    def meet(self, agent: _Agent) -> None:
        self.present = agent
        if self.command is not None:
            self.command.speaks = True
        self._met.set()
        for replica in self.wanted:
            agent.wish("prepare", replica)
        self.wanted.clear()

    def part(self) -> None:
        self.present = None
        self._lost = True
        self._met.clear()

    async def agent(self, timeout_s: float | None) -> _Agent:
        """Raises ReplicaFailed where none comes within the time, or the process that was to bring it ends."""
        met = asyncio.create_task(self._met.wait())
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            while not met.done() and not self.is_gone and (timeout_s is None or loop.time() < began + timeout_s):
                await asyncio.wait([met], timeout=0.1)
        finally:
            met.cancel()
        if self.present is not None:
            return self.present
        how = (
            f"none came within {timeout_s:g} s"
            if self.command is None or not self.command.has_ended
            else self.command.last_words()
        )
        name = self.machine.hostname
        raise ReplicaFailed(f"{name} has no agent: {how}; see that `ssh {name}` works, and that squall is there")

    def end(self, patience_s: float) -> None:
        """See that the process that brought the agent is gone; over ssh the agent goes with it."""
        self._lost = False
        if self.command is not None:
            self.command.end(patience_s)


class _Agent:
    """An agent that has proved itself."""

    def __init__(self, wire: Wire, host: _Host) -> None:
        self.host = host
        self._wire = wire
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[str]] = {}

    async def listen(self) -> None:
        """Until it is gone; raises PeerLost then."""
        beating = asyncio.create_task(self._wire.beat())
        try:
            while True:
                line = await self._wire.hear()
                if isinstance(line, Answer) and (asked := self._asked.pop(line.number, None)) is not None and not asked.done():
                    try:
                        asked.set_result(line.result())
                    except (ConfigError, ReplicaFailed) as error:
                        asked.set_exception(error)
        finally:
            beating.cancel()

    def wish(self, verb: str, replica: ReplicaId = 0, address: str = "") -> int:
        """Without waiting for an answer."""
        number = next(self._numbers)
        self._wire.say(Wish(number, verb, replica, address))  # type: ignore[arg-type]
        return number

    async def ask(self, verb: str, replica: ReplicaId = 0, address: str = "", *, timeout_s: float) -> str:
        """Raises as `Launcher.start`."""
        number = self.wish(verb, replica, address)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            found: str = await asyncio.wait_for(asked, timeout_s)
        except TimeoutError:
            raise ReplicaFailed(f"{self.host.machine.hostname} did not {verb} replica {replica} within {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)
        if verb == "start":
            self.host.addresses.add(found)
        return found

    def lose(self) -> None:
        self.host.part()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ReplicaFailed(f"the agent of {self.host.machine.hostname} is gone"))


def places_of(machine: Machine, at: int, per_host: int, gpus: int) -> list[Place]:
    """Of the replicas of the host that is number `at`: slots are numbered host by host."""
    places = []
    for slot in range(per_host):
        mine = slice(slot * gpus, (slot + 1) * gpus)
        places.append(Place(at * per_host + slot, machine.reached_at, machine.nics[mine], machine.devices[mine]))
    return places


def _is_here(address: str) -> bool:
    """It means this machine, whoever asks."""
    return address.startswith("127.") or address in ("localhost", "::1", "[::1]")


def _listen(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        if not (port.isdecimal() and int(port) < 1 << 16):  # the resolver takes it modulo 65536
            raise ValueError("no port")
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"launcher.listen = {listen!r} cannot be used ({error}); expected host:port of this machine") from None
    return listener
