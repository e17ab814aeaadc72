"""Starts and ends workers on a list of hosts, each of which has an agent. Knows hosts and agents, not what workers compute.

Several models share the hosts and their agents; what is said of each model goes by its number among them.

The agents dial us: started over ssh, or by a person with the command that we print. An agent that is gone takes its workers with
it; the next replica that is wanted there starts another one over ssh, or waits for the person. With a `Roster` agents outlive us,
and an agent that is lost, or that an earlier head had, is given a moment to dial again before another one is started. A host that
ssh brings no agent from is out of the fleet, and dialled at longer and longer intervals until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from squall.core.types import ReplicaId
from squall.errors import ConfigError, HostLost, PeerLost, PeerRefused, ReplicaFailed
from squall.launch_tables import Launcher
from squall.live.agents import MAX_WORD, SILENCE_S, Hello, Refused, Welcome, Wire, meet_agent, refuse
from squall.live.process import START_TIMEOUT_S
from squall.live.remote import Model, RemoteAgent, RemoteHost, Slot
from squall.live.roster import Roster
from squall.live.ssh import SshCommand
from squall.live.transport.frames import proof
from squall.quantities import counted

STOP_S = 15.0
"""A worker may take a while to end, and its host to be heard."""

REDIAL_S = 5.0
"""How long an agent may take to dial again: it tries every two seconds."""

REMIND_S = 30.0
"""After how long a person is told that a host has no agent yet: once, until one has come and gone."""

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


class FleetOnHosts:
    """The workers of one model: see `FleetLauncher`. They are started, and end, by the one agent that a host has for all models.

    Attributes:
        watch: hears of hosts that go and come; nobody by default.
        token: what all agents and workers know.
    """

    def __init__(self, launcher: HostsLauncher, number: int) -> None:
        self.watch: Watch | None = None
        self.token = launcher.token
        self._launcher = launcher
        self._number = number

    def prepare(self, replicas: Iterable[ReplicaId]) -> None:
        self._launcher.prepare((self._number, replica) for replica in replicas)

    def attend(self) -> None:
        self._launcher.attend()

    async def start(self, replica: ReplicaId) -> str:
        return await self._launcher.start((self._number, replica))

    async def stop(self, replica: ReplicaId) -> None:
        await self._launcher.stop((self._number, replica))

    async def kill(self, address: str) -> None:
        await self._launcher.kill(address)

    async def close(self) -> None:
        """Of all models: they end together."""
        await self._launcher.close()

    def kill_all(self) -> None:
        self._launcher.kill_all()


class HostsLauncher:
    """The hosts, and what the fleets that share them ask of their agents.

    Args:
        table: [launcher].
        models: whose workers run there; the number of each is its place among them.
        say: tells a person what to run, one line a host.
        fleet: all that two heads must have in common for one to take over from the other.
        roster: agents and workers outlive us, and those of an earlier head are taken over; they end with us when None.

    Attributes:
        fleets: of each model the launcher of its workers.
        address: "host:port" where agents reach us.
        token: what all agents and workers know.

    Raises ConfigError where we cannot listen there.
    """

    def __init__(
        self, table: Launcher, models: Sequence[Model], *, say: Callable[[str], None], fleet: str = "",
        roster: Roster | None = None,
    ) -> None:  # fmt: skip
        self._table = table
        self._models = tuple(models)
        self._say = say
        self._fleet = fleet
        self._roster = roster
        self.token = roster.token if roster is not None else secrets.token_hex(32)
        self._listener = _listen(table.listen)
        port = self._listener.getsockname()[1]
        self.address = f"{table.advertise or table.listen.rpartition(':')[0]}:{port}"
        hosts = [RemoteHost(number, machine, models) for number, machine in enumerate(table.hosts)]
        self._hosts = {host.name: host for host in hosts}
        self._at = {slot: host for host in hosts for slot in host.slots}
        self.fleets = [FleetOnHosts(self, number) for number in range(len(models))]
        self._server: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._meeting: set[asyncio.Task[None]] = set()
        self._dialling: set[asyncio.Task[None]] = set()  # hosts that are out
        self._expected = [host for host in hosts if roster is not None and host.name in roster.hosts]
        for host in self._expected:
            host.expect(math.inf)
        if roster is not None:
            roster.note()  # before anybody is told the token
        far = next((host.name for host in hosts if not _is_here(host.machine.reached_at)), None)
        if far is not None and _is_here(self.address.rpartition(":")[0]):
            say(f"{far} cannot dial {self.address}: set launcher.listen or launcher.advertise to what it calls this machine")

    def prepare(self, slots: Iterable[Slot]) -> None:
        """Start the agents; these processes come up as soon as they are heard."""
        for slot in slots:
            self._at[slot].prepared.append(slot)
        for host in self._hosts.values():
            if not host.is_expected:
                self._call(host)

    def attend(self) -> None:
        if self._server is None:
            self._server = asyncio.create_task(self._listen_for_agents())
            for host in self._expected:
                host.expect(REDIAL_S)

    async def start(self, slot: Slot) -> str:
        self.attend()
        host = self._at[slot]
        host.started.setdefault(slot, "")
        agent = await (self._reached(host) if self._table.launch == "ssh" else self._until_called(host))
        address = await agent.ask("start", slot, timeout_s=START_TIMEOUT_S + SILENCE_S)
        host.started[slot] = address
        self._note_places()
        return address

    async def stop(self, slot: Slot) -> None:
        host = self._at[slot]
        host.started.pop(slot, None)
        await self._tell(host, "stop", slot)
        self._note_places()

    async def kill(self, address: str) -> None:
        for host in self._hosts.values():
            here = [slot for slot, at in host.started.items() if at == address]
            for slot in here:
                del host.started[slot]
            if here:
                await self._tell(host, "kill", here[0], address)
                self._note_places()

    async def close(self) -> None:
        """The agents are told, and end with their workers. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        present = [host.present for host in self._hosts.values() if host.present is not None]
        for agent in present:
            agent.dismiss()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(agent.gone.wait() for agent in present)), STOP_S)
        tasks = [task for task in (self._server, *self._meeting, *self._dialling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        await asyncio.gather(*(asyncio.to_thread(host.end, STOP_S) for host in self._hosts.values()))
        if self._roster is not None:
            self._roster.clear()

    def kill_all(self) -> None:
        self._listener.close()
        for host in self._hosts.values():
            host.end(0.0)

    def _note_places(self) -> None:
        """Another head may then begin where the workers are."""
        if self._roster is not None:
            slots = sorted(slot for host in self._hosts.values() for slot, address in host.started.items() if address)
            of_each = {model.name: number for number, model in enumerate(self._models)}
            self._roster.note_places(
                {name: tuple(replica for at, replica in slots if at == number) for name, number in of_each.items()}
            )

    @property
    def _watches(self) -> list[Watch]:
        return [fleet.watch for fleet in self.fleets if fleet.watch is not None]

    # -- agents

    def _call(self, host: RemoteHost) -> None:
        """Start its agent, or have it started, unless it is there or that has been done."""
        if host.present is not None or (host.called and not (self._table.launch == "ssh" and host.is_gone)):
            return
        host.called = True
        command = [
            self._table.python or sys.executable,
            "-m",
            "squall.live.agent",
            "--head",
            self.address,
            "--host",
            host.name,
        ]
        if self._table.launch == "print":
            self._say(f"on {host.name}: SQUALL_TOKEN={self.token} {shlex.join(command)}")
            return
        host.end(0.0)
        name = host.name
        host.command = SshCommand(name, [*command, "--stdin"], self.token, lambda line: self._say(f"{name}: {line}"))

    async def _reached(self, host: RemoteHost) -> RemoteAgent:
        """Raises HostLost where there is no agent, and from then on there is no such host, until there is."""
        if host.is_out:
            raise HostLost(f"{host.name} cannot be reached")
        await host.as_expected()
        self._call(host)
        try:
            return await host.agent(START_TIMEOUT_S)
        except ReplicaFailed as error:
            if not host.is_out:
                host.num_tries = 1
                self._say(f"{error}; it is left out, and dialled again, until then")
                for watch in self._watches:
                    watch.host_out(host.number)
                task = asyncio.create_task(self._redial(host))
                self._dialling.add(task)
                task.add_done_callback(self._dialling.discard)
            raise HostLost(str(error)) from None

    async def _redial(self, host: RemoteHost) -> None:
        """Until it is back."""
        wait_s = FIRST_RETRY_S
        while not await self._is_back(host, wait_s):
            wait_s = min(2 * wait_s, LAST_RETRY_S)
        host.num_tries = 0
        self._say(f"{host.name} is back")
        for watch in self._watches:
            watch.host_back(host.number)

    async def _is_back(self, host: RemoteHost, wait_s: float) -> bool:
        """By itself within so long, or over ssh then."""
        host.end(0.0)
        if await host.met_within(wait_s):
            return True
        self._call(host)
        try:
            await host.agent(START_TIMEOUT_S)
        except ReplicaFailed as error:
            host.num_tries += 1
            if all(each.num_tries >= TRIES for each in self._hosts.values()):
                for watch in self._watches:
                    watch.no_host(str(error))
            return False
        return True

    async def _until_called(self, host: RemoteHost) -> RemoteAgent:
        """A person has to start it, and is told again that nobody has: once, however many replicas wait for it."""
        await host.as_expected()
        self._call(host)
        while not await host.met_within(REMIND_S):
            if not host.reminded:
                host.reminded = True
                self._say(f"{host.name} has no agent yet; run the command above there")
        assert host.present is not None
        return host.present

    async def _listen_for_agents(self) -> None:
        def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._live(Wire(reader, writer)))
            self._meeting.add(task)
            task.add_done_callback(self._meeting.discard)

        server = await asyncio.start_server(met, sock=self._listener, limit=MAX_WORD)
        async with server:
            await server.serve_forever()

    async def _live(self, wire: Wire) -> None:
        """From an agent's first word to its loss."""
        agent = None
        try:
            hello = await meet_agent(wire, self.token)
            host = self._host_of(wire, hello)
            if hello.fleet not in ("", self._fleet):
                await self._send_away(wire, host)
                return
            agent = RemoteAgent(wire, host, hello.agent)
            self._welcome(wire, agent, hello)
            await agent.listen()
        except PeerRefused as error:
            self._say(f"an agent was refused: {error}")
        except PeerLost as error:
            if agent is not None and agent.host.present is agent and self._closing is None:
                self._say(f"the agent of {agent.host.name} is gone: {error}")
                if self._roster is not None:
                    agent.host.expect(REDIAL_S)
        finally:
            if agent is not None:
                agent.lose()
            wire.close()

    def _host_of(self, wire: Wire, hello: Hello) -> RemoteHost:
        """Raises PeerRefused where no agent of that host, or another one, is wanted."""
        host = self._hosts.get(hello.host)
        if host is None:
            refuse(wire, f"launcher.hosts has no {hello.host!r}")
        if self._closing is not None:
            refuse(wire, "it ends")
        if host.present is not None and host.present.name != hello.agent:
            refuse(wire, f"{hello.host} has an agent already")
        return host

    async def _send_away(self, wire: Wire, host: RemoteHost) -> None:
        """An agent of a head of another configuration. What its workers hold the next ones may need."""
        self._say(f"the agent of {host.name} served another configuration: it ends with its workers, and another one is started")
        wire.say(Refused("it serves another configuration now"))
        host.expect(STOP_S)
        await wire.ended(STOP_S)
        host.expect(0.0)

    def _welcome(self, wire: Wire, agent: RemoteAgent, hello: Hello) -> None:
        """Its first word from us, or its next one, when it has dialled again."""
        host, roster = agent.host, self._roster
        outlive_s = roster.outlive_s if roster is not None and roster.note(host.name) else 0.0
        wire.say(Welcome(proof(self.token, "server", hello.nonce), host.deployed(), self._fleet, outlive_s))
        if host.present is not None:
            host.present.replaced()
        if hello.fleet:
            self._say(f"the agent of {host.name} has dialled again: taken over with {counted(hello.num_workers, 'worker')}")
        host.meet(agent)

    async def _tell(self, host: RemoteHost, verb: str, slot: Slot, address: str = "") -> None:
        """To an agent that is gone, nothing: so are its workers."""
        if (agent := host.present) is not None:
            with contextlib.suppress(ReplicaFailed):
                await agent.ask(verb, slot, address, timeout_s=STOP_S)


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
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"launcher.listen = {listen!r} is in use, by another head?; end it, or use another port") from None
        raise ConfigError(f"launcher.listen = {listen!r} cannot be used ({error}); expected host:port of this machine") from None
    return listener
