"""From a checkpoint's files, a host copy or peers into an arena. Knows how bytes get there, not what is computed with them.

Sections arrive in order, by several threads, and each is ready the moment its checksum is known: the first layers can be run
while the last are being read.
"""

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from squall.errors import ModelError, SquallError
from squall.live.engine.checkpoint import Checkpoint, revision
from squall.live.engine.weights import Part, Weights
from squall.live.transport.fetch import Fetch, Fetched, Source
from squall.live.transport.interface import Transport
from squall.live.transport.segment import HostCopies

Reading = Literal["buffered", "direct", "mapped"]
"""Through the page cache straight into the arena; past it (for a disk that is faster than the cache's copies, and a file that
is read once); or as mapped memory. What the file system cannot read directly is read buffered."""

SCRATCH = 8 << 20
"""Bytes that a thread reads at once where it cannot read straight into the arena."""

_SECTOR = 4096
_PAGE = 4096
"""A shard's part of a row that is shorter than a page is not read alone: the disk reads whole ones."""


def load_from_disk(weights: Weights, folder: Path, *, tied: bool, reading: Reading = "buffered", threads: int = 2) -> None:
    """Fill all sections from the checkpoint in `folder`, and publish each as it is complete.

    Args:
        tied: the checkpoint may hold a head that is not wanted.
        threads: that read; a section is read by one.

    Raises:
        ModelError: see `Checkpoint`; nothing was written then, unless a file shrank while it was read.
    """
    with Checkpoint(folder) as checkpoint:
        checkpoint.check({part.name: part.stored for places in weights.places.values() for part, _ in places}, tied=tied)
        region = weights.arena.region
        left = deque(index for index in range(len(region.sections)) if not region.verified(index))
        failures: list[Exception] = []

        def work() -> None:
            reader = _Reader(reading)
            try:
                while left and not failures:
                    try:
                        index = left.popleft()
                    except IndexError:
                        return
                    for part, view in weights.places[region.sections[index].name]:
                        _fill(view, part, checkpoint, reader)
                    region.publish(index)
            except Exception as error:
                failures.append(error)
            finally:
                reader.close()

        _in_threads(work, threads)
        if failures:
            raise failures[0] if isinstance(failures[0], SquallError) else _unreadable(folder, failures[0])


def load_from_host(
    weights: Weights, copies: HostCopies, folder: Path, *, tied: bool, reading: Reading = "buffered", threads: int = 2
) -> bool:
    """From this machine's copy of the checkpoint in `folder`; the first who asks reads the disk and leaves the copy.

    Returns:
        Whether the copy was there.

    Raises:
        ModelError: the checkpoint cannot be read. TransferFailed: the machine has no room for a copy.
    """
    region = weights.arena.region
    return copies.load(
        region, revision(folder), lambda: load_from_disk(weights, folder, tied=tied, reading=reading, threads=threads), threads
    )


def load_from_peers(
    weights: Weights,
    transport: Transport,
    sources: Sequence[Source],
    *,
    stripes: int = 1,
    deadline_s: float | None = None,
    arrived: Callable[[int], None] | None = None,
) -> Fetched:
    """From `sources`, and to whoever asks us meanwhile; see `Fetch`. Raises TransferFailed."""
    region = weights.arena.region
    transport.register(region)
    return Fetch(transport, region, sources, stripes=stripes, deadline_s=deadline_s, arrived=arrived).run()


def _in_threads(work: Callable[[], None], threads: int) -> None:
    helpers = [threading.Thread(target=work, name="load", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def _unreadable(folder: Path, error: Exception) -> Exception:
    return ModelError(f"{folder}: cannot be read ({error})") if isinstance(error, OSError) else error


# -- one tensor


def _fill(view: Tensor, part: Part, checkpoint: Checkpoint, reader: "_Reader") -> None:
    """The rows and columns of a shard, converted where the number types differ."""
    rows = part.shape[0]
    first = part.start if part.axis == 0 else 0
    columns = slice(part.start, part.start + part.shape[1]) if part.axis == 1 else slice(None)
    if reader.mapped:
        source = checkpoint.rows(part.name, first, first + rows)
        view.copy_(source[:, columns] if part.axis == 1 else source)
        return
    stored = checkpoint.stored(part.name)
    row_bytes = stored.num_bytes // stored.shape[0]
    if part.axis == 0 and stored.dtype is view.dtype:
        reader.read(stored.path, stored.offset + first * row_bytes, _bytes(view))
        return
    if part.axis == 1 and stored.dtype is view.dtype and view.stride(0) * view.itemsize >= _PAGE:
        at = stored.offset + first * row_bytes + part.start * view.itemsize
        for row in range(rows):
            reader.read(stored.path, at + row * row_bytes, _bytes(view[row]))
        return
    step = max(1, SCRATCH // row_bytes)
    scratch = torch.empty((min(step, rows), *stored.shape[1:]), dtype=stored.dtype)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        reader.read(stored.path, stored.offset + (first + row) * row_bytes, _bytes(scratch[:count]))
        view[row : row + count].copy_(scratch[:count, columns] if part.axis == 1 else scratch[:count])


def _bytes(tensor: Tensor) -> memoryview:
    values: Any = tensor.view(torch.uint8).numpy()
    return memoryview(values).cast("B")


class _Reader:
    """One thread's way of reading files."""

    def __init__(self, reading: Reading) -> None:
        self.mapped = reading == "mapped"
        self._direct = reading == "direct" and hasattr(os, "O_DIRECT")
        self._files: dict[Path, tuple[int, bool]] = {}
        self._window: mmap.mmap | None = None

    def close(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Raises OSError, ModelError for a file that has become shorter."""
        fd, direct = self._files.get(path) or self._open(path)
        done = 0
        while done < len(into):
            count = self._aligned(fd, offset + done, into[done:]) if direct else os.preadv(fd, [into[done:]], offset + done)
            if count <= 0:
                raise ModelError(f"{path}: ends at byte {offset + done}, in the middle of a tensor; fetch it again")
            done += count

    def _open(self, path: Path) -> tuple[int, bool]:
        if self._direct:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT), True
                return self._files[path]
            except OSError:
                pass  # the file system has none, as memory file systems
        self._files[path] = os.open(path, os.O_RDONLY), False
        return self._files[path]

    def _aligned(self, fd: int, offset: int, into: memoryview) -> int:
        """Read whole sectors into an aligned window, and of these what is wanted."""
        if self._window is None:
            self._window = mmap.mmap(-1, SCRATCH)
        skip = offset % _SECTOR
        count = min(SCRATCH, -(-(skip + len(into)) // _SECTOR) * _SECTOR)
        with memoryview(self._window) as window:
            got = min(os.preadv(fd, [window[:count]], offset - skip) - skip, len(into))
            if got > 0:
                into[:got] = window[skip : skip + got]
        return got
