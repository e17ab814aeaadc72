"""Memory that another process of this machine can read without its being sent. Knows bytes and file descriptors only.

The descriptor is anonymous: nothing in the file system names it, so nothing is left behind when its owner is killed. A peer
that was handed it copies with `preadv` and `pwritev`: one copy, no mapping, no page of ours counted as theirs.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

_MAX_VECTORS = 512
"""Buffers a system call; Linux takes 1024."""


class SharedMemory:
    """Zeroed, page-aligned memory; pages are taken only as they are written.

    Args:
        num_bytes: at least 1.

    Attributes:
        view: all of it, writable.
        fd: to hand to peers; None where the system has no anonymous shared files, and bytes must be sent.
    """

    def __init__(self, num_bytes: int) -> None:
        self.fd: int | None = None
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("squall", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, num_bytes)
            self._map = mmap.mmap(self.fd, num_bytes)
        else:
            self._map = mmap.mmap(-1, num_bytes)
        self.view = memoryview(self._map)

    @classmethod
    def of(cls, fd: int) -> "SharedMemory":
        """The memory behind a descriptor, which is ours from now on: all of it, also written to by whoever gave it."""
        memory = cls.__new__(cls)
        memory.fd = fd
        memory._map = mmap.mmap(fd, os.fstat(fd).st_size)
        memory.view = memoryview(memory._map)
        return memory

    def give_back(self) -> None:
        """Its pages to the system: it is zeroed memory again, also for whoever was handed it. Not where there is no `fd`."""
        if self.fd is not None and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        if getattr(self, "fd", None) is not None:
            os.close(self.fd)  # type: ignore[arg-type]  # the mapping goes with its last user


def read_into(fd: int, segments: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> None:
    """Copy `segments` (offset, length) of the memory behind `fd` into the buffers of the same lengths.

    Raises OSError when the memory is shorter than that.
    """
    for offset, views in _runs(segments, into):
        _move(os.preadv, fd, offset, views)


def write_from(fd: int, segments: Sequence[tuple[int, int]], data: Sequence[memoryview]) -> None:
    """Copy the buffers into `segments` of the memory behind `fd`; see `read_into`."""
    for offset, views in _runs(segments, data):
        _move(os.pwritev, fd, offset, views)


def _runs(segments: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Neighbouring segments together: one system call each."""
    runs: list[tuple[int, list[memoryview]]] = []
    end = -1
    for (offset, length), view in zip(segments, views, strict=True):
        if offset == end and len(runs[-1][1]) < _MAX_VECTORS:
            runs[-1][1].append(view)
        else:
            runs.append((offset, [view]))
        end = offset + length
    return runs


def _move(call: Callable[[int, Any, int], int], fd: int, offset: int, views: list[memoryview]) -> None:
    while views:
        done = call(fd, views, offset)
        if done <= 0:
            raise OSError(f"the peer's memory ends at byte {offset}")
        offset += done
        views = remainder(views, done)


def remainder(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` once their first `done` bytes have been moved."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []
