import pytest
from msgspec.structs import replace

from squall.errors import ConfigError
from squall.perf.catalogue import resolve_model
from squall.perf.decompose import Collective, Layout, Mixture, Operator, Pass, Product, Stage, refuse_overlap_alone, stages
from squall.perf.layers import Attention, Experts, LatentAttention, Mlp
from squall.perf.operators import AttentionShape
from squall.perf.quantization import Quantization
from squall.perf.spec import Layers, ModelSpec

SMALL = ModelSpec("small", "llama", 64, 1000, 512, (Layers(6, Attention(8, 2, 8), Mlp(96), 128),), final_norm=64)
SPARSE = replace(SMALL, layers=(Layers(4, Attention(8, 2, 8), Experts(8, 2, Mlp(32), shared=Mlp(48)), 128),))


def only(model: ModelSpec, layout: Layout) -> Stage:
    (stage,) = stages(model, layout)
    return stage


def products(stage: Stage) -> dict[str, tuple[int, int, str, int]]:
    return {op.name: (op.rows, op.columns, op.dtype, op.count) for op in stage.tokens if isinstance(op, Product)}


def collectives(stage: Stage) -> dict[str, tuple[str, float, int, int]]:
    return {op.name: (op.verb, op.token_bytes, op.gpus, op.count) for op in stage.tokens if isinstance(op, Collective)}


def weights(operators: tuple[Operator, ...], experts: int = 1) -> int:
    """Weights of the operators on one GPU."""
    total = 0
    for op in operators:
        if isinstance(op, Product):
            total += op.count * op.rows * op.columns
        if isinstance(op, Mixture):
            total += op.count * 3 * op.hidden * op.inter * op.experts // (op.tp * op.ep)
    return total


def test_a_dense_layer_is_four_products() -> None:
    assert products(only(SMALL, Layout())) == {
        "self_attn.qkv_proj": (64, 64 + 2 * 16, "bf16", 6),
        "self_attn.o_proj": (64, 64, "bf16", 6),
        "mlp.gate_up_proj": (64, 192, "bf16", 6),
        "mlp.down_proj": (96, 64, "bf16", 6),
    }


def test_gpus_that_share_a_layer_cut_its_first_products_by_columns_and_its_second_by_rows_and_add_up() -> None:
    stage = only(SMALL, Layout(tp=4))
    assert products(stage) == {
        "self_attn.qkv_proj": (64, 16 + 2 * 8, "bf16", 6),  # two KV heads for four GPUs: each keeps one whole
        "self_attn.o_proj": (16, 64, "bf16", 6),
        "mlp.gate_up_proj": (64, 48, "bf16", 6),
        "mlp.down_proj": (24, 64, "bf16", 6),
    }
    assert collectives(stage) == {
        "all-reduce of embedding": ("all_reduce", 128.0, 4, 1),
        "all-reduce of attention": ("all_reduce", 128.0, 4, 6),
        "all-reduce of mlp": ("all_reduce", 128.0, 4, 6),
    }
    assert stage.meetings == 1 + 6 + 6 + 1  # the last is the gathering of logits
    assert stage.attention == ((6, AttentionShape(2, 1, 8, "bf16")),)


def test_sequence_parallelism_shares_norms_and_splits_each_all_reduce() -> None:
    whole, shared = (only(SMALL, Layout(tp=4, sequence_parallel=on)) for on in (False, True))
    assert collectives(shared)["reduce-scatter of mlp"] == ("reduce_scatter", 128.0, 4, 6)
    assert collectives(shared)["all-gather after mlp"] == ("all_gather", 128.0, 4, 6)
    assert not any(verb == "all_reduce" for verb, *_ in collectives(shared).values())

    def norms(stage: Stage) -> float:
        return next(op.token_bytes for op in stage.tokens if isinstance(op, Pass) and op.name == "norm and residual")

    assert norms(whole) == 4 * norms(shared) == 4 * 64 * 2


def test_options_without_anything_to_work_on_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel needs GPUs to share norms"):
        refuse_overlap_alone(Layout(sequence_parallel=True))
    with pytest.raises(ConfigError, match="overlap_send needs pipeline stages"):
        refuse_overlap_alone(Layout(overlap_send=True))


def test_the_first_stage_embeds_the_last_chooses_and_what_is_left_over_lies_before_the_last() -> None:
    first, second, third, last = stages(SMALL, Layout(pp=4))
    assert [stage.num_layers for stage in (first, second, third, last)] == [1, 2, 2, 1]
    assert next(op.name for op in first.tokens if op.count == 1) == "embedding"
    assert [op.name for op in last.rows] == ["head", "sampling"]
    assert [stage.rows for stage in (first, second, third)] == [(), (), ()]
    assert first.send == second.send == third.send == Collective("send to the next stage", "send", 128.0, 1)
    assert last.send is None


def test_experts_are_one_operator_and_the_shared_one_a_dense_layer_beside_it() -> None:
    stage = only(SPARSE, Layout(tp=4, ep=2))
    (experts,) = (op for op in stage.tokens if isinstance(op, Mixture))
    assert experts == Mixture("experts", 64, 32, 8, 2, "bf16", tp=2, ep=2, count=4)
    assert products(stage)["mlp.gate"] == (64, 8, "bf16", 4)  # the router is on every GPU
    assert products(stage)["mlp.shared_experts.gate_up_proj"] == (64, 24, "bf16", 4)
    assert collectives(stage)["all-reduce of mlp"] == ("all_reduce", 128.0, 4, 4)


def test_experts_over_more_gpus_than_share_a_layer_are_sent_their_tokens() -> None:
    stage = only(SPARSE, Layout(tp=2, ep=4))
    assert Layout(tp=2, ep=4).groups == 2
    sent = 128 * 4 * (1 - 0.75**2)  # of four GPUs those that hold one of a token's two experts
    for name in ("tokens to their experts", "tokens back"):
        verb, token_bytes, gpus, count = collectives(stage)[name]
        assert (verb, gpus, count) == ("all_to_all", 4, 4)
        assert token_bytes == pytest.approx(sent)
    assert "all-reduce of mlp" not in collectives(stage)
    assert products(stage)["self_attn.qkv_proj"] == (64, 48, "bf16", 4)


def test_latent_attention_is_shared_by_its_heads_and_reads_one_vector_in_a_decode() -> None:
    latent = LatentAttention(8, 24, 32, 8, 4, 8)
    stage = only(replace(SMALL, layers=(Layers(2, latent, Mlp(96), 128),)), Layout(tp=2))
    assert products(stage)["self_attn.qkv_a_proj"] == (64, 24 + 36, "bf16", 2)
    assert products(stage)["self_attn.q_b_proj"] == (24, 4 * 12, "bf16", 2)
    assert products(stage)["self_attn.kv_b_proj"] == (32, 4 * 16, "bf16", 2)
    assert stage.attention == ((2, AttentionShape(4, 1, 12, "bf16", None, "mla", 32, 4, 8)),)


def test_layers_with_and_without_a_window_are_told_apart() -> None:
    full, windowed = Attention(8, 2, 8), Attention(8, 2, 8, window=128)
    alternating = tuple(Layers(1, attention, Mlp(96), 128) for attention in (windowed, full) * 3)
    stage = only(replace(SMALL, layers=alternating), Layout())
    assert [(count, shape.window) for count, shape in stage.attention] == [(3, 128), (3, None)]
    assert products(stage)["mlp.down_proj"][3] == 6  # equal products are one


def test_quantised_weights_are_those_that_the_checkpoint_quantised() -> None:
    layers = (Layers(6, Attention(8, 2, 8), Mlp(96), 128, unquantised=("mlp.down_proj",)),)
    packed = replace(SMALL, layers=layers, quantization=Quantization("int4"))
    stage = only(packed, Layout(weight_dtype="int4"))
    dtypes = {name: dtype for name, (_, _, dtype, _) in products(stage).items()}
    assert dtypes["mlp.down_proj"] == "bf16"
    assert dtypes["self_attn.qkv_proj"] == dtypes["mlp.gate_up_proj"] == "int4"
    (head,) = (op for op in stage.rows if isinstance(op, Product))
    assert head.dtype == "bf16"


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "gemma-2-9b", "mixtral-8x7b", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b", "Qwen/Qwen3-30B-A3B"]
)
@pytest.mark.parametrize("pp", [1, 3])
def test_the_operators_of_all_stages_hold_every_matrix_of_the_model(name: str, pp: int) -> None:
    model = resolve_model(name)
    cut = stages(model, Layout(pp=pp))
    held = sum(weights((*stage.tokens, *stage.rows)) for stage in cut)
    matrices = sum(g.count * m.copies * m.values for g in model.layers for m in g.matrices(model.hidden_size))
    assert held == matrices + model.vocab_size * model.hidden_size
    assert sum(stage.num_layers for stage in cut) == model.num_layers
