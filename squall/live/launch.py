"""Starts and ends worker processes on this machine. Knows processes, not what they compute and not what is said to them.

A worker watches its standard input, whose other end closes with us, however we die. It ends with it; where there is an `Estate`,
only after a while, in which another head may take it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from squall.core.types import ReplicaId
from squall.errors import ReplicaFailed, SquallError
from squall.live.estate import Estate, Survivor
from squall.live.process import Greeting, WorkerProcess

FILL_AFTER_S = 1.0
"""How long after a change another process is warmed."""


class Place(Struct, frozen=True):
    """Where a replica runs on its machine.

    Attributes:
        listen: the address that the head and peers reach its worker at.
        nics: those by which the weights of each of its ranks leave; `listen` for all when empty.
        devices: GPUs that it sees, by number or name; all when empty.
    """

    replica: ReplicaId
    listen: str = "127.0.0.1"
    nics: tuple[str, ...] = ()
    devices: tuple[int | str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        listen = ["--listen", f"{f'[{self.listen}]' if ':' in self.listen else self.listen}:0"]
        return [*listen, "--nics", ",".join(self.nics)] if self.nics else listen

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))} if self.devices else {}


class Launcher(Protocol):
    """Brings workers up and down. `start` of a replica whose worker still runs gives its address again.

    Attributes:
        token: what all workers of the fleet know.
    """

    token: str

    async def start(self, replica: ReplicaId) -> str:
        """The address of a worker that hosts `replica`.

        Raises:
            ConfigError: the worker found the configuration wrong.
            ReplicaFailed: it did not come up for another reason; carries its last words.
        """
        ...

    async def stop(self, replica: ReplicaId) -> None:
        """End the worker that hosts `replica`, unless others in it are still wanted. Idempotent."""
        ...

    async def kill(self, address: str) -> None:
        """The worker at `address` cannot be trusted: see that it is gone, with all that it hosts."""
        ...

    async def close(self) -> None:
        """End all workers."""
        ...


class FleetLauncher(Launcher, Protocol):
    """What `squall serve` asks besides."""

    def prepare(self, replicas: Iterable[ReplicaId]) -> None:
        """Start the processes of these replicas now, so that they import their libraries while we import ours."""
        ...

    def attend(self) -> None:
        """The loop runs: see to what goes on by itself."""
        ...

    def kill_all(self) -> None:
        """Whatever is left, at once, without a loop."""
        ...


class LocalLauncher:
    """Workers as processes of this machine. All of them are given the same secret, on their standard input.

    Args:
        config: the resolved configuration file that workers read.
        logs: directory for what workers print (`worker-0.log`, ...) and for their event logs.
        groups: which replicas share a process; each replica in exactly one group.
        extra: more arguments for each worker.
        token: the secret, where it is known elsewhere, too.
        places: of replicas that are not just anywhere on this machine.
        warm: processes of groups of which none is wanted that stand ready: one that a replica leaves is kept, others are started.
        estate: workers outlive us, and those that an earlier head left are taken over, unless `token` is another one.

    Attributes:
        token: what all workers know.
    """

    def __init__(
        self, config: Path, logs: Path, groups: Sequence[Sequence[ReplicaId]], extra: Sequence[str] = (),
        token: str | None = None, places: Sequence[Place] = (), warm: int = 0, estate: Estate | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._logs = logs
        self._groups = [tuple(group) for group in groups]
        self._extra = (*extra, "--grace-s", "inf") if warm else tuple(extra)
        self._warm = warm
        self._estate = estate
        self.token = token or (estate.token if estate is not None else secrets.token_hex(32))
        self._places = {place.replica: place for place in places}
        self._workers: dict[tuple[ReplicaId, ...], WorkerProcess] = {}
        self._survivors: list[Survivor] = []  # whose end nobody watches yet
        if estate is not None:
            self._extra = (*self._extra, "--outlive-s", f"{estate.outlive_s:g}")
            for survivor in estate.survivors:
                self._take_over(survivor)
        self._ending: dict[asyncio.Task[None], WorkerProcess] = {}
        self._wanted: set[ReplicaId] = set()
        self._filling: asyncio.TimerHandle | None = None
        self._trimming: asyncio.TimerHandle | None = None

    def prepare(self, replicas: Iterable[ReplicaId]) -> None:
        """Start the processes of these replicas now, so that they import their libraries while we import ours."""
        for group in dict.fromkeys(self._group(replica) for replica in replicas):
            if group not in self._workers:
                self._workers[group] = self._spawn(group)

    def attend(self) -> None:
        """Keep as many processes warm as there should be, a moment after each change: who comes up now needs the cores."""
        if self._warm and self._filling is None:
            self._filling = asyncio.get_running_loop().call_later(FILL_AFTER_S, self._fill)
        while self._warm and self._survivors:  # they do not wait for ever to be wanted
            self._survivors.pop().when_over(self.attend)

    async def start(self, replica: ReplicaId) -> str:
        group = self._group(replica)
        worker = self._workers.get(group)
        dead: WorkerProcess | None = None
        if worker is not None and worker.process.poll() is not None:
            del self._workers[group]
            worker, dead = None, worker
        try:
            if worker is None:  # and nothing is awaited before: whoever else asks for the group gets the same process
                worker = self._workers[group] = self._spawn(group)
        except OSError as error:
            raise ReplicaFailed(f"a worker cannot be started: {error}") from None
        finally:
            if dead is not None:
                await self._end(dead, at_once=True)
        self._wanted.add(replica)
        self.attend()
        try:
            address = (await worker.greeting()).address
        except SquallError:
            if self._workers.get(group) is worker:
                del self._workers[group]
            await self._end(worker, at_once=True)
            raise
        self._note()
        return address

    async def stop(self, replica: ReplicaId) -> None:
        self._wanted.discard(replica)
        group = self._group(replica)
        if self._wanted.intersection(group) or group not in self._workers:
            return
        warm = self.warm
        if group not in warm or len(warm) > self._warm:
            await self._end(self._workers.pop(group))

    async def kill(self, address: str) -> None:
        for group, worker in list(self._workers.items()):
            if worker.address == address:
                del self._workers[group]
                await self._end(worker, at_once=True)
                self.attend()

    def keep(self, wanted: Iterable[ReplicaId], patience_s: float) -> None:
        """Only these are wanted now. Whoever is not wanted again within `patience_s` ends, but for as many as stand ready."""
        self._wanted = set(wanted)
        if self._trimming is not None:
            self._trimming.cancel()
        self._trimming = asyncio.get_running_loop().call_later(patience_s, self._trim)

    async def trim(self) -> None:
        """Whoever is not wanted ends now, but for as many as stand ready, and has when this returns."""
        await asyncio.gather(*self._trim())

    def _trim(self) -> list[asyncio.Task[None]]:
        return [self._ended(self._workers.pop(group)) for group in self.warm[self._warm :]]

    @property
    def num_running(self) -> int:
        """Processes."""
        return sum(worker.process.poll() is None for worker in self._workers.values())

    async def close(self) -> None:
        self._warm = 0
        for timer in (self._filling, self._trimming):
            if timer is not None:
                timer.cancel()
        workers, self._workers = list(self._workers.values()), {}
        await asyncio.gather(*self._ending, *(worker.end() for worker in workers))

    def kill_all(self) -> None:
        """Whatever is left, at once, without a loop."""
        for worker in (*self._workers.values(), *self._ending.values()):
            worker.kill()
        self._workers.clear()

    async def _end(self, worker: WorkerProcess, *, at_once: bool = False) -> None:
        """It ends, and what it had open is closed, though whoever waits for that be called off."""
        await asyncio.shield(self._ended(worker, at_once=at_once))

    def _ended(self, worker: WorkerProcess, *, at_once: bool = False) -> asyncio.Task[None]:
        ending = asyncio.create_task(worker.end(at_once=at_once))
        self._ending[ending] = worker
        ending.add_done_callback(self._ending.pop)
        return ending

    @property
    def warm(self) -> list[tuple[ReplicaId, ...]]:
        """Groups whose process runs though none of them is wanted."""
        return [
            group
            for group, worker in self._workers.items()
            if worker.process.poll() is None and not self._wanted.intersection(group)
        ]

    def _fill(self) -> None:
        self._filling = None
        for group in self._groups:
            if len(self.warm) >= self._warm:
                return
            worker = self._workers.get(group)
            if worker is not None and worker.process.poll() is not None and not self._wanted.intersection(group):
                worker.close_pipes()
                worker = None
            if worker is None:
                with contextlib.suppress(OSError):  # whoever wants it will see
                    worker = self._workers[group] = self._spawn(group)
                    if self._estate is not None:
                        asyncio.ensure_future(worker.greeting()).add_done_callback(self._greeted)

    def _greeted(self, greeting: asyncio.Future[Greeting]) -> None:
        if not greeting.cancelled() and greeting.exception() is None:
            self._note()

    def _take_over(self, survivor: Survivor) -> None:
        group = survivor.left.replicas
        if group in self._groups and group not in self._workers:
            greeting = Greeting(survivor.left.address, group)
            self._workers[group] = WorkerProcess(survivor, self._log(group), greeting)
            self._survivors.append(survivor)
        else:
            survivor.terminate()

    def _note(self) -> None:
        """Let another head find those who listen now, and let them know: whoever would not be found ends with us."""
        if self._estate is None:
            return
        running = [(worker, group) for group, worker in self._workers.items() if worker.process.poll() is None]
        found = {worker.process.pid: (worker.address, group) for worker, group in running if worker.address}
        if self._estate.note(found):
            for worker, _ in running:
                if worker.process.pid in found:
                    worker.tell_noted()

    def _log(self, group: tuple[ReplicaId, ...]) -> Path:
        return self._logs / f"worker-{group[0]}.log"

    def pid(self, replica: ReplicaId) -> int | None:
        """The process that hosts `replica`, if there is one."""
        worker = self._workers.get(self._group(replica))
        return worker.process.pid if worker is not None and worker.process.poll() is None else None

    def _group(self, replica: ReplicaId) -> tuple[ReplicaId, ...]:
        return next(group for group in self._groups if replica in group)

    def _spawn(self, group: tuple[ReplicaId, ...]) -> WorkerProcess:
        log = self._log(group)
        place = self._places.get(group[0], Place(group[0]))
        replicas = ",".join(map(str, group))
        command = [sys.executable, "-m", "squall.live.worker", "--config", str(self._config), "--logs", str(self._logs)]
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                [*command, "--replicas", replicas, "--with-parent", *place.arguments, *self._extra],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={"GRPC_VERBOSITY": "ERROR", **os.environ, **place.environment},
                start_new_session=True,  # a Ctrl-C in the terminal is for the head, which drains
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its greeting will say so
            process.stdin.write(f"{self.token}\n".encode())
            process.stdin.flush()
        return WorkerProcess(process, log)
