"""What a head and the agents on its hosts say to each other: lines of JSON over one TCP connection. Knows no process.

Both prove that they know the fleet's token, which does not cross the connection, before anything else is said. Each says that it
lives every two seconds; who is silent for ten is lost. An agent whose head is lost ends with all its workers, or (`outlive_s`)
keeps them and dials again: the same head, whose network failed, or the next one. A head that ends says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from squall import __version__
from squall.core.types import ReplicaId
from squall.errors import ConfigError, PeerLost, PeerRefused, ReplicaFailed, SquallError
from squall.live.launch import Place
from squall.live.transport.frames import nonce, proof, proves
from squall.live.vigil import Vigil

SILENCE_S = 10.0
BEAT_S = 2.0

MAX_LINE = 4 << 20
"""Bytes that a head may say at once: a configuration."""

MAX_WORD = 64 << 10
"""Bytes that an agent may, who could be anybody before the greeting."""

MAX_ERROR = 2000
"""Characters of what went wrong."""


class Challenge(Struct, frozen=True, tag=True):
    nonce: bytes


class Hello(Struct, frozen=True, tag=True):
    """An agent on `host`; `nonce` is for the head to prove itself.

    Attributes:
        agent: the same whenever this agent dials.
        fleet: of the head that it had; nothing the first time.
        num_workers: that it still has of that one.
    """

    host: str
    proof: bytes
    nonce: bytes
    version: str = ""
    agent: str = ""
    fleet: str = ""
    num_workers: int = 0


class Deployed(Struct, frozen=True):
    """A model on this host: its resolved configuration, and the replicas that may run here; those of a group share a process.

    Attributes:
        name: of its folder, where there are several.
        warm: processes that stand ready.
        wanted: replicas that the head counts on, if they still run.
    """

    config: str
    places: tuple[Place, ...]
    groups: tuple[tuple[ReplicaId, ...], ...]
    name: str = ""
    warm: int = 0
    wanted: tuple[ReplicaId, ...] = ()


class Welcome(Struct, frozen=True, tag=True):
    """What the agent is to have workers of.

    Attributes:
        fleet: see `fleet_of`.
        outlive_s: how long workers wait for another head when this one is lost; 0 where they end with it.
    """

    proof: bytes
    deployed: tuple[Deployed, ...]
    fleet: str = ""
    outlive_s: float = 0.0


class Refused(Struct, frozen=True, tag=True):
    """To an agent that is not wanted, now or later: it ends with all its workers, and then the connection."""

    why: str


class Goodbye(Struct, frozen=True, tag=True):
    """The head ends, and nobody comes after it: as if refused."""


class Beat(Struct, frozen=True, tag=True):
    """I live."""


class Wish(Struct, frozen=True, tag=True):
    """What the head wants done; each is answered once. `model` is the number of a fleet in the welcome."""

    number: int
    verb: Literal["prepare", "start", "stop", "kill"]
    model: int = 0
    replica: ReplicaId = 0
    address: str = ""


class Answer(Struct, frozen=True, tag=True):
    """Of wish `number`: an address (or nothing), or what went wrong, and whether the configuration did."""

    number: int
    address: str = ""
    error: str | None = None
    is_config: bool = False

    def result(self) -> str:
        """Raises ConfigError, ReplicaFailed."""
        if self.error is not None:
            raise (ConfigError if self.is_config else ReplicaFailed)(self.error)
        return self.address

    @classmethod
    def failed(cls, number: int, error: SquallError) -> Answer:
        return cls(number, error=str(error)[:MAX_ERROR], is_config=isinstance(error, ConfigError))


Line = Challenge | Hello | Welcome | Refused | Goodbye | Beat | Wish | Answer

T = TypeVar("T", bound=Line)


class Wire:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, line: Line) -> None:
        """Never blocks; a broken connection shows when something is heard."""
        self._writer.write(msgspec.json.encode(line) + b"\n")

    async def hear(self, silence_s: float = SILENCE_S) -> Line:
        """The next line, signs of life left out. Raises PeerLost."""
        while True:
            try:
                data = await self._read(silence_s)
            except (OSError, ValueError) as error:
                raise PeerLost(f"the connection broke: {error}") from None
            if not data.endswith(b"\n"):
                raise PeerLost("the connection was closed")
            try:
                line: Line = msgspec.json.decode(data, type=Line)
            except msgspec.DecodeError as error:
                raise PeerLost(f"said what makes no sense: {error}") from None
            if not isinstance(line, Beat):
                return line

    async def _read(self, silence_s: float) -> bytes:
        reading = asyncio.ensure_future(self._reader.readline())
        watching = asyncio.ensure_future(Vigil(silence_s).over())
        try:
            await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise PeerLost(f"no sign of life for {silence_s:g} s")
            return reading.result()
        finally:
            reading.cancel()
            watching.cancel()

    async def ended(self, patience_s: float) -> None:
        """Once the other end has closed it, whatever it says until then."""
        with contextlib.suppress(PeerLost, TimeoutError):
            async with asyncio.timeout(patience_s):
                while True:
                    await self.hear(patience_s)

    async def expect(self, kind: type[T]) -> T:
        """Raises PeerRefused where it is refused, PeerLost where something else is said."""
        line = await self.hear()
        if isinstance(line, Refused):
            raise PeerRefused(line.why)
        if not isinstance(line, kind):
            raise PeerLost(f"said {type(line).__name__} instead of {kind.__name__}")
        return line

    async def beat(self) -> None:
        """For ever."""
        while True:
            self.say(Beat())
            await asyncio.sleep(BEAT_S)

    def close(self) -> None:
        self._writer.close()


async def meet_agent(wire: Wire, token: str) -> Hello:
    """The head's side of the greeting, up to the welcome.

    Raises PeerLost where nothing is proved, PeerRefused where it cannot be; whoever is there has been told so.
    """
    challenge = nonce()
    wire.say(Challenge(challenge))
    try:
        hello = await asyncio.wait_for(wire.expect(Hello), SILENCE_S)  # a stranger may say for ever that it lives
    except TimeoutError:
        raise PeerLost(f"no greeting within {SILENCE_S:g} s") from None
    if not proves(hello.proof, token, "client", challenge):
        refuse(wire, "wrong token; use the command of this run", f"{hello.host[:100]!r} does not know the token")
    if hello.version != __version__:
        here, there = f"squall {__version__}", f"squall {hello.version}" if hello.version else "an older squall"
        refuse(wire, f"it is {here}, this is {there}; install the same", f"it is {there}, this is {here}; install the same there")
    return hello


def refuse(wire: Wire, why: str, cause: str | None = None) -> NoReturn:
    """Raises PeerRefused, once the agent has been told."""
    wire.say(Refused(why))
    raise PeerRefused(cause or why)


async def meet_head(wire: Wire, host: str, token: str, agent: str, fleet: str = "", num_workers: int = 0) -> Welcome:
    """The agent's side. Raises PeerRefused where it is refused, PeerLost where the other end is not the head of this token."""
    challenge = await wire.expect(Challenge)
    ours = nonce()
    wire.say(Hello(host, proof(token, "client", challenge.nonce), ours, __version__, agent, fleet, num_workers))
    welcome = await wire.expect(Welcome)
    if not proves(welcome.proof, token, "server", ours):
        raise PeerLost("it does not know the token, so it is not our head")
    return welcome
