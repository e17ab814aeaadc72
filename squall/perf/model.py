"""Reads a Hugging Face config.json into a `ModelSpec`.

Knows no weights, no tokenizer and no hardware. A configuration that leaves a size open, contradicts itself or describes an
architecture that `families` does not know is refused by name: a guess here would mis-size every answer behind it.
"""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from squall.errors import ModelError
from squall.perf.dtypes import DTYPE_BYTES, DTYPE_NAMES, dtype_bytes, dtype_name
from squall.perf.families import FAMILIES, Family
from squall.perf.fields import Fields
from squall.perf.quantization import Exclusions, Quantization, read_modelopt, read_quantization
from squall.perf.spec import Layers, ModelSpec

__all__ = ["FAMILIES", "ModelSpec", "dtype_bytes", "dtype_name", "read_model", "spec_from_config"]

MOST_LAYERS = 2000
"""More than any model has; a number beyond it is a mistake, and reading would take for ever."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_SHARED_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "quantization")
"""Fields of a multimodal model that hold for its text part too, where that does not say otherwise."""


def read_model(path: Path) -> ModelSpec:
    """Reads a config.json, or the one in a checkpoint directory. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    name = path.name if path.is_dir() else path.parent.name if path.name == "config.json" else path.stem
    config = _read_object(file)
    beside = file.with_name("hf_quant_config.json")
    if file.name == "config.json" and beside.is_file() and not config.get("quantization_config"):
        quantisation = read_modelopt(_read_object(beside), str(beside))
        return _spec(config, str(file), name or str(path), quantisation)
    return spec_from_config(config, place=str(file), name=name or str(path))


def spec_from_config(config: Mapping[str, Any], place: str, name: str) -> ModelSpec:
    """The sizes in a parsed config.json. `place` names it in errors. Raises ModelError."""
    return _spec(config, place, name, None)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file; give a catalogue name, a config.json or a directory that holds one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read ({error})") from None
    if text.startswith("version https://git-lfs"):
        raise ModelError(f"{file}: is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}: is not complete JSON (line {error.lineno}: {error.msg}); fetch it again") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is no sensible JSON ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: holds a {type(config).__name__}, not an object with the model's sizes")
    return config


_Quantised = tuple[Quantization | None, Exclusions]


def _spec(config: Mapping[str, Any], place: str, name: str, quantised: _Quantised | None) -> ModelSpec:
    config, place = _text_part(config, place)
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(f"{place}: model_type is {model_type!r}; supported are {', '.join(sorted(FAMILIES))}")
    _refuse_contradictions(config, place, str(model_type), family)
    quantization, excluded = quantised or read_quantization(config, place)
    fields = Fields(config, place, family.defaults)
    return ModelSpec(
        name=name,
        family=str(model_type),
        hidden_size=fields.size("hidden_size"),
        vocab_size=fields.size("vocab_size", hint="add it: the number of rows of the embedding"),
        max_position=fields.size("seq_length" if "seq_length" in fields else "max_position_embeddings"),
        layers=_layers(fields, family, excluded if quantization else Exclusions()),
        tied=fields.flag("tie_word_embeddings"),
        final_norm=family.norm_width * fields.size("hidden_size"),
        head_bias=fields.flag("lm_head_bias"),
        dtype=_dtype(fields),
        quantization=quantization,
    )


def _text_part(config: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], str]:
    """The language model of a multimodal one; its encoders are not counted."""
    nested = config.get("text_config")
    if not isinstance(nested, dict) or not nested:
        return config, place
    shared = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    return {**shared, **{key: value for key, value in nested.items() if value is not None}}, f"{place}: text_config"


def _refuse_contradictions(config: Mapping[str, Any], place: str, model_type: str, family: Family) -> None:
    """Fields of another architecture than `model_type` says: one of the two is wrong."""
    for key in () if family.experts else _EXPERT_KEYS:
        if config.get(key):
            raise ModelError(f"{place}: {key} says mixture of experts, but model_type {model_type!r} has none; correct either")
    if config.get("kv_lora_rank") and not model_type.startswith("deepseek"):
        raise ModelError(f"{place}: kv_lora_rank says latent attention, but model_type {model_type!r} has none; correct either")


def _layers(fields: Fields, family: Family, excluded: Exclusions) -> tuple[Layers, ...]:
    """All layers, equal neighbours together."""
    hidden, count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"models have at most {MOST_LAYERS} layers; correct it")
    if "layer_types" in fields and len(fields.rows("layer_types")) != count:
        kinds = len(fields.rows("layer_types"))
        raise ModelError(
            f"{fields.place}: layer_types has {kinds} entries for {count} layers (num_hidden_layers); correct either"
        )
    layers = []
    for index in range(count):
        layer = family.layer(fields, index)
        if excluded:
            modules = dict.fromkeys(matrix.name for matrix in layer.matrices(hidden))
            layer = replace(layer, unquantised=tuple(module for module in modules if excluded.cover(index, module)))
        layers.append(layer)
    return tuple(replace(layer, count=len(list(equal))) for layer, equal in groupby(layers))


def _dtype(fields: Fields) -> str:
    """Type of the activations. Absent is bf16, what such checkpoints are published in."""
    key = "dtype" if "dtype" in fields else "torch_dtype"
    given = fields.get(key)
    name = DTYPE_NAMES.get(str(given).removeprefix("torch."), given) if given is not None else "bf16"
    if name not in ("fp32", "bf16", "fp16"):
        raise fields.refuse(key, "it must be float32, bfloat16 or float16")
    assert name in DTYPE_BYTES
    return str(name)
