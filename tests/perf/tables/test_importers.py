"""Profiles of other projects: small files in their formats, and the reference ones where they lie beside the checkout."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from squall.errors import ConfigError, ProfileError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.operators import AttentionShape, Estimate, Provenance
from squall.perf.tables.choose import import_profile

# -- Vidur


def vidur_mlp(**more: object) -> pl.DataFrame:
    times = {
        f"time_stats.{name}.median": [0.1, 0.2] for name in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    }
    times |= {"time_stats.input_layernorm.median": [0.002, 0.004], "time_stats.mlp_act.median": [0.003, 0.009]}
    keys: dict[str, object] = {
        "n_head": 32, "n_kv_head": 8, "n_embd": 4096, "n_expanded_embd": 14336, "use_gated_mlp": True,
        "num_tokens": [16, 512], "num_tensor_parallel_workers": 2,
    }  # fmt: skip
    return pl.DataFrame({**times, **keys, **more})


def seconds(estimate: Estimate | None) -> float:
    assert estimate is not None
    assert estimate.provenance is Provenance.MEASURED
    return estimate.seconds


def test_vidurs_operators_become_shares_of_shapes(tmp_path: Path) -> None:
    vidur_mlp().write_csv(tmp_path / "mlp.csv")
    profile = import_profile("vidur", tmp_path, None, None)
    assert profile.header.tp == (2,)
    source = profile.source()
    assert seconds(source.gemm(16, 4096, 2048 + 2 * 4 * 128, "bf16")) == pytest.approx(1e-4)  # queries, keys and values
    assert seconds(source.gemm(512, 4096, 14336, "bf16")) == pytest.approx(2e-4)  # gate and up
    assert seconds(source.gemm(512, 7168, 4096, "bf16")) == pytest.approx(2e-4)
    assert seconds(source.elementwise(16 * 2 * 2 * 4096, "norm")) == pytest.approx(2e-6)
    assert seconds(source.elementwise(16 * 2 * 3 * 7168, "activation")) == pytest.approx(3e-6)
    assert source.elementwise(16 * 2 * 2 * 4096, "rotary") is None  # nobody measured it


def test_vidurs_norms_are_told_with_the_addition_and_by_themselves(tmp_path: Path) -> None:
    """Kernels of as many bytes differ: a norm, an addition and a rotary embedding do not stand for each other."""
    times = {"add": [0.001, 0.003], "post_attention_layernorm": [0.004, 0.006], "attn_rope": [0.02, 0.03], "emb": [None, 0.1]}
    vidur_mlp(**{f"time_stats.{name}.median": value for name, value in times.items()}).write_csv(tmp_path / "mlp.csv")
    source = import_profile("vidur", tmp_path, None, None).source()
    assert seconds(source.elementwise(16 * 2 * 5 * 4096, "norm")) == pytest.approx(4e-6)  # between 2 + 1 and 4 + 1 us
    assert seconds(source.elementwise(512 * 2 * 5 * 4096, "norm")) == pytest.approx(8e-6)
    assert seconds(source.elementwise(16 * 2 * 2 * (2048 + 512), "rotary")) == pytest.approx(2e-5)
    assert seconds(source.elementwise(512 * 2 * 2 * 4096, "embedding")) == pytest.approx(1e-4)


def test_vidurs_attention_is_of_one_gpus_heads(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "n_embd": 4096, "n_q_head": 32, "n_kv_head": 8, "block_size": 16, "num_tensor_parallel_workers": 4,
            "batch_size": [1, 1, 8, 8], "prefill_chunk_size": [128, 512, 0, 0], "kv_cache_size": [0, 512, 256, 1024],
            "time_stats.attn_prefill.median": ["0.03", "0.2", "", ""], "time_stats.attn_decode.median": [None, None, 0.02, 0.05],
        }
    )  # fmt: skip
    frame.write_csv(tmp_path / "attention.csv")
    profile = import_profile("vidur", tmp_path / "attention.csv", None, None)
    assert (profile.header.block_size, profile.header.tp) == (16, (4,))
    shape = AttentionShape(8, 2, 128, "bf16")
    assert seconds(profile.source().prefill_attention(512, 512, shape)) == pytest.approx(2e-4)
    assert seconds(profile.source().decode_attention(8, 1024, shape)) == pytest.approx(5e-5)


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (vidur_mlp().drop("n_embd"), r"mlp.csv: has no column 'n_embd'"),
        (vidur_mlp().drop("time_stats.mlp_up_proj.median"), "is no table of Vidur's"),
        (vidur_mlp().with_columns(pl.lit("fast").alias("time_stats.mlp_down_proj.median")), "row 2: .*mlp_down_proj.* is 'fast'"),
        (vidur_mlp(num_tokens=[512, 512]), "rows 2, 3 are the same gemm"),
    ],
)
def test_what_is_wrong_in_vidurs_tables_is_named(tmp_path: Path, frame: pl.DataFrame, what: str) -> None:
    frame.write_csv(tmp_path / "mlp.csv")
    with pytest.raises(ProfileError, match=what):
        import_profile("vidur", tmp_path, None, None)


def test_of_several_tables_the_one_that_is_wrong_is_named(tmp_path: Path) -> None:
    vidur_mlp().write_csv(tmp_path / "a_mlp.csv")
    late = pl.lit(-1.0).alias("time_stats.mlp_down_proj.median")
    vidur_mlp().with_columns(late).write_csv(tmp_path / "b_mlp.csv")
    with pytest.raises(ProfileError, match=r"b_mlp.csv: row 2: the time of gemm is -0.001"):
        import_profile("vidur", tmp_path, None, None)
    slow = (10 * pl.col("time_stats.mlp_down_proj.median").cast(pl.Float64)).alias("time_stats.mlp_down_proj.median")
    vidur_mlp().with_columns(slow).write_csv(tmp_path / "b_mlp.csv")
    with pytest.raises(ProfileError, match=r"a_mlp.csv, .*b_mlp.csv: rows 2, 2 are the same gemm"):
        import_profile("vidur", tmp_path, None, None)


# -- LLMServingSim


def llmservingsim(folder: Path, unit: float = 1.0) -> Path:
    model = resolve_model("llama-3.1-8b")
    meta = f"hardware: RTX4090\nvllm_version: 0.19.0\nmodel: {model.name}\ntp_degrees: [1]\nengine_effective:\n  block_size: 16\n"
    (folder / "meta.yaml").write_text(meta)
    weights = {"qkv_proj": 6144 * 4096, "o_proj": 4096 * 4096, "gate_up_proj": 28672 * 4096, "down_proj": 14336 * 4096}
    dense = [
        (layer, tokens, unit * max(size / 4.5e5, tokens * size / 7.5e7))
        for layer, size in weights.items()
        for tokens in (1, 2048)
    ]
    dense += [
        (layer, tokens, unit * (2 + tokens / 50)) for layer in ("layernorm", "rotary_emb", "act_fn") for tokens in (1, 2048)
    ]
    table(folder / "dense.csv", ("layer", "tokens", "time_us"), dense)
    rows = [(layer, n, unit * us) for layer, us in (("lm_head", 1100.0), ("sampler", 30.0)) for n in (1, 256)]
    table(folder / "per_sequence.csv", ("layer", "sequences", "time_us"), rows)
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    attention = [(chunk, 0, 0, 0, unit * (10 + chunk**2 / 8e3)) for chunk in (16, 2048)]
    attention += [(0, 0, n, 1024, unit * (10 + n * 4.5)) for n in (1, 256)]
    attention += [(16, 0, n, 1024, unit * (12 + n * 4.5)) for n in (1, 256)]
    table(folder / "attention.csv", columns, attention)
    return folder


def table(path: Path, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    pl.DataFrame(rows, schema=list(columns), orient="row").write_csv(path)


def test_llmservingsims_layers_become_shapes_of_its_model(tmp_path: Path) -> None:
    profile = import_profile("llmservingsim", llmservingsim(tmp_path), resolve_gpu("rtx4090"), None)
    header = profile.header
    assert (header.gpu, header.engine, header.models, header.tp) == ("rtx4090", "vllm 0.19.0", ("meta-llama/Llama-3.1-8B",), (1,))
    source = profile.source()
    assert seconds(source.gemm(256, 4096, 128256, "bf16")) == pytest.approx(1.1e-3)
    assert seconds(source.sampling(1)) == pytest.approx(3e-5)
    shape = AttentionShape(32, 8, 128, "bf16")
    assert seconds(source.decode_attention(256, 1024, shape)) == pytest.approx((10 + 256 * 4.5) * 1e-6)
    assert seconds(source.mixed_attention(16, 0, 1, 1024, shape)) == pytest.approx(16.5e-6)


def test_times_in_another_unit_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"attention.csv: .* would reach .* its times are too long; are they in the unit"):
        import_profile("llmservingsim", llmservingsim(tmp_path, unit=1000.0), resolve_gpu("rtx4090"), None)


def test_a_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    path = llmservingsim(tmp_path) / "dense.csv"
    path.write_text(path.read_text().replace("o_proj", "out_proj"))
    with pytest.raises(ProfileError, match=r"dense.csv: has no row with layer 'o_proj'; it has .*out_proj"):
        import_profile("llmservingsim", tmp_path, None, None)
    (tmp_path / "meta.yaml").write_text("model: meta-llama/Llama-3.1-8B\n")
    with pytest.raises(ProfileError, match="has no tp_degrees"):
        import_profile("llmservingsim", tmp_path, None, None)


# -- aiconfigurator


def gemm_perf(**more: object) -> pl.DataFrame:
    return pl.DataFrame(
        {"device": "NVIDIA H100", "gemm_dtype": "bfloat16", "m": [16, 4096], "n": 8192, "k": 4096, "latency": [0.03, 0.4], **more}
    )


def test_aiconfigurators_tables_are_known_by_their_names(tmp_path: Path) -> None:
    gemm_perf().write_parquet(tmp_path / "gemm_perf.parquet")
    counts = {"allreduce_dtype": "bfloat16", "num_gpus": 4, "message_size": [128, 1 << 20, 128, 1 << 20]}
    backends = ["vllm_eager", "vllm_eager", "vllm_graph", "vllm_graph"]
    pl.DataFrame({**counts, "backend": backends, "latency": [0.05, 0.06, 0.005, 0.03]}).write_csv(
        tmp_path / "custom_allreduce_perf.csv"
    )
    profile = import_profile("aiconfigurator", tmp_path, None, None)
    assert (profile.header.gpu, sorted(profile.rows)) == ("NVIDIA H100", ["all_reduce", "gemm"])
    source = profile.source()
    assert seconds(source.gemm(4096, 4096, 8192, "bf16")) == pytest.approx(4e-4)
    assert seconds(source.all_reduce(2 << 20, 4)) == pytest.approx(3e-5)  # 2^20 values of two bytes, in a graph


def test_latent_attention_is_that_of_its_own_tables(tmp_path: Path) -> None:
    kinds = {"mla_dtype": "bfloat16", "kv_cache_dtype": "fp8", "num_heads": 16}
    prompts = {**kinds, "batch_size": [1, 1, 8], "isl": [1024, 4096, 1024], "step": 0, "latency": [0.1, 1.2, 0.7]}
    decodes = {**kinds, "batch_size": [1, 1, 64, 64], "isl": 1, "step": [1023, 8191] * 2, "latency": [0.01, 0.02, 0.05, 0.3]}
    pl.DataFrame(prompts).write_csv(tmp_path / "context_mla_perf.csv")
    pl.DataFrame(decodes).write_csv(tmp_path / "generation_mla_perf.csv")
    source = import_profile("aiconfigurator", tmp_path, None, None).source()
    deepseek = AttentionShape(16, 1, 192, "fp8", None, "mla", 512, 64, 128)
    assert seconds(source.prefill_attention(4096, 0, deepseek)) == pytest.approx(1.2e-3)  # batches of prompts are left out
    assert seconds(source.decode_attention(64, 8192, deepseek)) == pytest.approx(3e-4)
    chunk = source.prefill_attention(1024, 3072, deepseek)
    assert chunk is not None
    assert 1e-4 < chunk.seconds < 1.2e-3
    assert source.decode_attention(64, 8192, AttentionShape(16, 1, 192, "fp8", None, "mla", 256, 64, 128)) is None
    assert source.decode_attention(64, 8192, AttentionShape(16, 16, 128, "fp8")) is None


def test_aiconfigurators_tables_of_two_gpus_are_told_apart(tmp_path: Path) -> None:
    gemm_perf().write_csv(tmp_path / "aic_h100_sxm__gemm__vllm__0.24.0__gemm_perf.csv")
    gemm_perf(device="NVIDIA H200").write_csv(tmp_path / "aic_h200_sxm__gemm__vllm__0.24.0__gemm_perf.csv")
    with pytest.raises(ProfileError, match="NVIDIA H100 and NVIDIA H200; import one GPU at a time"):
        import_profile("aiconfigurator", tmp_path, None, None)
    assert import_profile("aiconfigurator", tmp_path, resolve_gpu("h200"), None).header.gpu == "h200"
    with pytest.raises(ProfileError, match="holds no table of sglang"):
        import_profile("aiconfigurator", tmp_path, resolve_gpu("h200"), None, "sglang")


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    gemm_perf().rename({"latency": "latency_us"}).write_csv(tmp_path / "gemm_perf.csv")
    with pytest.raises(ProfileError, match=r"gemm_perf.csv: has no column 'latency'; it has latency_us"):
        import_profile("aiconfigurator", tmp_path, None, None)


def test_a_pointer_in_place_of_a_table_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "gemm_perf.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a4d068a7\nsize 51429517\n")
    with pytest.raises(ProfileError, match=r"gemm_perf.csv: is a git-lfs pointer"):
        import_profile("aiconfigurator", tmp_path, None, None)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--format 'csv' is unknown; use one of vidur, llmservingsim, aiconfigurator"):
        import_profile("csv", tmp_path, None, None)


# -- the reference data


@pytest.mark.shared
@pytest.mark.parametrize(
    ("format", "folder", "gpu", "rows"),
    [
        ("vidur", "vidur_profiles/a100", "a100-80g", {"gemm": 8288, "prefill_attention": 4206, "decode_attention": 10112}),
        ("llmservingsim", "op_profiles/rtx4090_llama-3.1-8b", "rtx4090", {"gemm": 648, "mixed_attention": 8448, "sampling": 40}),
        ("aiconfigurator", "op_profiles", "a100-80g", {"gemm": 9240, "decode_attention": 5427, "all_reduce": 69}),
    ],
)
def test_reference_profiles_are_read(shared: Path, format: str, folder: str, gpu: str, rows: dict[str, int]) -> None:
    profile = import_profile(format, shared / "data" / folder, resolve_gpu(gpu), None)
    assert {name: len(profile.rows[name]) for name in rows} == rows
