"""Blocks that other processes cannot read, and the memory in which they can."""

import mmap
import os

import pytest
import torch

from squall.live.engine.mirror import Mirror
from squall.live.transport.memory import SharedMemory

SHAPE = (3, 2, 8, 4, 2, 64)  # layers, keys and values, blocks of 2 KiB
BLOCK = 4 * 2 * 64 * 4


def made() -> tuple[torch.Tensor, SharedMemory, Mirror]:
    pool = torch.rand(SHAPE)
    memory = SharedMemory(pool.numel() * 4)
    return pool, memory, Mirror(pool, memory)


def seen(memory: SharedMemory) -> torch.Tensor:
    return torch.frombuffer(memory.view, dtype=torch.float32).view(SHAPE)


def num_pages(memory: SharedMemory) -> int:
    assert memory.fd is not None
    return os.fstat(memory.fd).st_blocks * 512 // mmap.PAGESIZE


def test_what_is_shown_is_what_was_asked_for_and_nothing_else() -> None:
    pool, memory, mirror = made()
    mirror.show(1, 3, [5, 0])
    expected = torch.zeros(SHAPE)
    expected[1:3, :, [5, 0]] = pool[1:3, :, [5, 0]]
    assert torch.equal(seen(memory), expected)


def test_what_has_come_lies_where_it_is_computed_with_and_nothing_else_has_changed() -> None:
    pool, memory, mirror = made()
    expected = pool.clone()
    seen(memory)[:] = -1.0
    mirror.take(0, 2, [7, 3, 4])
    expected[0:2, :, [7, 3, 4]] = -1.0
    assert torch.equal(pool, expected)


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="pages cannot be given back on this system")
def test_memory_is_taken_only_while_something_is_on_its_way() -> None:
    _, memory, mirror = made()
    mirror.begin()
    with mirror.used():
        mirror.show(0, 3, range(8))
    assert num_pages(memory) == 3 * 2 * 8 * BLOCK // mmap.PAGESIZE  # somebody else still moves blocks
    mirror.end()
    assert num_pages(memory) == 0


@pytest.mark.gpu
def test_blocks_of_a_gpu_go_out_and_come_in() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pool = torch.rand(SHAPE, dtype=torch.bfloat16, device="cuda")
    kept, memory = pool.clone(), SharedMemory(pool.numel() * 2)
    mirror = Mirror(pool, memory)
    mirror.show(0, 3, [1, 6])
    pool.zero_()
    mirror.take(0, 3, [1, 6])
    expected = torch.zeros_like(kept)
    expected[:, :, [1, 6]] = kept[:, :, [1, 6]]
    assert torch.equal(pool, expected)
