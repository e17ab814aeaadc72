"""What a head and the agents on its hosts say to each other: lines of JSON over one TCP connection. Knows no process.

Both prove that they know the fleet's token, which does not cross the connection, before anything else is said. Each says that it
lives every two seconds; who is silent for ten is lost, and an agent without its head ends with all its workers.
"""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from squall.core.types import ReplicaId
from squall.errors import ConfigError, PeerLost, ReplicaFailed, SquallError
from squall.live.launch import Place
from squall.live.transport.frames import nonce, proof, proves

SILENCE_S = 10.0
BEAT_S = 2.0
MAX_LINE = 4 << 20


class Challenge(Struct, frozen=True, tag=True):
    nonce: bytes


class Hello(Struct, frozen=True, tag=True):
    """An agent on `host`; `nonce` is for the head to prove itself."""

    host: str
    proof: bytes
    nonce: bytes


class Welcome(Struct, frozen=True, tag=True):
    """The resolved configuration, and the replicas that may run on this host; those of a group share a process."""

    proof: bytes
    config: str
    places: tuple[Place, ...]
    groups: tuple[tuple[ReplicaId, ...], ...]
    warm: int = 0


class Refused(Struct, frozen=True, tag=True):
    why: str


class Beat(Struct, frozen=True, tag=True):
    """I live."""


class Wish(Struct, frozen=True, tag=True):
    """What the head wants done; each is answered once."""

    number: int
    verb: Literal["prepare", "start", "stop", "kill"]
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
        return cls(number, error=str(error), is_config=isinstance(error, ConfigError))


Line = Challenge | Hello | Welcome | Refused | Beat | Wish | Answer

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
                data = await asyncio.wait_for(self._reader.readline(), silence_s)
            except TimeoutError:
                raise PeerLost(f"no sign of life for {silence_s:g} s") from None
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

    async def expect(self, kind: type[T]) -> T:
        """Raises PeerLost where something else is said."""
        line = await self.hear()
        if isinstance(line, Refused):
            raise PeerLost(f"it refuses: {line.why}")
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
    """The head's side of the greeting, up to the welcome. Raises PeerLost for a stranger, who has been told so."""
    challenge = nonce()
    wire.say(Challenge(challenge))
    hello = await wire.expect(Hello)
    if not proves(hello.proof, token, "client", challenge):
        wire.say(Refused("wrong token; use the command of this run"))
        raise PeerLost(f"{hello.host} does not know the token")
    return hello


async def meet_head(wire: Wire, host: str, token: str) -> Welcome:
    """The agent's side. Raises PeerLost where it is refused, or the other end is not the head of this token."""
    challenge = await wire.expect(Challenge)
    ours = nonce()
    wire.say(Hello(host, proof(token, "client", challenge.nonce), ours))
    welcome = await wire.expect(Welcome)
    if not proves(welcome.proof, token, "server", ours):
        raise PeerLost("it does not know the token, so it is not our head")
    return welcome
