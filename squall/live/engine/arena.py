"""A worker's weights in memory: one allocation, section by section, and which sections may be computed with.

Knows sections and readiness; not what tensors lie in a section, nor where the bytes come from. On a CPU they arrive where they
stay, in memory that peers can read. On a GPU they do, too, from peers whose memory it can map; all others come by host memory.
"""

from collections.abc import Sequence

import torch

from squall.errors import TransferFailed
from squall.live.engine import devices
from squall.live.engine.device_memory import TorchMemory
from squall.live.transport.device import Lent
from squall.live.transport.memory import SharedMemory
from squall.live.transport.region import CHUNK, Region, Section

PAGE = 4096
"""Sections begin at multiples of it: what direct reads from a disk and registered memory ask for."""

WEIGHTS = "weights"
"""The region's name, the same to all peers; that of another shard than the first ends in its rank: "weights 1"."""


DEVICE_CHUNK = 8 << 20
"""As `CHUNK`, where bytes come from another device: at hundreds of gigabytes a second, to ask for a smaller one takes longer."""


def region_name(rank: int) -> str:
    return f"{WEIGHTS} {rank}" if rank else WEIGHTS


def sections(sizes: Sequence[tuple[str, int]]) -> tuple[Section, ...]:
    """Sections of these names and bytes, one after the other, each at a page."""
    placed, offset = [], 0
    for name, num_bytes in sizes:
        placed.append(Section(name, offset, num_bytes))
        offset += -(-num_bytes // PAGE) * PAGE
    return tuple(placed)


class Arena:
    """Room for all weights, with whatever the memory held.

    Args:
        parts: embed, layer 0 to L - 1, norm and, where it is not tied, head.
        fingerprint: the model, its number type and its shard, as told to peers.
        device: where the tensors lie.
        chunk_bytes: of the region; as its memory wants it when None.
        name: of the region.
        memory: of another process that fills it; our own when None.
        lent: the device's memory, by another process that fills it; our own when None.

    Attributes:
        region: the bytes, and what has arrived of them.
        host: all bytes in host memory, uint8; tensor: on the device, which on a CPU is the same memory.
    """

    def __init__(
        self, parts: Sequence[Section], fingerprint: str, device: torch.device, chunk_bytes: int | None = None,
        name: str = WEIGHTS, memory: SharedMemory | None = None, lent: Lent | None = None,
    ) -> None:  # fmt: skip
        last = parts[-1]
        filled = memory is not None  # in host memory alone, by a process that does not reach our device
        memory = memory or SharedMemory(-(-(last.offset + last.num_bytes) // PAGE) * PAGE)
        self._memory = memory
        self.host = torch.frombuffer(memory.view, dtype=torch.uint8)
        self._copied = [False] * len(parts) if filled and device.type != "cpu" else None
        held = None if filled else _held(device, lent, len(self.host))
        if held is None:
            self.tensor = self.host if device.type == "cpu" else torch.empty_like(self.host, device=device)
        else:
            (self.tensor,) = held.tensors
        chunk_bytes = chunk_bytes or (CHUNK if held is None else DEVICE_CHUNK)
        self.region = Region(name, memory, fingerprint=fingerprint, sections=parts, chunk_bytes=chunk_bytes, device=held)

    @property
    def layers_ready(self) -> int:
        """Leading layers that may be run: all that come after the embedding and have arrived without a gap."""
        last_layer = sum(section.name.startswith("layer ") for section in self.region.sections)
        return max(0, min(self.region.num_verified - 1, last_layer))

    @property
    def complete(self) -> bool:
        return self.region.complete

    def wait(self, section: str, timeout_s: float) -> bool:
        """Whether a section ("embed", "layer 3", "norm", "head") may be computed with, within the time.

        Raises TransferFailed when it will not arrive.
        """
        return self.region.wait_verified(self._index(section), timeout_s)

    def require(self, first: int, last: int, *, embed: bool = False, head: bool = False) -> None:
        """That layers [first, last), and what lies before or after them, may be computed with.

        Raises TransferFailed naming the first section that may not: nothing is computed with weights that are not verified.
        """
        for name in self._wanted(first, last, embed, head):
            index = self._index(name)
            if not self.region.verified(index):
                raise TransferFailed(f"{name} is needed, but has not arrived")

    def forget(self) -> None:
        """None of it has arrived, and its memory is free for others; peers that read it are told. Nothing may be on its way."""
        self.region.fail("its replica was stopped")
        for index in range(len(self.region.sections)):
            self.region.discard(index)
        self.region.began_at = None
        self._memory.give_back()

    def upload(self, first: int, last: int, *, embed: bool = False, head: bool = False) -> None:
        """As `require`, for memory that another process fills and has verified. Where that one does not reach our device, what is
        wanted is copied there at its first use."""
        if self._copied is not None:
            for name in self._wanted(first, last, embed, head):
                self._to_device(self._index(name))

    def _wanted(self, first: int, last: int, embed: bool, head: bool) -> list[str]:
        layers = [f"layer {index}" for index in range(first, last)]
        tail = self.region.sections[-1].name
        return (["embed"] if embed else []) + layers + (["norm", tail if tail == "head" else "embed"] if head else [])

    def _index(self, name: str) -> int:
        return next(index for index, section in enumerate(self.region.sections) if section.name == name)

    def _to_device(self, index: int) -> None:
        """In the thread that computes, so that no other stream must be waited for."""
        if self._copied is None or self._copied[index]:
            return
        section = self.region.sections[index]
        span = slice(section.offset, section.offset + section.num_bytes)
        self.tensor[span].copy_(self.host[span])
        self._copied[index] = True


def _held(device: torch.device, lent: Lent | None, num_bytes: int) -> TorchMemory | None:
    """Memory on a device that is not a CPU: our own, or another process's."""
    if lent is not None:
        return TorchMemory.borrowed(lent, device)
    lender = devices.device_of(device)
    return None if lender is None else TorchMemory.allocate([lender], num_bytes)
