"""Operators: the pieces of a step that can be measured or estimated by themselves, and what a source of their times must answer.

Knows no hardware and no times. A source that does not know an operator says None, and the next one in order of trust is asked.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Literal, Protocol

from msgspec import Struct


class Provenance(StrEnum):
    """How a time was come by, the most trustworthy first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    ROOFLINE = "roofline"


class Estimate(Struct, frozen=True):
    """The time of one operator.

    Attributes:
        seconds: at least 0.
        told: the spread, or what works it out: most times are asked for without it.
    """

    seconds: float
    provenance: Provenance
    told: float | Callable[[], float]

    @property
    def spread(self) -> float:
        """Nine times in ten the true time lies between `seconds / (1 + spread)` and `seconds * (1 + spread)`."""
        return self.told() if callable(self.told) else self.told


Kernel = Literal["", "embedding", "norm", "rotary", "activation"]
"""Element-wise work: looking tokens up; adding to the residual and norm; rotary embedding with the cache write; the MLP's
activation; "" where it does not matter which."""


class AttentionShape(Struct, frozen=True):
    """The attention of one layer as one GPU computes it.

    Attributes:
        heads, kv_heads: on this GPU.
        head_dim: width of a head's query and key; with "mla" as in prefill, where keys are expanded (plain and rotary part).
        kv_dtype: of the cache.
        window: tokens that it looks back; None for all.
        kind: "gqa" (multi-head and multi-query are its ends), or "mla": latent attention, whose decodes read one vector of
            `kv_rank + rope_dim` values a token for all heads.
        value_dim: width of a head's value; 0 where it is `head_dim`.
        dtype: of the arithmetic.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    window: int | None = None
    kind: Literal["gqa", "mla"] = "gqa"
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    dtype: str = "bf16"


class OperatorSource(Protocol):
    """Times of operators on one kind of GPU. None: this source does not know it.

    Every size is that of one GPU's share. Bytes of a collective are those of the whole tensor: what `all_reduce` leaves on every
    GPU, what `all_gather` leaves on every GPU, what `reduce_scatter` finds on every GPU, what one GPU has to send in
    `all_to_all` and `send`.
    """

    @property
    def name(self) -> str: ...

    def gemm(self, tokens: int, rows: int, columns: int, dtype: str) -> Estimate | None:
        """A product [tokens, rows] x [rows, columns]; `dtype` is that of the weights."""
        ...

    def prefill_attention(self, chunk: int, before: int, shape: AttentionShape) -> Estimate | None:
        """One sequence: `chunk` new tokens after `before` others."""
        ...

    def decode_attention(self, batch: int, context: int, shape: AttentionShape) -> Estimate | None:
        """`batch` sequences of `context` tokens each."""
        ...

    def moe(
        self, tokens: int, hidden: int, inter: int, experts: int, top_k: int, dtype: str, tp: int, ep: int
    ) -> Estimate | None:
        """The experts of one layer (`inter` is the width of a whole one), for `tokens` tokens of all `tp` or `ep` GPUs."""
        ...

    def elementwise(self, num_bytes: int, kernel: Kernel = "") -> Estimate | None:
        """A kernel that reads and writes so many bytes together; a source that tells kernels apart looks at which one it is."""
        ...

    def sampling(self, rows: int) -> Estimate | None:
        """Choosing a token for each of so many rows of logits."""
        ...

    def all_reduce(self, num_bytes: int, gpus: int) -> Estimate | None: ...

    def all_gather(self, num_bytes: int, gpus: int) -> Estimate | None: ...

    def reduce_scatter(self, num_bytes: int, gpus: int) -> Estimate | None: ...

    def all_to_all(self, num_bytes: int, gpus: int) -> Estimate | None: ...

    def send(self, num_bytes: int, gpus: int) -> Estimate | None:
        """From a stage to the next; `gpus` of each take part, with their share."""
        ...
