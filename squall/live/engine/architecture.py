"""The mathematics that a config.json asks of the decoder.

`ModelSpec` (squall.perf.model) knows the sizes; this adds what a forward pass needs besides: epsilon, rotary embedding, windows.
Knows no tensors. What the decoder cannot compute is refused by name: a model that almost runs gives almost its answers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from squall.errors import ModelError
from squall.live.engine.jsonfile import read_json
from squall.perf.model import ModelSpec, spec_from_config

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
    """All that the decoder computes by. `windows`: for every layer, how many tokens it looks back, 0 for all."""

    spec: ModelSpec
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int, ...]


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Of a checkpoint directory. Raises ModelError naming the file and the field."""
    path = folder / "config.json"
    config = read_json(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path}: model_type is {family!r}; the built-in engine runs {', '.join(FAMILIES)}")
    spec = spec_from_config(config, place=str(path), name=folder.name)
    if "quantization_config" in config or spec.weight_dtype != spec.dtype:
        raise ModelError(f"{path}: quantization_config: the built-in engine runs unquantised checkpoints only")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{path}: hidden_act is {activation!r}; the built-in engine runs 'silu' only")
    if spec.head_dim % 2:
        raise ModelError(f"{path}: head_dim is {spec.head_dim}; rotary embedding needs an even one")
    eps = _number(config, "rms_norm_eps", 1e-6, path)
    return DecoderConfig(spec, eps, _rope(config, spec.max_position, path), _windows(config, spec))


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


def _windows(config: Mapping[str, Any], spec: ModelSpec) -> tuple[int, ...]:
    """Qwen's first `max_window_layers` layers look back without limit; Mistral's window holds for all."""
    window = spec.sliding_window or 0
    unlimited = int(config.get("max_window_layers", 0)) if spec.family.startswith("qwen") else 0
    return tuple(window if layer >= unlimited else 0 for layer in range(spec.num_layers))
