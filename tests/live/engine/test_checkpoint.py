"""Checkpoints that are as they should be, and every way in which they are not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from squall.errors import ModelError
from squall.live.engine.architecture import read_decoder_config
from squall.live.engine.checkpoint import load_checkpoint
from squall.live.engine.weights import Weights, allocate, pieces

Edit = Callable[..., None]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    config = read_decoder_config(folder)
    weights = allocate(config, dtype, torch.device("cpu"))
    load_checkpoint(folder, weights.views, frozenset({"lm_head.weight"} if config.tied else ()))
    return weights


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_tensor_lands_in_its_place_and_none_overlap(tiny: Path) -> None:
    weights = load(tiny)
    stored = load_file(tiny / "model.safetensors")
    assert stored.keys() == weights.views.keys()
    assert all(torch.equal(weights.views[name], tensor) for name, tensor in stored.items())
    assert torch.equal(weights.layers[1].qkv[:48], stored["model.layers.1.self_attn.q_proj.weight"])
    assert all(
        tensor.data_ptr() % 64 == weights.arena.tensor.data_ptr() % 64
        for tensor in (weights.embed, weights.layers[2].down, weights.head)
    )


def test_layers_lie_one_after_the_other(tiny: Path) -> None:
    order = [piece.layer for piece in pieces(read_decoder_config(tiny))]
    assert order[0] is None
    assert [layer for layer in order if layer is not None] == sorted(layer for layer in order if layer is not None)


def test_a_sharded_checkpoint_is_the_same(checkpoint: Callable[..., Path], tiny: Path) -> None:
    sharded = checkpoint(max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert torch.equal(load(sharded).views["lm_head.weight"], load(tiny).views["lm_head.weight"])


def test_number_types_are_converted(tiny: Path, copy: Path) -> None:
    change(copy, lambda tensors: tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}))
    exact = load(tiny).views["lm_head.weight"]
    assert torch.equal(load(copy).views["lm_head.weight"], exact.to(torch.bfloat16).float())
    assert torch.equal(load(tiny, torch.bfloat16).views["lm_head.weight"], exact.to(torch.bfloat16))


def test_a_head_that_is_tied_needs_no_tensor_and_ignores_one(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(tie_word_embeddings=True)
    weights = load(folder)
    assert weights.head is weights.embed
    change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(260, 48)}))
    assert torch.equal(load(folder).head, weights.head)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (
        drop("model.layers.1.mlp.up_proj.weight"),
        r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing, though config",
    ),
    "extra": (lambda tensors: tensors.update(a=torch.zeros(1), b=torch.zeros(1)), r"tensor a \(and 1 more\) has no place"),
    "shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}),
        r"tensor model\.norm\.weight is \[47\], but config\.json says \[48\]",
    ),
    "type": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}),
        r"tensor model\.norm\.weight is of type I8; only F32, F16, BF16 are read",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_tensors_that_contradict_the_config_are_named(kind: str, copy: Path) -> None:
    spoil, message = SPOILT[kind]
    change(copy, spoil)
    with pytest.raises(ModelError, match=message):
        load(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_a_file_that_is_cut_short_is_named(keep: int, copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or no safetensors file .* fetch it again") as caught:
        load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["5", "null", '["x"]', '"../other/model.safetensors"', '"/etc/passwd"', '"a\\u0000b"', '""'])
def test_an_index_that_names_no_file_of_its_folder_is_refused(name: str, copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"model.norm.weight": {name}}}}}')
    with pytest.raises(ModelError, match="weight_map must say of each tensor which file of this folder holds it"):
        load(copy)


def test_an_index_that_names_a_file_that_cannot_be_says_so(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"model.norm.weight": "{"x" * 300}"}}}}')
    with pytest.raises(ModelError, match="missing, though the index names it"):
        load(copy)


def test_a_git_lfs_pointer_is_recognised(copy: Path) -> None:
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 12\n")
    with pytest.raises(ModelError, match=r"git-lfs pointer, .*`git lfs pull`"):
        load(copy)


def test_missing_files_are_named(copy: Path, checkpoint: Callable[..., Path]) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(copy)
    sharded = checkpoint(max_shard_size="60KB")
    next(sharded.glob("model-00001-of-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-0000.\.safetensors: missing, though the index names it"):
        load(sharded)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "falcon"}, r"model_type is 'falcon'; the built-in engine runs llama, mistral, qwen2, qwen3"),
    "experts": ({"num_local_experts": 8}, r"num_local_experts says mixture of experts"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: .* unquantised"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
    "rope kind": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
        r"rope_type is 'longrope'; .* linear, dynamic",
    ),
    "rope without factor": ({"rope_parameters": {"rope_type": "linear"}}, r"rope_type 'linear' needs a factor"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear", "factor": "big"}}, r"factor is 'big'; it must be a number"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"rope_parameters differ by layer"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: .* whole heads"),
    "chunks": ({"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": 4}, r"layer_types has 'chunked_attention'"),
    "odd heads": ({"head_dim": 13}, r"head_dim is 13; rotary embedding needs an even one"),
    "a size missing": ({"hidden_size": None}, r"config\.json: hidden_size is missing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_computed_is_refused_by_field(kind: str, copy: Path, edit: Edit) -> None:
    changes, message = REFUSED[kind]
    edit(copy / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        read_decoder_config(copy)


@pytest.mark.parametrize(("text", "message"), [("{", "not readable as JSON"), ("[1]", "holds a list, expected a JSON object")])
def test_a_broken_config_is_named(text: str, message: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        read_decoder_config(copy)
