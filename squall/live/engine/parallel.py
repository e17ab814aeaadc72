"""Rank 0's decoder in a tensor-parallel replica: what it computes, the other ranks are told to compute with it.

The same calls as `Decoder`. A rank keeps the latest batch and the residual stream; what it does not have comes with the call:
a step's few arrays (a kilobyte or so) once, and the stream only where it was computed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from squall.live.engine.attention import Batch, KvCache, Span
from squall.live.engine.collectives import Group, meeting
from squall.live.engine.decoder import Decoder
from squall.live.engine.devices import beside
from squall.live.engine.team import SETUP_S, Embed, Layers, Logits, Packed, Setup, Team
from squall.live.engine.weights import DTYPES, Weights

T = TypeVar("T")


class Shape:
    """What every rank of a replica is told about it; see `Setup`."""

    def __init__(
        self, folder: Path, threads: int, native: bool, max_model_len: int, num_blocks: int, block_size: int
    ) -> None:  # fmt: skip
        self.folder = folder
        self.threads = threads
        self.native = native
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = block_size


def assemble(team: Team, shape: Shape, shards: list[Weights], cache: KvCache, timeout_s: float = SETUP_S) -> Group:
    """Set the other ranks up and join them. Returns rank 0's end of the group.

    Args:
        shards: of all ranks; the memory of each is handed to its rank.
        cache: rank 0's; its memory, where it is all ranks', is handed to each.

    Raises ReplicaFailed.
    """
    device, dtype = shards[0].device, shards[0].embed.dtype
    name = next(name for name, known in DTYPES.items() if known is dtype)
    store = meeting(timeout_s)
    setups = []
    for rank, weights in enumerate(shards[1:], 1):
        held, pools = weights.arena.region.device, cache.held
        ours = held.lent[0] if held is not None and held.lent else None
        lent = ours, pools.lent[rank] if ours is not None and pools is not None and pools.lent else None
        setup = Setup(
            rank, team.size, store.port, team.timeout_s, str(shape.folder), str(beside(device, rank)), name, shape.threads,
            shape.native, shape.max_model_len, shape.num_blocks, shape.block_size, *lent,
        )  # fmt: skip
        memory = weights.arena.region.fd, None if cache.memory is None else cache.memory.fd
        setups.append((setup, [fd for fd in memory if fd is not None and ours is None]))
    team.set_up(setups)
    team.until_ready(timeout_s)
    try:
        return Group(0, team.size, store.port, device, team.timeout_s, store)
    except RuntimeError as error:
        raise team.explain(error) from None


class Leading:
    """See the module.

    Args:
        decoder: of rank 0's shard.
        team: the other ranks.
    """

    def __init__(self, decoder: Decoder, team: Team) -> None:
        self.config = decoder.config
        self._decoder = decoder
        self._team = team
        self._batch: Batch | None = None  # that the ranks have
        self._held: Tensor | None = None  # the residual stream that they have

    def embed(self, tokens: Tensor) -> Tensor:
        self._team.tell(Embed(raw(tokens)))
        self._held = self._together(lambda: self._decoder.embed(tokens))
        return self._held

    def run(self, x: Tensor, batch: Batch, cache: KvCache, first: int, last: int) -> Tensor:
        self._team.tell(Layers(first, last, None if batch is self._batch else packed(batch), self._unknown(x)))
        self._batch = batch
        self._held = self._together(lambda: self._decoder.run(x, batch, cache, first, last))
        return self._held

    def logits(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        self._team.tell(Logits(None if rows is None else raw(rows), self._unknown(x)))
        self._held = x
        return self._together(lambda: self._decoder.logits(x, rows))

    def _unknown(self, x: Tensor) -> bytes | None:
        """The bytes of a stream that the ranks do not have."""
        return None if x is self._held else raw(x)

    def _together(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise self._team.explain(error) from None


# -- arrays on the wire


def raw(tensor: Tensor) -> bytes:
    values: Any = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return values.tobytes()  # type: ignore[no-any-return]


def array(data: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One dimension."""
    values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return values.to(device)


def packed(batch: Batch) -> Packed:
    spans = tuple((span.start, span.stop, span.offset, raw(span.blocks)) for span in batch.spans)
    return Packed(raw(batch.positions), raw(batch.slots), raw(batch.tables), raw(batch.lengths), batch.longest, spans)


def unpacked(batch: Packed, device: torch.device) -> Batch:
    """Without its tokens, which were embedded before."""
    lengths = array(batch.lengths, torch.int32, device)
    tables = array(batch.tables, torch.int32, device).view(len(lengths), -1) if len(lengths) else lengths.view(0, 1)
    positions, slots = (array(data, torch.int64, device) for data in (batch.positions, batch.slots))
    spans = [Span(start, stop, offset, array(blocks, torch.int64, device)) for start, stop, offset, blocks in batch.spans]
    return Batch(positions[:0], positions, slots, tables, lengths, batch.longest, spans)
