"""What moves bulk bytes between workers, whatever carries them: four verbs, and peers that come and go. Knows no sockets.

    register   memory under a name, for peers to read (and write, where it says so)
    read       a peer's bytes into memory of ours
    write      memory of ours into a peer's
    notify     a few bytes for the peer's program to see, after which it has seen them

Every call blocks and belongs in a thread. Each ends within the transport's patience: in its result, PeerLost (try another
peer, or again) or PeerRefused (do not).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from squall.live.transport.device import Segment
from squall.live.transport.region import Region


class Link(Protocol):
    """A connection to one peer, used by one thread; `interrupt` from any. Its calls raise PeerLost and PeerRefused.

    Attributes:
        peer: the node at the other end.
    """

    peer: str

    def open(self, region: str, fingerprint: str = "", into: Region | None = None) -> dict[str, int]:
        """Begin with a region, whose content must be `fingerprint`. Returns the checksums that are known there.

        Args:
            into: a region here that is to be read into: from device to device, where both lie on such as can.
        """
        ...

    def read(
        self, region: str, segments: Sequence[Segment], into: Region, at: Sequence[Segment] | None = None,
        *, verified: bool = False,
    ) -> None:  # fmt: skip
        """`ask` and `take` of one read; waits as long as the peer says that the bytes are still to come."""
        ...

    def ask(self, region: str, segments: Sequence[Segment], *, verified: bool = False) -> None:
        """Begin a read. Several may be under way; they end in order."""
        ...

    def take(
        self, region: str, segments: Sequence[Segment], into: Region, at: Sequence[Segment] | None = None
    ) -> tuple[str, ...] | None:
        """End the oldest read, which these are. The bytes go to `at` of `into`: to the same places when None.

        Returns:
            None when it is over. Otherwise the nodes that the bytes wait for, nearest first: call again.

        Raises:
            TransferFailed: the peer will never have them.
        """
        ...

    def checksum(self, region: str, section: str) -> int | None:
        """Of a section; None where the peer has not learned it within a moment, after which the link is of no more use."""
        ...

    def write(self, region: str, segments: Sequence[Segment], data: Sequence[memoryview]) -> None: ...

    def notify(self, payload: bytes) -> None:
        """Returns when the peer's `on_notify` has returned."""
        ...

    def interrupt(self) -> None:
        """Make the call that is under way, and all later ones, raise PeerLost."""
        ...

    def close(self) -> None: ...


OnNotify = Callable[[str, bytes], None]
"""Told the node and the payload, in a thread of the transport."""


class Transport(Protocol):
    """One process's end of all its links.

    Attributes:
        node: its name, the same to all peers.
        addresses: where peers reach it; the first that they can use is the fastest.
    """

    node: str
    addresses: tuple[str, ...]

    def register(self, region: Region) -> None:
        """Let peers open `region`. Replaces one of the same name."""
        ...

    def unregister(self, name: str) -> None:
        """No peer can open or read it any more. Harmless if there is none."""
        ...

    def connect(self, address: str) -> Link:
        """Raises PeerLost, PeerRefused; ConfigError for an address of no kind that it knows."""
        ...

    def close(self) -> None:
        """End all links and threads, and keep no region any more."""
        ...
