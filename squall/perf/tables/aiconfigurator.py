"""NVIDIA aiconfigurator's operator tables as a profile: matrix products, attention, experts and collectives (times in ms).

Knows that project's file and column names (ai-dynamo/aiconfigurator, Apache-2.0) and none of its code. Its message sizes count
values, not bytes: an all-reduce of 2^29 of them in 4.5 ms on four H100s is 350 GB/s for 16-bit values, and would be half of what
these links are known to reach if they were bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import polars as pl

from squall.errors import ProfileError
from squall.perf.dtypes import DTYPE_BYTES
from squall.perf.hardware import Gpu
from squall.perf.tables.checks import ROW
from squall.perf.tables.profile import VERSION, Header, OperatorProfile, gather
from squall.perf.tables.reading import MILLI, numbers, pick, read_table

SYSTEMS = {
    "a100-80g": "a100_sxm", "a100-80g-pcie": "a100_pcie", "h100-sxm": "h100_sxm", "h100-pcie": "h100_pcie", "h200": "h200_sxm",
    "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200", "gb300": "gb300", "l40s": "l40s", "l4": "l4",
    "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
"""Its names of our GPUs."""

_DTYPES = {
    "bfloat16": "bf16", "float16": "bf16", "half": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4",
    "int8_wo": "int8", "int4_wo": "int4", "w4a16_mxfp4": "mxfp4",
}  # fmt: skip
_HEADS = ("num_heads", "num_key_value_heads", "head_dim", "attn_dtype", "kv_cache_dtype", "batch_size", "isl", "step")
_NCCL = {"all_gather": "all_gather", "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all"}
_SHAPE = {"head_dim": pl.col("head_dim"), "kv_heads": pl.col("num_key_value_heads"), "heads": pl.col("num_heads")}

_MLA_HEADS = ("num_heads", "mla_dtype", "kv_cache_dtype", "batch_size", "isl", "step")
_LATENT = {"head_dim": 192, "value_dim": 128, "kv_rank": 512, "rope_dim": 64}
"""DeepSeek's, the only latent attention that its tables hold."""

FILES = {
    "gemm_perf": ("gemm_dtype", "m", "n", "k"),
    "context_attention_perf": _HEADS,
    "generation_attention_perf": _HEADS,
    "context_mla_perf": _MLA_HEADS,
    "generation_mla_perf": _MLA_HEADS,
    "custom_allreduce_perf": ("allreduce_dtype", "num_gpus", "message_size"),
    "nccl_perf": ("op_name", "nccl_dtype", "num_gpus", "message_size"),
    "moe_perf": (
        "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
        "distribution",
    ),
}  # fmt: skip
"""The end of a table's name, and the columns that it needs beside `latency`."""


def read_aiconfigurator(files: Iterable[Path], gpu: Gpu | None = None, engine: str = "", place: str = "") -> OperatorProfile:
    """The profile that some of its tables make; files of other names are passed over.

    Args:
        files: of one GPU and one engine.
        gpu: what they were measured on.
        engine, place: for the header.

    Raises ProfileError naming file, row or column.
    """
    parts: dict[str, pl.DataFrame] = {}
    places: dict[str, str] = {}
    devices: set[str] = set()
    for file in sorted(files, key=lambda file: "nccl" in file.name):  # an engine's own all-reduce goes before NCCL's
        kind = table_kind(file)
        if kind is None:
            continue
        frame = numbers(file, read_table(file, (*FILES[kind], "latency")), ["latency"])
        if "device" in frame.columns:
            devices |= set(frame["device"].unique().to_list())
        for name, rows in _READERS[kind](frame).items():
            if name not in parts and not rows.is_empty():
                parts[name], places[name] = rows, str(file)
    if not parts:
        raise ProfileError(f"{place or 'aiconfigurator'}: holds none of the tables {', '.join(FILES)}")
    if len(devices) > 1:
        raise ProfileError(f"{place}: the tables are of {' and '.join(sorted(devices))}; import one GPU at a time (--gpu)")
    source = f"NVIDIA aiconfigurator (Apache-2.0), {place}".removesuffix(", ")
    header = Header(VERSION, gpu.name if gpu else min(devices, default="unknown"), engine or "unknown", source)
    return gather(header, parts, places, gpu)


def table_kind(file: Path) -> str | None:
    """Which of `FILES` a file is."""
    name = file.name.partition(".csv")[0].removesuffix(".parquet")
    return next((kind for kind in FILES if name == kind or name.endswith(f"__{kind}")), None)


def of_system(files: Sequence[Path], gpu: Gpu | None) -> list[Path]:
    """Those of one GPU, where names or folders tell systems apart."""
    system = SYSTEMS.get(gpu.name) if gpu is not None else None
    return [file for file in files if system in file.parts or f"{system}__" in file.name] or list(files)


def _gemm(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    columns = {"dtype": _dtype("gemm_dtype"), "rows": pl.col("k"), "columns": pl.col("n"), "tokens": pl.col("m")}
    return {"gemm": pick(frame, columns, _ms()).filter(pl.col("dtype") != "")}


def _attention(frame: pl.DataFrame, name: str, sizes: Mapping[str, pl.Expr | int | str]) -> dict[str, pl.DataFrame]:
    window = pl.col("window_size") if "window_size" in frame.columns else pl.lit(0)
    kinds = {"window": window, "kv_dtype": _dtype("kv_cache_dtype"), "dtype": _dtype("attn_dtype")}
    known = [pl.col("kv_dtype") != "", pl.col("dtype") != ""]
    return {name: _fastest(pick(frame, {**_SHAPE, **kinds, **sizes}, _ms()).filter(*known))}


def _context(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Prompts, one at a time."""
    sizes: dict[str, pl.Expr | int | str] = {"chunk": pl.col("isl"), "before": pl.col("step")}
    return _attention(frame.filter(pl.col("batch_size") == 1), "prefill_attention", sizes)


def _generation(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    sizes: dict[str, pl.Expr | int | str] = {"batch": pl.col("batch_size"), "context": pl.col("isl") + pl.col("step")}
    return _attention(frame, "decode_attention", sizes)


def _latent(frame: pl.DataFrame, name: str, sizes: Mapping[str, pl.Expr | int | str]) -> dict[str, pl.DataFrame]:
    kinds = {"kv_dtype": _dtype("kv_cache_dtype"), "dtype": _dtype("mla_dtype"), "heads": pl.col("num_heads")}
    known = [pl.col("kv_dtype") != "", pl.col("dtype") != ""]
    return {name: _fastest(pick(frame, {**_LATENT, **kinds, **sizes}, _ms()).filter(*known))}


def _latent_context(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    sizes: dict[str, pl.Expr | int | str] = {"chunk": pl.col("isl"), "before": pl.col("step")}
    return _latent(frame.filter(pl.col("batch_size") == 1), "latent_prefill", sizes)


def _latent_generation(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    sizes: dict[str, pl.Expr | int | str] = {"batch": pl.col("batch_size"), "context": pl.col("isl") + pl.col("step")}
    return _latent(frame, "latent_decode", sizes)


def _all_reduce(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """In a captured graph, where both ways were measured: engines decode in graphs."""
    if "backend" in frame.columns and frame["backend"].str.ends_with("_graph").any():
        frame = frame.filter(pl.col("backend").str.ends_with("_graph"))
    return {"all_reduce": _collective(frame, "allreduce_dtype")}


def _nccl(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    half = frame.filter(pl.col("nccl_dtype") == "half")
    return {ours: _collective(half.filter(pl.col("op_name") == theirs), "nccl_dtype") for theirs, ours in _NCCL.items()}


def _collective(frame: pl.DataFrame, dtype: str) -> pl.DataFrame:
    width = _dtype(dtype).replace_strict(DTYPE_BYTES, default=2.0, return_dtype=pl.Float64)
    bytes_ = (pl.col("message_size") * width).cast(pl.Int64)
    return pick(frame, {"gpus": pl.col("num_gpus"), "bytes": bytes_}, _ms())


def _moe(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """With tokens dealt out as unevenly as routers do (a power law with exponent 1.2), where that was measured."""
    for uneven in ("power_law_1.2", "power_law_1.01"):
        if (frame["distribution"] == uneven).any():
            frame = frame.filter(pl.col("distribution") == uneven)
            break
    kinds = {
        "dtype": "moe_dtype",
        "hidden": "hidden_size",
        "inter": "inter_size",
        "experts": "num_experts",
        "top_k": "topk",
    }
    sizes = {"ep": "moe_ep_size", "tp": "moe_tp_size", "tokens": "num_tokens"}
    columns: dict[str, pl.Expr | int | str] = {name: pl.col(theirs) for name, theirs in (kinds | sizes).items()}
    columns |= {"dtype": _dtype("moe_dtype")}
    rows = pick(frame, columns, _ms()).filter(pl.col("dtype") != "")
    return {"moe": _fastest(rows)}


_READERS = {
    "gemm_perf": _gemm, "context_attention_perf": _context, "generation_attention_perf": _generation,
    "context_mla_perf": _latent_context, "generation_mla_perf": _latent_generation,
    "custom_allreduce_perf": _all_reduce, "nccl_perf": _nccl, "moe_perf": _moe,
}  # fmt: skip


def _fastest(rows: pl.DataFrame) -> pl.DataFrame:
    """Of several kernels for one point an engine takes the fastest."""
    points = [name for name in rows.columns if name not in ("seconds", ROW)]
    return rows.sort("seconds").unique(points, keep="first", maintain_order=True)


def _dtype(column: str) -> pl.Expr:
    """Our word for a number type; empty for one that we have none for."""
    return pl.col(column).replace_strict(_DTYPES, default="", return_dtype=pl.String)


def _ms() -> pl.Expr:
    return pl.col("latency") * MILLI
