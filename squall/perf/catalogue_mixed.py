"""Well-known models whose layers are not all alike, or whose config.json has words of its own. Knows nothing but their sizes.

Each entry restates the fields that matter of the config.json that its publisher put on the Hugging Face hub under that name.
"""

from typing import Any

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def _model(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, words: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": words, "max_position_embeddings": positions,
        **more,
    }  # fmt: skip


def _deepseek(model_type: str, layers: int, hidden: int, heads: int, inner: int, words: int, **more: Any) -> dict[str, Any]:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _model(model_type, layers, hidden, heads, heads, inner, words, 163840, **latent, **more)


def _v3() -> dict[str, Any]:
    return _deepseek(
        "deepseek_v3", 61, 7168, 128, 18432, 129280, q_lora_rank=1536, first_k_dense_replace=3, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, quantization_config=_FP8,
    )  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, heads: int, inner: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return _model("qwen3_moe", layers, hidden, heads, 4, inner, 151936, 40960, head_dim=128, **experts)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    chosen = {"num_local_experts": experts, "num_experts_per_tok": 4}
    return _model(
        "gpt_oss",
        layers,
        2880,
        64,
        8,
        2880,
        201088,
        131072,
        head_dim=64,
        sliding_window=128,
        quantization_config=_MXFP4,
        **chosen,
    )


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, dim: int, window: int = 1024) -> dict[str, Any]:
    return _model("gemma3_text", layers, hidden, heads, kv_heads, inner, 262144, 131072, head_dim=dim, sliding_window=window)


def _llama4(experts: int, step: int) -> dict[str, Any]:
    return _model(
        "llama4_text", 48, 5120, 40, 8, 8192, 202048, 262144, head_dim=128, intermediate_size_mlp=16384,
        num_local_experts=experts, num_experts_per_tok=1, interleave_moe_layer_step=step,
    )  # fmt: skip


MIXED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen-72B": _model("qwen", 80, 8192, 64, 64, 49152, 152064, 32768, kv_channels=128, no_bias=True),
    "internlm/internlm-20b": _model("internlm", 60, 5120, 40, 40, 13824, 103168, 4096, bias=False),
    "tiiuae/falcon-7b-instruct": {
        "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024,
    },
    "microsoft/phi-1_5": _model("phi", 24, 2048, 32, 32, 8192, 51200, 2048, torch_dtype="float16"),
    "microsoft/phi-2": _model("phi", 32, 2560, 32, 32, 10240, 51200, 2048, torch_dtype="float16"),
    "mistralai/Mixtral-8x7B-v0.1": _model(
        "mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "mistralai/Mixtral-8x22B-v0.1": _model(
        "mixtral", 56, 6144, 48, 8, 16384, 32000, 65536, num_local_experts=8, num_experts_per_tok=2
    ),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(48, 2048, 32, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 12288, 1536),
    "deepseek-ai/DeepSeek-V2-Lite": _deepseek(
        "deepseek_v2", 27, 2048, 16, 10944, 102400, first_k_dense_replace=1, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408,
    ),
    "deepseek-ai/DeepSeek-V3": _v3(),
    "deepseek-ai/DeepSeek-R1": _v3(),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "google/gemma-2-2b": _model("gemma2", 26, 2304, 8, 4, 9216, 256000, 8192, head_dim=256, sliding_window=4096),
    "google/gemma-2-9b": _model("gemma2", 42, 3584, 16, 8, 14336, 256000, 8192, head_dim=256, sliding_window=4096),
    "google/gemma-2-27b": _model("gemma2", 46, 4608, 32, 16, 36864, 256000, 8192, head_dim=128, sliding_window=4096),
    "google/gemma-3-4b": _gemma3(34, 2560, 8, 4, 10240, 256),
    "google/gemma-3-12b": _gemma3(48, 3840, 16, 8, 15360, 256),
    "google/gemma-3-27b": _gemma3(62, 5376, 32, 16, 21504, 128),
    "meta-llama/Llama-4-Scout-17B-16E": _llama4(16, 1),
    "meta-llama/Llama-4-Maverick-17B-128E": _llama4(128, 2),
}  # fmt: skip
"""By the name on the hub, as fields of a config.json. Of multimodal models only the text part is described."""
