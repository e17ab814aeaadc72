"""The architectures: how the fields of each family's config.json describe its layers.

Knows no files. Every family restates what its published model code builds; a field that asks for something else is refused by
name. Defaults are those of the families' own configuration classes, and only where published files leave a field to them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from squall.errors import ModelError
from squall.perf.fields import Fields
from squall.perf.layers import AnyAttention, Attention, Experts, LatentAttention, Linear, Mlp
from squall.perf.spec import Layers

Layer = Layers
"""One layer; equal neighbours are put together afterwards."""


class Family(Struct, frozen=True):
    """How to read one `model_type`.

    Attributes:
        layer: builds the layer of an index.
        defaults: of its configuration class, for fields that its published files omit.
        norm_width: values of a norm, in widths of the residual: 2 where norms have a bias.
        experts: its layers may be mixtures of experts.
    """

    layer: Callable[[Fields, int], Layer]
    defaults: Mapping[str, Any] = {}
    norm_width: int = 1
    experts: bool = False


# -- parts that families share


def _heads(fields: Fields) -> tuple[int, int]:
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", hint=f"add it: {heads} for multi-head attention, fewer for grouped heads")
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"it does not divide num_attention_heads {heads}; one of them is wrong")
    return heads, kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    """Its own field where there is one (it need not be hidden / heads), otherwise hidden / heads."""
    own, hidden = fields.optional_size("head_dim"), fields.size("hidden_size")
    if own is not None:
        return own
    if hidden % heads:
        raise fields.refuse("hidden_size", f"not a multiple of num_attention_heads {heads}; add head_dim")
    return hidden // heads


def _grouped(fields: Fields, window: int | None, *, qkv_bias: bool = False, out_bias: bool = False, **more: bool) -> Attention:
    heads, kv_heads = _heads(fields)
    return Attention(heads, kv_heads, _head_dim(fields, heads), window, qkv_bias, out_bias, **more)


def _mlp(fields: Fields, key: str = "intermediate_size") -> Mlp:
    return Mlp(fields.size(key), bias=fields.flag("mlp_bias"))


def _window(fields: Fields, index: int, slides: Callable[[int], bool] = lambda _: True) -> int | None:
    """The window of one layer: `layer_types` decides where there is one, else `slides`."""
    kinds = fields.rows("layer_types")
    if kinds:
        match kinds[index]:
            case "full_attention":
                return None
            case "sliding_attention":
                return fields.size("sliding_window", hint="add it: layer_types has layers of sliding attention")
            case "chunked_attention":
                return fields.size("attention_chunk_size", hint="add it: layer_types has layers of chunked attention")
        raise ModelError(f"{fields.place}: layer_types has {kinds[index]!r}; supported are full, sliding and chunked attention")
    return fields.optional_size("sliding_window") if slides(index) else None


def _mixture(fields: Fields, num: str, size: str, active: str = "num_experts_per_tok", **more: Any) -> Experts:
    count, chosen = fields.size(num), fields.size(active)
    if chosen > count:
        raise fields.refuse(active, f"there are only {count} experts ({num})")
    return Experts(count, chosen, more.pop("expert", None) or Mlp(fields.size(size)), **more)


# -- the families


def _llama(fields: Fields, index: int) -> Layer:
    bias = fields.flag("attention_bias")
    attention = _grouped(fields, _window(fields, index, lambda _: False), qkv_bias=bias, out_bias=bias)
    return Layer(1, attention, _mlp(fields), 2 * fields.size("hidden_size"))


def _mistral(fields: Fields, index: int) -> Layer:
    """Mistral, Phi-3: as Llama, but the window holds for every layer."""
    bias = fields.flag("attention_bias")
    attention = _grouped(fields, _window(fields, index), qkv_bias=bias, out_bias=bias)
    return Layer(1, attention, _mlp(fields), 2 * fields.size("hidden_size"))


def _qwen_window(fields: Fields, index: int) -> int | None:
    """Qwen's files carry a window that `use_sliding_window` switches off; the first layers never have one."""
    if not fields.flag("use_sliding_window"):
        return None
    unlimited = fields.count("max_window_layers")
    return _window(fields, index, lambda layer: layer >= unlimited)


def _qwen2(fields: Fields, index: int) -> Layer:
    attention = _grouped(fields, _qwen_window(fields, index), qkv_bias=True)
    return Layer(1, attention, _mlp(fields), 2 * fields.size("hidden_size"))


def _qwen3(fields: Fields, index: int) -> Layer:
    bias = fields.flag("attention_bias")
    attention = _grouped(fields, _qwen_window(fields, index), qkv_bias=bias, out_bias=bias, qk_norm=True)
    return Layer(1, attention, _mlp(fields), 2 * fields.size("hidden_size"))


def _qwen_is_sparse(fields: Fields, index: int) -> bool:
    step = fields.size_or("decoder_sparse_step", 1)
    return index not in fields.rows("mlp_only_layers") and (index + 1) % step == 0


def _qwen2_moe(fields: Fields, index: int) -> Layer:
    attention = _grouped(fields, _qwen_window(fields, index), qkv_bias=True)
    shared = Mlp(fields.size("shared_expert_intermediate_size"))
    sparse = _mixture(fields, "num_experts", "moe_intermediate_size", shared=shared, shared_gate=True)
    return Layer(1, attention, sparse if _qwen_is_sparse(fields, index) else _mlp(fields), 2 * fields.size("hidden_size"))


def _qwen3_moe(fields: Fields, index: int) -> Layer:
    dense = _qwen3(fields, index)
    sparse = _mixture(fields, "num_experts", "moe_intermediate_size")
    return Layer(1, dense.attention, sparse if _qwen_is_sparse(fields, index) else dense.mlp, dense.norms)


def _mixtral(fields: Fields, index: int) -> Layer:
    attention = _grouped(fields, _window(fields, index))
    return Layer(1, attention, _mixture(fields, "num_local_experts", "intermediate_size"), 2 * fields.size("hidden_size"))


def _phimoe(fields: Fields, index: int) -> Layer:
    """Its norms have a bias."""
    bias = fields.flag("attention_bias")
    attention = _grouped(fields, _window(fields, index), qkv_bias=bias, out_bias=bias)
    return Layer(1, attention, _mixture(fields, "num_local_experts", "intermediate_size"), 4 * fields.size("hidden_size"))


def _gpt_oss(fields: Fields, index: int) -> Layer:
    bias = fields.flag("attention_bias")
    window = _window(fields, index, lambda layer: layer % 2 == 0)
    attention = _grouped(fields, window, qkv_bias=bias, out_bias=bias, sinks=True)
    expert = Mlp(fields.size("intermediate_size"), bias=True)
    experts = _mixture(fields, "num_local_experts", "", expert=expert, router_bias=True)
    return Layer(1, attention, experts, 2 * fields.size("hidden_size"))


def _deepseek(fields: Fields, index: int) -> Layer:
    """V2, V3, R1. Not counted: the optional layers that predict further tokens (`num_nextn_predict_layers`)."""
    attention = LatentAttention(
        fields.size("num_attention_heads"), fields.optional_size("q_lora_rank"), fields.size("kv_lora_rank"),
        fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim"), fields.size("v_head_dim"),
        fields.flag("attention_bias"),
    )  # fmt: skip
    sparse = "n_routed_experts" in fields and index >= fields.count("first_k_dense_replace")
    mlp: Mlp | Experts = _mlp(fields)
    if sparse and index % fields.size_or("moe_layer_freq", 1) == 0:
        shared = fields.count("n_shared_experts") * fields.size("moe_intermediate_size")
        corrections = fields.size("n_routed_experts") if fields.get("topk_method") == "noaux_tc" else 0
        mlp = _mixture(
            fields, "n_routed_experts", "moe_intermediate_size", shared=Mlp(shared) if shared else None, vectors=corrections
        )
    return Layer(1, attention, mlp, 2 * fields.size("hidden_size"))


def _gemma(fields: Fields, _index: int) -> Layer:
    bias = fields.flag("attention_bias")
    attention = _grouped(fields, None, qkv_bias=bias, out_bias=bias)
    return Layer(1, attention, _mlp(fields), 2 * fields.size("hidden_size"))


def _gemma2(fields: Fields, index: int) -> Layer:
    """Every other layer slides; norms before and after attention and MLP."""
    bias = fields.flag("attention_bias")
    attention = _grouped(fields, _window(fields, index, lambda layer: layer % 2 == 0), qkv_bias=bias, out_bias=bias)
    return Layer(1, attention, _mlp(fields), 4 * fields.size("hidden_size"))


def _gemma3(fields: Fields, index: int) -> Layer:
    """All but every sixth layer slide."""
    bias, pattern = fields.flag("attention_bias"), fields.size("sliding_window_pattern")
    window = _window(fields, index, lambda layer: (layer + 1) % pattern != 0)
    attention = _grouped(fields, window, qkv_bias=bias, out_bias=bias, qk_norm=True)
    return Layer(1, attention, _mlp(fields), 4 * fields.size("hidden_size"))


def _gemma4(fields: Fields, index: int) -> Layer:
    """Global layers have wider heads of their own number; experts, where there are some, stand beside the MLP."""
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if fields.count(key):
            raise fields.refuse(key, "models with shared caches or embeddings per layer are not supported; 0 is")
    window = _window(fields, index, lambda layer: (layer + 1) % 6 != 0)
    heads, kv_heads = _heads(fields)
    bias, dim = fields.flag("attention_bias"), _head_dim(fields, heads)
    alike = window is None and fields.flag("attention_k_eq_v")
    if window is None:
        kv_heads = fields.size_or("num_global_key_value_heads", kv_heads) if alike else kv_heads
        dim = fields.size_or("global_head_dim", dim)
    attention = Attention(heads, kv_heads, dim, window, bias, bias, qk_norm=True, keys_are_values=alike)
    hidden, mlp = fields.size("hidden_size"), _mlp(fields)
    if not fields.flag("enable_moe_block"):
        return Layer(1, attention, mlp, 4 * hidden)
    scales = fields.size("num_experts") + hidden  # of the router: its input's, and each expert's
    experts = _mixture(fields, "num_experts", "moe_intermediate_size", "top_k_experts", shared=mlp, vectors=scales)
    return Layer(1, attention, experts, 7 * hidden)


def _llama4(fields: Fields, index: int) -> Layer:
    """All but every fourth layer attend within chunks; some layers are mixtures with one shared expert."""
    bias, hidden = fields.flag("attention_bias"), fields.size("hidden_size")
    window = _window(fields, index) if "layer_types" in fields else None
    if "layer_types" not in fields and _llama4_is_chunked(fields, index):
        window = fields.optional_size("attention_chunk_size")
    attention = _grouped(fields, window, qkv_bias=bias, out_bias=bias)
    step = fields.size("interleave_moe_layer_step")
    if index not in fields.rows("moe_layers") and ("moe_layers" in fields or (index + 1) % step):
        return Layer(1, attention, Mlp(fields.size("intermediate_size_mlp")), 2 * hidden)
    expert = Mlp(fields.size("intermediate_size"))
    return Layer(1, attention, _mixture(fields, "num_local_experts", "", expert=expert, shared=expert), 2 * hidden)


def _llama4_is_chunked(fields: Fields, index: int) -> bool:
    """Layers with rotary embedding attend within chunks; the others, every fourth, to everything."""
    rotary = fields.rows("no_rope_layers")
    return bool(rotary[index]) if index < len(rotary) else (index + 1) % fields.size("no_rope_layer_interval") != 0


def _falcon(fields: Fields, _index: int) -> Layer:
    """One norm a layer where attention and MLP run side by side; norms have a bias; `num_kv_heads` holds for new models only."""
    heads, hidden, bias = fields.size("num_attention_heads"), fields.size("hidden_size"), fields.flag("bias")
    new = fields.flag("new_decoder_architecture")
    kv_heads = fields.size("num_kv_heads") if new else 1 if fields.flag("multi_query") else heads
    norms = 1 if fields.flag("parallel_attn") and not new else fields.size_or("num_ln_in_parallel_attn", 2)
    attention = Attention(heads, kv_heads, _head_dim(fields, heads), None, bias, bias)
    return Layer(1, attention, Mlp(fields.size_or("ffn_hidden_size", 4 * hidden), gated=False, bias=bias), 2 * norms * hidden)


def _phi(fields: Fields, _index: int) -> Layer:
    """Phi before its third: attention and MLP side by side below one norm, and a bias for everything, the head included."""
    if fields.flag("qk_layernorm"):
        raise fields.refuse("qk_layernorm", "no published Phi has norms of queries and keys; set it to false")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size_or("num_key_value_heads", heads)
    attention = Attention(heads, kv_heads, _head_dim(fields, heads), None, qkv_bias=True, out_bias=True)
    return Layer(1, attention, Mlp(fields.size("intermediate_size"), gated=False, bias=True), 2 * fields.size("hidden_size"))


def _internlm(fields: Fields, _index: int) -> Layer:
    heads, bias = fields.size("num_attention_heads"), fields.flag("bias")
    kv_heads = fields.size_or("num_key_value_heads", heads)
    attention = Attention(heads, kv_heads, _head_dim(fields, heads), None, bias, bias)
    return Layer(1, attention, Mlp(fields.size("intermediate_size")), 2 * fields.size("hidden_size"))


def _internlm2(fields: Fields, _index: int) -> Layer:
    bias = fields.flag("bias")
    attention = _grouped(fields, None, qkv_bias=bias, out_bias=bias)
    return Layer(1, attention, _mlp(fields), 2 * fields.size("hidden_size"))


def _qwen(fields: Fields, _index: int) -> Layer:
    """The first Qwen: a head each, biased queries, and an `intermediate_size` that counts gate and up together."""
    heads, bias = fields.size("num_attention_heads"), not fields.flag("no_bias")
    dim = fields.size_or("kv_channels", 0) or _head_dim(fields, heads)
    attention = Attention(heads, heads, dim, None, qkv_bias=True, out_bias=bias)
    return Layer(1, attention, Mlp(fields.size("intermediate_size") // 2, bias=bias), 2 * fields.size("hidden_size"))


def _nemotron_nas(fields: Fields, index: int) -> Layer:
    """Every layer as `block_configs` says: attention and MLP of its own width, left out, or one matrix instead."""
    blocks = fields.rows("block_configs")
    block = blocks[index] if index < len(blocks) else None
    if not isinstance(block, dict) or not all(isinstance(block.get(key), dict) for key in ("attention", "ffn")):
        raise ModelError(f"{fields.place}: block_configs[{index}] has no attention and ffn; it needs both for every layer")
    at = f"{fields.place}: block_configs[{index}]"
    attention = _nas_attention(fields, Fields(block["attention"], f"{at}.attention", {}))
    mlp = _nas_mlp(fields, Fields(block["ffn"], f"{at}.ffn", {}))
    norms = (attention is not None) + (mlp is not None)
    return Layer(1, attention, mlp, norms * fields.size("hidden_size"))


def _nas_attention(fields: Fields, block: Fields) -> AnyAttention | Linear | None:
    if block.flag("no_op"):
        return None
    if block.flag("replace_with_linear"):
        return Linear("self_attn.linear_attn")
    heads, bias = fields.size("num_attention_heads"), fields.flag("attention_bias")
    group = block.size("n_heads_in_group")
    if heads % group:
        raise block.refuse("n_heads_in_group", f"it does not divide num_attention_heads {heads}")
    return Attention(heads, heads // group, _head_dim(fields, heads), None, bias, bias)


def _nas_mlp(fields: Fields, block: Fields) -> Mlp | Linear | None:
    """`ffn_mult` is of the width of a plain MLP; its two thirds make a gated one, rounded up to 256 columns."""
    if block.flag("no_op"):
        return None
    if block.flag("replace_with_linear"):
        return Linear("mlp.linear_mlp")
    factor = block.get("ffn_mult")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        raise block.refuse("ffn_mult", "it must be a number above 0")
    columns = int(2 * factor * fields.size("hidden_size") / 3)
    return Mlp(-(-columns // 256) * 256, bias=fields.flag("mlp_bias"))


_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    "sliding_window": 4096, "sliding_window_pattern": 6,
}  # fmt: skip
_LLAMA4 = {"interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "no_rope_layer_interval": 4}
_FALCON = {"tie_word_embeddings": True, "max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True}

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(_mistral),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3, {"head_dim": 128}),
    "phi": Family(_phi, {"lm_head_bias": True}, norm_width=2),
    "phi3": Family(_mistral),
    "internlm": Family(_internlm, {"bias": True}),
    "internlm2": Family(_internlm2),
    "qwen": Family(_qwen, {"no_bias": True}),
    "gemma": Family(_gemma, _GEMMA),
    "gemma2": Family(_gemma2, _GEMMA | {"sliding_window": 4096}),
    "gemma3": Family(_gemma3, _GEMMA3),
    "gemma3_text": Family(_gemma3, _GEMMA3),
    "gemma4_text": Family(_gemma4, _GEMMA | {"global_head_dim": 512, "sliding_window": 512}, experts=True),
    "mixtral": Family(_mixtral, experts=True),
    "qwen2_moe": Family(_qwen2_moe, experts=True),
    "qwen3_moe": Family(_qwen3_moe, experts=True),
    "phimoe": Family(_phimoe, norm_width=2, experts=True),
    "gpt_oss": Family(_gpt_oss, {"attention_bias": True, "head_dim": 64, "sliding_window": 128}, experts=True),
    "deepseek_v2": Family(_deepseek, experts=True),
    "deepseek_v3": Family(_deepseek, {"topk_method": "noaux_tc"}, experts=True),
    "llama4_text": Family(_llama4, _LLAMA4, experts=True),
    "falcon": Family(_falcon, _FALCON, norm_width=2),
    "nemotron-nas": Family(_nemotron_nas),
}
"""By `model_type`."""
