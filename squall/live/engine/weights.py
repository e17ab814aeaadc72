"""A model's weights in one arena, layer after layer. Knows where every tensor lies, not where its values come from.

Matrices that multiply the same input lie one below the other, so that one product serves them: q, k and v; gate and up.
"""

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from squall.live.engine.architecture import DecoderConfig

_ALIGNMENT = 64  # bytes; a cache line


class Part(Struct, frozen=True):
    """A tensor of the checkpoint, by its name there."""

    name: str
    shape: tuple[int, ...]


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
    """All tensors of a model: views into one flat arena.

    Attributes:
        embed: [vocabulary, hidden]; head: the same tensor where they are tied; norm: [hidden].
        views: every checkpoint tensor's place, by its name there: what a loader writes to.
    """

    def __init__(self, config: DecoderConfig, arena: Tensor, tensors: dict[tuple[int | None, str], Tensor]) -> None:
        self.arena = arena
        self.views = {part.name: view for piece in pieces(config) for part, view in _split(piece, tensors)}
        self.embed = tensors[None, "embed"]
        self.norm = tensors[None, "norm"]
        self.head = tensors.get((None, "head"), self.embed)
        self.layers = [
            LayerWeights({field: tensor for (at, field), tensor in tensors.items() if at == layer})
            for layer in range(config.num_layers)
        ]


def allocate(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Room for all weights, with whatever the memory held."""
    step = _ALIGNMENT // dtype.itemsize
    places: list[tuple[Piece, int]] = []
    size = 0
    for piece in pieces(config):
        places.append((piece, size))
        size += -(-piece.num_values // step) * step
    arena = torch.empty(size, dtype=dtype, device=device)
    tensors = {(piece.layer, piece.field): arena[at : at + piece.num_values].view(piece.shape) for piece, at in places}
    return Weights(config, arena, tensors)


def pieces(config: DecoderConfig) -> Iterator[Piece]:
    """Every tensor of the model, in the order in which they lie in the arena."""
    yield Piece(None, "embed", (Part("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),))
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    yield Piece(None, "norm", (Part("model.norm.weight", (config.hidden_size,)),))
    if not config.tied:
        yield Piece(None, "head", (Part("lm_head.weight", (config.vocab_size, config.hidden_size)),))


def _layer(config: DecoderConfig, layer: int) -> Iterator[Piece]:
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}

    def piece(field: str, *parts: tuple[str, tuple[int, ...]]) -> Piece:
        return Piece(layer, field, tuple(Part(f"model.layers.{layer}.{name}", shape) for name, shape in parts))

    yield piece("attn_norm", ("input_layernorm.weight", (hidden,)))
    yield piece("qkv", *((f"self_attn.{x}_proj.weight", (size, hidden)) for x, size in rows.items()))
    if config.qkv_bias:
        yield piece("qkv_bias", *((f"self_attn.{x}_proj.bias", (size,)) for x, size in rows.items()))
    if config.qk_norm:
        yield piece("q_norm", ("self_attn.q_norm.weight", (config.head_dim,)))
        yield piece("k_norm", ("self_attn.k_norm.weight", (config.head_dim,)))
    yield piece("out", ("self_attn.o_proj.weight", (hidden, config.q_size)))
    if config.out_bias:
        yield piece("out_bias", ("self_attn.o_proj.bias", (hidden,)))
    yield piece("mlp_norm", ("post_attention_layernorm.weight", (hidden,)))
    yield piece("gate_up", ("mlp.gate_proj.weight", (inner, hidden)), ("mlp.up_proj.weight", (inner, hidden)))
    if config.mlp_bias:
        yield piece("gate_up_bias", ("mlp.gate_proj.bias", (inner,)), ("mlp.up_proj.bias", (inner,)))
    yield piece("down", ("mlp.down_proj.weight", (hidden, inner)))
    if config.mlp_bias:
        yield piece("down_bias", ("mlp.down_proj.bias", (hidden,)))


def _split(piece: Piece, tensors: dict[tuple[int | None, str], Tensor]) -> Iterator[tuple[Part, Tensor]]:
    at = 0
    for part in piece.parts:
        yield part, tensors[piece.layer, piece.field][at : at + part.shape[0]]
        at += part.shape[0]
