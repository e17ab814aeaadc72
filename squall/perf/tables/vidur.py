"""Vidur's CSV tables as an operator profile: matrix products, attention and collectives, by their columns (times in ms, medians).

Knows Vidur's column names and units (microsoft/vidur, MIT) and none of its code. A file is known by its columns, not by its name.
Element-wise operators become kernels of so many bytes, each kind by itself: 2 bytes a value, each value read and written once.
"""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from squall.errors import ProfileError
from squall.perf.hardware import Gpu
from squall.perf.operators import Kernel
from squall.perf.tables.checks import ROW, numbered
from squall.perf.tables.operations import NO_WINDOW, OPERATIONS
from squall.perf.tables.profile import VERSION, Header, OperatorProfile, gather
from squall.perf.tables.reading import MILLI, numbers, pick, read_table, tables_in

_MLP = "time_stats.mlp_up_proj.median"
_ATTENTION = "time_stats.attn_decode.median"
_SHAPES = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens", "num_tensor_parallel_workers")
_ATTENTION_SHAPES = (
    "n_embd", "n_q_head", "n_kv_head", "block_size", "num_tensor_parallel_workers", "batch_size", "prefill_chunk_size",
    "kv_cache_size",
)  # fmt: skip
_KERNELS: dict[Kernel, tuple[tuple[str, ...], ...]] = {
    "norm": (("input_layernorm", "add"), ("post_attention_layernorm", "add")), "rotary": (("attn_rope",),),
    "activation": (("mlp_act",),), "embedding": (("emb",),),
}  # fmt: skip
"""Columns of each kind. Norms are told with the addition to the residual, where that was measured: engines run the two as one."""

_NETWORK = ("num_workers", "size", "devices_per_node")


def read_vidur(path: Path, gpu: Gpu | None = None, models: Sequence[str] = ()) -> OperatorProfile:
    """The profile that a file or a folder of Vidur's holds. Raises ProfileError naming file, row or column.

    Args:
        gpu: what it was measured on.
        models: whose shapes these are, for the header; Vidur says so in the names of its folders only.
    """
    parts: dict[str, list[pl.DataFrame]] = {}
    files: dict[str, list[str]] = {}
    tps: set[int] = set()
    blocks: set[int] = set()
    for file in tables_in(path):
        frame = read_table(file, ())
        for name, rows in _operators(file, frame):
            if name not in _KERNELS:  # those are of one size each, which is settled over all files
                numbered(OPERATIONS[name], rows, str(file))
            parts.setdefault(name, []).append(rows)
            if str(file) not in files.setdefault(name, []):
                files[name].append(str(file))
        if "num_tensor_parallel_workers" in frame.columns:
            tps |= set(frame["num_tensor_parallel_workers"].cast(pl.Int64).to_list())
        if "block_size" in frame.columns:
            blocks |= set(frame["block_size"].cast(pl.Int64).to_list())
    if len(blocks) > 1:
        raise ProfileError(f"{path}: block_size is {' and '.join(map(str, sorted(blocks)))}; import one block size at a time")
    header = Header(
        VERSION, gpu.name if gpu else "unknown", "vidur", f"Vidur profile {path.name}", tuple(models), tuple(sorted(tps)),
        min(blocks, default=None),
    )  # fmt: skip
    together = {name: pl.concat(rows) for name, rows in parts.items()}
    together |= {kind: typical(together[kind]) for kind in _KERNELS if kind in together}
    return gather(header, together, {name: ", ".join(several) for name, several in files.items()}, gpu)


def _operators(file: Path, frame: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    if _MLP in frame.columns:
        return _dense(file, frame)
    if _ATTENTION in frame.columns:
        return _attention(file, frame)
    for collective, operator in (("all_reduce", "all_reduce"), ("send_recv", "send")):
        if f"time_stats.{collective}.median" in frame.columns:
            return [(operator, _network(file, frame, collective))]
    known = ", ".join((_MLP, _ATTENTION, "time_stats.all_reduce.median", "time_stats.send_recv.median"))
    raise ProfileError(f"{file}: is no table of Vidur's: it has none of the columns {known}")


def _needed(file: Path, frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    for column in columns:
        if column not in frame.columns:
            raise ProfileError(f"{file}: has no column {column!r}")
    return frame


def _dense(file: Path, frame: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    """Matrix products and element-wise operators of each TP degree's share."""
    products = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    frame = _needed(file, frame, (*_SHAPES, *(f"time_stats.{name}.median" for name in products)))
    tp, hidden, tokens = pl.col("num_tensor_parallel_workers"), pl.col("n_embd"), pl.col("num_tokens")
    head_dim = hidden // pl.col("n_head")
    kv_heads = pl.max_horizontal(pl.col("n_kv_head") // tp, 1)
    gates = 1 + pl.col("use_gated_mlp").cast(pl.Int64)
    queries, inner = hidden // tp, pl.col("n_expanded_embd") // tp
    shapes = {
        "attn_pre_proj": (hidden, queries + 2 * kv_heads * head_dim), "attn_post_proj": (queries, hidden),
        "mlp_up_proj": (hidden, gates * inner), "mlp_down_proj": (inner, hidden),
    }  # fmt: skip
    gemms = [
        pick(numbers(file, frame, [column]), {"dtype": "bf16", "rows": rows, "columns": columns, "tokens": tokens}, _ms(column))
        for name, (rows, columns) in shapes.items()
        for column in (f"time_stats.{name}.median",)
    ]
    values = {
        "input_layernorm": 2 * hidden, "post_attention_layernorm": 2 * hidden, "add": 3 * hidden, "emb": 2 * hidden,
        "attn_rope": 2 * (queries + kv_heads * head_dim), "mlp_act": (gates + 1) * inner,
    }  # fmt: skip
    kernels: list[tuple[str, pl.DataFrame]] = []
    for kind, names in ((kind, names) for kind, several in _KERNELS.items() for names in several):
        measured = [name for name in names if f"time_stats.{name}.median" in frame.columns]
        if names[0] in measured:
            some = numbers(file, frame, [f"time_stats.{name}.median" for name in measured])
            time = pl.sum_horizontal((_ms(f"time_stats.{name}.median") for name in measured), ignore_nulls=False)
            moved = pl.sum_horizontal(values[name] for name in measured)
            kernels.append((kind, pick(some.filter(time.is_not_null()), {"bytes": 2 * moved * tokens}, time)))
    return [("gemm", pl.concat(gemms)), *((kind, rows) for kind, rows in kernels if not rows.is_empty())]


def _attention(file: Path, frame: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    columns = [f"time_stats.{name}.median" for name in ("attn_prefill", "attn_decode")]
    frame = numbers(file, _needed(file, frame, (*_ATTENTION_SHAPES, *columns)), columns)
    tp = pl.col("num_tensor_parallel_workers")
    shape: dict[str, pl.Expr | int | str] = {
        "head_dim": pl.col("n_embd") // pl.col("n_q_head"), "window": NO_WINDOW, "kv_dtype": "bf16", "dtype": "bf16",
        "kv_heads": pl.max_horizontal(pl.col("n_kv_head") // tp, 1), "heads": pl.col("n_q_head") // tp,
    }  # fmt: skip
    prefills = frame.filter((pl.col("prefill_chunk_size") > 0) & (pl.col("batch_size") == 1))
    decodes = frame.filter(pl.col("prefill_chunk_size") == 0)
    before: dict[str, pl.Expr | int | str] = {"chunk": pl.col("prefill_chunk_size"), "before": pl.col("kv_cache_size")}
    context: dict[str, pl.Expr | int | str] = {"batch": pl.col("batch_size"), "context": pl.col("kv_cache_size")}
    found = []
    if not prefills.is_empty():
        found.append(("prefill_attention", pick(prefills, shape | before, _ms(columns[0]))))
    if not decodes.is_empty():
        found.append(("decode_attention", pick(decodes, shape | context, _ms(columns[1]))))
    return found


def _network(file: Path, frame: pl.DataFrame, collective: str) -> pl.DataFrame:
    """Of GPUs in one node; a transfer between stages is one GPU's."""
    column = f"time_stats.{collective}.median"
    frame = numbers(file, _needed(file, frame, (*_NETWORK, column)), [column])
    inside = frame.filter(pl.col("num_workers") == pl.col("devices_per_node"))
    if inside.is_empty():
        raise ProfileError(f"{file}: no row has num_workers equal to devices_per_node; {collective} inside one node is needed")
    gpus: pl.Expr | int = pl.col("num_workers") if collective == "all_reduce" else 1
    return pick(inside, {"gpus": gpus, "bytes": pl.col("size")}, _ms(column))


def typical(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels of a kind that move as many bytes, as one: the median of their times."""
    return kernels.group_by("bytes", maintain_order=True).agg(pl.col("seconds").median(), pl.col(ROW).first())


def _ms(column: str) -> pl.Expr:
    return pl.col(column) * MILLI
