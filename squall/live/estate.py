"""What a head leaves on its own machine when it dies: workers, which run on for a while, and what it takes to take them over.

Knows processes by number and start, so that nobody else is ever taken for one of them; not what they compute. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from squall.core.types import ReplicaId
from squall.errors import ConfigError
from squall.live.state import StateFolder

FILE = "workers.json"


class Left(Struct, frozen=True):
    """A worker that listens.

    Attributes:
        started: when its process did, in the clock of /proc, which begins with the machine: a number that is given out again has
            another.
    """

    pid: int
    started: int
    address: str
    replicas: tuple[ReplicaId, ...]


class _Estate(Struct, frozen=True):
    fleet: str
    token: str
    boot: str
    workers: tuple[Left, ...] = ()


class Survivor:
    """The process of a worker that another head has started: as much of `subprocess.Popen` as it takes to see it end."""

    stdin = stdout = None

    def __init__(self, left: Left) -> None:
        self.pid = left.pid
        self.left = left
        self._fd = os.pidfd_open(left.pid)

    def when_over(self, call: Callable[[], object]) -> None:
        """Once it has ended, on the loop that runs."""
        loop = asyncio.get_running_loop()

        def over() -> None:
            loop.remove_reader(self._fd)
            call()

        loop.add_reader(self._fd, over)

    def poll(self) -> int | None:
        """0 when it has ended, however it did: only its parent is told."""
        return 0 if self._ends_within(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ends_within(timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return 0

    def _ends_within(self, seconds: float | None) -> bool:
        poll = select.poll()  # `select` knows no descriptor past 1,023
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGTERM)

    def kill(self) -> None:
        """With all that it started; returns when it has ended."""
        if self.poll() is None:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class Estate(StateFolder):
    """Holds the folder, and finds what the last head left in it.

    Workers of another fleet (another configuration, or version of squall) are of no use: they are asked to end.

    Args:
        folder: made where it is not there.
        fleet: all that two heads must have in common for one to take over from the other.
        outlive_s: how long workers wait for another head.
        say: tells a person what goes wrong later.

    Attributes:
        token: what all workers of the fleet know; the last head's, where it left one.
        survivors: workers that still run, to be taken over.

    Raises ConfigError: the folder cannot be used, or another head holds it.
    """

    def __init__(self, folder: Path, fleet: str, outlive_s: float, say: Callable[[str], None]) -> None:
        if not hasattr(os, "pidfd_open"):
            raise ConfigError(
                "launcher.state needs Linux, whose processes can be told from others with the same number; leave it out"
            )
        super().__init__(folder, FILE, say)
        self.outlive_s = outlive_s
        self._fleet = fleet
        self._written: tuple[Left, ...] | None = None
        self._is_written = False
        found = self.read(_Estate)
        if found is not None and found.boot != _boot():
            found = None
        running = [survivor for left in found.workers if (survivor := _survivor(left))] if found is not None else []
        same = found is not None and found.fleet == self._fleet
        self.token = found.token if found is not None and same else secrets.token_hex(32)
        self.survivors = running if same else []
        for stranger in () if same else running:
            stranger.terminate()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nobody is left, unless nobody was taken over yet. Another head may hold the folder."""
        if self._written is not None:
            self.clear()
        super().__exit__(kind, error, trace)

    @property
    def places(self) -> list[ReplicaId]:
        """Where survivors hold what no other replica's worker does: those that share a process, share it wherever they are."""
        return [replica for survivor in self.survivors for replica in survivor.left.replicas if len(survivor.left.replicas) == 1]

    def keep(self, wanted: Collection[ReplicaId]) -> None:
        """Survivors of which none of these replicas is end now, and have ended when this returns: others may need their GPUs."""
        useless = [survivor for survivor in self.survivors if not set(survivor.left.replicas).intersection(wanted)]
        self.survivors = [survivor for survivor in self.survivors if survivor not in useless]
        for survivor in useless:
            survivor.kill()

    def note(self, workers: Mapping[int, tuple[str, tuple[ReplicaId, ...]]]) -> bool:
        """These processes listen now: their addresses and replicas. Returns whether another head will find them."""
        left = tuple(
            Left(pid, started, address, replicas)
            for pid, (address, replicas) in workers.items()
            if (started := _started(pid)) is not None
        )
        if left != self._written:
            self._written = left
            self._is_written = self.write(_Estate(self._fleet, self.token, _boot(), left))
        return self._is_written


def _boot() -> str:
    """The same until the machine is started anew; nothing where it does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _survivor(left: Left) -> Survivor | None:
    """None where it has ended. Held first and looked at then, as its number may be given to another one at any time."""
    try:
        survivor = Survivor(left)
    except (OSError, OverflowError):
        return None
    return survivor if _started(left.pid) == left.started else None


def _started(pid: int) -> int | None:
    """None of a process that is not there, or has ended and waits to be fetched."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat[stat.rfind(")") + 2 :].split()  # its name may hold anything
    return None if fields[0] in ("Z", "X") else int(fields[19])
