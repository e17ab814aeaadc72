"""The head's sessions with its replicas: a process and a client each, from the replica's start to its loss or its end.

Knows who starts processes, and how a session is held; not what is said in it, and no machine: its keeper is told how each ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Protocol

from squall.core.actions import AnyAction, StopReplica
from squall.core.events import AnyEvent, ReplicaLost, ReplicaStopped
from squall.core.types import ReplicaId
from squall.errors import ConfigError, HostLost, SquallError
from squall.live.launch import Launcher
from squall.live.rpc.client import Listener, ReplicaClient

GOODBYE_S = 2.0
"""How long a worker may take to end a session that it was asked to end."""


class Keeper(Listener, Protocol):
    """Whose sessions they are: hears what replicas say, and how they end. Called on the loop."""

    def cannot_serve(self, why: str) -> None:
        """The process of a replica refuses what the user has asked for."""
        ...

    def gone(self, replica: ReplicaId) -> None:
        """Nothing more is heard of it: its end will be `over`."""
        ...

    def over(self, event: ReplicaLost | ReplicaStopped, *, said: bool = False) -> None:
        """It has ended. `said`: a person has been told why, of all replicas of its host."""
        ...


class Sessions:
    """By replica, one at a time.

    Args:
        launcher: starts workers.
        keeper: see there.
        silence_s: after how much silence a replica counts as lost.
    """

    def __init__(self, launcher: Launcher, keeper: Keeper, silence_s: float) -> None:
        self._launcher = launcher
        self._keeper = keeper
        self._silence_s = silence_s
        self._clients: dict[ReplicaId, ReplicaClient] = {}
        self._tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._stopping: set[ReplicaId] = set()
        self._last_words: dict[ReplicaId, str] = {}

    @property
    def wanted(self) -> Set[ReplicaId]:
        """Replicas whose processes run or come up, and are to stay."""
        return self._tasks.keys() - self._stopping

    def get(self, replica: ReplicaId) -> ReplicaClient | None:
        """Its client; None before it answers, and once it is gone."""
        return self._clients.get(replica)

    def holds(self, client: ReplicaClient) -> bool:
        """Whether that is still its replica's. What others say comes too late."""
        return self._clients.get(client.replica) is client

    def send(self, replica: ReplicaId, message: AnyEvent | AnyAction) -> None:
        """To a replica that is gone, nothing: its loss is on the way to the machines."""
        if client := self._clients.get(replica):
            client.send(message)

    def start(self, replica: ReplicaId, *, settled: bool) -> None:
        """A settled one was there when the fleet began."""
        self._tasks[replica] = asyncio.create_task(self._live(replica, settled=settled))

    def stop(self, replica: ReplicaId) -> None:
        """It has no requests, or none that anybody waits for."""
        self._stopping.add(replica)
        self._tasks[replica] = asyncio.create_task(self._end(replica, self._tasks.get(replica)))

    def will_end(self, replica: ReplicaId, why: str) -> None:
        """It has said why its session is about to end."""
        self._last_words[replica] = why

    async def close(self) -> None:
        """End all of them, and the launcher."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._launcher.close()

    async def _live(self, replica: ReplicaId, *, settled: bool) -> None:
        """From its start to its loss."""
        address, client, said = "", None, False
        try:
            address = await self._launcher.start(replica)
            client = ReplicaClient(replica, self._keeper, self._launcher.token, self._silence_s, settled=settled)
            self._clients[replica] = client
            why = await client.run(address)
        except SquallError as error:
            why, said = str(error), isinstance(error, HostLost)
            if isinstance(error, ConfigError):
                self._keeper.cannot_serve(why)
        if replica in self._stopping:
            return
        self._forget(replica)
        if client is not None and not client.was_stopped:  # else it may have waited for us in vain, and gets another session
            await self._launcher.kill(address)
        why = self._last_words.pop(replica, why)
        self._over(ReplicaLost(replica, why), said=said)

    async def _end(self, replica: ReplicaId, living: asyncio.Task[None] | None) -> None:
        self.send(replica, StopReplica(replica))
        if living is not None:
            if replica in self._clients:
                await asyncio.wait([living], timeout=GOODBYE_S)
            living.cancel()
        self._forget(replica)
        await self._launcher.stop(replica)
        self._stopping.discard(replica)
        self._over(ReplicaStopped(replica))

    def _forget(self, replica: ReplicaId) -> None:
        """Hear nothing of it any more."""
        self._clients.pop(replica, None)
        self._keeper.gone(replica)

    def _over(self, event: ReplicaLost | ReplicaStopped, *, said: bool = False) -> None:
        self._tasks.pop(event.replica, None)
        self._keeper.over(event, said=said)
