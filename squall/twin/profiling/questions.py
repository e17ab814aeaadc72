"""What there is to measure for a model: the operators of every TP degree's share, each with the sizes that it may have.

Knows no tensors and no clock. It asks `perf.decompose`, as the latency model does, so what is measured is what will be asked:
one device answers for all degrees, because it only ever sees one GPU's share.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from squall.perf.decompose import Layout, Mixture, Pass, Product, Sampling, stages
from squall.perf.dtypes import DTYPE_BYTES
from squall.perf.operators import AttentionShape
from squall.perf.spec import ModelSpec
from squall.perf.tables.operations import NO_WINDOW
from squall.twin.profiling.lines import Line, Measurable, Place, Sheet

COMPUTED = ("fp32", "bf16", "fp16")
"""Number types that the built-in engine computes in."""


class Limits(Struct, frozen=True):
    """How far curves reach.

    Attributes:
        tokens: of a step; rows: of its logits, and so the largest batch.
        context: of a sequence.
        cache_bytes: of the KV cache of one layer.
    """

    tokens: int
    rows: int
    context: int
    cache_bytes: int


class Questions(Struct, frozen=True):
    """Attributes:
    curves: to measure.
    kernels: bytes a token of every element-wise kernel.
    left_out: what the built-in engine does not run, in words.
    """

    curves: list[Measurable]
    kernels: dict[str, float]
    left_out: list[str]


def questions(model: ModelSpec, layouts: Sequence[Layout], limits: Limits) -> Questions:
    """The curves of all layouts, each once. Raises ConfigError for a layout that cannot be."""
    curves: dict[tuple[object, ...], Measurable] = {}
    kernels: dict[str, float] = {}
    left_out: dict[str, None] = {}
    for layout in layouts:
        (stage,) = stages(model, layout)
        for operator in (*stage.tokens, *stage.rows):
            most = limits.rows if operator in stage.rows else limits.tokens
            if isinstance(operator, Product):
                if operator.dtype not in COMPUTED:
                    left_out[f"products of {operator.dtype} weights"] = None
                    continue
                fixed: Place = {"dtype": _wide(operator.dtype), "rows": operator.rows, "columns": operator.columns}
                curves.setdefault(
                    ("gemm", *fixed.values()), Line("gemm", fixed, "tokens", sizes(1, most, also=(9,)), operator.count)
                )
            elif isinstance(operator, Pass):
                if operator.kernel and operator.kernel not in kernels:
                    kernels[operator.kernel] = operator.token_bytes
                    bytes_ = [max(1, int(size * operator.token_bytes)) for size in sizes(1, most)]
                    curves[(operator.kernel,)] = Line(operator.kernel, {}, "bytes", bytes_, operator.count)
            elif isinstance(operator, Mixture):
                left_out["experts"] = None
            elif isinstance(operator, Sampling):
                curves.setdefault(("sampling",), Line("sampling", {}, "rows", sizes(1, most), operator.count))
        for count, shape in stage.attention:
            if shape.kind != "gqa" or shape.value_dim not in (0, shape.head_dim):
                left_out["latent attention"] = None
                continue
            for sheet in _attention(shape, count, limits):
                curves.setdefault((sheet.operator, *sheet.fixed.values()), sheet)
    return Questions(list(curves.values()), kernels, list(left_out))


def _attention(shape: AttentionShape, count: int, limits: Limits) -> Iterator[Sheet]:
    fixed: Place = {
        "head_dim": shape.head_dim, "window": NO_WINDOW if shape.window is None else shape.window,
        "kv_dtype": _wide(shape.kv_dtype), "dtype": _wide(shape.dtype), "kv_heads": shape.kv_heads, "heads": shape.heads,
    }  # fmt: skip
    token_bytes = 2 * shape.kv_heads * shape.head_dim * DTYPE_BYTES[shape.kv_dtype]
    most = int(limits.cache_bytes / token_bytes)

    def contexts(batch: int) -> list[int]:
        return sizes(16, min(limits.context, most // batch))

    def before(chunk: int) -> list[int]:
        longest = min(limits.context, most) - chunk
        return [0, *sizes(64, longest)] if longest >= 0 else []

    yield Sheet("decode_attention", fixed, "batch", sizes(1, limits.rows), "context", contexts, count)
    yield Sheet("prefill_attention", fixed, "chunk", sizes(8, limits.tokens), "before", before, count, power=2.0)


def sizes(first: int, last: int, also: Sequence[int] = ()) -> list[int]:
    """Sizes from the first to the last, half as many again in turn with a third more: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    found = {size for size in (first, last, *also) if first <= size <= last}
    size = first
    while size < last:
        found |= {size, size * 3 // 2} if size * 3 // 2 < last else {size}
        size *= 2
    return sorted(found)


def _wide(dtype: str) -> str:
    """As tables call it: both types of 16 bits are one."""
    return "bf16" if dtype == "fp16" else dtype
