"""The head's end of one replica's session. Knows the wire and its deadlines, not what the messages mean.

A session is over when its stream ends, breaks, or is silent for longer than a heartbeat may take; its owner is told once, with
one line that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

import grpc

from squall.core.actions import AnyAction
from squall.core.events import AnyEvent, HandedOver
from squall.core.types import MachineId, ReplicaId, RequestId
from squall.errors import SquallError
from squall.live.activations import ActivationsOffer
from squall.live.engine.interface import Job, TokenOut
from squall.live.rpc import convert
from squall.live.rpc.convert import Peer, ReplicaLoad, WeightsMoved
from squall.live.rpc.generated import squall_pb2 as pb
from squall.live.rpc.service import OPTIONS, introduce, session_of
from squall.live.transport.kv import KvOffer
from squall.live.vigil import Vigil

SILENCE_S = 10.0
"""A replica that says nothing for so long is lost: a live one sends its load twice a second."""


class Listener(Protocol):
    """Who hears what a replica says. Called on the loop, in the order in which the replica spoke."""

    def heard(self, client: ReplicaClient, to: MachineId, event: AnyEvent) -> None: ...
    def handed_over(self, client: ReplicaClient, to: MachineId, event: HandedOver, jobs: Sequence[Job]) -> None: ...
    def tokens(self, client: ReplicaClient, tokens: Sequence[TokenOut]) -> None: ...
    def load(self, client: ReplicaClient, load: ReplicaLoad) -> None: ...
    def begun(self, client: ReplicaClient, requests: Sequence[RequestId]) -> None: ...
    def reachable(self, client: ReplicaClient, peer: Peer) -> None: ...
    def moved(self, client: ReplicaClient, moved: WeightsMoved) -> None: ...
    def offered(self, client: ReplicaClient, offer: KvOffer | ActivationsOffer) -> None: ...


class ReplicaClient:
    """One session with one replica.

    Args:
        replica: its id.
        listener: hears what comes.
        token: what all workers of the fleet know.
        silence_s: after how much silence the replica counts as lost.
        settled: the fleet begins with it (see `Open`).

    Attributes:
        was_stopped: at the end of the session this process had just stood still, which may be why it ended.
    """

    def __init__(
        self, replica: ReplicaId, listener: Listener, token: str, silence_s: float = SILENCE_S, *, settled: bool = False
    ) -> None:
        self.replica = replica
        self._token = token
        self._settled = settled
        self._listener = listener
        self._vigil = Vigil(silence_s)
        self._silence_s = silence_s
        self._outbox: asyncio.Queue[pb.ToReplica] = asyncio.Queue()
        self.was_stopped = False

    def send(
        self, message: AnyEvent | AnyAction, job: Job | None = None, peers: Sequence[Peer] = (), jobs: Sequence[Job] = ()
    ) -> None:
        """Put a message on the stream. Never blocks; what a broken stream loses, its owner learns of as a lost replica."""
        self._outbox.put_nowait(convert.to_replica(message, job, peers, jobs))

    def hand_on(self, offer: KvOffer | ActivationsOffer) -> None:
        """What another replica offers this one; as `send`."""
        message = convert.to_message(offer)
        kv = isinstance(offer, KvOffer)
        self._outbox.put_nowait(pb.ToReplica(kv_offer=message) if kv else pb.ToReplica(activations_offer=message))

    async def run(self, address: str) -> str:
        """Talk until the session is over, and say why it is."""
        loop = asyncio.get_running_loop()
        self._vigil.heard()
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            tasks = [loop.create_task(part) for part in (self._talk(channel), self._watch())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self.was_stopped = self._vigil.stood_still
                return _why(done)
            finally:
                await _end(tasks)

    async def _talk(self, channel: grpc.aio.Channel) -> str:
        loop = asyncio.get_running_loop()
        call = session_of(channel)(None, metadata=await introduce(channel, self._token))
        tasks = [loop.create_task(part) for part in (self._write(call), self._read(call))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return _why(done)
        finally:
            call.cancel()
            await _end(tasks)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.ToReplica, pb.FromReplica]) -> str:
        await call.write(pb.ToReplica(open=pb.Open(replica=self.replica, settled=self._settled)))
        while True:
            await call.write(await self._outbox.get())

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.ToReplica, pb.FromReplica]) -> str:
        async for message in call:
            self._vigil.heard()
            match message.WhichOneof("message"):
                case "output":
                    self._listener.tokens(self, convert.tokens_from_message(message.output))
                case "send":
                    event = convert.event_from_message(message.send.event)
                    if isinstance(event, HandedOver):
                        jobs = [convert.from_message(job, Job) for job in message.jobs]
                        self._listener.handed_over(self, message.send.to, event, jobs)
                    else:
                        self._listener.heard(self, message.send.to, event)
                case "begun":
                    self._listener.begun(self, message.begun.requests)
                case "load":
                    self._listener.load(self, convert.from_message(message.load, ReplicaLoad))
                case "peer":
                    self._listener.reachable(self, convert.from_message(message.peer, Peer))
                case "moved":
                    self._listener.moved(self, convert.from_message(message.moved, WeightsMoved))
                case "kv_offer":
                    self._listener.offered(self, convert.from_message(message.kv_offer, KvOffer))
                case "activations_offer":
                    self._listener.offered(self, convert.from_message(message.activations_offer, ActivationsOffer))
        return "the worker ended the session"

    async def _watch(self) -> str:
        await self._vigil.over()
        return f"no sign of life for {self._silence_s:g} s"


async def _end(tasks: Sequence[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _why(done: set[asyncio.Task[str]]) -> str:
    """The reason in the first of the tasks that has one; a reader's is better than a writer's."""
    reasons = []
    for task in done:
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is None:
                return task.result()
            reasons.append(_one_line(error))
    return max(reasons, key=len, default="the session was closed")


def _one_line(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower().replace('_', ' ')}: {error.details() or 'the connection broke'}"
    if isinstance(error, SquallError):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]
