"""Host memory that bytes pass through."""

import mmap
import os

import pytest

from squall.live.engine.window import Window
from squall.live.transport.memory import SharedMemory


def num_pages(memory: SharedMemory) -> int:
    assert memory.fd is not None
    return os.fstat(memory.fd).st_blocks * 512 // mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="pages cannot be given back on this system")
def test_memory_is_taken_only_while_something_is_on_its_way() -> None:
    memory = SharedMemory(8 * mmap.PAGESIZE)
    window = Window(memory)
    window.begin()
    with window.used():
        memory.view[: 3 * mmap.PAGESIZE] = bytes([1]) * 3 * mmap.PAGESIZE
    assert num_pages(memory) == 3  # somebody else still moves bytes
    window.end()
    assert num_pages(memory) == 0
