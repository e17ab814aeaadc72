"""Bytes on devices: read, written, copied from a peer's, summed up; see `DeviceMemory`. Knows no regions, and no kind of device.

A checksum is computed where the bytes lie and will be computed with: copying them back for it would take the way through the
host that mapping saves. It is of whole numbers, so that every device comes to the same one, in whatever order it adds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from squall.live.engine.devices import Device, Room, device_for
from squall.live.transport.device import Lent, Mapped, Segment, Unreachable

_PIECE = 1 << 19
"""Words of 8 bytes that are multiplied by a key each and added up at once."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1

_log = logging.getLogger(__name__)


class TorchMemory:
    """See `DeviceMemory`.

    Args:
        parts: devices and as many bytes on each.
    """

    def __init__(self, parts: Sequence[tuple[Device, Room]]) -> None:
        self._devices = tuple(device for device, _ in parts)
        self._rooms = tuple(room for _, room in parts)
        self.tensors = tuple(room.tensor for room in self._rooms)
        self.kind = self._devices[0].kind
        self._size = len(self.tensors[0])
        self._told = False

    @classmethod
    def allocate(cls, devices: Sequence[Device], num_bytes: int) -> TorchMemory:
        """So many zeros on each."""
        return cls([(device, device.allocate(num_bytes)) for device in devices])

    @classmethod
    def borrowed(cls, lent: Lent, device: torch.device) -> TorchMemory:
        """Another process's, which has lent it to us to compute with on `device`. Raises Unreachable."""
        borrower = device_for(lent, device)
        return cls([(borrower, borrower.open(lent))])

    @property
    def lent(self) -> tuple[Lent, ...]:
        lent = tuple(room.lent for room in self._rooms if room.lent is not None)
        return lent if len(lent) == len(self._rooms) else ()

    def get(self, segments: Sequence[Segment], into: Sequence[memoryview]) -> None:
        for part, mine in _by_part(segments, self._size):
            views = [_host(into[index]) for index, _ in mine]
            with self._devices[part].ordered():
                there = _gathered(self.tensors[part], [place for _, place in mine])
                if len(views) == 1:
                    views[0].copy_(there)
                else:
                    _dealt(there.cpu(), views)

    def put(self, segments: Sequence[Segment], data: Sequence[memoryview]) -> None:
        for part, mine in _by_part(segments, self._size):
            views = [_host(data[index]) for index, _ in mine]
            with self._devices[part].ordered():
                places = [self.tensors[part][offset : offset + length] for _, (offset, length) in mine]
                if len(views) == 1:
                    places[0].copy_(views[0])
                else:
                    _dealt(torch.cat(views).to(self.tensors[part].device), places)

    def digest(self, segments: Sequence[Segment]) -> int:
        value = 0
        for part, mine in _by_part(segments, self._size):
            with self._devices[part].ordered():
                value = _then(value, checksum(_gathered(self.tensors[part], [place for _, place in mine])))
        return value

    def open(self, lent: Sequence[Lent]) -> Mapped:
        if len(lent) != len(self._devices):
            raise Unreachable(f"it lies on {len(lent)} devices, ours on {len(self._devices)}")
        rooms: list[Room] = []
        try:
            for device, each in zip(self._devices, lent, strict=True):
                rooms.append(device.open(each))
        except Unreachable as error:
            Mapping(rooms, 0).close()
            if not self._told:
                self._told = True
                _log.warning("memory of a peer cannot be mapped, its bytes come by the host: %s", error)
            raise
        return Mapping(rooms, lent[0].num_bytes)

    def copy(self, mapped: Mapped, segments: Sequence[Segment], at: Sequence[Segment]) -> None:
        assert isinstance(mapped, Mapping)
        there = dict(_by_part(segments, mapped.size))
        for part, here in _by_part(at, self._size):
            device, tensor, room = self._devices[part], self.tensors[part], mapped.rooms[part]
            with device.ordered():
                for begin, offset, length in _runs([place for _, place in there[part]], [place for _, place in here]):
                    device.copy(room, begin, tensor[offset : offset + length])


class Mapping:
    """A peer's parts, so many bytes each. See `Mapped`."""

    def __init__(self, rooms: Sequence[Room], size: int) -> None:
        self.rooms = tuple(rooms)
        self.size = size

    def close(self) -> None:
        for room in self.rooms:
            room.close()


def checksum(data: Tensor) -> int:
    """Of bytes in a row, on any device: 64 bits.

    Of each word of 8 bytes the upper half is folded into the lower one (or any two signs that change would cancel out), it is
    multiplied by an odd key of its place, and all are added up, modulo 2^64. One word that changes always changes the sum.
    """
    num_bytes = len(data)
    odd = -num_bytes % 8
    if odd:
        data = torch.nn.functional.pad(data, (0, odd))
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    words, sums = data.view(torch.int64), []
    for begin in range(0, len(words), _PIECE):
        piece = words[begin : begin + _PIECE]
        folded = (piece >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(piece)
        sums.append(folded.mul_(_keys(data.device)[: len(piece)]).sum())
    value = num_bytes
    for each in torch.stack(sums).tolist():
        value = _then(value, each)
    return value


def _then(value: int, following: int) -> int:
    return (value * _GOLDEN + following) & _MASK


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """Made on the CPU: the same everywhere, and there when this returns, for every stream."""
    keys = torch.arange(1, _PIECE + 1) * _signed(_GOLDEN)
    keys = (keys ^ (keys >> 31)) * _signed(_MIX)
    return ((keys ^ (keys >> 29)) | 1).to(device)


def _signed(value: int) -> int:
    return value - (1 << 64)


def _by_part(segments: Sequence[Segment], size: int) -> Iterator[tuple[int, list[tuple[int, Segment]]]]:
    """By part of so many bytes, in order: the number of each segment that lies there, and where."""
    parts: dict[int, list[tuple[int, Segment]]] = {}
    for index, (offset, length) in enumerate(segments):
        part, begin = divmod(offset, size)
        parts.setdefault(part, []).append((index, (begin, length)))
    yield from parts.items()


def _gathered(tensor: Tensor, places: Sequence[Segment]) -> Tensor:
    parts = [tensor[offset : offset + length] for offset, length in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dealt(data: Tensor, places: Sequence[Tensor]) -> None:
    """One way over the bus for many small places, and on the other side piece by piece."""
    at = 0
    for place in places:
        place.copy_(data[at : at + len(place)])
        at += len(place)


def _runs(there: Sequence[Segment], here: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Where each copy begins on both sides, and how long it is: neighbours on both sides together."""
    runs: list[tuple[int, int, int]] = []
    for (begin, length), (offset, _) in zip(there, here, strict=True):
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (begin, offset):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + length)
        else:
            runs.append((begin, offset, length))
    return runs


def _host(view: memoryview) -> Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)
