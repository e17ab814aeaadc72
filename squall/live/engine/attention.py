"""Attention of a packed batch over a paged KV cache. Knows no weights, no requests and no sampling.

A batch is flat: first one token of every decoding sequence, then the chunks of prompts, one after the other.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from squall.live.engine import devices
from squall.live.engine.device_memory import TorchMemory
from squall.live.engine.kernels import Kernels
from squall.live.engine.weights import WHOLE, Shard
from squall.live.engine.window import Window
from squall.live.transport.device import Lent
from squall.live.transport.memory import SharedMemory


class Span:
    """A chunk's place in the batch.

    Args:
        start, stop: its tokens' indices in the batch.
        offset: tokens of its sequence before it, whose KV is in the cache.
        blocks: block numbers of its sequence, int64, enough for all tokens up to its end.
    """

    def __init__(self, start: int, stop: int, offset: int, blocks: Tensor) -> None:
        self.start = start
        self.stop = stop
        self.offset = offset
        self.blocks = blocks
        self._masks: dict[int, Tensor] = {}

    def mask(self, window: int) -> Tensor:
        """Which of the sequence's tokens each token of the chunk sees: bool [chunk, offset + chunk]. Made once a step."""
        if window not in self._masks:
            length = self.offset + self.stop - self.start
            seen = torch.arange(length, device=self.blocks.device)
            at = seen[self.offset :].unsqueeze(1)
            sees = seen <= at
            self._masks[window] = sees & (seen > at - window) if window else sees
        return self._masks[window]


class Batch:
    """What a step computes, all tensors on the model's device.

    Attributes:
        tokens, positions: int64 [num_tokens].
        slots: int64 [num_tokens]; where each token's keys and values go: block * block_size + place in the block.
        tables: int32 [num_decodes, any width]; lengths: int32 [num_decodes], the new token counted.
        longest: the largest of lengths.
        spans: the chunks.
    """

    def __init__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor, longest: int, spans: list[Span]
    ) -> None:
        self.tokens = tokens
        self.positions = positions
        self.slots = slots
        self.tables = tables
        self.lengths = lengths
        self.longest = longest
        self.spans = spans
        self.num_decodes = lengths.shape[0]
        self._scratch: Tensor | None = None

    def scores(self, heads: int, block_size: int) -> Tensor:
        """Scratch for the native kernel, one for all layers."""
        if self._scratch is None:
            self._scratch = torch.empty((heads, self.longest + block_size + 8))
        return self._scratch


class KvCache:
    """The pools of all layers: [layers, keys and values, num_blocks, block_size, kv_heads, dim].

    Rank 0 makes those of all ranks of a replica, one after the other: on a CPU in one piece of memory, on GPUs each rank's on its
    own and lent to it. So one process can hand out and take in what all of them hold of a sequence.

    Args:
        kv_heads: of this shard, whose part of the memory is used.
        memory: all ranks', from the process that made it; lent: this rank's, by that process. Made here when neither is given.

    Attributes:
        keys, values: for every layer [num_blocks, block_size, kv_heads, dim].
        memory: all ranks', for peers to read; None at other ranks than 0 on GPUs, and where these cannot lend to each other.
        held: all ranks' pools on devices, which `memory` is but a window on; None on a CPU.
        window: whoever moves what it holds uses it meanwhile; None on a CPU.
    """

    def __init__(
        self, layers: int, num_blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device,
        shard: Shard = WHOLE, memory: SharedMemory | None = None, lent: Lent | None = None,
    ) -> None:  # fmt: skip
        shape = (layers, 2, num_blocks, block_size, kv_heads, dim)
        num_bytes = math.prod(shape) * dtype.itemsize
        # Zeros, not garbage: what is masked away is still multiplied by 0. On a CPU, memory is taken only as it is written to.
        self.memory: SharedMemory | None = memory
        self.held = None if memory is not None else _held(device, shard, num_bytes, lent)
        self.window: Window | None = None
        if self.held is None:
            self.memory = memory or SharedMemory(shard.size * num_bytes)
            pool = torch.frombuffer(self.memory.view, dtype=dtype).view(shard.size, *shape)[shard.rank]
        else:
            pool = self.held.tensors[0].view(dtype).view(shape)
            if len(self.held.tensors) == shard.size:
                self.memory = SharedMemory(shard.size * num_bytes)
                self.window = Window(self.memory)
        self.keys = [pool[layer, 0] for layer in range(layers)]
        self.values = [pool[layer, 1] for layer in range(layers)]


def _held(device: torch.device, shard: Shard, num_bytes: int, lent: Lent | None) -> TorchMemory | None:
    """The pools on devices: this rank's that is lent to it; of rank 0 all, or its own alone where it cannot lend the others'."""
    if lent is not None:
        return TorchMemory.borrowed(lent, device)
    lender = devices.device_of(device)
    if lender is None:
        return None
    first = lender, lender.allocate(num_bytes)
    if shard.rank or first[1].lent is None:
        return TorchMemory([first])
    others = [devices.device_of(devices.beside(device, rank)) for rank in range(1, shard.size)]
    return TorchMemory([first, *((other, other.allocate(num_bytes)) for other in others if other is not None)])


def rope_store(qkv: Tensor, cosine: Tensor, sine: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """As `Kernels.rope_store`, in PyTorch."""
    kv_heads, dim = keys.shape[2], keys.shape[3]
    half = dim // 2
    cosine, sine = cosine.to(qkv.dtype).unsqueeze(1), sine.to(qkv.dtype).unsqueeze(1)
    rotated = qkv[:, :-kv_heads]
    a, b = rotated[..., :half], rotated[..., half:]
    turned = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    rotated.copy_(turned)
    keys.view(-1, kv_heads, dim).index_copy_(0, slots, turned[:, -kv_heads:])
    values.view(-1, kv_heads, dim).index_copy_(0, slots, qkv[:, -kv_heads:])


def attend(qkv: Tensor, keys: Tensor, values: Tensor, batch: Batch, window: int, kernels: Kernels | None) -> Tensor:
    """Attention of every token of the batch over its own sequence, whose keys and values are already in the cache.

    Args:
        qkv: [num_tokens, heads + 2 kv_heads, dim], rotated.
        window: tokens to look back, 0 for all.

    Returns:
        [num_tokens, heads * dim].
    """
    n = batch.num_decodes
    heads = qkv.shape[1] - 2 * keys.shape[2]
    parts = []
    if n and kernels is not None:
        scores = batch.scores(heads, keys.shape[1])
        parts.append(kernels.attend(qkv[:n], keys, values, batch.tables, batch.lengths, scores, window))
    elif n:
        q, where = qkv[:n, :heads], (batch.tables, batch.lengths)
        if qkv.is_cuda:
            parts.append(attend_together(q, keys, values, *where, window, batch.longest))
        else:
            parts.append(attend_one_by_one(q, keys, values, *where, window))
    parts.extend(_attend_span(qkv[span.start : span.stop], keys, values, span, window) for span in batch.spans)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def attend_one_by_one(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int) -> Tensor:
    """Decodes, sequence by sequence: on a CPU gathering costs more than calling, so nothing is padded. [n, heads, dim]"""
    _, heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    rows = []
    for row, length in enumerate(lengths.tolist()):
        blocks = tables[row, : -(-length // block_size)]
        first = max(0, length - window) if window else 0
        k, v = (
            pool.index_select(0, blocks).view(1, -1, kv_heads, dim)[:, first:length].transpose(1, 2) for pool in (keys, values)
        )
        grouped = q[row].view(1, kv_heads, heads // kv_heads, dim)  # heads that share keys become rows of one product
        rows.append(F.scaled_dot_product_attention(grouped, k, v).view(heads, dim))
    return torch.stack(rows)


def attend_together(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int, longest: int | None = None
) -> Tensor:
    """Decodes, padded to the longest: on a GPU calls cost more than bytes. [n, heads, dim]

    `longest` is the largest of `lengths`; without it the GPU has to be waited for.
    """
    n, heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    width = -(-(int(lengths.max()) if longest is None else longest) // block_size)
    blocks = tables[:, :width].to(torch.int64)
    k, v = (pool[blocks].view(n, width * block_size, kv_heads, dim).transpose(1, 2) for pool in (keys, values))
    at = torch.arange(width * block_size, device=q.device)
    ends = lengths.unsqueeze(1)
    sees = (at < ends) & (at >= ends - window) if window else at < ends
    grouped = q.reshape(n, kv_heads, heads // kv_heads, dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=sees[:, None, None]).reshape(n, heads, dim)


def _attend_span(qkv: Tensor, keys: Tensor, values: Tensor, span: Span, window: int) -> Tensor:
    """A chunk: its own keys where nothing lies before it, otherwise those of its blocks. [chunk, heads, dim]"""
    _, _, kv_heads, dim = keys.shape
    q = qkv[:, : -2 * kv_heads].transpose(0, 1).unsqueeze(0)
    size = qkv.shape[0]
    if span.offset == 0:
        k, v = qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
    else:
        k, v = (pool.index_select(0, span.blocks).view(-1, kv_heads, dim)[: span.offset + size] for pool in (keys, values))
    mask = None if span.offset == 0 and not 0 < window < size else span.mask(window)
    k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
