"""A model's weights in one arena: embed | layer 0 .. L-1 | norm | head. Knows where each tensor lies, not where values come from.

Matrices that multiply the same input lie one below the other, so that one product serves them: q, k and v; gate and up. Under
tensor parallelism a worker holds a shard: rows of what multiplies the residual stream (whole heads; columns of the MLP's
middle), columns of what leads back to it, rows of the vocabulary; norms, and biases that are added to the residual, whole.
"""

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from squall.errors import ModelError
from squall.live.engine.architecture import DecoderConfig
from squall.live.engine.arena import Arena, region_name, sections
from squall.live.transport.device import Lent
from squall.live.transport.memory import SharedMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_ALIGNMENT = 64  # bytes; a cache line


class Shard(Struct, frozen=True):
    """Number `rank` of `size` equal parts of a model."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


class Part(Struct, frozen=True):
    """A tensor of the checkpoint, by its name there, or a shard of one.

    Attributes:
        shape: here.
        stored: in the checkpoint.
        axis: along which it is cut; start: where it begins there.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    axis: int = 0
    start: int = 0


class Piece(Struct, frozen=True):
    """A tensor of the decoder: `parts` on top of each other. `layer` is None outside the layers."""

    layer: int | None
    field: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def num_values(self) -> int:
        first, *rest = self.shape
        return first * (rest[0] if rest else 1)

    @property
    def section(self) -> str:
        """Of the arena, which it lies in."""
        return self.field if self.layer is None else f"layer {self.layer}"


class LayerWeights:
    """One layer's tensors: `qkv`, `out`, `gate_up`, `down` [out features, in features], their biases, and the norms."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.attn_norm = tensors["attn_norm"]
        self.qkv = tensors["qkv"]
        self.qkv_bias = tensors.get("qkv_bias")
        self.q_norm = tensors.get("q_norm")
        self.k_norm = tensors.get("k_norm")
        self.out = tensors["out"]
        self.out_bias = tensors.get("out_bias")
        self.mlp_norm = tensors["mlp_norm"]
        self.gate_up = tensors["gate_up"]
        self.gate_up_bias = tensors.get("gate_up_bias")
        self.down = tensors["down"]
        self.down_bias = tensors.get("down_bias")


class Weights:
    """All tensors of a model: views into one arena.

    Attributes:
        shard: which part of the model.
        embed: [vocabulary, hidden]; head: the same tensor where they are tied; norm: [hidden].
        places: every tensor of the checkpoint that a section needs, by the section's name, and where it goes: in host
            memory, which is what a loader writes to.
    """

    def __init__(self, config: DecoderConfig, shard: Shard, arena: Arena, tensors: "_Tensors", host: "_Tensors") -> None:
        self.arena = arena
        self.shard = shard
        self.places: dict[str, list[tuple[Part, Tensor]]] = {}
        for piece in pieces(config, shard):
            self.places.setdefault(piece.section, []).extend(_split(piece, host))
        self.embed = tensors[None, "embed"]
        self.norm = tensors[None, "norm"]
        self.head = tensors.get((None, "head"), self.embed)
        self.layers = [
            LayerWeights({field: tensor for (at, field), tensor in tensors.items() if at == layer})
            for layer in range(config.num_layers)
        ]

    @property
    def device(self) -> torch.device:
        return self.arena.tensor.device

    @property
    def views(self) -> dict[str, Tensor]:
        """The place of every tensor of the checkpoint, by its name there."""
        return {part.name: view for places in self.places.values() for part, view in places}


_Tensors = dict[tuple[int | None, str], Tensor]


def allocate(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    chunk_bytes: int | None = None,
    memory: SharedMemory | None = None,
    lent: Lent | None = None,
) -> Weights:
    """Room for all weights of a shard, in `memory`, or what is `lent`, where another process fills it.

    Raises ModelError where the model cannot be cut so.
    """
    step = _ALIGNMENT // dtype.itemsize
    sizes: dict[str, int] = {}
    inside: list[tuple[Piece, int]] = []
    for piece in pieces(config, shard):
        at = sizes.get(piece.section, 0)
        inside.append((piece, at))
        sizes[piece.section] = at + -(-piece.num_values // step) * _ALIGNMENT
    parts, name = sections(list(sizes.items())), region_name(shard.rank)
    arena = Arena(parts, fingerprint(config, dtype, shard), device, chunk_bytes, name, memory, lent)
    begins = {section.name: section.offset for section in arena.region.sections}

    def views(memory: Tensor) -> _Tensors:
        return {
            (piece.layer, piece.field): memory[start : start + piece.num_values * dtype.itemsize].view(dtype).view(piece.shape)
            for piece, at in inside
            for start in (begins[piece.section] + at,)
        }

    return Weights(config, shard, arena, views(arena.tensor), views(arena.host))


def fingerprint(config: DecoderConfig, dtype: torch.dtype, shard: Shard) -> str:
    """What two workers must agree on before one takes the other's weights; in words, for the message when they do not."""
    name = str(dtype).removeprefix("torch.")
    sizes = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"
    heads = f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}, MLP {config.intermediate_size}"
    flags = "".join("01"[flag] for flag in (config.tied, config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm))
    return f"{config.name} in {name}, shard {shard.rank} of {shard.size} ({sizes}, {heads}, layout {flags})"


def pieces(config: DecoderConfig, shard: Shard = WHOLE) -> Iterator[Piece]:
    """Every tensor of a shard, in the order in which they lie in the arena. Raises ModelError where it cannot be cut so."""
    cut = _Cutter(config, shard)
    hidden = config.hidden_size
    yield Piece(None, "embed", (cut.vocabulary("model.embed_tokens.weight"),))
    for layer in range(config.num_layers):
        yield from _layer(config, layer, cut)
    yield Piece(None, "norm", (cut.whole("model.norm.weight", hidden),))
    if not config.tied:
        yield Piece(None, "head", (cut.vocabulary("lm_head.weight"),))


class _Cutter:
    """Cuts tensors of a checkpoint for one shard."""

    def __init__(self, config: DecoderConfig, shard: Shard) -> None:
        self._config = config
        self._shard = shard
        for count, what in ((config.num_heads, "attention heads"), (config.intermediate_size, "columns of the MLP")):
            if count % shard.size:
                raise ModelError(f"replica.tp is {shard.size}, which does not divide {config.name}'s {count} {what}")
        if config.num_kv_heads % shard.size and shard.size % config.num_kv_heads:
            raise ModelError(
                f"replica.tp is {shard.size}; {config.name} has {config.num_kv_heads} KV heads, which cannot be dealt out so"
            )
        if vocabulary_share(config, shard) * (shard.size - 1) >= config.vocab_size:
            raise ModelError(f"replica.tp is {shard.size}; {config.name} has {config.vocab_size} tokens, too few to deal out")

    def whole(self, name: str, *shape: int) -> Part:
        return Part(name, shape, shape)

    def rows(self, name: str, count: int, *rest: int) -> Part:
        size = count // self._shard.size
        return Part(name, (size, *rest), (count, *rest), 0, size * self._shard.rank)

    def columns(self, name: str, rows: int, count: int) -> Part:
        size = count // self._shard.size
        return Part(name, (rows, size), (rows, count), 1, size * self._shard.rank)

    def kv_heads(self, name: str, *rest: int) -> Part:
        """Whole heads."""
        config, shard = self._config, self._shard
        first = shard.rank * config.num_kv_heads // shard.size
        return Part(
            name, (kv_heads_share(config, shard) * config.head_dim, *rest), (config.kv_size, *rest), 0, first * config.head_dim
        )

    def vocabulary(self, name: str) -> Part:
        """Equal shares; the last is shorter where they do not come out even."""
        rows, hidden = self._config.vocab_size, self._config.hidden_size
        size = vocabulary_share(self._config, self._shard)
        start = size * self._shard.rank
        return Part(name, (min(size, rows - start), hidden), (rows, hidden), 0, start)


def kv_heads_share(config: DecoderConfig, shard: Shard) -> int:
    """KV heads of each shard; with more shards than heads, several hold the same one."""
    return max(1, config.num_kv_heads // shard.size)


def vocabulary_share(config: DecoderConfig, shard: Shard) -> int:
    """Tokens of each shard but the last, which may have fewer."""
    return -(-config.vocab_size // shard.size)


def _layer(config: DecoderConfig, layer: int, cut: _Cutter) -> Iterator[Piece]:
    hidden, inner, q_size = config.hidden_size, config.intermediate_size, config.q_size
    prefix = f"model.layers.{layer}."

    def piece(field: str, *parts: Part) -> Piece:
        return Piece(layer, field, parts)

    def qkv(kind: str, *rest: int) -> tuple[Part, Part, Part]:
        name = f"{prefix}self_attn.{{}}_proj.{kind}".format
        return cut.rows(name("q"), q_size, *rest), cut.kv_heads(name("k"), *rest), cut.kv_heads(name("v"), *rest)

    yield piece("attn_norm", cut.whole(f"{prefix}input_layernorm.weight", hidden))
    yield piece("qkv", *qkv("weight", hidden))
    if config.qkv_bias:
        yield piece("qkv_bias", *qkv("bias"))
    if config.qk_norm:
        yield piece("q_norm", cut.whole(f"{prefix}self_attn.q_norm.weight", config.head_dim))
        yield piece("k_norm", cut.whole(f"{prefix}self_attn.k_norm.weight", config.head_dim))
    yield piece("out", cut.columns(f"{prefix}self_attn.o_proj.weight", hidden, q_size))
    if config.out_bias:
        yield piece("out_bias", cut.whole(f"{prefix}self_attn.o_proj.bias", hidden))
    yield piece("mlp_norm", cut.whole(f"{prefix}post_attention_layernorm.weight", hidden))
    yield piece("gate_up", *(cut.rows(f"{prefix}mlp.{x}_proj.weight", inner, hidden) for x in ("gate", "up")))
    if config.mlp_bias:
        yield piece("gate_up_bias", *(cut.rows(f"{prefix}mlp.{x}_proj.bias", inner) for x in ("gate", "up")))
    yield piece("down", cut.columns(f"{prefix}mlp.down_proj.weight", hidden, inner))
    if config.mlp_bias:
        yield piece("down_bias", cut.whole(f"{prefix}mlp.down_proj.bias", hidden))


def _split(piece: Piece, tensors: _Tensors) -> Iterator[tuple[Part, Tensor]]:
    at = 0
    for part in piece.parts:
        yield part, tensors[piece.layer, piece.field][at : at + part.shape[0]]
        at += part.shape[0]
