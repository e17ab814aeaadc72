"""Configurations in the words of vLLM and SGLang: every policy has commands, and what they do not say is said."""

from typing import Any

import pytest

from squall.config import Config, from_tree
from squall.search.flags import doubts, sglang, vllm
from tests.search.conftest import tree

LONGEST = 8192
"""Of Llama 3 8B."""


def config(**tables: Any) -> Config:
    return from_tree("test", tree(**tables))


@pytest.mark.parametrize(
    ("batching", "theirs", "sglangs"),
    [
        (
            {"kind": "vllm", "max_num_seqs": 64, "max_num_batched_tokens": 512},
            "--max-num-seqs 64 --max-num-batched-tokens 512 --enable-prefix-caching",
            "--max-running-requests 64 --chunked-prefill-size 512 --enable-mixed-chunk",
        ),
        (
            {"kind": "sarathi", "max_num_seqs": 256, "chunk_size": 128, "prefix_cache": False},
            "--max-num-seqs 256 --max-num-batched-tokens 256 --no-enable-prefix-caching",
            "--max-running-requests 256 --chunked-prefill-size 128 --enable-mixed-chunk --disable-radix-cache",
        ),
        (
            {"kind": "vllm_v0", "max_num_seqs": 64, "max_num_batched_tokens": 4096, "prefix_cache": True},
            f"--max-num-seqs 64 --no-enable-chunked-prefill --max-num-batched-tokens {LONGEST} --enable-prefix-caching",
            "--max-running-requests 64 --chunked-prefill-size -1 --max-prefill-tokens 4096",
        ),
        (
            {"kind": "orca", "max_num_seqs": 32},
            f"--max-num-seqs 32 --no-enable-chunked-prefill --max-num-batched-tokens {LONGEST} --no-enable-prefix-caching",
            "--max-running-requests 32 --chunked-prefill-size -1 --disable-radix-cache",
        ),
        (
            {"kind": "faster_transformer", "max_num_seqs": 32},
            f"--max-num-seqs 32 --no-enable-chunked-prefill --max-num-batched-tokens {LONGEST} --no-enable-prefix-caching",
            "--max-running-requests 32 --chunked-prefill-size -1 --disable-radix-cache",
        ),
        (
            {"kind": "lightllm", "max_num_seqs": 32, "max_num_batched_tokens": 9000},
            "--max-num-seqs 32 --no-enable-chunked-prefill --max-num-batched-tokens 9000 --no-enable-prefix-caching",
            "--max-running-requests 32 --chunked-prefill-size -1 --max-prefill-tokens 9000 --disable-radix-cache",
        ),
        (
            {"kind": "blitz", "max_num_seqs": 32, "max_num_batched_tokens": 2048},
            f"--max-num-seqs 32 --no-enable-chunked-prefill --max-num-batched-tokens {LONGEST} --no-enable-prefix-caching",
            "--max-running-requests 32 --chunked-prefill-size -1 --max-prefill-tokens 2048 --disable-radix-cache",
        ),
    ],
)
def test_every_policy_has_commands(batching: dict[str, Any], theirs: str, sglangs: str) -> None:
    asked = config(batching=batching)
    assert vllm(asked) == (
        f"vllm serve meta-llama/Meta-Llama-3-8B --tensor-parallel-size 1 --block-size 16 --gpu-memory-utilization 0.9 {theirs}"
    )
    assert sglang(asked) == (
        "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B --tp-size 1 --page-size 16 "
        f"--mem-fraction-static 0.9 {sglangs}"
    )
    assert bool(doubts(asked)) == (batching["kind"] not in ("vllm", "vllm_v0"))


def test_a_model_goes_by_the_name_that_others_know() -> None:
    """Ours are short; what is a place already, and what nobody knows, stays as it is."""
    for name, theirs in (("qwen-72b", "Qwen/Qwen-72B"), ("Qwen/Qwen-72B", "Qwen/Qwen-72B"), ("./mine", "./mine"), ("my", "my")):
        assert vllm(config(model={"name": name})).startswith(f"vllm serve {theirs} --tensor-parallel-size 1 ")


def test_the_rest_of_a_replica() -> None:
    shape = {"tp": 2, "pp": 2, "dtype": "bf16", "kv_dtype": "fp8", "max_model_len": 2048, "block_size": 32}
    asked = config(replica=shape, cluster={"gpu": "h100-sxm"})
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2 --block-size 32" in vllm(asked)
    assert vllm(asked).endswith("--dtype bfloat16 --kv-cache-dtype fp8 --max-model-len 2048")
    assert "--tp-size 2 --pp-size 2 --page-size 32" in sglang(asked)
    assert sglang(asked).endswith("--dtype bfloat16 --kv-cache-dtype fp8_e4m3 --context-length 2048")


def test_a_longest_sequence_of_ones_own_is_what_a_whole_prompt_may_be() -> None:
    asked = config(batching={"kind": "orca", "max_num_seqs": 32}, replica={"max_model_len": 2048})
    assert "--max-num-batched-tokens 2048" in vllm(asked)


def test_what_one_command_cannot_start_is_said() -> None:
    cluster = {"gpu": "a100-80g", "nodes": 2}
    several = config(fleet={"replicas": 3}, cluster=cluster)
    assert doubts(several) == ["these start one replica; 3 of them need a router in front (least_loaded)"]
    elastic = doubts(config(fleet={"replicas": {"min": 1, "max": 4}}, scale={"kind": "concurrency"}, cluster=cluster))
    assert elastic[1] == "what starts and stops replicas (concurrency, weights by disk) is not theirs"
    apart = config(fleet={"mode": "disaggregated", "prefill": 1, "decode": 2}, cluster=cluster)
    assert "--disaggregation-mode" in doubts(apart)[0]
    drafting = config(latency={"speculation": {"draft_tokens": 3}})
    assert "--speculative-config" in doubts(drafting)[0]
