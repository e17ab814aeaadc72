"""A worker's process from its start to its end, as whoever started it or took it over sees it. Knows not what it computes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from squall.core.types import ReplicaId
from squall.errors import ConfigError, ReplicaFailed
from squall.live.estate import Survivor

START_TIMEOUT_S = 120.0
"""Importing torch from a cold, slow disk is the longest part."""

STOP_TIMEOUT_S = 5.0

CONFIG_ERROR = 2
"""The exit code of a worker that finds its configuration wrong; the last line of its log says what."""


class Greeting(Struct, frozen=True):
    """The one line that a worker prints when it listens."""

    address: str
    replicas: tuple[ReplicaId, ...]


class WorkerProcess:
    """One worker process. One that was taken over has been heard, by another head."""

    def __init__(self, process: subprocess.Popen[bytes] | Survivor, log: Path, heard: Greeting | None = None) -> None:
        self.process = process
        self._log = log
        self._heard = heard
        self._told = False
        self._greeting: asyncio.Task[Greeting] | None = None

    @property
    def address(self) -> str | None:
        """None until it listens."""
        if self._heard is not None:
            return self._heard.address
        greeting = self._greeting
        return greeting.result().address if greeting is not None and greeting.done() and greeting.exception() is None else None

    def tell_noted(self) -> None:
        """That another head would find it."""
        if self.process.stdin is not None and not self._told:
            self._told = True
            with contextlib.suppress(OSError):  # it has just ended
                self.process.stdin.write(b"\n")
                self.process.stdin.flush()

    async def greeting(self) -> Greeting:
        """What it said when it came up, however often that is asked. Raises as `Launcher.start`."""
        if self._heard is not None:
            return self._heard
        if self._greeting is None:
            self._greeting = asyncio.create_task(self._read_greeting())
        return await asyncio.shield(self._greeting)

    async def _read_greeting(self) -> Greeting:
        assert self.process.stdout is not None
        line = asyncio.create_task(asyncio.to_thread(self.process.stdout.readline))
        done, _ = await asyncio.wait([line], timeout=START_TIMEOUT_S)
        if not done:
            _kill(self.process)  # which ends the read, too
            await line
            raise ReplicaFailed(f"a worker did not start within {START_TIMEOUT_S:g} s{self._last_words()}")
        try:
            return msgspec.json.decode(line.result(), type=Greeting)
        except msgspec.DecodeError:
            code = await asyncio.to_thread(self.process.wait)
            if code == CONFIG_ERROR:
                raise ConfigError(self._last_line().removeprefix("worker: error: ")) from None
            raise ReplicaFailed(f"a worker {_describe_exit(code)} before it was up{self._last_words()}") from None

    async def end(self, *, at_once: bool = False) -> None:
        """Ask it to end, and see to it that it and its children do."""
        if not at_once:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S)
        _kill(self.process)
        await asyncio.to_thread(self.process.wait)
        if self._greeting is not None:
            await asyncio.gather(self._greeting, return_exceptions=True)
        self.close_pipes()

    def kill(self) -> None:
        """At once, without a loop."""
        _kill(self.process)
        self.process.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        """Once the process has ended and nobody reads from it any more."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _last_words(self) -> str:
        line = self._last_line()
        return f": {line} (more in {self._log})" if line else f" (its log, {self._log}, is empty)"

    def _last_line(self) -> str:
        return (self._log.read_text(errors="replace").strip().splitlines() or [""])[-1]


def _kill(process: subprocess.Popen[bytes] | Survivor) -> None:
    """The process leads a group of its own; whatever it started goes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
