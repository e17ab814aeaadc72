"""A rank of a tensor-parallel replica other than rank 0: computes its shard of what it is told, and nothing else.

    python -m squall.live.engine.rank FD FD      (started by `team.Team`, with two sockets)

Knows no requests: rank 0 keeps sequences, blocks and sampling, and sends batches. Weights arrive in memory that rank 0 fills, and
rank 0 sees our KV, too, and moves it; what is said to be run has arrived.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from squall.live.engine.architecture import read_decoder_config
from squall.live.engine.attention import Batch, KvCache
from squall.live.engine.collectives import Group
from squall.live.engine.decoder import Decoder, native_fits
from squall.live.engine.kernels import load_kernels
from squall.live.engine.parallel import array, unpacked
from squall.live.engine.team import Broken, Embed, Layers, Logits, Ready, Setup, Told, send, watch_leader
from squall.live.engine.weights import DTYPES, Shard, allocate
from squall.live.transport.memory import SharedMemory

_log = logging.getLogger(__name__)


class Rank:
    """One shard's decoder and its part of the KV pool.

    Args:
        setup: what rank 0 says that we are.
        weights: where they arrive; kv: of all ranks. Neither where rank 0 lends us memory of our device; no KV where it cannot.
    """

    def __init__(self, setup: Setup, weights: SharedMemory | None = None, kv: SharedMemory | None = None) -> None:
        self._setup = setup
        self._memory = weights
        self._kv = kv
        self._batch: Batch
        self._hidden: Tensor

    def set_up(self, ready: Callable[[], None]) -> None:
        """`ready` is called when the others may be met.

        Raises RuntimeError where the other ranks do not come; SquallError for the model or the device.
        """
        setup = self._setup
        torch.set_num_threads(setup.threads)
        config = read_decoder_config(Path(setup.folder))
        self._device, self._dtype = torch.device(setup.device), DTYPES[setup.dtype]
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        kernels = load_kernels() if setup.native and native_fits(self._dtype, self._device, setup.threads) else None
        shard = Shard(setup.rank, setup.size)
        self._weights = allocate(config, self._dtype, self._device, shard, memory=self._memory, lent=setup.weights)
        ready()  # importing and reading took long; meeting the others does not
        group = Group(setup.rank, setup.size, setup.port, self._device, setup.timeout_s)
        self._decoder = Decoder(config, self._weights, setup.max_model_len, kernels, group)
        shape = (config.num_layers, setup.num_blocks, setup.block_size, self._decoder.num_kv_heads, config.head_dim)
        self._cache = KvCache(*shape, dtype=self._dtype, device=self._device, shard=shard, memory=self._kv, lent=setup.kv)

    @torch.inference_mode()
    def compute(self, message: Told) -> None:
        """What rank 0 computes now, too."""
        arena = self._weights.arena
        match message:
            case Embed(tokens):
                arena.upload(0, 0, embed=True)
                self._hidden = self._decoder.embed(array(tokens, torch.int64, self._device))
            case Layers(first, last, batch, hidden):
                arena.upload(first, last)
                if batch is not None:
                    self._batch = unpacked(batch, self._device)
                self._take(hidden)
                self._hidden = self._decoder.run(self._hidden, self._batch, self._cache, first, last)
            case Logits(rows, hidden):
                arena.upload(0, 0, head=True)
                self._take(hidden)
                self._decoder.logits(self._hidden, None if rows is None else array(rows, torch.int64, self._device))
            case _:
                raise ValueError(f"rank {self._setup.rank} is told {type(message).__name__} out of turn")

    def _take(self, hidden: bytes | None) -> None:
        if hidden is not None:
            self._hidden = array(hidden, self._dtype, self._device).view(-1, self._decoder.config.hidden_size)


def main(told: int, said: int) -> None:
    """Until rank 0 is gone, which ends the process."""
    messages: queue.SimpleQueue[tuple[Told, list[int]]] = queue.SimpleQueue()
    threading.Thread(
        target=watch_leader,
        args=(socket.socket(fileno=told), lambda message, fds: messages.put((message, fds))),
        name="leader",
        daemon=True,
    ).start()
    answers = socket.socket(fileno=said)
    setup, fds = messages.get()
    try:
        if not isinstance(setup, Setup):
            raise ValueError(f"a rank is told {type(setup).__name__} before it was set up")
        rank = Rank(setup, *map(SharedMemory.of, fds))
        rank.set_up(lambda: send(answers, Ready()))
        while True:
            rank.compute(messages.get()[0])
    except Exception as error:
        _log.error("the rank failed", exc_info=error)
        send(answers, Broken(f"failed: {type(error).__name__}: {' '.join(str(error).split())}"))
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
