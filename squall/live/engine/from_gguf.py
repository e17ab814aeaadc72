"""A Llama model in a GGUF file, rewritten as a checkpoint in Hugging Face layout.

Knows GGUF's names, its order of rotary dimensions and its tokenizer metadata. Does not know where the file came from nor
where the checkpoint goes. Weights are de-quantised to float32: a 4-bit value times a scale plus an offset does not fit a
bfloat16, so nothing narrower would keep the model's logits.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from squall.errors import ModelError

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # of GGUF's token types, those that are matched in the text before the BPE runs


def convert(source: Path, target: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `target`.

    Raises:
        ModelError: `source` is no GGUF file, or of an architecture or tokenizer that is not understood.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{source}: not a readable GGUF file ({error}); fetch it again") from None
    _require(source, fields, "general.architecture", "llama")
    _require(source, fields, "tokenizer.ggml.model", "gpt2")
    _require(source, fields, "tokenizer.ggml.pre", "smollm")
    _write_weights(reader, fields, target / "model.safetensors")
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    _write_json(target / "config.json", _config(fields, tied))
    ids = {key: fields[f"tokenizer.ggml.{gguf}_token_id"] for key, gguf in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    _write_json(target / "generation_config.json", {f"{key}_token_id": value for key, value in ids.items()})
    _write_json(target / "tokenizer.json", _tokenizer(fields))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields))


def _require(source: Path, fields: dict[str, Any], key: str, value: str) -> None:
    if fields.get(key) != value:
        raise ModelError(f"{source}: {key} is {fields.get(key)!r}; only {value!r} can be converted")


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for tensor in reader.tensors:
        layer, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # type: ignore[union-attr]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if kind in heads:
            values = _halves_from_pairs(values, heads[kind])
        prefix = "" if layer is None else f"model.layers.{layer}."
        tensors[f"{prefix}{_TENSORS[kind]}.weight"] = np.ascontiguousarray(values)
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _halves_from_pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """GGUF rotates neighbouring dimensions (0,1), (2,3), ...; a Hugging Face checkpoint rotates i with i + head_dim / 2."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    eps = float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}")  # a float32 in GGUF: 9.999999747378752e-06
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """A byte-level BPE whose digits stand alone, as tokenizer.json."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": id, "content": token, **flags, "special": kind == _CONTROL}
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **{name: tokens[fields[f"tokenizer.ggml.{gguf}_token_id"]] for name, gguf in roles.items()},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.flush()
        os.fsync(file.fileno())
