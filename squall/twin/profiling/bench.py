"""Runs single operators of a model's share as the built-in engine runs them, with values that mean nothing.

Knows sizes and the engine's functions; no checkpoint and no requests. Weights and KV blocks are taken in turn from memory that
is larger than the caches, because in a step every layer brings its own.
"""

from collections.abc import Callable, Mapping
from itertools import cycle

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from squall.errors import ProfileError
from squall.live.engine.attention import Batch, Span, attend, rope_store
from squall.live.engine.decoder import linear
from squall.live.engine.interface import Job, Sampling
from squall.live.engine.kernels import Kernels
from squall.live.engine.sampling import draw
from squall.live.engine.sequence import SequenceState
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.transport.memory import SharedMemory
from squall.perf.layers import Attention, Mlp
from squall.perf.spec import ModelSpec
from squall.twin.profiling.lines import Place
from squall.twin.profiling.timing import Call, Timer

COLD_BYTES = 256 << 20
"""More than caches hold, on CPUs as on GPUs."""

CAPTURED = ("gemm", "decode_attention", "norm", "rotary", "activation", "embedding")
"""What an engine captures in graphs; prompts and sampling run by themselves."""


class Widths(Struct, frozen=True):
    """What element-wise kernels need to know of a model: of one GPU that has all of it.

    Attributes:
        heads, kv_heads, head_dim, inter: None where no layer is like the built-in engine's.
        kernels: bytes a token of every element-wise kernel.
    """

    hidden: int
    vocab: int
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    inter: int | None
    kernels: Mapping[str, float]


def widths(model: ModelSpec, kernels: Mapping[str, float]) -> Widths:
    """Of the first layers that the built-in engine could run. `kernels` loses those that it could not."""
    attention = next((group.attention for group in model.layers if isinstance(group.attention, Attention)), None)
    mlp = next((group.mlp for group in model.layers if isinstance(group.mlp, Mlp)), None)
    lacking = {"rotary": attention is None, "activation": mlp is None}
    return Widths(
        model.hidden_size,
        model.vocab_size,
        attention.num_heads if attention else None,
        attention.num_kv_heads if attention else None,
        attention.head_dim if attention else None,
        mlp.size if mlp else None,
        {name: size for name, size in kernels.items() if not lacking.get(name)},
    )


class Cold:
    """Flat pieces of memory that together are larger than the caches, to be used in turn."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def pieces(self, num_values: int) -> Callable[[], Tensor]:
        """The next piece of so many values, at each call."""
        wanted = max(num_values, COLD_BYTES // self._dtype.itemsize)
        if len(self._memory) < wanted:
            self._memory = self._room(wanted).uniform_(-0.05, 0.05)
        count = len(self._memory) // num_values
        turn = cycle(self._memory[index * num_values : (index + 1) * num_values] for index in range(min(count, 4096)))
        return turn.__next__

    def _room(self, num_values: int) -> Tensor:
        """As the engine takes it for weights and KV: memory that peers can read, whose pages are small ones."""
        if self._device.type != "cpu":
            return torch.empty(num_values, dtype=self._dtype, device=self._device)
        return torch.frombuffer(SharedMemory(num_values * self._dtype.itemsize).view, dtype=self._dtype)


class OperatorBench:
    """Measures operators on one device.

    Args:
        widths: of the model.
        block_size: of the KV cache.
        kernels: the engine's own, where it would use them.
        timer: times them; `captured` those that engines capture in graphs.
    """

    def __init__(
        self,
        widths: Widths,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None,
        timer: Timer,
        captured: Timer | None = None,
    ) -> None:
        self._widths = widths
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._timer = timer
        self._captured = captured or timer
        self._cold = Cold(dtype, device)

    @torch.inference_mode()
    def seconds(self, operator: str, at: Place) -> float:
        """The time of an operator at a row's sizes. Raises ProfileError for one that the built-in engine does not have."""
        make = {
            "gemm": self._gemm, "decode_attention": self._decode, "prefill_attention": self._prefill, "norm": self._norm,
            "rotary": self._rotary, "activation": self._activation, "embedding": self._embedding, "sampling": self._sampling,
        }.get(operator)  # fmt: skip
        if make is None:
            raise ProfileError(f"{operator} is not run by the built-in engine, so it cannot be measured")
        numbers = {key: value for key, value in at.items() if isinstance(value, int)}
        timer = self._captured if operator in CAPTURED else self._timer
        return timer.seconds(make(numbers))

    # -- products

    def _gemm(self, at: Mapping[str, int]) -> Call:
        rows, columns = at["rows"], at["columns"]
        x = self._values(at["tokens"], rows)
        piece, kernels = self._cold.pieces(rows * columns), self._kernels
        return lambda: linear(x, piece().view(columns, rows), None, kernels)

    # -- attention

    def _decode(self, at: Mapping[str, int]) -> Call:
        batch, context = at["batch"], at["context"]
        blocks = -(-context // self._block_size)
        tables = torch.arange(batch * blocks, dtype=torch.int32, device=self._device).view(batch, blocks)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=self._device)
        return self._attention(at, batch, batch * blocks, self._batch(tables, lengths, context, []))

    def _prefill(self, at: Mapping[str, int]) -> Call:
        chunk, before = at["chunk"], at["before"]
        blocks = torch.arange(-(-(before + chunk) // self._block_size), device=self._device)
        none = torch.empty(0, dtype=torch.int32, device=self._device)
        batch = self._batch(none.view(0, 1), none, 0, [Span(0, chunk, before, blocks)])
        return self._attention(at, chunk, len(blocks), batch)

    def _attention(self, at: Mapping[str, int], tokens: int, num_blocks: int, batch: Batch) -> Call:
        heads, kv_heads, dim, window = at["heads"], at["kv_heads"], at["head_dim"], at["window"]
        qkv = self._values(tokens, heads + 2 * kv_heads, dim)
        shape = (2, num_blocks, self._block_size, kv_heads, dim)
        piece, kernels = self._cold.pieces(2 * num_blocks * self._block_size * kv_heads * dim), self._kernels

        def call() -> Tensor:
            keys, values = piece().view(shape)
            return attend(qkv, keys, values, batch, window, kernels)

        return call

    def _batch(self, tables: Tensor, lengths: Tensor, longest: int, spans: list[Span]) -> Batch:
        """What attention looks at; tokens and their slots are others' business."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return Batch(none, none, none, tables, lengths, longest, spans)

    # -- element-wise

    def _norm(self, at: Mapping[str, int]) -> Call:
        hidden = self._widths.hidden
        x, y, weight = self._values(self._tokens("norm", at), hidden), self._values(1, hidden), self._values(hidden)
        return lambda: F.rms_norm(x + y, weight.shape, weight, 1e-5)

    def _rotary(self, at: Mapping[str, int]) -> Call:
        heads, kv_heads, dim = self._widths.heads, self._widths.kv_heads, self._widths.head_dim
        assert heads is not None
        assert kv_heads is not None
        assert dim is not None
        tokens = self._tokens("rotary", at)
        qkv = self._values(tokens, heads + 2 * kv_heads, dim)
        angle = torch.rand(tokens, dim // 2, device=self._device)
        cosine, sine = angle.cos(), angle.sin()
        slots = torch.arange(tokens, device=self._device)
        shape = (2, -(-tokens // self._block_size), self._block_size, kv_heads, dim)
        piece = self._cold.pieces(2 * shape[1] * self._block_size * kv_heads * dim)
        store = rope_store if self._kernels is None else self._kernels.rope_store

        def call() -> None:
            keys, values = piece().view(shape)
            store(qkv, cosine, sine, slots, keys, values)

        return call

    def _activation(self, at: Mapping[str, int]) -> Call:
        assert self._widths.inter is not None
        both = self._values(self._tokens("activation", at), 2 * self._widths.inter)

        def call() -> Tensor:
            gate, up = both.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)

        return call

    def _embedding(self, at: Mapping[str, int]) -> Call:
        tokens = torch.randint(self._widths.vocab, (self._tokens("embedding", at),), device=self._device)
        piece = self._cold.pieces(self._widths.vocab * self._widths.hidden)
        return lambda: F.embedding(tokens, piece().view(-1, self._widths.hidden))

    def _sampling(self, at: Mapping[str, int]) -> Call:
        """Greedy, as whole steps are measured."""
        logits = torch.randn(at["rows"], self._widths.vocab, device=self._device)
        greedy = Sampling(max_tokens=1, temperature=0, ignore_eos=True)
        states = [SequenceState(Job(row, (0,), greedy), ByteTokenizer(), 2) for row in range(at["rows"])]
        return lambda: draw(logits, states)

    # --

    def _tokens(self, kernel: str, at: Mapping[str, int]) -> int:
        return max(1, round(at["bytes"] / self._widths.kernels[kernel]))

    def _values(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self._device).to(self._dtype)
