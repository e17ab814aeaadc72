"""What a model is to the performance models: its layers, and every size that follows from them.

Knows no file format, no weights and no hardware. Sizes of a GPU's share take `tp` (GPUs that cut every matrix), `pp` (stages
of consecutive layers; the fullest stage counts) and `ep` (GPUs that experts are dealt out over: a divisor or a multiple of `tp`).
"""

from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from squall.errors import ConfigError, ModelError
from squall.perf.dtypes import DTYPE_BYTES, dtype_bytes, dtype_name
from squall.perf.layers import AnyAttention, Attention, Experts, LatentAttention, Linear, Matrix, Mlp
from squall.perf.quantization import Quantization


class Layers(Struct, frozen=True):
    """`count` equal layers in a row.

    Attributes:
        attention, mlp: None where the layer has none.
        norms: values of the layer's norms and other small vectors, beside those of its parts; every GPU keeps them.
        unquantised: modules that a quantised checkpoint keeps in its plain type.
    """

    count: int
    attention: AnyAttention | Linear | None
    mlp: Mlp | Experts | Linear | None
    norms: int
    unquantised: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[AnyAttention | Mlp | Experts | Linear, ...]:
        return tuple(part for part in (self.attention, self.mlp) if part is not None)

    @property
    def cached(self) -> AnyAttention | None:
        """The attention that keeps keys and values, if the layer has one."""
        return self.attention if isinstance(self.attention, Attention | LatentAttention) else None

    @property
    def vectors(self) -> int:
        return self.norms + sum(_part_vectors(part) for part in self.parts)

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        for part in self.parts:
            yield from part.matrices(hidden)


def _part_vectors(part: AnyAttention | Mlp | Experts | Linear) -> int:
    """Values of a part that are in no matrix."""
    inner = part.shared.vectors if isinstance(part, Experts) and part.shared else 0
    return part.vectors + inner


class ModelSpec(Struct, frozen=True, dict=True):
    """The sizes of a decoder-only transformer.

    Attributes:
        name: for reports.
        family: the `model_type` of its config.json.
        layers: from the first to the last, equal neighbours together.
        tied: one matrix serves as embedding and head.
        final_norm: values of the norm before the head.
        head_bias: the head adds a value for every word.
        dtype: of activations, embeddings and head ("bf16", ...).
        quantization: of the layers' matrices; None where they are stored as `dtype`.
    """

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[Layers, ...]
    tied: bool = False
    final_norm: int = 0
    head_bias: bool = False
    dtype: str = "bf16"
    quantization: Quantization | None = None

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def weight_dtype(self) -> str:
        """Of the layers' matrices."""
        return self.quantization.dtype if self.quantization else self.dtype

    # -- parameters and arithmetic

    @cached_property
    def num_params(self) -> int:
        return self._params(active=False)

    @cached_property
    def num_active_params(self) -> int:
        """Those that compute one token: of the experts only the chosen ones. Embedding and head count in full."""
        return self._params(active=True)

    def _params(self, active: bool) -> int:
        total = self.embedding_params + self.final_norm + (self.vocab_size if self.head_bias else 0)
        for group in self.layers:
            matrices = sum(
                (m.active if active else m.copies) * (m.values + m.bias_values) for m in group.matrices(self.hidden_size)
            )
            total += group.count * (matrices + group.vectors)
        return total

    @property
    def embedding_params(self) -> int:
        """Embedding and head; one matrix serves as both where they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    def flops_per_token(self, context: int = 0, *, decode: bool = False) -> int:
        """Multiplications and additions to compute one token that attends to `context` tokens, head included.

        `decode` takes latent attention as decodes do it (over the latent vectors), otherwise as prefills do.
        """
        matrices = sum(g.count * m.active * m.values for g in self.layers for m in g.matrices(self.hidden_size))
        attention = sum(
            group.count * (part.decode_pair_flops if decode else part.pair_flops) * _seen(part, context)
            for group, part in self._cached()
        )
        return 2 * (matrices + self.vocab_size * self.hidden_size) + attention

    def _cached(self) -> Iterator[tuple[Layers, AnyAttention]]:
        return ((group, group.cached) for group in self.layers if group.cached)

    # -- bytes

    def dtypes(self, dtype: str = "auto") -> tuple[str, str]:
        """Types of the activations and of the layers' matrices when `dtype` is asked for; 8 bits and less serve matrices only."""
        if dtype == "auto":
            return self.dtype, self.weight_dtype
        name = dtype_name(dtype)
        return (name, name) if DTYPE_BYTES[name] >= 2 else ("bf16" if self.dtype == "fp32" else self.dtype, name)

    def weight_bytes(self, tp: int = 1, dtype: str = "auto", *, pp: int = 1, ep: int = 1) -> int:
        """Bytes of weights on the fullest GPU, scales included. `dtype` replaces the checkpoint's own type."""
        plain_dtype, matrix_dtype = self.dtypes(dtype)
        plain = DTYPE_BYTES[plain_dtype]
        quantised = self._quantisation(dtype, matrix_dtype)
        packed = plain if quantised is None else quantised.weight_bytes
        table = self.vocab_size * self.hidden_size / tp * (packed if quantised and quantised.embeddings else plain)
        fullest = 0.0
        for stage, layers in enumerate(self.stages(pp)):
            first, last = stage == 0, stage == pp - 1
            tables = 1 if first and last and self.tied else first + last
            head = self.final_norm + (self.vocab_size / tp if self.head_bias else 0) if last else 0
            inner = sum(group.count * self._layer_bytes(group, tp, ep, packed, plain) for group in layers)
            fullest = max(fullest, inner + tables * table + head * plain)
        return int(fullest)

    def _quantisation(self, dtype: str, matrix_dtype: str) -> Quantization | None:
        if dtype == "auto" or (self.quantization and self.quantization.dtype == matrix_dtype):
            return self.quantization
        return Quantization(matrix_dtype) if DTYPE_BYTES[matrix_dtype] < 2 else None

    def _layer_bytes(self, group: Layers, tp: int, ep: int, packed: float, plain: float) -> float:
        """One layer's share. Routers and what the checkpoint excludes stay plain, as do biases and norms."""
        total = group.vectors * plain
        for matrix in group.matrices(self.hidden_size):
            each = plain if matrix.name == "mlp.gate" or matrix.name in group.unquantised else packed
            total += matrix.copies * matrix.share(tp, ep) * (matrix.values * each + matrix.bias_values * plain)
        return total

    def stages(self, pp: int) -> list[tuple[Layers, ...]]:
        """The layers of each pipeline stage; those left over go to the stages before the last, which has the head to do."""
        if not 1 <= pp <= self.num_layers:
            raise ConfigError(f"replica.pp is {pp}, but {self.name} has {self.num_layers} layers; use 1 to {self.num_layers}")
        each, left = divmod(self.num_layers, pp)
        counts = [each + (1 if pp - 1 - left <= stage < pp - 1 else 0) for stage in range(pp)]
        rest, cut = list(self.layers), []
        for count in counts:
            taken: list[Layers] = []
            while count:
                group = rest.pop(0)
                taken.append(replace(group, count=min(count, group.count)))
                if group.count > count:
                    rest.insert(0, replace(group, count=group.count - count))
                count -= taken[-1].count
            cut.append(tuple(taken))
        return cut

    def kv_bytes_per_token(self, kv_dtype: str, tp: int = 1, *, pp: int = 1) -> int:
        """Bytes of KV cache that a token needs on each GPU, all layers together, while every window still reaches it."""
        return self.kv_bytes(1, kv_dtype, tp, pp=pp)

    def kv_bytes(self, context: int, kv_dtype: str, tp: int = 1, *, pp: int = 1) -> int:
        """Bytes of KV cache of one sequence of `context` tokens on the fullest GPU; a layer keeps its window at most."""
        values = max(
            sum(group.count * group.cached.kv_values(tp) * _seen(group.cached, context) for group in layers if group.cached)
            for layers in self.stages(pp)
        )
        return int(values * dtype_bytes(kv_dtype))

    # -- sharing a model

    def check_tp(self, tp: int, ep: int = 1) -> None:
        """Raises ConfigError unless `tp` GPUs can share every matrix evenly, and `ep` the experts."""
        if self.can_share(tp, ep):
            return
        parts = ", ".join(f"{n} {what}" for what, n in self._sizes())
        if ep != 1 and self.can_share(tp):
            possible = ", ".join(str(n) for n in range(1, 257) if self.can_share(tp, n)) or "1"
            raise ConfigError(f"replica.ep is {ep}, but {self.name} has {parts} and tp is {tp}: use one of {possible}")
        possible = ", ".join(str(n) for n in range(1, 17) if self.can_share(n))
        parts = " and ".join(parts.rsplit(", ", 1))
        raise ConfigError(f"replica.tp is {tp}, but {self.name} has {parts}, which divide by {possible}: use one of these")

    def can_share(self, tp: int, ep: int = 1) -> bool:
        """Whether `tp` GPUs can each hold an even share (KV heads may be copied instead), with experts dealt out over `ep`."""
        if tp < 1 or ep < 1 or (tp % ep and ep % tp):
            return False
        if not all(matrix.can_share(tp, ep) for group in self.layers for matrix in group.matrices(self.hidden_size)):
            return False
        return ep == 1 or self.num_experts > 0

    def _sizes(self) -> list[tuple[str, int]]:
        """What GPUs have to share, each with its name, for messages."""
        sizes: dict[tuple[str, int], None] = {}
        for group in self.layers:
            attention, mlp = group.cached, group.mlp
            if attention:
                sizes["heads", attention.num_heads] = None
            if isinstance(attention, Attention):
                sizes["KV heads", attention.num_kv_heads] = None
            if isinstance(mlp, Mlp):
                sizes["MLP columns", mlp.size] = None
            if isinstance(mlp, Experts):
                sizes["experts", mlp.num_experts] = sizes["expert columns", mlp.expert.size] = None
        return list(sizes)

    @cached_property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 0 for a dense model."""
        return max((group.mlp.num_experts for group in self.layers if isinstance(group.mlp, Experts)), default=0)

    def kv_heads_per_gpu(self, tp: int) -> int:
        """KV heads that each GPU keeps; with more GPUs than KV heads each head is kept more than once."""
        return max(1, self.num_kv_heads // tp)

    # -- the layer of a model whose layers are all alike: grouped heads and a gated MLP

    @cached_property
    def attention(self) -> Attention:
        """What all layers have in common, windows apart. Raises ModelError where there is no such thing."""
        kinds = {replace(a, window=None) if isinstance(a := group.attention, Attention) else a for group in self.layers}
        kind = kinds.pop()
        if kinds or not isinstance(kind, Attention) or kind.keys_are_values or kind.sinks:
            raise ModelError(f"{self.name}: its attention is not the same grouped-head attention in every layer{_PLAIN_ONLY}")
        return kind

    @cached_property
    def mlp(self) -> Mlp:
        """The MLP of every layer. Raises ModelError where there is no such thing."""
        kinds = {group.mlp for group in self.layers}
        kind = kinds.pop()
        if kinds or not isinstance(kind, Mlp) or not kind.gated:
            raise ModelError(f"{self.name}: its layers do not all have the same gated MLP{_PLAIN_ONLY}")
        return kind

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def q_size(self) -> int:
        return self.attention.q_size

    @property
    def kv_size(self) -> int:
        """Width of the keys of one layer; the values are as wide."""
        return self.attention.kv_size

    @property
    def qkv_bias(self) -> bool:
        return self.attention.qkv_bias

    @property
    def out_bias(self) -> bool:
        return self.attention.out_bias

    @property
    def qk_norm(self) -> bool:
        return self.attention.qk_norm

    @property
    def intermediate_size(self) -> int:
        return self.mlp.size

    @property
    def mlp_bias(self) -> bool:
        return self.mlp.bias

    @property
    def sliding_window(self) -> int | None:
        """Tokens that the windowed layers look back; None where none has a window."""
        return max((part.window for _, part in self._cached() if part.window), default=None)


_PLAIN_ONLY = "; only `squall plan` knows such models so far, prices and the built-in engine need layers that are all alike"


def _seen(attention: AnyAttention, context: int) -> int:
    """Tokens of a context that a layer attends to and keeps."""
    return context if attention.window is None else min(context, attention.window)
