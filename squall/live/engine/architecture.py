"""The mathematics that a config.json asks of the decoder.

`squall.perf` reads the sizes; this adds what a forward pass needs besides: epsilon and rotary embedding. Knows no tensors. What
the decoder cannot compute is refused by name: a model that almost runs gives almost its answers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from squall.errors import ModelError
from squall.live.engine.jsonfile import read_json
from squall.perf.layers import Attention, Mlp
from squall.perf.model import spec_from_config
from squall.perf.spec import Layers, ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class Rope(Struct, frozen=True):
    """Rotary embedding; `squall.live.engine.rope` turns it into frequencies.

    Attributes:
        kind: one of ROPE_KINDS.
        original_max_position: the length that the model was trained on before it was stretched.
        low_freq_factor, high_freq_factor: of llama3.
        beta_fast, beta_slow, truncate: of yarn.
        attention_factor: of yarn: what cosine and sine are multiplied by.
    """

    theta: float
    kind: str
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class DecoderConfig(Struct, frozen=True):
    """All that the decoder computes by; every layer is the same but for its window.

    Attributes:
        dtype: of the checkpoint ("bf16", ...).
        windows: for every layer, how many tokens it looks back, 0 for all.
    """

    name: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of a token's keys; its values are as wide."""
        return self.num_kv_heads * self.head_dim


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Of a checkpoint directory. Raises ModelError naming the file and the field."""
    path = folder / "config.json"
    config = read_json(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path}: model_type is {family!r}; the built-in engine runs {', '.join(FAMILIES)}")
    spec = spec_from_config(config, place=str(path), name=folder.name)
    _refuse_what_differs(config, spec, path)
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    return DecoderConfig(
        name=spec.name,
        dtype=spec.dtype,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate_size=mlp.size,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        tied=spec.tied,
        qkv_bias=attention.qkv_bias,
        out_bias=attention.out_bias,
        mlp_bias=mlp.bias,
        qk_norm=attention.qk_norm,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6, path),
        rope=_rope(config, spec.max_position, path),
        windows=tuple(window or 0 for group in spec.layers for window in [_window(group)] * group.count),
    )


def _refuse_what_differs(config: Mapping[str, Any], spec: ModelSpec, path: Path) -> None:
    if "quantization_config" in config or spec.quantization is not None:
        raise ModelError(f"{path}: quantization_config: the built-in engine runs unquantised checkpoints only")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{path}: hidden_act is {activation!r}; the built-in engine runs 'silu' only")
    if "chunked_attention" in (config.get("layer_types") or ()):
        raise ModelError(f"{path}: layer_types has 'chunked_attention'; the built-in engine runs full and sliding attention")
    for group in spec.layers:
        if isinstance(group.attention, Attention) and group.attention.head_dim % 2:
            raise ModelError(f"{path}: head_dim is {group.attention.head_dim}; rotary embedding needs an even one")


def _window(group: Layers) -> int | None:
    return group.attention.window if isinstance(group.attention, Attention) else None


def _rope(config: Mapping[str, Any], max_position: int, path: Path) -> Rope:
    """From `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{path}: rope_parameters differ by layer; the built-in engine needs one set for all")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise ModelError(f"{path}: rope_type is {kind!r}; the built-in engine knows {', '.join(ROPE_KINDS)}")
    if _number({**config, **given}, "partial_rotary_factor", 1.0, path) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor: the built-in engine rotates whole heads only")
    original = int(_number({**config, **given}, "original_max_position_embeddings", max_position, path))
    stretch = max_position / original
    if kind != "default" and kind != "yarn" and "factor" not in given:
        raise ModelError(f"{path}: rope_type {kind!r} needs a factor")
    optional = {key: _number(given, key, 0.0, path) for key in ("attention_factor", "mscale", "mscale_all_dim") if given.get(key)}
    return Rope(
        theta=_number({**config, **given}, "rope_theta", 10_000.0, path),
        kind=kind,
        factor=_number(given, "factor", stretch, path),
        original_max_position=original,
        low_freq_factor=_number(given, "low_freq_factor", 1.0, path),
        high_freq_factor=_number(given, "high_freq_factor", 4.0, path),
        beta_fast=_number(given, "beta_fast", 32.0, path),
        beta_slow=_number(given, "beta_slow", 1.0, path),
        truncate=bool(given.get("truncate", True)),
        **optional,
    )


def _number(fields: Mapping[str, Any], key: str, default: float, path: Path) -> float:
    value = fields.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{path}: {key} is {value!r}; it must be a number above 0")
    return float(value)
