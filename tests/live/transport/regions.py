"""Regions of random bytes for tests, also for their other processes: knows no pytest, whose import takes long."""

import random

from squall.live.transport.device import DeviceMemory
from squall.live.transport.memory import SharedMemory
from squall.live.transport.region import Region, Section

TOKEN = "open sesame"
CHUNK = 16 * 1024
SIZES = (50_000, 120_000, 120_000, 120_000, 64, 50_000)  # odd ends: the last chunk of a section is short


def sections() -> tuple[Section, ...]:
    placed, at = [], 0
    for index, size in enumerate(SIZES):
        placed.append(Section(f"section {index}", at, size))
        at += -(-size // 4096) * 4096
    return tuple(placed)


def num_bytes() -> int:
    """Of a region."""
    last = sections()[-1]
    return last.offset + last.num_bytes


def make_region(name: str = "weights", fingerprint: str = "a model", device: DeviceMemory | None = None) -> Region:
    memory = SharedMemory(num_bytes())
    return Region(name, memory, fingerprint=fingerprint, sections=sections(), chunk_bytes=CHUNK, device=device)


def room(num_bytes: int) -> Region:
    """Where bytes are read into."""
    return Region("room", memoryview(bytearray(num_bytes)))


def fill(region: Region, seed: int = 0, upto: int | None = None) -> Region:
    """Write random bytes and publish sections [0, upto)."""
    dice = random.Random(seed)
    content = dice.randbytes(len(region.memory))
    for index, section in enumerate(region.sections[:upto]):
        region.view((section.offset, section.num_bytes))[:] = content[section.offset : section.offset + section.num_bytes]
        region.publish(index)
    return region


def same(one: Region, other: Region) -> bool:
    for region in (one, other):
        region.show([(part.offset, part.num_bytes) for part in region.sections])
    return all(one.view((part.offset, part.num_bytes)) == other.view((part.offset, part.num_bytes)) for part in one.sections)
