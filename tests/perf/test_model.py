import csv
import json
from pathlib import Path
from typing import Any

import pytest

from squall.errors import ConfigError, ModelError
from squall.perf.catalogue import CONFIGS, KNOWN_AS, resolve_model
from squall.perf.model import read_model, spec_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

NOT_AS_PUBLISHED = {
    "hand--falcon-7b-instruct.json": 6_921_720_704,  # the published total counts the tied embedding twice
    "hand--gemma-3-27b-text.json": 27_009_346_304,  # has 64 more words than the published text model
}


def config(**changes: Any) -> dict[str, Any]:
    """Llama-3.1-8B with some fields changed; None removes one."""
    return {key: value for key, value in (LLAMA | changes).items() if value is not None}


def test_the_sizes_of_llama_3_1_8b_give_its_published_parameters_and_kv_bytes() -> None:
    spec = spec_from_config(config(), "config.json", "llama")
    assert spec.num_params == 8_030_261_248
    assert spec.kv_bytes_per_token("bf16") == 131_072
    assert spec.kv_bytes_per_token("fp8", tp=4) == 131_072 // 8
    assert spec.weight_bytes() == 2 * spec.num_params


def rows(shared: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((shared / "data" / "model_configs" / "params.csv").read_text().splitlines()))


@pytest.mark.shared
def test_parameters_equal_the_published_ones_for_every_model_with_a_published_total(shared: Path) -> None:
    published = {row["file"]: int(row["published_total_params"]) for row in rows(shared) if row["published_total_params"]}
    assert len(published) == 41
    counted = {name: read_model(shared / "data" / "model_configs" / name).num_params for name in published}
    assert counted == published | NOT_AS_PUBLISHED


@pytest.mark.shared
def test_active_parameters_equal_an_independent_count(shared: Path) -> None:
    active = {row["file"]: int(row["own_counter_active"]) for row in rows(shared) if row["own_counter_active"]}
    assert len(active) >= 12
    assert {name: read_model(shared / "data" / "model_configs" / name).num_active_params for name in active} == active


@pytest.mark.shared
def test_every_shared_config_is_read_but_the_one_without_a_vocabulary(shared: Path) -> None:
    for file in sorted((shared / "data" / "model_configs").glob("*.json")):
        if file.stem == "hand--TinyLlama-1.1B-missing-vocab":
            with pytest.raises(ModelError, match=r"missing-vocab.json: vocab_size is missing; add it"):
                read_model(file)
        else:
            assert read_model(file).weight_bytes() > 0


@pytest.mark.shared
def test_kv_bytes_of_every_kind_of_attention(shared: Path) -> None:
    def values(name: str, context: int = 1) -> float:
        return read_model(shared / "data" / "model_configs" / f"{name}.json").kv_bytes(context, "bf16") / 2

    assert values("deepseek-ai--DeepSeek-V3") == 61 * 576
    assert values("isim--deepseek-v2-lite") == 27 * 576
    assert values("meta-llama--Meta-Llama-3.1-8B") == 32 * 2 * 8 * 128
    assert values("isim--llama-2-7b-hf") == 32 * 2 * 32 * 128
    assert values("hand--falcon-7b-instruct") == 32 * 2 * 64
    assert values("openai--gpt-oss-120b", 1000) == 2 * 8 * 64 * (18 * 1000 + 18 * 128)
    assert values("hand--gemma-2-9b", 8192) == 2 * 8 * 256 * (21 * 8192 + 21 * 4096)
    assert values("hand--gemma-3-27b-text", 10_000) == 2 * 16 * 128 * (10 * 10_000 + 52 * 1024)
    assert values("hand--Mistral-7B-v0.1", 10_000) == 32 * 2 * 8 * 128 * 4096
    assert values("google--gemma-4-26B-A4B", 10_000) == 2 * 8 * 256 * 25 * 1024 + 2 * 2 * 512 * 5 * 10_000
    assert values("Qwen--Qwen3-32B") == 64 * 2 * 8 * 128


@pytest.mark.shared
def test_a_name_that_promises_fewer_bits_is_not_believed(shared: Path) -> None:
    folder = shared / "data" / "model_configs"
    assert read_model(folder / "nvidia--Llama-3.1-70B-Instruct-FP8.json").weight_dtype == "bf16"
    assert read_model(folder / "Qwen--Qwen3-32B-FP8.json").weight_dtype == "fp8"


def test_a_catalogue_row_gives_the_published_parameters() -> None:
    published = {
        "smollm2": 134_515_008, "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
        "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496, "llama-3.2-1b": 1_235_814_400, "mistral-7b": 7_248_023_552,
        "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264,
        "codellama-34b": 33_743_970_304, "phi-3.5-mini": 3_821_079_552, "mistral-nemo": 12_247_782_400,
        "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
        "deepseek-v3": 671_026_419_200, "deepseek-r1": 671_026_419_200, "deepseek-v2-lite": 15_706_484_224,
        "gpt-oss-120b": 116_829_156_672, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984,
        "gemma-3-27b": 27_009_002_240, "deepseek-r1-distill-llama-8b": 8_030_261_248, "qwen2.5-72b": 72_706_203_648,
        "qwen2.5-3b": 3_085_938_688, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-14b": 14_768_307_200,
        "phi-1_5": 1_418_270_720, "phi-2": 2_779_683_840, "phi-3-mini": 3_821_079_552, "phi-4": 14_659_507_200,
        "phi-4-mini": 3_836_021_760,
    }  # fmt: skip
    assert {name: resolve_model(name).num_params for name in published} == published


def test_the_models_of_the_papers_have_the_sizes_that_their_names_promise() -> None:
    billions = {
        "llama-2-7b": 7, "llama-2-13b": 13, "llama-2-70b": 70, "llama-3-8b": 8, "llama-3-70b": 70, "codellama-34b": 34,
        "internlm-20b": 20, "qwen-72b": 72, "qwen2.5-72b": 72, "mistral-small-24b": 24, "deepseek-r1-distill-llama-8b": 8,
    }  # fmt: skip
    for name, size in billions.items():
        assert resolve_model(name).num_params / 1e9 == pytest.approx(size, rel=0.05), name
    assert resolve_model("mistral-small-24b").head_dim == 128 != 5120 // 32


def test_every_spelling_in_the_catalogue_leads_to_a_model() -> None:
    assert set(KNOWN_AS.values()) == set(CONFIGS)
    assert (
        resolve_model("SmolLM2-135M-Instruct") is resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct") is resolve_model("smollm2")
    )
    assert resolve_model("meta-llama/Llama-3.1-8B-Instruct") is resolve_model("llama-3.1-8b")


def test_an_unknown_model_lists_close_matches() -> None:
    with pytest.raises(ModelError, match=r"'lama-3-8b' is neither .* did you mean llama-3-8b"):
        resolve_model("lama-3-8b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, r"num_attention_heads is 0; it must be a whole number above 0"),
        ({"num_key_value_heads": None}, r"num_key_value_heads is missing; add it: 32 for multi-head"),
        ({"num_key_value_heads": 5}, r"num_key_value_heads is 5; it does not divide num_attention_heads 32"),
        ({"vocab_size": None}, r"vocab_size is missing; add it"),
        ({"hidden_size": "4096"}, r"hidden_size is '4096'"),
        ({"hidden_size": True}, r"hidden_size is True"),
        ({"num_attention_heads": 24}, r"hidden_size is 4096; not a multiple of num_attention_heads 24; add head_dim"),
        ({"max_position_embeddings": None}, r"max_position_embeddings is missing"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no'; it must be true or false"),
        ({"model_type": "nemotron_h"}, r"model_type is 'nemotron_h'; supported are .*llama"),
        ({"model_type": None}, r"model_type is None; supported are .*llama"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; supported are"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000; models have at most 2000"),
        ({"torch_dtype": "int3"}, r"torch_dtype is 'int3'; it must be float32, bfloat16 or float16"),
        ({"num_local_experts": 8}, r"num_local_experts says mixture of experts"),
        ({"kv_lora_rank": 512}, r"kv_lora_rank says latent attention"),
        ({"text_config": {"model_type": "mamba"}}, r"text_config: model_type is 'mamba'; supported are"),
        ({"layer_types": ["full_attention"]}, r"layer_types has 1 entries for 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, r"layer_types has 'linear_attention'; supported are full, sliding"),
        ({"layer_types": ["sliding_attention"] * 32}, r"sliding_window is missing; add it: layer_types has"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quantization_config.quant_method is 'bitsandbytes'; supported are fp8",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, r"quantization_config.bits is 3; only 4 and 8"),
    ],
)
def test_a_config_that_leaves_a_size_open_is_refused_with_file_field_and_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^some/config.json: {message}"):
        spec_from_config(config(**changes), "some/config.json", "x")


def test_head_dim_is_its_own_field_and_null_means_hidden_over_heads() -> None:
    assert spec_from_config(config(head_dim=160), "x", "x").q_size == 32 * 160
    assert spec_from_config(LLAMA | {"head_dim": None}, "x", "x").head_dim == 128


def test_a_qwen_file_carries_a_window_that_its_switch_turns_off() -> None:
    qwen = config(model_type="qwen2", sliding_window=4096)
    assert spec_from_config(qwen | {"use_sliding_window": False}, "x", "x").sliding_window is None
    assert spec_from_config(qwen | {"use_sliding_window": True}, "x", "x").sliding_window == 4096
    assert spec_from_config(config(model_type="mistral", sliding_window=4096), "x", "x").sliding_window == 4096


def test_quantised_weights_are_smaller_but_embeddings_are_not() -> None:
    plain = spec_from_config(config(), "x", "x")
    packed = spec_from_config(config(quantization_config={"quant_method": "fp8"}), "x", "x")
    matrices = sum(matrix.values for matrix in plain.layers[0].matrices(plain.hidden_size))
    assert plain.weight_bytes() - packed.weight_bytes() == plain.num_layers * matrices
    assert packed.weight_bytes() == plain.weight_bytes(dtype="fp8")


def test_gpus_share_the_matrices_and_copy_kv_heads_that_are_too_few() -> None:
    spec = resolve_model("llama-3-8b")
    norms = 2 * (spec.num_layers * spec.layers[0].vectors + spec.hidden_size)
    assert 8 * (spec.weight_bytes(tp=8) - norms) == spec.weight_bytes() - norms
    assert spec.kv_heads_per_gpu(16) == 1
    assert 16 * spec.weight_bytes(tp=16) > 8 * spec.weight_bytes(tp=8)


@pytest.mark.parametrize(("tp", "fits"), [(1, True), (3, True), (2, False), (0, False), (9, False)])
def test_nine_heads_cannot_be_shared_by_two_gpus(tp: int, fits: bool) -> None:
    spec = resolve_model("smollm2")
    if fits:
        spec.check_tp(tp)
    else:
        with pytest.raises(ConfigError, match=rf"replica.tp is {tp}, but .* 9 heads, 3 KV heads .* divide by 1, 3"):
            spec.check_tp(tp)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 40', "is not complete JSON"),
        ("[1, 2]", "holds a list"),
        ("version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    ],
)
def test_a_broken_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config.json: {message}"):
        resolve_model(str(tmp_path))


def test_a_checkpoint_directory_without_config_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: no such file; give a catalogue name"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="no such file"):
        read_model(tmp_path / "none.json")


def test_a_checkpoint_directory_goes_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    spec = resolve_model("smollm2")
    assert (spec.name, spec.num_layers) == ("smollm2", 32)


@pytest.mark.shared
def test_the_odd_configs_are_read_rightly_or_refused(shared: Path) -> None:
    fixtures = shared / "data" / "oddities" / "fixtures"
    eight_billion = 8_030_261_248
    assert read_model(fixtures / "c02_head_dim_null.json").num_params == eight_billion
    assert read_model(fixtures / "c03_rope_type_old_key.json").num_params == eight_billion
    assert read_model(fixtures / "c04_rope_scaling_both.json").num_params == eight_billion
    with pytest.raises(ModelError, match=r"c01_no_kv_heads.json: num_key_value_heads is missing"):
        read_model(fixtures / "c01_no_kv_heads.json")
    with pytest.raises(ModelError, match=r"c08_zero_heads.json: num_attention_heads is 0"):
        read_model(fixtures / "c08_zero_heads.json")
    with pytest.raises(ConfigError, match=r"replica.tp is 2, but c07_kv_heads_not_divisible has 9 heads, 3 KV heads"):
        read_model(fixtures / "c07_kv_heads_not_divisible.json").check_tp(2)


def test_the_work_of_a_token_is_two_operations_a_parameter_and_four_a_head_and_context_token() -> None:
    spec = resolve_model("llama-3-8b")
    vectors = spec.num_layers * spec.layers[0].vectors + spec.hidden_size
    assert spec.flops_per_token() == 2 * (spec.num_params - vectors - spec.vocab_size * spec.hidden_size)
    assert spec.flops_per_token(1000) - spec.flops_per_token() == 4 * 32 * 4096 * 1000
