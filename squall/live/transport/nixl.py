"""Bytes moved by NIXL, NVIDIA's library for it: RDMA or NVLink where there are some, shared memory or TCP where there are not.

Knows memory, peers' agents and the patience; not regions, and no connection: who may read what, and when, is said elsewhere.
An extra, because NIXL has no build for every system, and its thread keeps a core busy: `pip install 'squall[nixl]'`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from squall.errors import ConfigError, PeerLost
from squall.extras import install

INSTALL = install("nixl")

_DRAM = "DRAM"
_SMALLEST = 1 << 16
"""Bytes of a buffer."""

_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 500e-6
"""Between two looks at a transfer, which tells nobody when it ends."""

Segments = Sequence[tuple[int, int]]
"""Addresses and lengths in bytes."""


class Held(Struct, frozen=True, array_like=True):
    """Where a region's bytes are, for a peer's NIXL: whose (an agent's description of itself), and the address of the first."""

    agent: bytes
    address: int


class NixlAgent:
    """One process's NIXL. All methods from any thread.

    Args:
        node: its name; the agent's is one that no other agent has, also of the same node.
        patience_s: how long one call may take.

    Raises ConfigError where NIXL is not installed, or cannot be used.
    """

    def __init__(self, node: str, patience_s: float) -> None:
        api = _library()
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._registered: dict[int, tuple[memoryview, Any]] = {}  # by address; kept, as peers may be reading
        self._free: dict[int, list[_Buffer]] = {}  # by size
        self._lost: list[_Buffer] = []
        try:
            sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent = api.nixl_agent(f"{node}-{secrets.token_hex(8)}", api.nixl_agent_config(sync_mode=sync))
        except Exception as error:
            raise ConfigError(f"NIXL cannot be used here ({error}); take another transport") from None
        if not self._agent.backends:
            raise ConfigError("NIXL has no way to move bytes here (its UCX plugin is missing); take another transport")

    # -- memory that peers may ask for

    def register(self, memory: memoryview) -> None:
        """All of `memory` may be read and written by peers that are told where it is. Idempotent."""
        address = _address(memory)
        with self._lock:
            if (known := self._registered.get(address)) is not None and len(known[0]) >= len(memory):
                return
            self._registered[address] = memory, self._agent.register_memory([(address, len(memory), 0, "")], _DRAM)

    def held(self, memory: memoryview) -> Held:
        """What a peer must know to read from, or write to, registered memory."""
        with self._lock:
            return Held(self._agent.get_agent_metadata(), _address(memory))

    def close(self) -> None:
        """Nobody reads here any more."""
        with self._lock:
            for _, registered in self._registered.values():
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(registered)
            self._registered.clear()

    # -- peers

    def meet(self, held: Held) -> str:
        """Learn of a peer, or what it has registered since. Returns its agent's name. Raises PeerLost."""
        try:
            name = self._agent.add_remote_agent(held.agent)
        except Exception as error:
            raise PeerLost(_said(error)) from None
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, peer: str, segments: Segments, into: Sequence[memoryview], alive: Callable[[], None]) -> None:
        """Copy `segments` of a peer's memory into the buffers of the same lengths.

        Args:
            alive: called now and then; raises where there is no use in waiting on.

        Raises PeerLost, also when the patience is over; then nothing has come, and nothing will.
        """
        with self._buffer(sum(map(len, into))) as buffer:
            self._move("READ", peer, segments, buffer, alive)
            for view, part in zip(into, _cut(buffer.view, segments), strict=True):
                view[:] = part

    def write(self, peer: str, segments: Segments, data: Sequence[memoryview], alive: Callable[[], None]) -> None:
        """The other way; see `read`. What was given up may still come to the peer."""
        with self._buffer(sum(map(len, data))) as buffer:
            for view, part in zip(data, _cut(buffer.view, segments), strict=True):
                part[:] = view
            self._move("WRITE", peer, segments, buffer, alive)

    def _move(self, verb: str, peer: str, segments: Segments, buffer: _Buffer, alive: Callable[[], None]) -> None:
        agent, address, here = self._agent, buffer.address, []
        for _, length in segments:
            here.append((address, length, 0))
            address += length
        there = agent.get_xfer_descs([(at, length, 0) for at, length in segments], _DRAM)
        try:
            buffer.handle = agent.initialize_xfer(verb, agent.get_xfer_descs(here, _DRAM), there, peer)
            self._wait(buffer.handle, alive)
            buffer.handle.release()
            buffer.handle = None
        except BaseException as error:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(peer)  # the next connection meets it anew
            if isinstance(error, PeerLost) or not isinstance(error, Exception):
                raise
            raise PeerLost(_said(error)) from None

    def _wait(self, handle: Any, alive: Callable[[], None]) -> None:
        until, pause_s = time.monotonic() + self._patience_s, _PAUSE_S
        state = self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > until:
                raise PeerLost("nothing was heard of it in time")
            alive()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise PeerLost("NIXL lost it in the middle of a transfer")

    @contextlib.contextmanager
    def _buffer(self, num_bytes: int) -> Iterator[_Buffer]:
        """One for NIXL alone: it may bring bytes long after we have given up, when their place is somebody else's."""
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(size, [])
            buffer = free.pop() if free else None
        if buffer is None:
            buffer = _Buffer(size)
            self._agent.register_memory([(buffer.address, size, 0, "")], _DRAM)
        try:
            yield buffer
        finally:
            with self._lock:
                (self._lost if buffer.handle is not None else free).append(buffer)


class _Buffer:
    """Registered memory, and the transfer that uses it: never used again where that was given up."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size))
        self.address = _address(self.view)
        self.handle: Any = None


def _cut(view: memoryview, segments: Segments) -> Iterator[memoryview]:
    """The view's beginning in parts as long as the segments."""
    begin = 0
    for _, length in segments:
        yield view[begin : begin + length]
        begin += length


def _library() -> Any:
    """NIXL. What it says goes to standard error, with whatever else a worker has to say."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            library = importlib.import_module("nixl")
    except ImportError as error:
        raise ConfigError(f"NIXL is not installed here ({error}): {INSTALL}, or take another transport") from None
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return library


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
