"""Squall's own operator profile: what is written is read, and what is wrong in a file is named."""

from pathlib import Path

import polars as pl
import pytest
from msgspec.structs import replace

from squall.errors import ProfileError
from squall.perf.catalogue import resolve_model
from squall.perf.decompose import Layout, Product, stages
from squall.perf.hardware import resolve_gpu
from squall.perf.operators import AttentionShape, Provenance
from squall.perf.tables.profile import KEY, VERSION, Header, OperatorProfile, gather, is_operator_profile, load, save

SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=128, kv_dtype="bf16")


def profile(**header: object) -> OperatorProfile:
    sizes = [(tokens, 8192, 8192) for tokens in (1, 16, 256, 4096)]
    gemm = pl.DataFrame(sizes, schema=["tokens", "rows", "columns"], orient="row").with_columns(
        pl.lit("bf16").alias("dtype"), (5e-6 + pl.col("tokens") * 2e-7).alias("seconds"), pl.int_range(2, 6).alias("row")
    )
    decodes = [(batch, context) for batch in (1, 8, 64) for context in (0, 1024, 8192)]
    decode = pl.DataFrame(decodes, schema=["batch", "context"], orient="row").with_columns(
        pl.lit("bf16").alias("kv_dtype"), pl.lit("bf16").alias("dtype"), pl.lit(128).alias("head_dim"), pl.lit(0).alias("window"),
        pl.lit(2).alias("kv_heads"), pl.lit(8).alias("heads"), pl.int_range(2, 11).alias("row"),
        (4e-6 + pl.col("batch") * pl.col("context") * 1024 / 2e12).alias("seconds"),
    )  # fmt: skip
    parts = {"gemm": gemm, "decode_attention": decode}
    fields = {"gpu": "h100-sxm", "engine": "vllm 0.24", "source": "a test", "models": ("m",), "tp": (4,), "block_size": 16}
    return gather(Header(VERSION, **(fields | header)), parts, dict.fromkeys(parts, "t"))  # type: ignore[arg-type]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "h100.profile.parquet"
    save(profile(), path)
    again = load(path)
    assert again.header == profile().header
    assert again.num_rows == 13
    assert is_operator_profile(path)
    before, after, told = profile().source(), again.source(), []
    assert after.name == "measured (h100-sxm, vllm 0.24)"
    for asked in (before.gemm(100, 8192, 8192, "bf16"), after.gemm(100, 8192, 8192, "bf16")):
        assert asked is not None
        told.append((asked.seconds, asked.provenance, asked.spread))
    assert told[0] == told[1]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_source_says_how_it_knows() -> None:
    source = profile().source()
    for tokens, how in ((16, Provenance.MEASURED), (17, Provenance.INTERPOLATED), (5000, Provenance.EXTRAPOLATED)):
        estimate = source.gemm(tokens, 8192, 8192, "fp16")  # as bf16
        assert estimate is not None
        assert estimate.provenance is how
        assert estimate.seconds == pytest.approx(5e-6 + tokens * 2e-7, rel=0.05)
    assert source.gemm(1, 8192, 8192, "fp8") is None
    assert source.all_reduce(1 << 20, 8) is None
    assert source.prefill_attention(16, 0, SHAPE) is None


def test_attention_of_another_kind_is_read_off_the_nearest_one() -> None:
    source = profile().source()
    known = source.decode_attention(8, 1024, SHAPE)
    halved = source.decode_attention(8, 1024, AttentionShape(8, 2, 64, "bf16"))
    windowed = source.decode_attention(8, 8192, AttentionShape(8, 2, 128, "bf16", window=1024))
    assert known is not None
    assert halved is not None
    assert windowed is not None
    assert known.provenance is Provenance.MEASURED
    assert halved.provenance is Provenance.EXTRAPOLATED
    assert known.seconds / 2 < halved.seconds < known.seconds
    assert windowed.seconds == pytest.approx(known.seconds, rel=0.1)
    assert source.decode_attention(8, 1024, AttentionShape(8, 1, 192, "bf16", kind="mla", kv_rank=512, rope_dim=64)) is None


@pytest.mark.parametrize(
    ("gpu", "tp", "block_size", "what"),
    [
        ("a100-80g", 4, 16, "was measured on h100-sxm, not on a100-80g; set cluster.gpu"),
        ("h100-sxm", 8, 16, "was measured for a TP of 4, not 8; set replica.tp"),
        ("h100-sxm", 4, 32, "KV blocks of 16 tokens, not 32; set replica.block_size = 16"),
    ],
)
def test_a_profile_of_something_else_is_refused(gpu: str, tp: int, block_size: int, what: str) -> None:
    with pytest.raises(ProfileError, match=what):
        profile().check("p", resolve_gpu(gpu), tp, block_size)


def test_a_machines_cpu_and_a_gpu_are_not_taken_for_each_other() -> None:
    with pytest.raises(ProfileError, match="was measured on cpu, not on h100-sxm"):
        profile(gpu="cpu").check("p", resolve_gpu("h100-sxm"), 4, 16)
    with pytest.raises(ProfileError, match="was measured on h100-sxm, not on cpu"):
        profile().check("p", replace(resolve_gpu("h100-sxm"), name="cpu"), 4, 16)


def test_a_profile_of_another_model_is_refused_unless_its_shapes_are_the_same() -> None:
    llama = resolve_model("llama-3.1-8b")
    with pytest.raises(ProfileError, match=r"for m, not for .*8B, whose self_attn.qkv_proj of 4096 x 6144 is not in it"):
        profile().check_model("p", llama, Layout())
    profile(models=(llama.name,)).check_model("p", llama, Layout())
    profile(models=("somebody/Llama-3.1-8B",)).check_model("p", llama, Layout())
    profile(models=()).check_model("p", llama, Layout())
    shapes = [(op.rows, op.columns) for op in stages(llama, Layout())[0].tokens if isinstance(op, Product)]
    same = OperatorProfile(profile().header, {"gemm": pl.DataFrame(shapes, schema=["rows", "columns"], orient="row")})
    same.check_model("p", replace(llama, name="derived"), Layout())


def test_kernels_of_one_kind_have_rows_of_their_own_and_the_others_share_some() -> None:
    def rows(each: float) -> pl.DataFrame:
        sizes = pl.DataFrame({"bytes": [1000, 100_000, 10_000_000], "row": [1, 2, 3]})
        return sizes.with_columns((1e-6 + pl.col("bytes") * each).alias("seconds"))

    source = gather(
        profile().header, {"norm": rows(2e-10), "elementwise": rows(1e-10)}, {"norm": "t", "elementwise": "t"}
    ).source()
    norm, other = source.elementwise(100_000, "norm"), source.elementwise(100_000, "rotary")
    assert norm is not None
    assert other is not None
    assert norm.seconds == pytest.approx(21e-6)
    assert other.seconds == pytest.approx(11e-6)


def test_what_a_step_costs_beside_its_operators_goes_with_the_profile(tmp_path: Path) -> None:
    save(profile(step_s=0.003), tmp_path / "p.parquet")
    assert load(tmp_path / "p.parquet").source().step_s == 0.003
    assert profile().source().step_s is None


def test_files_that_are_no_profile_are_named(tmp_path: Path) -> None:
    plain, text = tmp_path / "plain.parquet", tmp_path / "text.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(plain)
    text.write_text("hello")
    for path, what in ((plain, "no operator profile"), (text, "not a Parquet file"), (tmp_path / "none", "no such file")):
        with pytest.raises(ProfileError, match=f"{path}: .*{what}"):
            load(path)


def test_a_profile_without_a_column_says_so(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    save(profile(), path)
    header = pl.read_parquet_metadata(path)[KEY]
    pl.read_parquet(path).drop("columns").write_parquet(path, metadata={KEY: header})
    with pytest.raises(ProfileError, match="has no column 'columns', which gemm needs"):
        load(path)
    pl.read_parquet(path).write_parquet(path, metadata={KEY: header.replace('"version":1', '"version":9')})
    with pytest.raises(ProfileError, match="is of version 9, this squall reads version 1"):
        load(path)
