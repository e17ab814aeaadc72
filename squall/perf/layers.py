"""What a layer of a transformer is made of: attention and MLP as lists of matrices, from which every size follows.

Knows no checkpoint, no number type and no hardware. A part tells its matrices for a given width of the residual; parameters,
arithmetic, bytes and shares of GPUs are sums over them.
"""

from collections.abc import Iterator

from msgspec import Struct


class Matrix(Struct, frozen=True):
    """A weight matrix, or `copies` equal ones (experts), of which a token passes `active`.

    Attributes:
        name: its module in a layer of a checkpoint, in Llama's words ("self_attn.q_proj").
        rows, columns: inputs and outputs.
        parts: equal pieces that it can be cut into; a matrix of one piece is kept by every GPU.
        copied: with more GPUs than pieces (few KV heads), pieces are kept more than once.
        bias: it adds a value for every output.
    """

    name: str
    rows: int
    columns: int
    parts: int = 1
    copies: int = 1
    active: int = 1
    copied: bool = False
    bias: bool = False

    @property
    def values(self) -> int:
        """Parameters of one copy, without the bias."""
        return self.rows * self.columns

    @property
    def bias_values(self) -> int:
        """Parameters in the bias of one copy."""
        return self.columns if self.bias else 0

    @property
    def is_expert(self) -> bool:
        return self.copies > 1

    def share(self, tp: int, ep: int) -> float:
        """The part of all copies that one GPU holds: experts are dealt out over `ep` GPUs, a matrix is cut over the rest."""
        piece = max(1, self.parts // self.cut(tp, ep)) / self.parts
        return piece / ep if self.is_expert else piece

    def cut(self, tp: int, ep: int) -> int:
        """GPUs that one copy is cut over."""
        return max(1, tp // ep) if self.is_expert else tp

    def can_share(self, tp: int, ep: int) -> bool:
        """Whether every GPU can hold an even share."""
        cut = self.cut(tp, ep)
        even = self.parts == 1 or self.parts % cut == 0 or (self.copied and cut % self.parts == 0)
        return even and (not self.is_expert or self.copies % ep == 0)


class Attention(Struct, frozen=True):
    """Attention with heads that share keys and values in groups (multi-head and multi-query are its two ends).

    Attributes:
        window: how many tokens back it looks; None for all.
        qk_norm: queries and keys are normalised a head.
        keys_are_values: one projection serves both (Gemma 4's global layers); both are cached nevertheless.
        sinks: a learned logit a head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    keys_are_values: bool = False
    sinks: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of a token's keys; its values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def vectors(self) -> int:
        return (2 * self.head_dim if self.qk_norm else 0) + (self.num_heads if self.sinks else 0)

    @property
    def pair_flops(self) -> int:
        """Arithmetic for a token and one token it attends to: query with key, weight with value."""
        return 4 * self.q_size

    @property
    def decode_pair_flops(self) -> int:
        return self.pair_flops

    @property
    def width(self) -> int:
        """Values of one token alive at once: queries, keys, values and the result."""
        return 2 * self.q_size + 2 * self.kv_size

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        heads, kv_heads, bias = self.num_heads, self.num_kv_heads, self.qkv_bias
        yield Matrix("self_attn.q_proj", hidden, self.q_size, heads, bias=bias)
        yield Matrix("self_attn.k_proj", hidden, self.kv_size, kv_heads, copied=True, bias=bias)
        if not self.keys_are_values:
            yield Matrix("self_attn.v_proj", hidden, self.kv_size, kv_heads, copied=True, bias=bias)
        yield Matrix("self_attn.o_proj", self.q_size, hidden, heads, bias=self.out_bias)

    def kv_values(self, tp: int, /) -> int:
        """Values that one GPU caches for a token; a KV head is kept whole."""
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim


class LatentAttention(Struct, frozen=True):
    """DeepSeek's attention over a compressed cache (MLA): a token leaves one latent vector and one rotary key for all heads.

    Attributes:
        q_rank: width that queries are compressed to; None for one plain projection.
        kv_rank: width of the latent vector.
        nope_dim, rope_dim: of a head's query and key, without and with rotary embedding.
        v_dim: of a head's value.
        bias: the two down-projections and the output have one.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    window: int | None = None

    @property
    def vectors(self) -> int:
        return self.kv_rank + (self.q_rank or 0)

    @property
    def pair_flops(self) -> int:
        """As in prefill, where the latent vectors are expanded to keys and values of every head."""
        return 2 * self.num_heads * (self.nope_dim + self.rope_dim + self.v_dim)

    @property
    def decode_pair_flops(self) -> int:
        """As in decode, where the heads attend to the latent vectors themselves (the projections are absorbed)."""
        return 2 * self.num_heads * (2 * self.kv_rank + self.rope_dim)

    @property
    def width(self) -> int:
        """Values of one token alive at once, expanded: queries, keys, values and the result."""
        return 2 * self.num_heads * (self.nope_dim + self.rope_dim + self.v_dim)

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        heads, query = self.num_heads, self.num_heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            yield Matrix("self_attn.q_proj", hidden, query, heads)
        else:
            yield Matrix("self_attn.q_a_proj", hidden, self.q_rank, bias=self.bias)
            yield Matrix("self_attn.q_b_proj", self.q_rank, query, heads)
        yield Matrix("self_attn.kv_a_proj_with_mqa", hidden, self.kv_rank + self.rope_dim, bias=self.bias)
        yield Matrix("self_attn.kv_b_proj", self.kv_rank, heads * (self.nope_dim + self.v_dim), heads)
        yield Matrix("self_attn.o_proj", heads * self.v_dim, hidden, heads, bias=self.bias)

    def kv_values(self, _tp: int, /) -> int:
        """Every GPU caches the whole latent vector and rotary key."""
        return self.kv_rank + self.rope_dim


class Mlp(Struct, frozen=True):
    """Two matrices, or three where a gate multiplies the first one's result."""

    size: int
    gated: bool = True
    bias: bool = False
    vectors: int = 0

    @property
    def width(self) -> int:
        """Values of one token alive at once: gate and up, and their product."""
        return (3 if self.gated else 2) * self.size

    def matrices(self, hidden: int, name: str = "mlp", copies: int = 1, active: int = 1) -> Iterator[Matrix]:
        for projection in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            yield Matrix(f"{name}.{projection}", hidden, self.size, self.size, copies, active, bias=self.bias)
        yield Matrix(f"{name}.down_proj", self.size, hidden, self.size, copies, active, bias=self.bias)


class Experts(Struct, frozen=True):
    """A mixture of experts: a router sends every token to `num_active` of `num_experts` MLPs.

    Attributes:
        expert: one of them.
        shared: an MLP that every token passes besides (shared experts are as good as one wide one); None for none.
        shared_gate: one more matrix, of one column, scales the shared MLP's result.
        vectors: further values, such as corrections of the routing or norms inside.
    """

    num_experts: int
    num_active: int
    expert: Mlp
    shared: Mlp | None = None
    shared_gate: bool = False
    router_bias: bool = False
    vectors: int = 0

    @property
    def width(self) -> int:
        """Of one token in all experts that it passes; their results, as wide as the residual, come on top."""
        return self.num_active * self.expert.width + (self.shared.width if self.shared else 0)

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        yield Matrix("mlp.gate", hidden, self.num_experts, bias=self.router_bias)
        yield from self.expert.matrices(hidden, "mlp.experts", self.num_experts, self.num_active)
        if self.shared:
            yield from self.shared.matrices(hidden, "mlp.shared_experts")
        if self.shared_gate:
            yield Matrix("mlp.shared_expert_gate", hidden, 1)


class Linear(Struct, frozen=True):
    """One matrix, as wide as the residual, in the place of attention or MLP."""

    name: str

    @property
    def vectors(self) -> int:
        return 0

    @property
    def width(self) -> int:
        return 0

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        yield Matrix(self.name, hidden, hidden, hidden)


AnyAttention = Attention | LatentAttention
