"""A source of operator times read off tables. Knows no file: it gets a profile's rows.

Whatever no row speaks of is answered by None, so that the next source is asked.
"""

from collections.abc import Mapping, Sequence
from math import sqrt

from squall.perf.operators import AttentionShape, Estimate, Kernel
from squall.perf.tables.operations import NO_WINDOW
from squall.perf.tables.table import Curve, OperatorTable

_ALIKE = ("head_dim", "window", "kv_dtype", "dtype")
_ALIKE_LATENT = ("kv_dtype", "dtype")
_SIXTEEN_BITS = {"fp16": "bf16"}
"""Both run at the same speed, on the same kernels."""


class TableSource:
    """An `OperatorSource`.

    Args:
        name: for reports.
        tables: by the operator's name; those that are missing are unknown to this source.
        step_s: what a step costs beside its operators, where that was measured too.
    """

    def __init__(self, name: str, tables: Mapping[str, OperatorTable], step_s: float | None = None) -> None:
        self.name = name
        self.tables = tables
        self.step_s = step_s

    def gemm(self, tokens: int, rows: int, columns: int, dtype: str) -> Estimate | None:
        """See `OperatorSource.gemm`."""
        return self._ask("gemm", (_SIXTEEN_BITS.get(dtype, dtype),), (rows, columns, tokens))

    def prefill_attention(self, chunk: int, before: int, shape: AttentionShape) -> Estimate | None:
        """See `OperatorSource.prefill_attention`.

        Where no chunk after another was measured, one is as fast as a whole prompt of as much arithmetic: time in proportion.
        """
        found = self._attention("prefill", shape)
        if found is None:
            return None
        table, curve, kind, heads = found
        if before and curve.most("before") == 0:
            alike = sqrt(chunk * (chunk + 2.0 * before))
            whole = table.like(curve, kind, (*heads, alike, 0))
            at = curve.at((*heads, chunk, before))
            share = curve.trend.seconds(at) / curve.trend.seconds(curve.at((*heads, alike, 0)))
            return Estimate(whole.seconds * share, whole.provenance, whole.told)
        return table.like(curve, kind, (*heads, chunk, before))

    def decode_attention(self, batch: int, context: int, shape: AttentionShape) -> Estimate | None:
        """See `OperatorSource.decode_attention`."""
        found = self._attention("decode", shape)
        if found is None:
            return None
        table, curve, kind, heads = found
        return table.like(curve, kind, (*heads, batch, context))

    def mixed_attention(self, chunk: int, before: int, batch: int, context: int, shape: AttentionShape) -> Estimate | None:
        """A chunk after `before` tokens and `batch` decodes of `context` tokens each, in one kernel."""
        found = self._attention("mixed", shape)
        if found is None:
            return None
        table, curve, kind, heads = found
        return table.like(curve, kind, (*heads, chunk, before, batch, context))

    def moe(
        self, tokens: int, hidden: int, inter: int, experts: int, top_k: int, dtype: str, tp: int, ep: int
    ) -> Estimate | None:
        """See `OperatorSource.moe`."""
        kind = (_SIXTEEN_BITS.get(dtype, dtype), hidden, inter, experts, top_k)
        return self._ask("moe", kind, (ep, tp, tokens))

    def elementwise(self, num_bytes: int, kernel: Kernel = "") -> Estimate | None:
        """See `OperatorSource.elementwise`: off the kernel's own rows, or off those that stand for all."""
        return self._ask(kernel if kernel in self.tables else "elementwise", (), (num_bytes,))

    def sampling(self, rows: int) -> Estimate | None:
        """Choosing a token for each of so many rows of logits."""
        return self._ask("sampling", (), (rows,))

    def all_reduce(self, num_bytes: int, gpus: int) -> Estimate | None:
        """See `OperatorSource`."""
        return self._collective("all_reduce", num_bytes, gpus)

    def all_gather(self, num_bytes: int, gpus: int) -> Estimate | None:
        """See `OperatorSource`."""
        return self._collective("all_gather", num_bytes, gpus)

    def reduce_scatter(self, num_bytes: int, gpus: int) -> Estimate | None:
        """See `OperatorSource`."""
        return self._collective("reduce_scatter", num_bytes, gpus)

    def all_to_all(self, num_bytes: int, gpus: int) -> Estimate | None:
        """See `OperatorSource`."""
        return self._collective("all_to_all", num_bytes, gpus)

    def send(self, num_bytes: int, gpus: int) -> Estimate | None:
        """See `OperatorSource.send`."""
        return self._ask("send", (), (gpus, num_bytes))

    # --

    def _ask(self, operator: str, kind: tuple[object, ...], sizes: tuple[float, ...]) -> Estimate | None:
        table = self.tables.get(operator)
        return None if table is None else table.estimate(kind, sizes)

    def _collective(self, operator: str, num_bytes: int, gpus: int) -> Estimate | None:
        """None for one GPU too: it has nobody to talk to."""
        return None if gpus < 2 else self._ask(operator, (), (gpus, num_bytes))

    def _attention(self, phase: str, shape: AttentionShape) -> "_Found | None":
        """The table, the curve that knows most of this shape, the kind that was asked for, and heads as the table counts them."""
        cache, dtype = (_SIXTEEN_BITS.get(name, name) for name in (shape.kv_dtype, shape.dtype))
        kind: tuple[object, ...]
        heads: tuple[int, ...]
        loose: tuple[str, ...]
        if shape.kind == "mla":
            table, loose, heads = self.tables.get(f"latent_{phase}"), _ALIKE_LATENT, (shape.heads,)
            kind = (shape.head_dim, shape.value_dim, shape.kv_rank, shape.rope_dim, cache, dtype)
            if shape.window is not None:
                return None
        else:
            table, loose, heads = self.tables.get(f"{phase}_attention"), _ALIKE, (shape.kv_heads, shape.heads)
            kind = (shape.head_dim, NO_WINDOW if shape.window is None else shape.window, cache, dtype)
            if shape.value_dim not in (0, shape.head_dim):
                return None
        curve = None if table is None else table.near(kind, loose)
        return None if table is None or curve is None else (table, curve, kind, heads)


_Found = tuple[OperatorTable, Curve, tuple[object, ...], tuple[int, ...]]


class FastestProducts(TableSource):
    """One engine's tables, with the fastest engine's matrix products.

    Engines call the same few libraries, and bring inputs to 8 or 4 bits in the kernel before. A table whose products do that by
    themselves, or miss the best kernel, says more than the engine takes: on a B200 by half, where the engines differ by twice.

    Args:
        others: sources of other engines' matrix products on the same GPU.
    """

    def __init__(self, own: TableSource, others: Sequence[TableSource]) -> None:
        super().__init__(own.name, own.tables, own.step_s)
        self._others = tuple(others)

    def gemm(self, tokens: int, rows: int, columns: int, dtype: str) -> Estimate | None:
        """See `OperatorSource.gemm`."""
        asked = [super().gemm(tokens, rows, columns, dtype)]
        asked += [source.gemm(tokens, rows, columns, dtype) for source in self._others]
        known = [estimate for estimate in asked if estimate is not None]
        return min(known, key=lambda estimate: estimate.seconds, default=None)
