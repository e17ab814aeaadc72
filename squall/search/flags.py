"""A configuration in the words of other engines: the command that starts one replica of it with vLLM, and with SGLang.

Knows their flags of 2025 and says where a policy of ours has no counterpart there; what it does not know of them it leaves to
their defaults.
"""

from __future__ import annotations

from msgspec import Struct

from squall.config import Config

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

LIKE_VLLM = {"vllm", "sarathi", "vllm_v0"}
"""Policies that these engines have in some form: chunked prefill beside decodes, or vLLM's older one without chunks."""


def vllm(config: Config) -> str:
    """`vllm serve`, for one replica."""
    replica, batch = config.replica, config.batching
    words = ["vllm serve", config.model.name, f"--tensor-parallel-size {replica.tp}"]
    if replica.pp > 1:
        words.append(f"--pipeline-parallel-size {replica.pp}")
    words += [f"--block-size {replica.block_size}", f"--gpu-memory-utilization {replica.gpu_memory_utilization:g}"]
    if (seqs := getattr(batch, "max_num_seqs", None)) is not None:
        words.append(f"--max-num-seqs {seqs}")
    if (tokens := _tokens(config)) is not None:
        words.append(f"--max-num-batched-tokens {tokens}")
    if _kind(config) == "vllm_v0":
        words.append("--no-enable-chunked-prefill")
    caches = getattr(batch, "prefix_cache", None)
    if caches is not None:
        words.append("--enable-prefix-caching" if caches else "--no-enable-prefix-caching")
    words += _common(config, "--dtype", "--kv-cache-dtype", "--max-model-len")
    return " ".join(words)


def sglang(config: Config) -> str:
    """`sglang.launch_server`, for one replica."""
    replica, batch = config.replica, config.batching
    words = ["python -m sglang.launch_server", f"--model-path {config.model.name}", f"--tp-size {replica.tp}"]
    if replica.pp > 1:
        words.append(f"--pp-size {replica.pp}")
    words += [f"--page-size {replica.block_size}", f"--mem-fraction-static {replica.gpu_memory_utilization:g}"]
    if (seqs := getattr(batch, "max_num_seqs", None)) is not None:
        words.append(f"--max-running-requests {seqs}")
    if (tokens := _tokens(config)) is not None:
        words.append("--chunked-prefill-size -1" if _kind(config) == "vllm_v0" else f"--chunked-prefill-size {tokens}")
    if getattr(batch, "prefix_cache", True) is False:
        words.append("--disable-radix-cache")
    words += _common(config, "--dtype", "--kv-cache-dtype", "--context-length")
    return " ".join(words)


def doubts(config: Config) -> list[str]:
    """What these commands do not say."""
    found = []
    kind = _kind(config)
    if kind not in LIKE_VLLM:
        found.append(f"batching.kind = {kind} has no counterpart in vLLM or SGLang: they will batch in their own way")
    elif kind == "sarathi":
        found.append("sarathi's chunk is these engines' token budget of a step: close, not the same")
    if (replicas := getattr(config.fleet, "replicas", 1)) != 1:
        found.append(f"these start one replica; {replicas} of them need a router in front ({_kind_of(config.route)})")
    return found


def _common(config: Config, dtype: str, kv_dtype: str, length: str) -> list[str]:
    replica = config.replica
    words = []
    if replica.dtype != "auto":
        words.append(f"{dtype} {DTYPES[replica.dtype]}")
    if replica.kv_dtype == "fp8":
        words.append(f"{kv_dtype} {'fp8' if length == '--max-model-len' else 'fp8_e4m3'}")
    if replica.max_model_len is not None:
        words.append(f"{length} {replica.max_model_len}")
    return words


def _tokens(config: Config) -> int | None:
    """Of a step; Sarathi calls it the chunk."""
    found: int | None = getattr(config.batching, "max_num_batched_tokens", getattr(config.batching, "chunk_size", None))
    return found


def _kind(config: Config) -> str:
    return _kind_of(config.batching)


def _kind_of(policy: Struct) -> str:
    """One of ours has a tag; one of the user's own is called by its class."""
    return str(policy.__struct_config__.tag or type(policy).__name__)
