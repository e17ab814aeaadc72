"""The operators that tables hold: the columns that say which one a row is, and the physics that its time follows.

Knows no file and no hardware. A `Law` says how much arithmetic and how much memory traffic a row stands for; what a GPU makes of
them, `trend` learns from the rows themselves. The sizes are those of `perf.operators`, one GPU's share each.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.perf.dtypes import DTYPE_BYTES

Sizes = dict[str, Any]
"""Column to number, or to an array of numbers: laws work on both."""

NO_WINDOW = 0
"""In the column `window`: attention to everything."""


class Operation(Struct, frozen=True):
    """One operator as a table.

    Attributes:
        kinds: columns that must be equal for rows to be of one curve.
        sizes: columns that a curve runs along, the one that varies most last.
        law: (arithmetic, bytes) of rows; both grow with every size that a step can vary.
        tiled: whether the last size is computed in whole tiles.
    """

    name: str
    kinds: tuple[str, ...]
    sizes: tuple[str, ...]
    law: Callable[[Sizes], tuple[Any, Any]]
    tiled: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.kinds, *self.sizes)


def _gemm(at: Sizes) -> tuple[Any, Any]:
    tokens, rows, columns = at["tokens"], at["rows"], at["columns"]
    weights = rows * columns * DTYPE_BYTES.get(at["dtype"], 2.0)
    return 2.0 * tokens * rows * columns, weights + 2.0 * tokens * (rows + columns)


def _pairs(chunk: Any, before: Any, window: int) -> Any:
    """Pairs of a token of the chunk and a token that it attends to; a little for those outside the window, whose blocks are
    listed all the same, so that no size is without effect."""
    pairs = chunk * (before + (chunk + 1) / 2)
    if window == NO_WINDOW:
        return pairs
    ramp = np.clip(window - before, 0, chunk)  # of its tokens, so many see everything before them
    seen = ramp * (before + (ramp + 1) / 2) + (chunk - ramp) * window
    return np.minimum(seen, pairs) + 1e-3 * pairs


def _prefill(at: Sizes) -> tuple[Any, Any]:
    chunk, before, head_dim = at["chunk"], at["before"], at["head_dim"]
    arithmetic = 4.0 * at["heads"] * head_dim * _pairs(chunk, before, at["window"])
    cache = 2.0 * (before + chunk) * at["kv_heads"] * head_dim * DTYPE_BYTES.get(at["kv_dtype"], 2.0)
    return arithmetic, cache + 4.0 * chunk * at["heads"] * head_dim


def _decode(at: Sizes) -> tuple[Any, Any]:
    batch, context, head_dim, window = at["batch"], at["context"], at["head_dim"], at["window"]
    seen = context if window == NO_WINDOW else np.minimum(context, window)
    arithmetic = 4.0 * batch * at["heads"] * head_dim * (seen + 1)
    cache = 2.0 * seen * at["kv_heads"] * head_dim * DTYPE_BYTES.get(at["kv_dtype"], 2.0)
    table = context / 4.0  # four bytes for a block of 16 tokens
    return arithmetic, batch * (cache + table + 4.0 * at["heads"] * head_dim)


def _latent_prefill(at: Sizes) -> tuple[Any, Any]:
    """Keys and values are expanded for every head; the cache holds one vector a token for all of them."""
    chunk, before, wide = at["chunk"], at["before"], at["head_dim"] + at["value_dim"]
    cache = (before + chunk) * (at["kv_rank"] + at["rope_dim"]) * DTYPE_BYTES.get(at["kv_dtype"], 2.0)
    return 2.0 * at["heads"] * wide * _pairs(chunk, before, NO_WINDOW), cache + 4.0 * chunk * at["heads"] * wide


def _latent_decode(at: Sizes) -> tuple[Any, Any]:
    """All heads share what is read, and compute with whole latent vectors."""
    batch, context, both = at["batch"], at["context"], at["kv_rank"] + at["rope_dim"]
    arithmetic = 2.0 * batch * at["heads"] * (context + 1) * (both + at["kv_rank"])
    cache = context * both * DTYPE_BYTES.get(at["kv_dtype"], 2.0)
    return arithmetic, batch * (cache + context / 4.0 + 2.0 * at["heads"] * (both + at["kv_rank"]))


def _mixed(at: Sizes) -> tuple[Any, Any]:
    """A chunk and decodes in one kernel."""
    prefill, cache = _prefill(at)
    decode, read = _decode(at)
    return prefill + decode, np.where(at["chunk"] > 0, cache, 0.0) + read


def _collective(at: Sizes) -> tuple[Any, Any]:
    """Hops in place of arithmetic, and what a ring sends."""
    gpus = at["gpus"]
    return gpus - 1.0, at["bytes"] * (gpus - 1.0) / gpus


def _send(at: Sizes) -> tuple[Any, Any]:
    return at["gpus"] * 1.0, at["bytes"] * 1.0


def _elementwise(at: Sizes) -> tuple[Any, Any]:
    return at["bytes"] * 1.0, at["bytes"] * 1.0


def _moe(at: Sizes) -> tuple[Any, Any]:
    """Tokens are dealt out evenly over the experts of all `ep` GPUs, each of which `tp` GPUs share."""
    tokens, experts, top_k, ep = at["tokens"], at["experts"], at["top_k"], at["ep"]
    matrices = 3.0 * at["hidden"] * at["inter"] / at["tp"]
    chosen = tokens * top_k / ep
    held = experts / ep
    touched = held * -np.expm1(-chosen / held)  # balls into bins
    arithmetic = 2.0 * chosen * matrices
    return arithmetic, touched * matrices * DTYPE_BYTES.get(at["dtype"], 2.0) + 4.0 * tokens * at["hidden"]


def _logits(at: Sizes) -> tuple[Any, Any]:
    return at["rows"] * 1.0, at["rows"] * 1.0


_ATTENTION = ("head_dim", "window", "kv_dtype", "dtype")
_LATENT = ("head_dim", "value_dim", "kv_rank", "rope_dim", "kv_dtype", "dtype")

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("gemm", ("dtype",), ("rows", "columns", "tokens"), _gemm, tiled=True),
        Operation("prefill_attention", _ATTENTION, ("kv_heads", "heads", "chunk", "before"), _prefill),
        Operation("decode_attention", _ATTENTION, ("kv_heads", "heads", "batch", "context"), _decode),
        Operation("latent_prefill", _LATENT, ("heads", "chunk", "before"), _latent_prefill),
        Operation("latent_decode", _LATENT, ("heads", "batch", "context"), _latent_decode),
        Operation("mixed_attention", _ATTENTION, ("kv_heads", "heads", "chunk", "before", "batch", "context"), _mixed),
        Operation("moe", ("dtype", "hidden", "inter", "experts", "top_k"), ("ep", "tp", "tokens"), _moe),
        Operation("elementwise", (), ("bytes",), _elementwise),
        *(Operation(kernel, (), ("bytes",), _elementwise) for kernel in ("embedding", "norm", "rotary", "activation")),
        Operation("sampling", (), ("rows",), _logits),
        Operation("all_reduce", (), ("gpus", "bytes"), _collective),
        Operation("all_gather", (), ("gpus", "bytes"), _collective),
        Operation("reduce_scatter", (), ("gpus", "bytes"), _collective),
        Operation("all_to_all", (), ("gpus", "bytes"), _collective),
        Operation("send", (), ("gpus", "bytes"), _send),
    )
}
"""By name: questions of `OperatorSource`, `mixed_attention`, and kinds of element-wise kernels."""

TEXTS = ("dtype", "kv_dtype")
"""Columns that hold words; all others hold whole numbers."""

Array = NDArray[np.float64]
