"""Takes a step apart: which operators the GPUs of each pipeline stage run, of which sizes, for any model and any sharing of it.

Knows no times: operators are asked of an `OperatorSource`. Three classes, as in Vidur: what every token passes (products, norms,
experts), attention, which knows sequences, and what GPUs say to each other. Left out: the router's sorting of tokens, which is in
the experts' own time, and the second expansion of cached latent vectors when a prompt comes in chunks.
"""

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from squall.errors import ConfigError
from squall.perf.dtypes import DTYPE_BYTES
from squall.perf.layers import AnyAttention, Experts, LatentAttention, Matrix, Mlp
from squall.perf.operators import AttentionShape, Estimate, Kernel, OperatorSource
from squall.perf.spec import Layers, ModelSpec

Verb = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

SEND = "send to the next stage"


class Layout(Struct, frozen=True):
    """How a model lies on GPUs.

    Attributes:
        tp: GPUs that cut every matrix.
        pp: stages of consecutive layers.
        ep: GPUs that experts are dealt out over; beyond `tp`, `ep / tp` groups of GPUs share the requests among them, and only
            the experts between all.
        dtype, kv_dtype: of the activations, and of the cache.
        weight_dtype: of the layers' matrices.
        sequence_parallel: norms are shared as well: a reduce-scatter and an all-gather in the place of each all-reduce
            (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022).
        overlap_send: a stage hands its result on while it computes the next batch.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    sequence_parallel: bool = False
    overlap_send: bool = False

    @property
    def groups(self) -> int:
        """Groups of `tp` GPUs that share the requests among them."""
        return max(1, self.ep // self.tp)


class Product(Struct, frozen=True):
    """A product with a weight matrix of which this GPU has [rows, columns]; `dtype` is that of the weights."""

    name: str
    rows: int
    columns: int
    dtype: str
    count: int = 1
    groups: int = 1

    def ask(self, source: OperatorSource, tokens: int) -> Estimate | None:
        return source.gemm(-(-tokens // self.groups), self.rows, self.columns, self.dtype)


class Pass(Struct, frozen=True):
    """An element-wise kernel: `token_bytes` read and written a token."""

    name: str
    kernel: Kernel
    token_bytes: float
    count: int = 1
    groups: int = 1

    def ask(self, source: OperatorSource, tokens: int) -> Estimate | None:
        return source.elementwise(max(1, int(-(-tokens // self.groups) * self.token_bytes)), self.kernel)


class Mixture(Struct, frozen=True):
    """The experts of a layer, `inter` wide; `tp` GPUs cut each of them, `ep` share them among them."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    dtype: str
    tp: int
    ep: int
    count: int = 1

    def ask(self, source: OperatorSource, tokens: int) -> Estimate | None:
        return source.moe(tokens, self.hidden, self.inter, self.experts, self.top_k, self.dtype, self.tp, self.ep)


class Sampling(Struct, frozen=True):
    """Choosing tokens."""

    name: str = "sampling"
    count: int = 1

    def ask(self, source: OperatorSource, tokens: int) -> Estimate | None:
        return source.sampling(tokens)


class Collective(Struct, frozen=True):
    """What `gpus` GPUs say to each other: `token_bytes` a token."""

    name: str
    verb: Verb
    token_bytes: float
    gpus: int
    count: int = 1
    groups: int = 1

    def ask(self, source: OperatorSource, tokens: int) -> Estimate | None:
        num_bytes = max(1, int(-(-tokens // self.groups) * self.token_bytes))
        match self.verb:
            case "all_reduce":
                return source.all_reduce(num_bytes, self.gpus)
            case "all_gather":
                return source.all_gather(num_bytes, self.gpus)
            case "reduce_scatter":
                return source.reduce_scatter(num_bytes, self.gpus)
            case "all_to_all":
                return source.all_to_all(num_bytes, self.gpus)
            case "send":
                return source.send(num_bytes, self.gpus)


Operator = Product | Pass | Mixture | Sampling | Collective
"""Something that runs `count` times a step. `ask(source, tokens)`: the time of one of them for so many tokens, at least 1."""


class Stage(Struct, frozen=True):
    """The operators of one stage.

    Attributes:
        tokens: for every token that the step computes.
        rows: for every token whose successor it chooses: the head's.
        attention: layers of each shape.
        send: hands the result on; None for the last stage.
        meetings: collectives that several GPUs have to come to.
    """

    num_layers: int
    tokens: tuple[Operator, ...]
    rows: tuple[Operator, ...]
    attention: tuple[tuple[int, AttentionShape], ...]
    send: Collective | None
    meetings: int

    @property
    def launches(self) -> int:
        """Kernels of a step, about."""
        return sum(operator.count for operator in (*self.tokens, *self.rows)) + sum(count for count, _ in self.attention)


def stages(model: ModelSpec, layout: Layout) -> tuple[Stage, ...]:
    """The stages in order: the first has the embedding, the last the head. Layers that are left over go before the last.

    Raises ConfigError for a layout that cannot be.
    """
    model.check_tp(layout.tp, layout.ep)
    cut = model.stages(layout.pp)
    return tuple(_stage(model, layout, group, index == 0, index == len(cut) - 1) for index, group in enumerate(cut))


def _stage(model: ModelSpec, layout: Layout, groups: tuple[Layers, ...], first: bool, last: bool) -> Stage:
    wide = model.hidden_size * DTYPE_BYTES[layout.dtype]
    tokens: list[Operator] = []
    if first:
        tokens.append(Pass("embedding", "embedding", 2 * wide, groups=layout.groups))
        tokens.extend(_sum("embedding", wide, 1, layout))
    for group in groups:
        tokens.extend(_layer(model, layout, group))
    if last:
        tokens.append(Pass("final norm", "norm", 4 * wide, groups=layout.groups))
    tokens = _merged(tokens)
    rows = tuple(_head(model, layout)) if last else ()
    send = None if last else Collective(SEND, "send", wide, layout.tp, groups=layout.groups)
    meetings = sum(op.count for op in (*tokens, *rows) if isinstance(op, Collective))
    shapes: dict[AttentionShape, int] = {}
    for group in groups:
        if group.cached:
            shape = attention_shape(group.cached, layout)
            shapes[shape] = shapes.get(shape, 0) + group.count
    attention = tuple((count, shape) for shape, count in shapes.items())
    return Stage(sum(group.count for group in groups), tuple(tokens), rows, attention, send, meetings)


def _merged(operators: list[Operator]) -> list[Operator]:
    """Equal operators of several groups of layers as one that runs more often."""
    counts: dict[Operator, int] = {}
    for operator in operators:
        one = replace(operator, count=1)
        counts[one] = counts.get(one, 0) + operator.count
    return [replace(operator, count=count) for operator, count in counts.items()]


# -- a layer


def _layer(model: ModelSpec, layout: Layout, group: Layers) -> Iterator[Operator]:
    hidden, count = model.hidden_size, group.count
    wide = hidden * DTYPE_BYTES[layout.dtype]
    shared = layout.tp if layout.sequence_parallel else 1
    norms = min(4, max(1, round(group.norms / hidden))) if group.norms else 1
    yield Pass("norm and residual", "norm", 4 * wide / shared, count * norms, layout.groups)
    yield from _products(model, layout, group)
    if group.cached:
        yield from _around_attention(group.cached, layout, count)
    if group.attention is not None:
        yield from _sum("attention", wide, count, layout)
    mlp = group.mlp
    if isinstance(mlp, Experts):
        yield from _experts(model, layout, group, mlp)
    elif isinstance(mlp, Mlp):
        yield _activation("activation", mlp, layout, count)
    if mlp is not None and not (isinstance(mlp, Experts) and layout.groups > 1):
        yield from _sum("mlp", wide, count, layout)


def _products(model: ModelSpec, layout: Layout, group: Layers) -> Iterator[Operator]:
    """The layer's matrices outside the experts; those that read the same values are one product, as engines run them."""
    merged: dict[tuple[str, int, str], int] = {}
    for matrix in group.matrices(model.hidden_size):
        if not matrix.is_expert:
            rows, columns = _shard(matrix, layout)
            part, _, last = matrix.name.rpartition(".")
            key = f"{part}.{_FUSED.get(last, last)}", rows, _dtype(matrix, group, layout)
            merged[key] = merged.get(key, 0) + columns
    for (name, rows, dtype), columns in merged.items():
        yield Product(name, rows, columns, dtype, group.count, layout.groups)


_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "q_a_proj": "qkv_a_proj", "kv_a_proj_with_mqa": "qkv_a_proj",
}  # fmt: skip
_CUT_BY_ROWS = ("o_proj", "down_proj")


def _shard(matrix: Matrix, layout: Layout) -> tuple[int, int]:
    """(rows, columns) on one GPU."""
    share = matrix.share(layout.tp, layout.ep)
    if matrix.name.endswith(_CUT_BY_ROWS):
        return max(1, round(matrix.rows * share)), matrix.columns
    return matrix.rows, max(1, round(matrix.columns * share))


def _dtype(matrix: Matrix, group: Layers, layout: Layout) -> str:
    """Routers and what the checkpoint excludes stay plain."""
    plain = matrix.name == "mlp.gate" or matrix.name in group.unquantised
    return layout.dtype if plain else layout.weight_dtype


def _around_attention(attention: AnyAttention, layout: Layout, count: int) -> Iterator[Operator]:
    """Rotary embedding with the cache write, and norms of queries and keys."""
    each = DTYPE_BYTES[layout.dtype] / layout.tp
    if isinstance(attention, LatentAttention):
        rotated = 2 * attention.num_heads * (attention.nope_dim + attention.rope_dim) * each + 2 * attention.kv_values(layout.tp)
        yield Pass("rotary and cache write", "rotary", rotated, count, layout.groups)
        yield Pass("norms of the latent vectors", "norm", 2 * attention.vectors * DTYPE_BYTES[layout.dtype], count, layout.groups)
        return
    values = 2 * (attention.q_size + 2 * attention.kv_size)
    yield Pass("rotary and cache write", "rotary", values * each, count, layout.groups)
    if attention.qk_norm:
        yield Pass("norms of queries and keys", "norm", 2 * (attention.q_size + attention.kv_size) * each, count, layout.groups)


def _activation(name: str, mlp: Mlp, layout: Layout, count: int) -> Pass:
    return Pass(name, "activation", mlp.width * DTYPE_BYTES[layout.dtype] / layout.tp, count, layout.groups)


def _experts(model: ModelSpec, layout: Layout, group: Layers, mlp: Experts) -> Iterator[Operator]:
    expert = next(matrix for matrix in group.matrices(model.hidden_size) if matrix.is_expert)
    cut = expert.cut(layout.tp, layout.ep)
    dtype = _dtype(expert, group, layout)
    if dtype == "fp8" and model.quantization and model.quantization.scale_bytes:
        dtype = "fp8_block"  # kernels with a scale for every block of weights are others
    yield Mixture(
        "experts", model.hidden_size, mlp.expert.size, mlp.num_experts, mlp.num_active, dtype, cut, layout.ep, group.count
    )
    if mlp.shared:
        yield _activation("activation of the shared expert", mlp.shared, layout, group.count)
    if layout.groups > 1:
        wide = model.hidden_size * DTYPE_BYTES[layout.dtype]
        sent = wide * _places(layout.ep, mlp.num_active)
        yield Collective("tokens to their experts", "all_to_all", sent, layout.ep, group.count, layout.groups)
        yield Collective("tokens back", "all_to_all", sent, layout.ep, group.count, layout.groups)


def _places(ep: int, top_k: int) -> float:
    """GPUs that a token is expected to be sent to: those that hold at least one of its `top_k` experts."""
    return ep * (1 - (1 - 1 / ep) ** top_k)


def _sum(name: str, wide: float, count: int, layout: Layout) -> Iterator[Operator]:
    """The results of the GPUs that cut a matrix are added up."""
    if layout.tp == 1:
        return
    if layout.sequence_parallel:
        yield Collective(f"reduce-scatter of {name}", "reduce_scatter", wide, layout.tp, count, layout.groups)
        yield Collective(f"all-gather after {name}", "all_gather", wide, layout.tp, count, layout.groups)
    else:
        yield Collective(f"all-reduce of {name}", "all_reduce", wide, layout.tp, count, layout.groups)


def _head(model: ModelSpec, layout: Layout) -> Iterator[Operator]:
    dtype = layout.weight_dtype if model.quantization and model.quantization.embeddings else layout.dtype
    yield Product("head", model.hidden_size, -(-model.vocab_size // layout.tp), dtype, groups=layout.groups)
    if layout.tp > 1:
        wide = model.vocab_size * DTYPE_BYTES[layout.dtype]
        yield Collective("all-gather of logits", "all_gather", wide, layout.tp, groups=layout.groups)
    yield Sampling()


def attention_shape(attention: AnyAttention, layout: Layout) -> AttentionShape:
    """The attention of a layer on one GPU."""
    heads = max(1, attention.num_heads // layout.tp)
    if isinstance(attention, LatentAttention):
        return AttentionShape(
            heads, 1, attention.nope_dim + attention.rope_dim, layout.kv_dtype, attention.window, "mla",
            attention.kv_rank, attention.rope_dim, attention.v_dim, layout.dtype,
        )  # fmt: skip
    kv_heads = max(1, attention.num_kv_heads // layout.tp)
    return AttentionShape(heads, kv_heads, attention.head_dim, layout.kv_dtype, attention.window, dtype=layout.dtype)


def refuse_overlap_alone(layout: Layout) -> None:
    """Raises ConfigError where an option has nothing to work on."""
    if layout.sequence_parallel and layout.tp == 1:
        raise ConfigError("latency.sequence_parallel needs GPUs to share norms: use replica.tp of 2 or more, or leave it out")
    if layout.overlap_send and layout.pp == 1:
        raise ConfigError("latency.overlap_send needs pipeline stages: use replica.pp of 2 or more, or leave it out")
