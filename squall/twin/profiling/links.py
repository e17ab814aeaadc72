"""How fast bytes move on this machine: from another process's memory, over TCP, from a disk, to a GPU.

Knows no model. Each way is the one that weights take: `preadv` from a peer's memory, `recv_into` from a socket, the loader's
reads of a file. What is measured is one stream; several share what there is.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct

from squall.errors import ConfigError
from squall.live.home import home
from squall.live.transport.memory import SharedMemory, read_into

ROUNDS = 5
_PIECE = 4 << 20
"""Bytes of a system call."""

SHARED, TCP, DISK, CACHED, DEVICE = "shared memory", "TCP (loopback)", "disk", "disk, cached", "host to device"


class Link(Struct, frozen=True):
    """One way of moving bytes, in one direction."""

    name: str
    bytes_per_s: float


def measure_links(folder: Path | None, num_bytes: int, device: str = "cpu") -> list[Link]:
    """Every way that this machine has. Raises ConfigError where the disk cannot be tried in that folder."""
    found = [Link(SHARED, _shared(num_bytes)), Link(TCP, _tcp(num_bytes)), *_disk(folder or home(), num_bytes)]
    return found + ([Link(DEVICE, _to_device(num_bytes, device))] if device != "cpu" else [])


def settings_of(links: Sequence[Link]) -> str:
    """The keys of the configuration that these figures are for."""
    keys = {DISK: "cluster.ssd_gbps", DEVICE: "cluster.host_gbps"}
    return " ".join(f"--set {keys[link.name]}={link.bytes_per_s * 8 / 1e9:.1f}" for link in links if link.name in keys)


def _rate(num_bytes: int, move: Callable[[], object]) -> float:
    """Bytes a second, the median of some rounds after a first one that nobody times."""
    move()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        move()
        taken.append(time.perf_counter() - began)
    return num_bytes / median(taken)


def _shared(num_bytes: int) -> float:
    """As a peer that was handed our descriptor reads."""
    theirs = SharedMemory(num_bytes)
    theirs.view[:] = bytes(num_bytes)
    ours = memoryview(mmap.mmap(-1, num_bytes))
    if theirs.fd is None:
        return _rate(num_bytes, lambda: ours.__setitem__(slice(None), theirs.view))
    fd = theirs.fd
    return _rate(num_bytes, lambda: read_into(fd, [(0, num_bytes)], [ours]))


def _tcp(num_bytes: int) -> float:
    """One connection, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = context.Process(target=_send, args=(server.getsockname()[1], num_bytes, ROUNDS + 1), daemon=True)
        sender.start()
        try:
            server.settimeout(60)
            connection, _ = server.accept()
            with connection:
                buffer = memoryview(bytearray(num_bytes))

                def receive() -> None:
                    connection.sendall(b"\0")
                    at = 0
                    while at < num_bytes:
                        count = connection.recv_into(buffer[at:])
                        if not count:
                            raise ConnectionError("the sender is gone")
                        at += count

                return _rate(num_bytes, receive)
        finally:
            sender.kill()
            sender.join()


def _send(port: int, num_bytes: int, times: int) -> None:
    data = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(times):
            if not connection.recv(1):
                return
            connection.sendall(data)


def _disk(folder: Path, num_bytes: int) -> list[Link]:
    """A file, past the page cache where the file system can, and through it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".squall-") as file:
            piece = os.urandom(min(_PIECE, num_bytes))
            size = max(1, num_bytes // len(piece)) * len(piece)
            for _ in range(size // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return [
                Link(DISK, _read(Path(file.name), size, direct=True)),
                Link(CACHED, _read(Path(file.name), size, direct=False)),
            ]
    except OSError as error:
        raise ConfigError(f"{folder}: no file can be tried there ({error.strerror or error}); name another --folder") from None


def _read(path: Path, num_bytes: int, *, direct: bool) -> float:
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    try:
        fd = os.open(path, flags)
    except OSError:
        fd = os.open(path, os.O_RDONLY)  # a file system in memory
    window = memoryview(mmap.mmap(-1, _PIECE))

    def read() -> None:
        if direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        at = 0
        while at < num_bytes:
            count = os.preadv(fd, [window[: min(_PIECE, num_bytes - at)]], at)
            if not count:
                raise OSError(f"{path} became shorter")
            at += count

    try:
        return _rate(num_bytes, read)
    finally:
        os.close(fd)


def _to_device(num_bytes: int, device: str) -> float:
    """From pinned memory, by events."""
    import torch

    from squall.twin.profiling.timing import CudaTimer

    if not torch.cuda.is_available():
        raise ConfigError(f"--device is {device!r}, but this PyTorch sees no GPU; use 'cpu', or install a CUDA build")
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / CudaTimer().seconds(lambda: there.copy_(host, non_blocking=True))
