"""Small models of every family, counted by us and built by `transformers` (as shapes only, without memory)."""

from typing import Any

import pytest

from squall.errors import ModelError
from squall.perf.families import FAMILIES
from squall.perf.layers import Attention, Experts, LatentAttention, Linear, Mlp
from squall.perf.model import spec_from_config
from squall.perf.spec import ModelSpec

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 112, "max_position_embeddings": 128,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1,
}  # fmt: skip
TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("phi", {}),
    ("phi3", {"pad_token_id": 0}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("mixtral", TWO_OF_FOUR),
    ("phimoe", TWO_OF_FOUR | {"attention_bias": True, "lm_head_bias": True}),
    ("gpt_oss", TWO_OF_FOUR),
    ("llama4_text", TWO_OF_FOUR | {"intermediate_size_mlp": 160, "interleave_moe_layer_step": 2, "head_dim": 16}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}),
    (
        "qwen2_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
            "decoder_sparse_step": 2, "mlp_only_layers": [3],
        },
    ),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    # transformers keeps the corrections of V3's routing as a buffer; a checkpoint has them, and so do we unless told otherwise
    ("deepseek_v3", LATENT | {"q_lora_rank": 24, "n_shared_experts": 1, "first_k_dense_replace": 2, "topk_method": "greedy"}),
    ("falcon", {"multi_query": True, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    (
        "gemma4_text",
        {
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96,
        },
    ),
]  # fmt: skip


def small(family: str, **changes: Any) -> ModelSpec:
    return spec_from_config({"model_type": family, **SMALL, **changes}, "config.json", "small")


@pytest.mark.filterwarnings("ignore")  # of transformers, about its own configuration classes
@pytest.mark.parametrize(("family", "changes"), CASES, ids=[family for family, _ in CASES])
def test_parameters_are_those_of_the_model_that_transformers_builds(family: str, changes: dict[str, Any]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {family}")
    config = transformers.CONFIG_MAPPING[family](**{**SMALL, **changes})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert small(family, **changes).num_params == sum(parameter.numel() for parameter in model.parameters())


def test_every_family_but_those_without_an_oracle_is_compared() -> None:
    unknown_to_transformers = {"internlm", "internlm2", "qwen", "nemotron-nas"}
    assert {family for family, _ in CASES} == set(FAMILIES) - unknown_to_transformers - {"gemma3"}


def test_a_dense_layer_before_the_mixtures_and_experts_that_all_tokens_share() -> None:
    spec = small("deepseek_v2", **LATENT, q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=2)
    dense, sparse = spec.layers
    assert (dense.count, dense.mlp) == (2, Mlp(112))
    assert (sparse.count, sparse.mlp) == (4, Experts(4, 2, Mlp(40), shared=Mlp(80)))
    assert sparse.attention == LatentAttention(4, None, 32, 16, 8, 24)
    assert spec.kv_bytes_per_token("bf16") == spec.kv_bytes_per_token("bf16", tp=4) == 6 * (32 + 8) * 2


def test_the_first_phis_have_heads_of_their_own_unless_told_and_no_norms_of_queries() -> None:
    assert small("phi", num_key_value_heads=None).num_kv_heads == SMALL["num_attention_heads"]
    with pytest.raises(ModelError, match=r"config.json: qk_layernorm.*set it to false"):
        small("phi", qk_layernorm=True)


def windows(spec: ModelSpec) -> list[int | None]:
    return [group.cached.window for group in spec.layers for _ in range(group.count) if group.cached]


def test_which_layers_look_back_how_far() -> None:
    assert windows(small("gemma2", sliding_window=32)) == [32, None] * 3
    assert windows(small("gemma3_text", sliding_window=32)) == [32] * 5 + [None]
    assert windows(small("gpt_oss", **TWO_OF_FOUR)) == [128, None] * 3
    assert windows(small("mistral", sliding_window=32)) == [32] * 6
    assert windows(small("qwen2", sliding_window=32)) == [None] * 6
    assert windows(small("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=4)) == [None] * 4 + [32] * 2
    scout = small("llama4_text", **TWO_OF_FOUR, intermediate_size_mlp=160, attention_chunk_size=64)
    assert windows(scout) == [64, 64, 64, None, 64, 64]
    kinds = ["full_attention"] + ["sliding_attention"] * 5
    assert windows(small("gemma3_text", sliding_window=32, layer_types=kinds)) == [None] + [32] * 5


def test_embeddings_are_tied_by_default_in_some_families_only() -> None:
    assert [small(family).tied for family in ("llama", "qwen3", "gemma", "gemma2", "gemma3_text")] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert not small("gemma2", tie_word_embeddings=False).tied


def test_the_text_part_of_a_multimodal_model_is_read_with_the_defaults_of_its_family() -> None:
    nested = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 112,
        "sliding_window": 32,
    }
    spec = spec_from_config({"model_type": "gemma3", "text_config": nested, "dtype": "float16"}, "x", "x")
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.tied) == (262208, 8, 4, 256, True)
    assert spec.dtype == "fp16"


def nas(*blocks: tuple[dict[str, Any], dict[str, Any]]) -> ModelSpec:
    listed = [{"attention": attention, "ffn": ffn} for attention, ffn in blocks]
    changes = {"num_hidden_layers": len(blocks), "num_key_value_heads": None, "intermediate_size": None}
    return small("nemotron-nas", **changes, block_configs=listed)


def test_layers_of_their_own_shape() -> None:
    """The sums are those of the three blocks written out; two thirds of 6 x 64 columns make 256."""
    none, plain = {"no_op": True}, ({"n_heads_in_group": 2}, {"ffn_mult": 6.0})
    spec = nas(plain, (none, {"ffn_mult": 6.0}), ({"replace_with_linear": True}, none))
    assert [group.attention for group in spec.layers] == [Attention(4, 2, 16), None, Linear("self_attn.linear_attn")]
    attention, mlp, table = 64 * (64 + 32 + 32 + 64), 3 * 64 * 256, 2 * 96 * 64
    assert spec.num_params == attention + 2 * mlp + 64 * 64 + (2 + 1 + 1) * 64 + table + 64
    assert spec.kv_bytes(100, "bf16") == 100 * 2 * 2 * 16 * 2
    with pytest.raises(ModelError, match="its attention is not the same grouped-head attention in every layer"):
        _ = spec.num_heads


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": 4}, "num_experts_per_tok is missing"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; there are only 4 experts"),
        ("llama", {"num_experts": 4}, "num_experts says mixture of experts, but model_type 'llama' has none"),
        ("mistral", {"kv_lora_rank": 4}, "kv_lora_rank says latent attention, but model_type 'mistral' has none"),
        ("deepseek_v3", LATENT | {"v_head_dim": None}, "v_head_dim is missing"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; models with shared caches"),
        ("nemotron-nas", {}, r"block_configs\[0\] has no attention and ffn"),
        (
            "nemotron-nas",
            {"block_configs": [{"attention": {"n_heads_in_group": 3}, "ffn": {}}]},
            r"block_configs\[0\].attention: n_heads_in_group is 3; it does not divide num_attention_heads 4",
        ),
        (
            "nemotron-nas",
            {"block_configs": [{"attention": {"no_op": True}, "ffn": {"ffn_mult": "wide"}}]},
            r"block_configs\[0\].ffn: ffn_mult is 'wide'",
        ),
    ],
)
def test_what_an_architecture_lacks_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^config.json: {message}"):
        small(family, **changes)
