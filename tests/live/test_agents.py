"""What head and agents say to each other before either believes the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from squall.errors import PeerLost, PeerRefused
from squall.live import agents
from squall.live.agents import MAX_WORD, Beat, Challenge, Hello, Refused, Welcome, Wire, meet_agent, meet_head
from squall.live.transport.frames import proof

TOKEN = "ours"


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Wire, Wire]]:
    """The head's end and the other one's."""
    arrived: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *ends: arrived.set_result(Wire(*ends)), "127.0.0.1", 0, limit=MAX_WORD)
    async with server:
        other = Wire(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        head = await arrived
        try:
            yield head, other
        finally:
            head.close()
            other.close()


async def test_both_prove_themselves() -> None:
    async with connected() as (head, agent):
        meeting = asyncio.create_task(meet_head(agent, "alpha", TOKEN, "a1", "fleet", 2))
        hello = await meet_agent(head, TOKEN)
        assert (hello.host, hello.agent, hello.fleet, hello.num_workers) == ("alpha", "a1", "fleet", 2)
        welcome = Welcome(proof(TOKEN, "server", hello.nonce), (), fleet="fleet", outlive_s=5.0)
        head.say(welcome)
        assert await meeting == welcome


async def test_a_head_that_does_not_know_the_token_is_not_believed() -> None:
    async with connected() as (head, agent):
        meeting = asyncio.create_task(meet_head(agent, "alpha", TOKEN, "a1"))
        head.say(Challenge(b"any"))
        hello = await head.expect(Hello)
        head.say(Welcome(proof("guess", "server", hello.nonce), ()))
        with pytest.raises(PeerLost, match="does not know the token, so it is not our head"):
            await meeting


async def test_an_agent_of_another_version_is_refused_and_both_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (head, agent):
        challenge = asyncio.create_task(meet_agent(head, TOKEN))
        nonce = (await agent.expect(Challenge)).nonce
        agent.say(Hello("alpha", proof(TOKEN, "client", nonce), b"any", version="0.0.1"))
        with pytest.raises(PeerRefused, match=r"it is squall 0\.0\.1, this is squall .*; install the same there"):
            await challenge
        with pytest.raises(PeerRefused, match=r"it is squall .*, this is squall 0\.0\.1; install the same"):
            await agent.expect(Welcome)


async def test_a_stranger_is_refused_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (head, stranger):
        meeting = asyncio.create_task(meet_agent(head, TOKEN))
        stranger.say(Hello("x" * 1000 + "\n", b"guess", b"any"))
        with pytest.raises(PeerRefused, match=r"^'x{100}' does not know the token$"):
            await meeting
        assert isinstance(await stranger.expect(Challenge), Challenge)
        assert await stranger.hear() == Refused("wrong token; use the command of this run")


async def test_of_a_stranger_no_long_line_is_read() -> None:
    async with connected() as (head, stranger):
        meeting = asyncio.create_task(meet_agent(head, TOKEN))
        stranger.say(Hello("x" * (3 * MAX_WORD), b"guess", b"any"))
        with pytest.raises(PeerLost, match="the connection broke"):
            await meeting


async def test_a_stranger_that_only_lives_is_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "SILENCE_S", 0.3)
    monkeypatch.setattr(agents, "BEAT_S", 0.05)
    async with connected() as (head, stranger):
        beating = asyncio.create_task(stranger.beat())
        with pytest.raises(PeerLost, match=r"no greeting within 0\.3 s"):
            await asyncio.wait_for(meet_agent(head, TOKEN), 10)
        beating.cancel()


async def test_what_makes_no_sense_ends_the_connection() -> None:
    async with connected() as (head, other):
        other._writer.write(msgspec.json.encode(Beat()) + b"\nnonsense\n")
        with pytest.raises(PeerLost, match="said what makes no sense"):
            await head.hear()
