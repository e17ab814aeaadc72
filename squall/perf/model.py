"""What a model is to the performance models: its sizes, read from a Hugging Face config.json.

Knows no weights, no tokenizer and no hardware. A configuration that leaves a size open, contradicts itself or describes
another architecture (mixture of experts, latent attention, ...) is refused by name: a guess here would mis-size every
answer behind it.
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from squall.errors import ConfigError, ModelError

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "internlm2")
"""Model types whose layer is: norm, attention with grouped heads, norm, gated MLP; all linear, no experts."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_QUANTIZED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "awq": "int4", "gptq": "int4", "modelopt": "fp8"}


class ModelSpec(Struct, frozen=True):
    """The sizes of a decoder-only transformer of the Llama family.

    Attributes:
        name: for reports.
        family: the `model_type` of its config.json.
        sliding_window: tokens a layer attends to at most; None attends to all. Prices and KV sizes ignore it (an upper bound).
        qkv_bias, out_bias, mlp_bias: which projections have one.
        qk_norm: queries and keys are normalised a head.
        dtype: of activations, embeddings and head ("bf16", ...).
        weight_dtype: of the layers' matrices, where quantised; otherwise `dtype`.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: str = "bf16"
    weight_dtype: str = "bf16"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys of one layer; the values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Parameters in the matrices of one layer: query, key, value, output, gate, up, down."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_vectors(self) -> int:
        """Parameters in the norms and biases of one layer."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.q_size + 2 * self.kv_size if self.qkv_bias else 0) + (self.hidden_size if self.out_bias else 0)
        return norms + biases + (2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0)

    @property
    def embedding_params(self) -> int:
        """Embedding and head; one matrix serves as both where they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def num_params(self) -> int:
        return self.num_layers * (self.layer_matrices + self.layer_vectors) + self.embedding_params + self.hidden_size

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError unless `tp` GPUs can share every matrix evenly."""
        if not self.can_share(tp):
            sizes = f"{self.num_heads} heads, {self.num_kv_heads} KV heads and {self.intermediate_size} MLP columns"
            possible = ", ".join(str(n) for n in range(1, 17) if self.can_share(n))
            raise ConfigError(f"replica.tp is {tp}, but {self.name} has {sizes}, which divide by {possible}: use one of these")

    def can_share(self, tp: int) -> bool:
        """Whether `tp` GPUs can each hold an even share; KV heads may be copied instead of split."""
        if tp < 1 or self.num_heads % tp or self.intermediate_size % tp:
            return False
        return self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0

    def kv_heads_per_gpu(self, tp: int) -> int:
        """KV heads that each GPU keeps; with more GPUs than KV heads each head is kept more than once."""
        return max(1, self.num_kv_heads // tp)

    def kv_bytes_per_token(self, kv_dtype: str, tp: int = 1) -> int:
        """Bytes of KV cache that one token needs on each GPU, all layers together."""
        return int(2 * self.num_layers * self.kv_heads_per_gpu(tp) * self.head_dim * dtype_bytes(kv_dtype))

    def weight_bytes(self, tp: int = 1, dtype: str = "auto") -> int:
        """Bytes of weights on each GPU. `dtype` replaces the checkpoint's own; norms and biases are kept on every GPU."""
        plain, quantised = self.dtypes(dtype)
        kv_copies = self.kv_heads_per_gpu(tp) * tp / self.num_kv_heads
        copied = 2 * self.hidden_size * self.kv_size * (kv_copies - 1)
        matrices = self.num_layers * (self.layer_matrices + copied) / tp * dtype_bytes(quantised)
        vectors = (self.num_layers * self.layer_vectors + self.hidden_size) * dtype_bytes(plain)
        return int(matrices + vectors + self.embedding_params / tp * dtype_bytes(plain))

    def dtypes(self, dtype: str = "auto") -> tuple[str, str]:
        """Types of the activations and of the layers' matrices when `dtype` is asked for; 8 bits and less serve matrices only."""
        if dtype == "auto":
            return self.dtype, self.weight_dtype
        name = dtype_name(dtype)
        return (name, name) if DTYPE_BYTES[name] >= 2 else ("bf16" if self.dtype == "fp32" else self.dtype, name)

    def flops_per_token(self, context: int = 0) -> int:
        """Multiplications and additions to compute one token that attends to `context` tokens, head included."""
        matrices = self.num_layers * self.layer_matrices + self.vocab_size * self.hidden_size
        return 2 * matrices + 4 * self.num_layers * self.q_size * context


def dtype_name(dtype: str) -> str:
    """The short name of a number type ("bf16" for "bfloat16"). Raises ConfigError for an unknown one."""
    name = DTYPE_NAMES.get(dtype.removeprefix("torch."), dtype)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"number type {dtype!r} is unknown: use one of {', '.join(DTYPE_BYTES)}")
    return name


def dtype_bytes(dtype: str) -> float:
    return DTYPE_BYTES[dtype_name(dtype)]


# -- reading config.json


def read_model(path: Path) -> ModelSpec:
    """Reads a config.json, or the one in a checkpoint directory. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
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
    if not isinstance(config, dict):
        raise ModelError(f"{file}: holds a {type(config).__name__}, not an object with the model's sizes")
    name = path.name if path.is_dir() else path.parent.name if path.name == "config.json" else path.stem
    return spec_from_config(config, place=str(file), name=name or str(path))


def spec_from_config(config: dict[str, Any], place: str, name: str) -> ModelSpec:
    """The sizes in a parsed config.json. `place` names it in errors. Raises ModelError."""
    family = _family(config, place)
    fields = _Fields(config, place)
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", hint=f"add it: {heads} for multi-head attention, fewer for grouped heads")
    if heads % kv_heads:
        raise ModelError(
            f"{place}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}; one of them is wrong"
        )
    hidden = fields.size("hidden_size")
    dtype, weight_dtype = _dtypes(config, place)
    attention_bias = fields.flag("bias" if family == "internlm2" else "attention_bias")
    return ModelSpec(
        name=name,
        family=family,
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, hidden, heads),
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size", hint="add it: the number of rows of the embedding"),
        max_position=fields.size("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias and family != "qwen2",
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_window=_window(fields, family),
        dtype=dtype,
        weight_dtype=weight_dtype,
    )


class _Fields:
    """Typed access to a config.json, with errors that name file and field."""

    def __init__(self, config: dict[str, Any], place: str) -> None:
        self._config = config
        self._place = place

    def size(self, key: str, hint: str = "add it") -> int:
        value = self._config.get(key)
        if value is None:
            raise ModelError(f"{self._place}: {key} is missing; {hint}")
        if type(value) is not int or value <= 0:
            raise ModelError(f"{self._place}: {key} is {value!r}; it must be a whole number above 0")
        return value

    def optional_size(self, key: str) -> int | None:
        return None if self._config.get(key) is None else self.size(key)

    def flag(self, key: str) -> bool:
        """Absent is False, as these families define it."""
        value = self._config.get(key, False)
        if not isinstance(value, bool):
            raise ModelError(f"{self._place}: {key} is {value!r}; it must be true or false")
        return value


def _family(config: dict[str, Any], place: str) -> str:
    if isinstance(config.get("text_config"), dict):
        raise ModelError(
            f"{place}: text_config is nested (a multimodal model); only text models of {', '.join(FAMILIES)} are supported"
        )
    for key in _EXPERT_KEYS:
        if config.get(key):
            raise ModelError(f"{place}: {key} says mixture of experts, which is not supported yet; use a dense model")
    if config.get("kv_lora_rank"):
        raise ModelError(f"{place}: kv_lora_rank says latent attention (MLA), which is not supported yet; use a dense model")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{place}: model_type is {family!r}; supported are {', '.join(FAMILIES)}")
    kinds = {kind for kind in config.get("layer_types") or () if kind != "full_attention"}
    if kinds:
        raise ModelError(
            f"{place}: layer_types has {', '.join(map(repr, sorted(kinds)))}; only layers of full attention are supported"
        )
    return str(family)


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    """Its own field where there is one (it need not be hidden / heads), otherwise hidden / heads."""
    own = fields.optional_size("head_dim")
    if own is not None:
        return own
    if hidden % heads:
        raise ModelError(f"{fields._place}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; add head_dim")
    return hidden // heads


def _window(fields: _Fields, family: str) -> int | None:
    """The sliding window that is in force: Qwen files carry one that `use_sliding_window` switches off."""
    if family.startswith("qwen") and not fields.flag("use_sliding_window"):
        return None
    return fields.optional_size("sliding_window")


def _dtypes(config: dict[str, Any], place: str) -> tuple[str, str]:
    """Types of activations and of the layers' matrices. Absent is bf16, what such checkpoints are published in."""
    dtype = dtype_name(str(config.get("dtype") or config.get("torch_dtype") or "bf16"))
    quantisation = config.get("quantization_config")
    if isinstance(quantisation, dict):
        method = quantisation.get("quant_method")
        if method not in _QUANTIZED:
            known = ", ".join(_QUANTIZED)
            raise ModelError(
                f"{place}: quantization_config.quant_method is {method!r}; supported are {known}, or unquantised weights"
            )
        if method in ("awq", "gptq") and quantisation.get("bits") != 4:
            raise ModelError(
                f"{place}: quantization_config.bits is {quantisation.get('bits')!r}; only 4 is supported for {method}"
            )
        return dtype, _QUANTIZED[method]
    packed = config.get("quantization")
    if isinstance(packed, dict):
        bits = packed.get("bits")
        if bits not in (4, 8):
            raise ModelError(f"{place}: quantization.bits is {bits!r}; supported are 4 and 8")
        return dtype, f"int{bits}"
    return dtype, dtype
