"""A piece of memory that peers may read, and how much of it has arrived. Knows no connections.

A region of weights has sections (embedding, layers, ...), each with a checksum, and is cut into chunks that never cross a
section: a chunk that has *arrived* may be passed on, a section that is *verified* may be computed with. A region without
sections (a KV pool) is always readable; who reads it has been told what is where. The bytes of a region may lie on a device;
then they pass through its host memory on the way from and to whoever cannot reach that.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import xxhash
from msgspec import Struct

from squall.errors import PeerRefused, TransferFailed
from squall.live.transport.device import DeviceMemory, Segment
from squall.live.transport.memory import SharedMemory

CHUNK = 1 << 20
"""Bytes that are asked for at once: what a chain's next member waits for, and what is asked again after a break."""


class Section(Struct, frozen=True):
    """A part of a region that is complete or not: bytes [offset, offset + num_bytes)."""

    name: str
    offset: int
    num_bytes: int


class Chunk(Struct, frozen=True):
    """Bytes [offset, offset + num_bytes) of section number `section`."""

    section: int
    offset: int
    num_bytes: int


class Region:
    """Memory under a name. All methods from any thread.

    Args:
        name: what peers ask for.
        memory: writable where anything is to arrive; peers on this machine read a `SharedMemory` without its being sent.
        fingerprint: what is in it (model, number type, shard); a peer that wants something else is refused.
        sections: in order, not overlapping; what lies between them never moves.
        writable: peers may write; not where a device is.
        device: where the bytes lie, as many as in `memory`; in `memory` itself when None.

    Attributes:
        chunks: in order.
        upstream: the nodes that the arrival of a chunk waits for, nearest first; whoever fetches sets it.
        on_verified: told the number of each section that may be computed with from now on, in the thread that brought it.
        began_at: on the monotonic clock, when the first bytes arrived; None before.
    """

    def __init__(
        self,
        name: str,
        memory: SharedMemory | memoryview,
        *,
        fingerprint: str = "",
        sections: Sequence[Section] = (),
        chunk_bytes: int = CHUNK,
        writable: bool = False,
        device: DeviceMemory | None = None,
    ) -> None:
        self.name = name
        self._shared = memory if isinstance(memory, SharedMemory) else None
        self.memory = memory.view if isinstance(memory, SharedMemory) else memory.cast("B")
        self.fingerprint = fingerprint if device is None else f"{fingerprint}, checksums of devices"
        self.device = device
        self.sections = tuple(sections)
        self.chunk_bytes = chunk_bytes
        self.writable = writable
        self.chunks = [
            Chunk(index, at, min(chunk_bytes, section.offset + section.num_bytes - at))
            for index, section in enumerate(self.sections)
            for at in range(section.offset, section.offset + section.num_bytes, chunk_bytes)
        ]
        self.upstream: Callable[[int], tuple[str, ...]] = lambda _: ()
        self.on_verified: Callable[[int], None] = lambda _: None
        self.began_at: float | None = None
        self._starts = [chunk.offset for chunk in self.chunks]
        self._arrived = [False] * len(self.chunks)
        self._missing = [sum(chunk.section == index for chunk in self.chunks) for index in range(len(self.sections))]
        self._verified = [False] * len(self.sections)
        self._sums: dict[int, int] = {}
        self._failure: str | None = None
        self._changed = threading.Condition()

    # -- what is here

    @property
    def fd(self) -> int | None:
        """A descriptor of the memory, where there is one."""
        return None if self._shared is None else self._shared.fd

    @property
    def sums(self) -> dict[str, int]:
        """The checksums known so far (see `digest`), by section."""
        with self._changed:
            return {self.sections[index].name: value for index, value in self._sums.items()}

    @property
    def complete(self) -> bool:
        return all(self._verified)

    @property
    def num_verified(self) -> int:
        """Leading sections that may be computed with."""
        return next((index for index, verified in enumerate(self._verified) if not verified), len(self._verified))

    def verified(self, section: int) -> bool:
        return self._verified[section]

    def missing(self) -> list[int]:
        """Chunks that have not arrived."""
        with self._changed:
            return [index for index, arrived in enumerate(self._arrived) if not arrived]

    def chunks_of(self, section: int) -> list[int]:
        return [index for index, chunk in enumerate(self.chunks) if chunk.section == section]

    def view(self, segment: Segment) -> memoryview:
        offset, length = segment
        return self.memory[offset : offset + length]

    def show(self, segments: Sequence[Segment]) -> None:
        """For whoever reads host memory: let it hold what the device does."""
        if self.device is not None:
            self.device.get(segments, [self.view(segment) for segment in segments])

    def settle(self, segments: Sequence[Segment]) -> None:
        """Host memory has been written to: bring it to where it belongs."""
        if self.device is not None:
            self.device.put(segments, [self.view(segment) for segment in segments])

    def digest(self, segments: Sequence[Segment]) -> int:
        """A checksum of all of them in order: XXH3 in host memory, a device's own there."""
        if self.device is not None:
            return self.device.digest(segments)
        digest = xxhash.xxh3_64()
        for segment in segments:
            digest.update(self.view(segment))
        return digest.intdigest()

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises PeerRefused where a segment is not inside."""
        for offset, length in segments:
            if offset < 0 or length <= 0 or offset + length > len(self.memory):
                raise PeerRefused(f"region {self.name} has {len(self.memory)} bytes; {length} at {offset} are not inside")

    # -- what arrives

    def publish(self, section: int) -> None:
        """All of a section was written by its owner: compute its checksum, which is the truth for all who fetch it."""
        self.settle([self._segment(section)])
        value = self.digest([self._segment(section)])
        with self._changed:
            self._sums[section] = value
            self._set(section, True)
        self.on_verified(section)

    def expect(self, sums: Mapping[str, int]) -> None:
        """Learn checksums from a source. Raises PeerRefused where it contradicts what is known: it holds other weights."""
        index = {section.name: at for at, section in enumerate(self.sections)}
        with self._changed:
            for name, value in sums.items():
                if name not in index:
                    raise PeerRefused(f"it has a section {name!r}, which is not in this layout")
                if self._sums.setdefault(index[name], value) != value:
                    raise PeerRefused(f"its {name} has another checksum: it holds other weights under the same name")
            self._changed.notify_all()

    def arrive(self, chunk: int) -> bool:
        """A chunk's bytes have been written. Returns whether its section is complete now, and has yet to be verified."""
        with self._changed:
            if self._arrived[chunk]:
                return False
            self._begin()
            self._arrived[chunk] = True
            section = self.chunks[chunk].section
            self._missing[section] -= 1
            self._changed.notify_all()
            return self._missing[section] == 0

    def accept(self, section: int) -> bool:
        """Compare a complete section with its checksum: verified, or else none of it has arrived."""
        value = self.digest([self._segment(section)])
        with self._changed:
            good = self._sums.get(section) == value
            self._set(section, good)
        if good:
            self.on_verified(section)
        return good

    def discard(self, section: int) -> None:
        """What has arrived of a section is to come again."""
        with self._changed:
            self._set(section, False)

    def fail(self, reason: str | None) -> None:
        """Nothing more will arrive, and why; None: it will again."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    # -- waiting

    def wait(self, segments: Sequence[Segment], timeout_s: float, *, verified: bool = False) -> int | None:
        """Wait until all of `segments` may be read.

        Returns:
            None when they may, otherwise a chunk that is still to come when the time is over.

        Raises:
            TransferFailed: it will not arrive.
        """
        wanted = self._touched(segments)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._absent(wanted, verified) is None, timeout_s)
            absent = self._absent(wanted, verified)
            if absent is not None and self._failure is not None:
                raise TransferFailed(self._failure)
            return absent

    def wait_verified(self, section: int, timeout_s: float) -> bool:
        """Whether a section may be computed with, within the time. Raises TransferFailed when it will not arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._verified[section], timeout_s)
            if not self._verified[section] and self._failure is not None:
                raise TransferFailed(self._failure)
            return self._verified[section]

    def wait_sum(self, name: str, timeout_s: float) -> int | None:
        """The checksum of a section, once it is known. Raises PeerRefused for a section that there is not."""
        index = next((at for at, section in enumerate(self.sections) if section.name == name), None)
        if index is None:
            raise PeerRefused(f"region {self.name} has no section {name!r}")
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or index in self._sums, timeout_s)
            if index not in self._sums and self._failure is not None:
                raise TransferFailed(self._failure)
            return self._sums.get(index)

    def _touched(self, segments: Sequence[Segment]) -> list[int]:
        touched: list[int] = []
        for offset, length in segments if self.chunks else ():
            first = max(0, bisect_right(self._starts, offset) - 1)
            touched += range(first, bisect_right(self._starts, offset + length - 1))
        return touched

    def _absent(self, wanted: Sequence[int], verified: bool) -> int | None:
        for chunk in wanted:
            section = self.chunks[chunk].section
            if verified and not self._verified[section]:  # it may be here, and wait for others of its section
                return next((part for part in self.chunks_of(section) if not self._arrived[part]), chunk)
            if not self._arrived[chunk]:
                return chunk
        return None

    def _segment(self, section: int) -> Segment:
        place = self.sections[section]
        return place.offset, place.num_bytes

    def _begin(self) -> None:
        if self.began_at is None:
            self.began_at = time.monotonic()

    def _set(self, section: int, here: bool) -> None:
        self._begin()
        chunks = self.chunks_of(section)
        for chunk in chunks:
            self._arrived[chunk] = here
        self._missing[section] = 0 if here else len(chunks)
        self._verified[section] = here
        self._changed.notify_all()
