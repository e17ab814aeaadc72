"""A host of `[[launcher.hosts]]` and its agent, as the head sees them. Knows no process but the ssh that brings an agent."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from itertools import count
from time import monotonic

from msgspec import Struct

from squall.core.types import ReplicaId
from squall.errors import ConfigError, ReplicaFailed
from squall.launch_tables import Machine
from squall.live.agents import Answer, Deployed, Goodbye, Wire, Wish
from squall.live.launch import Place
from squall.live.ssh import SshCommand

POLL_S = 0.1

Slot = tuple[int, ReplicaId]
"""A replica of the model with this number."""


class Model(Struct, frozen=True):
    """What the hosts must know of a model.

    Attributes:
        config: resolved, as text.
        gpus: devices of one replica.
        shared: all replicas of a host in one process.
        name: tells it from the others.
        warm: processes that stand ready on each host.
    """

    config: str
    gpus: int
    shared: bool = False
    name: str = ""
    warm: int = 0


class RemoteHost:
    """A host, and its agent, if there is one.

    Args:
        number: its place among the hosts, by which slots are numbered.
        machine: as in the table.
        models: whose workers may run there; the number of each is its place among them.

    Attributes:
        num_tries: in vain and in a row; 0 where it is not out.
        called: somebody or something was told to start an agent.
        reminded: they were told again, since the latest one was here.
        command: that was to bring the agent, over ssh.
        prepared: replicas whose processes are to come up as soon as there is an agent.
        started: replicas that we count on, and the addresses of their workers ("" where it is not known yet).
    """

    def __init__(self, number: int, machine: Machine, models: Sequence[Model]) -> None:
        self.number = number
        self.machine = machine
        self.num_tries = 0
        self.called = False
        self.reminded = False
        self.command: SshCommand | None = None
        self._models = tuple(models)
        self._places = [_places(machine, number, model.gpus) for model in models]
        self.prepared: list[Slot] = []
        self.started: dict[Slot, str] = {}
        self.present: RemoteAgent | None = None
        self._met = asyncio.Event()
        self._lost = False
        self._expected_until = -math.inf

    @property
    def name(self) -> str:
        return self.machine.hostname

    @property
    def slots(self) -> list[Slot]:
        return [(number, place.replica) for number, places in enumerate(self._places) for place in places]

    def deployed(self) -> tuple[Deployed, ...]:
        """What its agent is to have workers of."""
        told = []
        for number, (model, places) in enumerate(zip(self._models, self._places, strict=True)):
            replicas = tuple(place.replica for place in places)
            groups = (replicas,) if model.shared else tuple((replica,) for replica in replicas)
            wanted = tuple(dict.fromkeys(replica for at, replica in (*self.started, *self.prepared) if at == number))
            told.append(Deployed(model.config, places, groups, model.name, model.warm, wanted))
        return tuple(told)

    @property
    def is_gone(self) -> bool:
        """Its agent was started, and has ended, or was here and is lost: one that hangs does not end by itself."""
        return self.command is not None and self.present is None and (self._lost or self.command.has_ended)

    @property
    def is_out(self) -> bool:
        return self.num_tries > 0

    # -- an agent that dials by itself

    def expect(self, seconds: float) -> None:
        """One that runs already may dial within so long: until then none is started."""
        self._expected_until = monotonic() + seconds

    @property
    def is_expected(self) -> bool:
        return self.present is None and monotonic() < self._expected_until

    async def as_expected(self) -> None:
        """Until it has come, or nobody expects it any more."""
        while self.is_expected:
            await self.met_within(min(POLL_S, self._expected_until - monotonic()))

    # -- its coming and going

    def meet(self, agent: RemoteAgent) -> None:
        self.present = agent
        self.reminded = False
        if self.command is not None:
            self.command.speaks = True
        self._met.set()
        for slot in self.prepared:
            agent.wish("prepare", slot)
        self.prepared.clear()

    def part(self, agent: RemoteAgent) -> None:
        """Unless it has dialled again, and its old connection is what ended."""
        if self.present is agent:
            self.present = None
            self._lost = True
            self._met.clear()

    async def met_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._met.wait(), seconds)
        return self.present is not None

    async def agent(self, timeout_s: float) -> RemoteAgent:
        """Raises ReplicaFailed where none comes within the time, or the process that was to bring it ends."""
        deadline = monotonic() + timeout_s
        while self.present is None and not self.is_gone and monotonic() < deadline:
            await self.met_within(POLL_S)
        if self.present is not None:
            return self.present
        how = (
            f"none came within {timeout_s:g} s"
            if self.command is None or not self.command.has_ended
            else self.command.last_words()
        )
        raise ReplicaFailed(f"{self.name} has no agent: {how}; see that `ssh {self.name}` works, and that squall is there")

    def end(self, patience_s: float) -> None:
        """See that the process that brought the agent is gone. Over ssh the agent goes with it, unless it outlives us."""
        self._lost = False
        if self.command is not None:
            self.command.end(patience_s)


class RemoteAgent:
    """An agent that has proved itself.

    Args:
        wire: to it.
        host: that it is on.
        name: that it has given itself.

    Attributes:
        gone: once it is.
    """

    def __init__(self, wire: Wire, host: RemoteHost, name: str) -> None:
        self.host = host
        self.name = name
        self.gone = asyncio.Event()
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
                        asked.set_exception(type(error)(f"{self.host.name}: {error}"))
        finally:
            beating.cancel()

    def wish(self, verb: str, slot: Slot, address: str = "") -> int:
        """Without waiting for an answer."""
        number = next(self._numbers)
        self._wire.say(Wish(number, verb, *slot, address))  # type: ignore[arg-type]
        return number

    async def ask(self, verb: str, slot: Slot, address: str = "", *, timeout_s: float) -> str:
        """Raises as `Launcher.start`, ReplicaFailed where the agent is gone."""
        number = self.wish(verb, slot, address)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            found: str = await asyncio.wait_for(asked, timeout_s)
        except TimeoutError:
            raise ReplicaFailed(f"{self.host.name} did not {verb} replica {slot[1]} within {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)
        return found

    def dismiss(self) -> None:
        """We end, and nobody comes after us."""
        self._wire.say(Goodbye())

    def replaced(self) -> None:
        """It has dialled again."""
        self._wire.close()

    def lose(self) -> None:
        self.gone.set()
        self.host.part(self)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ReplicaFailed(f"the agent of {self.host.name} is gone"))


def _places(machine: Machine, number: int, gpus: int) -> tuple[Place, ...]:
    """Of a model's replicas on the host with this number: slots are numbered host by host."""
    places = []
    per_host = len(machine.devices) // gpus
    for slot in range(per_host):
        mine = slice(slot * gpus, (slot + 1) * gpus)
        places.append(Place(number * per_host + slot, machine.reached_at, machine.nics[mine], machine.devices[mine]))
    return tuple(places)
