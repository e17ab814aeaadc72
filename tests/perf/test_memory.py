import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import GPUS, Gpu
from squall.perf.memory import CPU_KV_BYTES, GRAPH_BYTES_PER_LAYER, LINK_RESERVE, Deployment, account, measure
from squall.perf.spec import ModelSpec

LLAMA = resolve_model("llama-3.1-8b")
A100 = GPUS["a100-80g"]


def test_the_account_adds_up() -> None:
    memory = account(LLAMA, A100)
    parts = (
        memory.weights, memory.activations, memory.graphs, memory.fragmentation, memory.runtime, memory.unused, memory.kv,
    )  # fmt: skip
    assert sum(parts) == memory.total == A100.memory_bytes
    assert min(parts) > 0
    assert memory.num_blocks == memory.kv // (16 * 131_072)


@pytest.mark.shared
def test_blocks_match_what_vllm_found_on_an_rtx_4090(shared: Path) -> None:
    folder = shared / "data" / "traces" / "llmservingsim_measured"
    run = json.loads((folder / "RTX4090_Llama-3.1-8B_meta.json").read_text())
    gpu = replace(GPUS["rtx4090"], memory_bytes=run["hardware"]["device_total_memory_bytes"])
    memory = account(LLAMA, gpu, max_num_batched_tokens=2048, max_num_seqs=256)
    assert memory.num_blocks == pytest.approx(run["kv_cache"]["num_gpu_blocks"], rel=0.01)


def test_a_smaller_cache_type_and_more_gpus_hold_more_blocks() -> None:
    blocks = account(LLAMA, A100).num_blocks
    assert account(LLAMA, A100, kv_dtype="fp8").num_blocks == pytest.approx(2 * blocks, abs=1)
    assert account(LLAMA, A100, tp=2).num_blocks > 2 * blocks
    assert account(LLAMA, A100, block_size=32).num_blocks == blocks // 2
    assert account(LLAMA, A100, max_num_batched_tokens=16384).num_blocks < blocks


def test_grouped_heads_need_less_cache_than_a_head_each() -> None:
    grouped = LLAMA.layers[0]
    everyone = replace(LLAMA, layers=(replace(grouped, attention=replace(LLAMA.attention, num_kv_heads=32)),))
    assert account(everyone, A100).num_blocks < account(LLAMA, A100).num_blocks / 4


def test_a_model_that_does_not_fit_says_by_how_much_and_which_tp_would() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Llama-2-70b-hf with replica.tp = 1 does not fit on a100-80g: .* 6\d.\d GB more .*; use replica.tp = 4",
    ):
        account(resolve_model("llama-2-70b"), A100)
    account(resolve_model("llama-2-70b"), A100, tp=4)


def test_a_model_that_no_sharing_helps_is_told_so() -> None:
    tiny = replace(GPUS["l4"], memory_bytes=100_000_000)
    with pytest.raises(ConfigError, match="use a GPU with more memory"):
        account(resolve_model("smollm2"), tiny)


def test_a_cpu_gives_a_fixed_pool_so_that_the_machine_keeps_its_memory() -> None:
    cpu = Gpu("cpu", "cpu", 1e11, None, 16 << 30, 1e10, "memory", 5e9, 5e9, 0.0, "", "")
    memory = account(resolve_model("smollm2"), cpu)
    assert memory.kv == CPU_KV_BYTES
    assert memory.weights == 4 * resolve_model("smollm2").num_params


@pytest.mark.parametrize(("key", "value"), [("gpu_memory_utilization", 1.5), ("gpu_memory_utilization", 0.0), ("block_size", 0)])
def test_a_senseless_setting_is_named(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"replica.{key} is {value}"):
        account(LLAMA, A100, **{key: value})  # type: ignore[arg-type]


def test_a_window_limits_what_a_sequence_needs_not_what_a_block_holds() -> None:
    gemma = resolve_model("gemma-3-27b")
    memory = measure(gemma, A100, Deployment(max_model_len=32768))
    full, sliding = 10 * 32768, 52 * 1024
    assert memory.sequence == 2 * 16 * 128 * 2 * (full + sliding)
    assert memory.num_sequences > memory.kv_tokens // 32768


def test_experts_at_work_need_room_for_their_results() -> None:
    dense, mixture = resolve_model("mistral-7b"), resolve_model("mixtral-8x7b")
    few, many = Deployment(tp=4, max_num_batched_tokens=256), Deployment(tp=4, max_num_batched_tokens=8192)

    def growth(model: ModelSpec) -> int:
        return measure(model, A100, many).activations - measure(model, A100, few).activations

    assert growth(mixture) > growth(dense)


def test_graphs_and_links_have_their_price() -> None:
    plain, eager = (measure(LLAMA, A100, Deployment(graphs=graphs)) for graphs in (True, False))
    assert plain.graphs == 32 * GRAPH_BYTES_PER_LAYER
    assert eager.graphs == 0
    assert eager.kv - plain.kv == plain.graphs
    assert measure(LLAMA, A100, Deployment(tp=2)).runtime - plain.runtime == LINK_RESERVE


def test_deepseek_fits_on_eight_h200_but_not_on_eight_h100() -> None:
    deepseek = resolve_model("deepseek-v3")
    assert account(deepseek, GPUS["h200"], tp=8).num_blocks > 0
    assert account(deepseek, GPUS["h100-sxm"], tp=8, pp=2).num_blocks > 0
    with pytest.raises(ConfigError, match=r"DeepSeek-V3 with replica.tp = 8 does not fit on h100-sxm: .*; use replica.tp = 16"):
        account(deepseek, GPUS["h100-sxm"], tp=8)
