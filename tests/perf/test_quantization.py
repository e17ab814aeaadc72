from pathlib import Path
from typing import Any

import pytest

from squall.errors import ModelError
from squall.perf.model import read_model, spec_from_config
from squall.perf.quantization import EXCLUDING_KEYS, Exclusions, Quantization, read_quantization
from squall.perf.spec import ModelSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
ATTENTION, MLP, TABLES = 256 * (256 + 128 + 128 + 256), 3 * 256 * 512, 2 * 1000 * 256
NORMS = 2 * (2 * 2 * 256 + 256)


def quantised(**block: Any) -> ModelSpec:
    return spec_from_config(LLAMA | {"quantization_config": block}, "config.json", "x")


@pytest.mark.parametrize(
    ("block", "stored", "bytes_"),
    [
        ({"quant_method": "fp8"}, "fp8", 1),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 1 + 4 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", 1),
        ({"quant_method": "mxfp4"}, "mxfp4", 0.5 + 1 / 32),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 1),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}},
            "fp8",
            1,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            "int4",
            0.5 + 2.5 / 128,
        ),
    ],
)
def test_bytes_of_a_weight_with_its_share_of_the_scales(block: dict[str, Any], stored: str, bytes_: float) -> None:
    spec = quantised(**block)
    assert (spec.dtype, spec.weight_dtype) == ("bf16", stored)
    assert spec.weight_bytes() == int(2 * (ATTENTION + MLP) * bytes_ + 2 * TABLES + NORMS)


def test_mlx_quantises_embeddings_too() -> None:
    spec = spec_from_config(LLAMA | {"quantization": {"bits": 4, "group_size": 64}}, "x", "x")
    assert spec.weight_bytes() == int((2 * (ATTENTION + MLP) + TABLES) * (0.5 + 4 / 64) + NORMS)


@pytest.mark.parametrize("key", EXCLUDING_KEYS)
@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["lm_head"], 0),
        (["model.layers.*.self_attn"], 2 * ATTENTION),
        (["re:.*self_attn.*"], 2 * ATTENTION),
        (["model.layers.1.self_attn*"], ATTENTION),
        (["self_attn"], 2 * ATTENTION),
        (["model.language_model.layers.0.mlp"], MLP),
        (["layers.0.mlp.down_proj", "mlp.gate"], MLP // 3),
        (["model.layers.10.mlp"], 0),
    ],
)
def test_excluded_modules_keep_their_type(key: str, names: list[str], plain: int) -> None:
    whole = 2 * (ATTENTION + MLP)
    assert quantised(**{"quant_method": "fp8", key: names}).weight_bytes() == whole + plain + 2 * TABLES + NORMS


def test_another_type_can_be_asked_for_whatever_is_stored() -> None:
    spec = quantised(quant_method="fp8")
    assert spec.weight_bytes(dtype="bf16") == 2 * spec.num_params
    assert spec.weight_bytes(dtype="int4") < spec.weight_bytes() < spec.weight_bytes(dtype="bf16")


def test_nvidia_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(str(LLAMA).replace("'", '"'))
    assert read_model(tmp_path).quantization is None
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text('{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*self_attn*"]}}')
    spec = read_model(tmp_path)
    assert spec.quantization == Quantization("fp8")
    assert spec.weight_bytes() == 2 * (2 * ATTENTION + MLP) + 2 * TABLES + NORMS
    beside.write_text("{}")
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization is missing"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method is 'bitsandbytes'; supported are fp8"),
        ({}, r"quant_method is None"),
        ({"quant_method": "awq", "bits": 3}, r"bits is 3; only 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size is 0"),
        ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size is 128"),
        ({"quant_method": "modelopt", "quant_algo": "FP2"}, r"quant_algo is 'FP2'"),
        ({"quant_method": "compressed-tensors"}, r"config_groups has 0 kinds"),
        ({"quant_method": "fp8", "ignore": "lm_head"}, r"ignore is 'lm_head'; it must be a list"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, r"ignore has 're:\('"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^config.json: quantization_config.{message}"):
        quantised(**block)


def test_a_config_without_a_block_is_not_quantised() -> None:
    assert read_quantization(LLAMA, "x") == (None, Exclusions())
