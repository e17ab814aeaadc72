"""What a head leaves behind when it dies: its workers, which run on for a while, and what the next head needs to take them over.

One file in a folder that one head holds at a time. Knows processes by number and start, so that nobody else is ever taken for one
of them; not what they compute. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec
from msgspec import Struct

from squall.core.types import ReplicaId
from squall.errors import ConfigError

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

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class Estate:
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
        self.outlive_s = outlive_s
        self._say = say
        self._path = folder / FILE
        self._fleet = hashlib.sha256(fleet.encode()).hexdigest()
        self._written: tuple[Left, ...] | None = None
        self._is_written = False
        if not hasattr(os, "pidfd_open"):
            raise ConfigError(
                "launcher.state needs Linux, whose processes can be told from others with the same number; leave it out"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"launcher.state = {str(folder)!r} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"launcher.state = {str(folder)!r} is in use by another head; end that one, or give this one a folder of its own"
            ) from None
        found = self._read()
        running = [survivor for left in found.workers if (survivor := _survivor(left))] if found is not None else []
        same = found is not None and found.fleet == self._fleet
        self.token = found.token if found is not None and same else secrets.token_hex(32)
        self.survivors = running if same else []
        for stranger in () if same else running:
            stranger.terminate()

    def __enter__(self) -> Estate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nobody is left, unless nobody was taken over yet. Another head may hold the folder."""
        if self._written is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def note(self, workers: Mapping[int, tuple[str, tuple[ReplicaId, ...]]]) -> bool:
        """These processes listen now: their addresses and replicas. Returns whether another head will find them."""
        left = tuple(
            Left(pid, started, address, replicas)
            for pid, (address, replicas) in workers.items()
            if (started := _started(pid)) is not None
        )
        if left != self._written:
            self._written = left
            self._is_written = self._write(left)
        return self._is_written

    def _write(self, left: tuple[Left, ...]) -> bool:
        fresh = self._path.with_suffix(".new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(_Estate(self._fleet, self.token, _boot(), left)))
            fresh.replace(self._path)
        except OSError as error:
            self._say(f"no other head will find all workers: cannot write {self._path}: {error.strerror}")
            return False
        return True

    def _read(self) -> _Estate | None:
        """None where nobody left anything that can be read, or the machine was started anew since."""
        try:
            if not self._path.is_file():  # a pipe would be waited for
                return None
            found = msgspec.json.decode(self._path.read_bytes(), type=_Estate)
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.boot == _boot() else None


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
