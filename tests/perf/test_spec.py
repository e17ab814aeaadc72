import pytest

from squall.errors import ConfigError, ModelError
from squall.perf.catalogue import CONFIGS, resolve_model
from squall.perf.spec import ModelSpec

MIXTRAL, DEEPSEEK, LLAMA = resolve_model("mixtral-8x7b"), resolve_model("deepseek-v3"), resolve_model("llama-3-70b")


@pytest.mark.parametrize("spec", [resolve_model(name) for name in CONFIGS], ids=CONFIGS)
@pytest.mark.parametrize("pp", [1, 2, 3, 7])
def test_stages_hold_every_layer_once_and_are_nearly_even(spec: ModelSpec, pp: int) -> None:
    counts = [sum(group.count for group in stage) for stage in spec.stages(pp)]
    assert sum(counts) == spec.num_layers
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_stages_keep_the_order_of_layers() -> None:
    first, second = DEEPSEEK.stages(2)
    assert [group.count for group in first] == [3, 28]
    assert [group.count for group in second] == [30]


def test_a_stage_needs_a_layer() -> None:
    with pytest.raises(ConfigError, match=r"replica.pp is 81, but meta-llama/Meta-Llama-3-70B has 80 layers; use 1 to 80"):
        LLAMA.stages(81)


def test_two_stages_halve_layers_and_cache_but_each_keeps_a_table() -> None:
    table = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    halves = 2 * LLAMA.weight_bytes(pp=2)
    assert halves - LLAMA.weight_bytes() == 2 * LLAMA.hidden_size  # the last stage is the fullest: it has the final norm
    assert LLAMA.weight_bytes(pp=2) > LLAMA.weight_bytes() / 2 > table
    assert 2 * LLAMA.kv_bytes_per_token("bf16", pp=2) == LLAMA.kv_bytes_per_token("bf16")


def test_experts_are_dealt_out_or_cut_with_the_same_share_for_each_gpu() -> None:
    whole = MIXTRAL.weight_bytes()
    assert MIXTRAL.weight_bytes(tp=8) == MIXTRAL.weight_bytes(tp=8, ep=8) == MIXTRAL.weight_bytes(tp=8, ep=2)
    assert whole / 8 < MIXTRAL.weight_bytes(tp=8) < 1.01 * whole / 8
    assert DEEPSEEK.weight_bytes(tp=8, ep=32) < DEEPSEEK.weight_bytes(tp=8, ep=8) / 3


def test_latent_attention_caches_the_same_on_every_gpu() -> None:
    assert DEEPSEEK.kv_bytes_per_token("fp8", tp=8) == DEEPSEEK.kv_bytes_per_token("fp8") == 61 * 576


@pytest.mark.parametrize(
    ("tp", "ep", "message"),
    [
        (3, 1, r"replica.tp is 3, but .* has 32 heads, 8 KV heads, 8 experts and 14336 expert columns, which divide by 1, 2, 4"),
        (4, 3, r"replica.ep is 3, but .* and tp is 4: use one of 1, 2, 4, 8"),
        (1, 16, r"replica.ep is 16"),
    ],
)
def test_a_share_that_is_not_even_is_named(tp: int, ep: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MIXTRAL.check_tp(tp, ep)


def test_a_dense_model_has_no_experts_to_deal_out() -> None:
    assert not LLAMA.can_share(4, 2)


def test_arithmetic_counts_only_the_experts_at_work() -> None:
    assert MIXTRAL.flops_per_token() == pytest.approx(2 * MIXTRAL.num_active_params, rel=0.03)
    assert DEEPSEEK.flops_per_token() == pytest.approx(2 * DEEPSEEK.num_active_params, rel=0.05)


def test_arithmetic_of_attention_stops_at_the_window_and_differs_for_latent_decodes() -> None:
    gemma = resolve_model("gemma-2-9b")
    near, far = (gemma.flops_per_token(n) - gemma.flops_per_token() for n in (4096, 8192))
    assert near == 42 * 4 * 16 * 256 * 4096
    assert far == near + 21 * 4 * 16 * 256 * 4096
    assert DEEPSEEK.flops_per_token(1) - DEEPSEEK.flops_per_token() == 61 * 2 * 128 * (128 + 64 + 128)
    assert DEEPSEEK.flops_per_token(1, decode=True) - DEEPSEEK.flops_per_token() == 61 * 2 * 128 * (2 * 512 + 64)


def test_prices_and_the_engine_are_told_when_layers_are_not_alike() -> None:
    assert (LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim, LLAMA.intermediate_size) == (64, 8, 128, 28672)
    assert resolve_model("gemma-2-9b").num_heads == 16  # they differ in their windows only
    with pytest.raises(ModelError, match=r"Mixtral-8x7B-v0.1: its layers do not all have the same gated MLP; only `squall plan`"):
        _ = MIXTRAL.intermediate_size
    with pytest.raises(ModelError, match=r"DeepSeek-V3: its attention is not the same grouped-head attention"):
        _ = DEEPSEEK.head_dim
