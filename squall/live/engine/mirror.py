"""A KV pool that no other process can read, as on a GPU, in host memory: block by block, for as long as somebody moves it.

What leaves is copied here before it is offered, what comes is copied from here once it is checked, at the same place of the pool:
peers see a region like any other. Knows tensors and blocks; not who moves them, nor where to.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from squall.live.transport.memory import SharedMemory


class Mirror:
    """From any thread; blocks of one call must stand still.

    Args:
        pool: [layers, keys and values, num_blocks, ...], on its device.
        memory: as many bytes. Its pages are taken as they are written to, and given back whenever nothing is on its way.
    """

    def __init__(self, pool: Tensor, memory: SharedMemory) -> None:
        self._pool = pool
        self._host = torch.frombuffer(memory.view, dtype=pool.dtype).view(pool.shape)
        self._memory = memory
        self._users = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Something is on its way, until `end`."""
        with self._lock:
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._memory.give_back()

    @contextmanager
    def used(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def show(self, first: int, last: int, blocks: Sequence[int]) -> None:
        """What layers [first, last) of these blocks hold, for peers to read."""
        here, there = self._indices(blocks)
        for layer in range(first, last):
            self._host[layer][:, here] = self._pool[layer][:, there].cpu()

    def take(self, first: int, last: int, blocks: Sequence[int]) -> None:
        """What has come, to where it is computed with."""
        here, there = self._indices(blocks)
        for layer in range(first, last):
            self._pool[layer][:, there] = self._host[layer][:, here].to(self._pool.device)

    def _indices(self, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        here = torch.tensor(blocks, dtype=torch.int64)
        return here, here.to(self._pool.device)
