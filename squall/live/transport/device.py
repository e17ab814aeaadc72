"""Memory that is not the host's, such as a GPU's: what regions, links and endpoints ask of it. Knows no GPU and no tensors.

A peer on the same machine maps what is lent to it, and copies from there into memory of its own kind. All others see the bytes
in host memory, into which they are copied for them.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

Segment = tuple[int, int]
"""Offset and length in bytes."""


class Unreachable(Exception):
    """Memory that is lent cannot be mapped here; its bytes have to come by the host."""


class Lent(Struct, frozen=True, array_like=True):
    """What a peer must know to map memory of ours.

    Attributes:
        kind: of device; only the same kind maps it.
        device: its name, the same to all processes, which number devices each in its own way.
        process: whose, unlike that of any other process.
        handle: to be opened.
    """

    kind: str
    device: str
    process: str
    handle: bytes
    num_bytes: int


class Mapped(Protocol):
    """A peer's memory, of which ours can copy."""

    def close(self) -> None:
        """Nothing is copied any more. Idempotent."""
        ...


class DeviceMemory(Protocol):
    """Bytes on one device, or one part after the other on several. All methods from any thread.

    What has been computed when a call begins is seen by it, and what it does is done when it returns. No segment crosses parts.

    Attributes:
        kind: see `Lent`.
        lent: each part's; none where no other process can map it.
    """

    @property
    def kind(self) -> str: ...

    @property
    def lent(self) -> tuple[Lent, ...]: ...

    def get(self, segments: Sequence[Segment], into: Sequence[memoryview]) -> None:
        """To host memory."""
        ...

    def put(self, segments: Sequence[Segment], data: Sequence[memoryview]) -> None:
        """From host memory."""
        ...

    def digest(self, segments: Sequence[Segment]) -> int:
        """A checksum of 64 bits of all of them in order, computed where they lie."""
        ...

    def open(self, lent: Sequence[Lent]) -> Mapped:
        """Map a peer's parts. Raises Unreachable."""
        ...

    def copy(self, mapped: Mapped, segments: Sequence[Segment], at: Sequence[Segment]) -> None:
        """`segments` of what `open` gave into `at`, pair by pair, each in the same part on both sides. Raises PeerLost."""
        ...
