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


# -- against hand calculations: bytes of the fullest GPU


def test_a_dense_models_last_stage_has_its_layers_and_the_head() -> None:
    llama = resolve_model("llama-3-70b")
    memory = measure(llama, GPUS["h100-sxm"], Deployment(pp=4))
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192
    assert memory.weights == 2 * (20 * layer + 8192 + 128256 * 8192)
    assert memory.num_blocks == memory.kv // (16 * 20 * 2 * 8 * 128 * 2)


def test_experts_are_dealt_out_and_what_every_token_passes_is_not() -> None:
    mixtral = resolve_model("mixtral-8x7b")
    memory = measure(mixtral, A100, Deployment(pp=2, ep=2))
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    layer = attention + 4 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096
    assert memory.weights == 2 * (16 * layer + 4096 + 32000 * 4096)
    assert memory.num_blocks == memory.kv // (16 * 16 * 2 * 8 * 128 * 2)


def test_latent_attention_is_shared_in_part_and_its_cache_not_at_all() -> None:
    memory = measure(resolve_model("deepseek-v3"), GPUS["h200"], Deployment(tp=8, ep=8))
    low_rank = 7168 * 1536 + 7168 * 576  # every GPU has these whole
    attention = low_rank + (1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168) // 8
    expert = 3 * 7168 * 2048
    in_8_bits = 61 * attention + 3 * 3 * 7168 * 18432 // 8 + 58 * (32 * expert + expert // 8)
    in_16_bits = 58 * 256 * 7168 + 2 * 129280 * 7168 // 8
    scales = 4 * in_8_bits / (128 * 128)
    assert memory.weights == pytest.approx(in_8_bits + 2 * in_16_bits + scales, rel=0.0005)
    assert memory.num_blocks == memory.kv // (16 * 61 * 576 * 2)
