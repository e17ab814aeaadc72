"""The decoder against `transformers`, on small checkpoints of every kind that it claims to run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from squall.live.engine.architecture import read_decoder_config
from squall.live.engine.kernels import Kernels

TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(50)]
PIECES = [1, 20, 3, 1, 1, 1, 7, 1, 15]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many KV heads": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 36}),
    "llama, heads of 14": ("llama", {"head_dim": 14}),
    "llama, other epsilon": ("llama", {"rms_norm_eps": 1e-3}),
    "llama, other theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "dynamic, within": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}},
    ),
    "yarn, all set": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64, "beta_fast": 16.0,
                "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(
    variant: str, checkpoint: Callable[..., Path], oracle: Any, forward: Any, kernels: Kernels
) -> None:
    family, changes = VARIANTS[variant]
    folder = checkpoint(family, **changes)
    expected = oracle(folder, TOKENS)
    assert expected.std() > 0.1
    torch.testing.assert_close(forward(folder, TOKENS), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(forward(folder, TOKENS, PIECES), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(forward(folder, TOKENS, PIECES, kernels), expected, atol=1e-4, rtol=0)


def test_dynamic_rope_beyond_the_original_length_is_that_of_the_longest_sequence(
    checkpoint: Callable[..., Path], oracle: Any, forward: Any
) -> None:
    folder = checkpoint(max_position_embeddings=20, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    expected = oracle(folder, TOKENS)
    torch.testing.assert_close(forward(folder, TOKENS, max_len=len(TOKENS)), expected, atol=1e-4, rtol=0)
    assert (forward(folder, TOKENS, max_len=20) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [[50], PIECES])
@pytest.mark.parametrize("native", [False, True])
def test_two_layer_ranges_give_bit_for_bit_what_one_gives(
    cut: int, sizes: list[int], native: bool, tiny: Path, forward: Any, kernels: Kernels
) -> None:
    chosen = kernels if native else None
    assert torch.equal(forward(tiny, TOKENS, sizes, chosen, cut=cut), forward(tiny, TOKENS, sizes, chosen))


@pytest.mark.parametrize("older", [False, True])
def test_the_first_layers_of_a_qwen_model_look_back_without_limit(
    older: bool, checkpoint: Callable[..., Path], oracle: Any, forward: Any, edit: Callable[..., None]
) -> None:
    folder = checkpoint("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=2)
    if older:  # without this field, transformers derives it the same way
        edit(folder / "config.json", layer_types=None)
    assert read_decoder_config(folder).windows == (0, 0, 6)
    torch.testing.assert_close(forward(folder, TOKENS, PIECES), oracle(folder, TOKENS), atol=1e-4, rtol=0)


def test_older_files_keep_theta_beside_rope_scaling_and_call_its_kind_type(
    checkpoint: Callable[..., Path], tmp_path: Path, edit: Callable[..., None]
) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    folder = checkpoint(rope_parameters={"rope_type": "llama3", "rope_theta": 5e3, **scaling})
    newer = read_decoder_config(folder)
    assert "rope_parameters" in json.loads((folder / "config.json").read_text())
    for key in ("type", "rope_type"):
        shutil.copy(folder / "config.json", tmp_path)
        edit(tmp_path / "config.json", rope_parameters=None, rope_theta=5e3, rope_scaling={key: "llama3", **scaling})
        assert read_decoder_config(tmp_path).rope == newer.rope
    assert newer.rope.kind == "llama3"
    assert newer.rope.theta == 5e3
