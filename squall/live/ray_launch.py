"""Starts and ends workers on a Ray cluster: one actor a replica, which has the worker as its child. Knows no weights.

Ray decides on which node an actor runs, gives it its GPUs (or, without any, as many cores as the replica has ranks), and ends it
with us; a worker watches its actor as it would watch its head, so that none outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import secrets
from collections.abc import Iterable
from typing import Any

from squall.core.types import ReplicaId
from squall.errors import ConfigError, ReplicaFailed, SquallError
from squall.extras import install
from squall.launch_tables import Launcher
from squall.live.launch import LocalLauncher, Place
from squall.live.process import START_TIMEOUT_S
from squall.live.scratch import scratch

PLACE_S = 60.0
"""How long Ray may look for a node, beside what a worker takes to come up."""

STOP_S = 15.0


class Keeper:
    """In an actor: one replica's worker. Ray passes no exceptions of ours on, so that what went wrong is told in words."""

    def __init__(self, config: str, token: str, replica: ReplicaId) -> None:
        ray: Any = importlib.import_module("ray")
        self._held = contextlib.ExitStack()
        folder = self._held.enter_context(scratch("squall-ray"))
        path = folder / "config.toml"
        path.write_text(config, encoding="utf-8")
        place = Place(replica, ray.util.get_node_ip_address())
        self._replica = replica
        self._launcher = LocalLauncher(path, folder, [(replica,)], token=token, places=[place])
        self._launcher.prepare([replica])

    async def start(self) -> tuple[str, str | None, bool]:
        """The worker's address; else what went wrong, and whether the configuration did."""
        try:
            return await self._launcher.start(self._replica), None, False
        except SquallError as error:
            return "", str(error), isinstance(error, ConfigError)

    async def close(self) -> None:
        """End the worker."""
        await self._launcher.close()
        self._held.close()


class RayLauncher:
    """See `FleetLauncher`.

    Args:
        table: [launcher].
        config: the resolved configuration, as text.
        ranks: processes of one replica, each with a core or a GPU.
        on_gpu: each takes a GPU.

    Attributes:
        token: what all workers of the fleet know.

    Raises ConfigError where Ray is not installed, or its cluster cannot be reached.
    """

    def __init__(self, table: Launcher, config: str, ranks: int, *, on_gpu: bool) -> None:
        self._config = config
        self.token = secrets.token_hex(32)
        self._needs = {"num_cpus": 0, "num_gpus": ranks} if on_gpu else {"num_cpus": ranks}
        self._actors: dict[ReplicaId, Any] = {}
        self._addresses: dict[str, ReplicaId] = {}
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError:
            raise ConfigError(f'launcher.kind = "ray" needs Ray: {install("ray")}') from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._ray.init(address=table.address, ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"launcher.address = {table.address!r} is no Ray cluster that can be reached: {why}") from None

    def prepare(self, replicas: Iterable[ReplicaId]) -> None:
        """Make the actors of these replicas, which start their workers."""
        for replica in replicas:
            self._actor(replica)

    def attend(self) -> None:
        """Nothing goes on by itself."""

    async def start(self, replica: ReplicaId) -> str:
        actor = self._actor(replica)
        try:
            called = _result(actor.start.remote())
            answer: tuple[str, str | None, bool] = await asyncio.wait_for(called, PLACE_S + START_TIMEOUT_S)
        except TimeoutError:
            self._drop(replica)
            needs = ", ".join(f"{name} = {count}" for name, count in self._needs.items() if count)
            raise ReplicaFailed(f"Ray found no place for replica {replica} ({needs}) within {PLACE_S:g} s") from None
        except self._ray.exceptions.RayError as error:
            self._drop(replica)
            raise ReplicaFailed(f"the actor of replica {replica} is lost: {_first_line(error)}") from None
        address, wrong, is_config = answer
        if wrong is not None:
            self._drop(replica)
            raise (ConfigError if is_config else ReplicaFailed)(wrong)
        self._addresses[address] = replica
        return address

    async def stop(self, replica: ReplicaId) -> None:
        actor = self._actors.get(replica)
        if actor is not None:
            with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
                await asyncio.wait_for(_result(actor.close.remote()), STOP_S)
            self._drop(replica)

    async def kill(self, address: str) -> None:
        if (replica := self._addresses.pop(address, None)) is not None:
            self._drop(replica)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(replica) for replica in list(self._actors)))

    def kill_all(self) -> None:
        for replica in list(self._actors):
            self._drop(replica)

    def _actor(self, replica: ReplicaId) -> Any:
        if replica not in self._actors:
            made = self._ray.remote(Keeper).options(**self._needs, max_restarts=0)
            self._actors[replica] = made.remote(self._config, self.token, replica)
        return self._actors[replica]

    def _drop(self, replica: ReplicaId) -> None:
        """End its actor at once; the worker sees the end of its input."""
        if (actor := self._actors.pop(replica, None)) is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)


async def _result(reference: Any) -> Any:
    """Of a call to an actor, which is awaited where it is made."""
    return await reference


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
