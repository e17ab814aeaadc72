"""A configuration in the words of other engines: the command that starts one replica of it with vLLM, and with SGLang.

Knows their flags of 2025 and says where a policy of ours has no counterpart there; what it does not know of them it leaves to
their defaults. vLLM refuses a token budget below its number of sequences, and one below its longest sequence where prompts are
not cut (`vllm/config/scheduler.py`): budgets are raised to that.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from squall.config import Config
from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

CUTS_PROMPTS = {"vllm", "sarathi"}
"""Policies that compute pieces of prompts beside decodes."""

WHOLE_PROMPTS = {"vllm_v0", "orca", "faster_transformer", "lightllm", "blitz"}
"""Policies that cut no prompt."""

DOUBTS = {
    "sarathi": "sarathi's chunk is these engines' token budget of a step: close, not the same",
    "orca": "orca puts whole prompts beside the decodes and reserves memory for the longest answer: neither engine does so now, "
    "and these commands keep its whole prompts only",
    "faster_transformer": "faster_transformer lets nobody join a batch: neither engine can do so, and these commands only keep "
    "its size",
    "lightllm": "lightllm admits what fits at the coming peak of memory: SGLang estimates that with --schedule-conservativeness, "
    "vLLM preempts instead",
    "blitz": "blitz reserves memory for the longest answer: these engines take it as it is needed",
}
"""What the commands do not say of a policy."""


def vllm(config: Config) -> str:
    """`vllm serve`, for one replica."""
    replica, kind = config.replica, _kind(config)
    words = ["vllm serve", _model(config), f"--tensor-parallel-size {replica.tp}"]
    if replica.pp > 1:
        words.append(f"--pipeline-parallel-size {replica.pp}")
    words += [f"--block-size {replica.block_size}", f"--gpu-memory-utilization {replica.gpu_memory_utilization:g}"]
    seqs, tokens = _seqs(config), _tokens(config)
    if seqs is not None:
        words.append(f"--max-num-seqs {seqs}")
    if kind in WHOLE_PROMPTS:
        words.append("--no-enable-chunked-prefill")
        tokens = max(tokens or 0, _longest(config)) or None
    if tokens is not None:
        words.append(f"--max-num-batched-tokens {max(tokens, seqs or 0)}")
    caches = getattr(config.batching, "prefix_cache", None)
    if caches is not None or kind in WHOLE_PROMPTS:
        words.append("--enable-prefix-caching" if caches else "--no-enable-prefix-caching")
    words += _common(config, "--dtype", "--kv-cache-dtype", "--max-model-len")
    return " ".join(words)


def sglang(config: Config) -> str:
    """`sglang.launch_server`, for one replica."""
    replica, kind = config.replica, _kind(config)
    words = ["python -m sglang.launch_server", f"--model-path {_model(config)}", f"--tp-size {replica.tp}"]
    if replica.pp > 1:
        words.append(f"--pp-size {replica.pp}")
    words += [f"--page-size {replica.block_size}", f"--mem-fraction-static {replica.gpu_memory_utilization:g}"]
    if (seqs := _seqs(config)) is not None:
        words.append(f"--max-running-requests {seqs}")
    tokens = _tokens(config)
    if kind in CUTS_PROMPTS and tokens is not None:
        words.append(f"--chunked-prefill-size {tokens} --enable-mixed-chunk")
    elif kind in WHOLE_PROMPTS:
        words.append("--chunked-prefill-size -1" + (f" --max-prefill-tokens {tokens}" if tokens is not None else ""))
    if getattr(config.batching, "prefix_cache", kind not in WHOLE_PROMPTS) is False:
        words.append("--disable-radix-cache")
    words += _common(config, "--dtype", "--kv-cache-dtype", "--context-length")
    return " ".join(words)


def doubts(config: Config) -> list[str]:
    """What these commands do not say."""
    return list(_doubts(config))


def _doubts(config: Config) -> Iterator[str]:
    kind, fleet = _kind(config), config.fleet
    if kind in DOUBTS:
        yield DOUBTS[kind]
    elif kind not in CUTS_PROMPTS | WHOLE_PROMPTS:
        yield f"batching.kind = {kind} is not known to vLLM and SGLang: they will batch in their own way"
    if fleet.mode == "disaggregated":
        yield (
            "these start one replica that does both; prefill and decode replicas of their own need --kv-transfer-config (vLLM), "
            "--disaggregation-mode (SGLang), and a router that knows of it"
        )
    elif fleet.num_maximum != 1:
        yield f"these start one replica; {fleet.num_maximum} of them need a router in front ({_kind_of(config.route)})"
    if any(bounds.minimum < bounds.maximum for bounds in fleet.bounds.values()):
        yield f"what starts and stops replicas ({_kind_of(config.scale)}, weights by {_kind_of(config.load)}) is not theirs"
    if config.latency.speculation is not None:
        yield "speculative decoding needs --speculative-config (vLLM) or --speculative-algorithm (SGLang) with a draft of yours"


def _common(config: Config, dtype: str, kv_dtype: str, length: str) -> list[str]:
    replica = config.replica
    words = []
    if replica.dtype != "auto":
        words.append(f"{dtype} {DTYPES[replica.dtype]}")
    if replica.kv_dtype == "fp8":
        words.append(f"{kv_dtype} {'fp8' if length == '--max-model-len' else 'fp8_e4m3'}")
    if replica.max_model_len is not None:
        words.append(f"{length} {replica.max_model_len}")
    if replica.ep > 1:
        words.append("--enable-expert-parallel" if length == "--max-model-len" else f"--ep-size {replica.ep}")
    return words


def _seqs(config: Config) -> int | None:
    found: int | None = getattr(config.batching, "max_num_seqs", None)
    return found


def _tokens(config: Config) -> int | None:
    """Of a step; Sarathi calls it the chunk."""
    found: int | None = getattr(config.batching, "chunk_size", getattr(config.batching, "max_num_batched_tokens", None))
    return found


def _model(config: Config) -> str:
    """By the name that these engines find it under: a short name is ours alone."""
    name = config.model.name
    if "/" in name:
        return name
    try:
        known = resolve_model(name).name
    except ConfigError:
        return name
    return known if known.count("/") == 1 else name


def _longest(config: Config) -> int:
    """Tokens of a sequence; 0 where nobody knows."""
    try:
        return config.replica.max_model_len or resolve_model(config.model.name).max_position
    except ConfigError:  # a model that is not here any more
        return 0


def _kind(config: Config) -> str:
    return _kind_of(config.batching)


def _kind_of(policy: Struct) -> str:
    """One of ours has a tag; one of the user's own is called by its class."""
    return str(policy.__struct_config__.tag or type(policy).__name__)
