"""LLMServingSim's operator profile as one of ours: dense layers, attention, layers with a row a sequence (times in microseconds).

Knows that project's file and column names (casys-kaist/LLMServingSim, MIT) and none of its code. `meta.yaml` beside the tables
says which model, TP degrees and block size they belong to. `skew.csv`, attention to unequal contexts, is left out: a price knows
how long the contexts of a batch are together, not each of them.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import polars as pl
from msgspec import Struct

from squall.errors import ProfileError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import Gpu
from squall.perf.model import ModelSpec
from squall.perf.tables.operations import NO_WINDOW
from squall.perf.tables.profile import VERSION, Header, OperatorProfile, gather
from squall.perf.tables.reading import MICRO, numbers, pick, read_table

_Columns = Mapping[str, pl.Expr | int | str]


class Meta(Struct, frozen=True):
    """What `meta.yaml` says."""

    gpu: str
    engine: str
    model: str
    tp: int
    block_size: int | None


def read_llmservingsim(path: Path, gpu: Gpu | None = None, model: ModelSpec | None = None) -> OperatorProfile:
    """The profile in a folder of LLMServingSim's. Raises ProfileError naming file, row or column.

    Args:
        gpu: what it was measured on; by its meta.yaml when None.
        model: whose layers they are; by its meta.yaml, from the catalogue, when None. Its shapes are not in the tables.
    """
    meta = read_meta(path / "meta.yaml")
    spec = model or resolve_model(meta.model)
    spec.check_tp(meta.tp)
    parts, places = _dense(path / "dense.csv", spec, meta.tp)
    sequences, more = _per_sequence(path / "per_sequence.csv", spec, meta.tp)
    attention, others = _attention(path / "attention.csv", spec, meta.tp)
    parts = {**attention, **parts, **sequences, "gemm": pl.concat([parts["gemm"], sequences["gemm"]])}
    places = {**others, **more, **places}
    header = Header(
        VERSION, gpu.name if gpu else meta.gpu, meta.engine, f"LLMServingSim profile {path.name}", (spec.name,), (meta.tp,),
        meta.block_size,
    )  # fmt: skip
    return gather(header, parts, places, gpu)


def read_meta(path: Path) -> Meta:
    """The lines of `meta.yaml` that matter here; `key: value`, whatever the indentation."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}); it says which model and block size the tables are of") from None
    found = {key: value.strip("'\" ") for key, value in re.findall(r"^\s*([a-z_]+): *(\S.*)$", text, re.MULTILINE)}
    model = re.search(r"^model: *(\S+)", text, re.MULTILINE)
    degrees = re.search(r"tp_degrees: *\[?\s*(?:- *)?([\d, ]+)", text)
    if model is None or degrees is None:
        raise ProfileError(f"{path}: has no {'model' if model is None else 'tp_degrees'}; it must say whose layers were measured")
    several = [int(number) for number in re.findall(r"\d+", degrees[1])]
    if len(several) != 1:
        raise ProfileError(f"{path}: tp_degrees is {several}; import the folder of one degree at a time")
    block_size = found.get("block_size", "")
    gpu = found.get("hardware", "unknown").lower()
    engine = f"vllm {found.get('vllm_version', '')}".strip()
    return Meta(gpu, engine, model[1].strip("'\""), several[0], int(block_size) if block_size.isdecimal() else None)


def _dense(path: Path, spec: ModelSpec, tp: int) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    frame = _timed(path, ("layer", "tokens"))
    hidden, queries, kv, inner = _sizes(spec, tp)
    products = {
        "qkv_proj": (hidden, queries + 2 * kv), "o_proj": (queries, hidden), "gate_up_proj": (hidden, 2 * inner),
        "down_proj": (inner, hidden),
    }  # fmt: skip
    kernels = {
        "norm": ("layernorm", 4 * hidden),
        "rotary": ("rotary_emb", 2 * (queries + kv)),
        "activation": ("act_fn", 3 * inner),
    }
    gemms = [
        pick(_layer(path, frame, layer), {"dtype": "bf16", "rows": rows, "columns": columns, "tokens": pl.col("tokens")}, _us())
        for layer, (rows, columns) in products.items()
    ]
    parts = {
        kind: pick(_layer(path, frame, layer), {"bytes": 2 * values * pl.col("tokens")}, _us())
        for kind, (layer, values) in kernels.items()
    }
    parts["gemm"] = pl.concat(gemms)
    return parts, dict.fromkeys(parts, str(path))


def _per_sequence(path: Path, spec: ModelSpec, tp: int) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    """The head, which computes one row a sequence, and sampling."""
    frame = _timed(path, ("layer", "sequences"))
    rows = pl.col("sequences")
    head: _Columns = {"dtype": "bf16", "rows": spec.hidden_size, "columns": spec.vocab_size // tp, "tokens": rows}
    parts = {
        "gemm": pick(_layer(path, frame, "lm_head"), head, _us()),
        "sampling": pick(_layer(path, frame, "sampler"), {"rows": rows}, _us()),
    }
    return parts, dict.fromkeys(parts, str(path))


def _attention(path: Path, spec: ModelSpec, tp: int) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    frame = _timed(path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
    shape: _Columns = {
        "head_dim": spec.head_dim, "window": NO_WINDOW, "kv_dtype": "bf16", "dtype": "bf16",
        "kv_heads": spec.kv_heads_per_gpu(tp), "heads": spec.num_heads // tp,
    }  # fmt: skip
    chunk: _Columns = {"chunk": pl.col("prefill_chunk"), "before": pl.col("kv_prefill")}
    decodes: _Columns = {"batch": pl.col("n_decode"), "context": pl.col("kv_decode")}
    alone, none = pl.col("n_decode") == 0, pl.col("prefill_chunk") == 0
    parts = {
        "prefill_attention": pick(frame.filter(alone), {**shape, **chunk}, _us()),
        "decode_attention": pick(frame.filter(none), {**shape, **decodes}, _us()),
        "mixed_attention": pick(frame.filter(~alone & ~none), {**shape, **chunk, **decodes}, _us()),
    }
    return parts, dict.fromkeys(parts, str(path))


def _sizes(spec: ModelSpec, tp: int) -> tuple[int, int, int, int]:
    """Hidden size, and one GPU's queries, keys and MLP columns."""
    return spec.hidden_size, spec.q_size // tp, spec.kv_heads_per_gpu(tp) * spec.head_dim, spec.intermediate_size // tp


def _timed(path: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    return numbers(path, read_table(path, (*columns, "time_us")), ["time_us"])


def _layer(path: Path, frame: pl.DataFrame, layer: str) -> pl.DataFrame:
    rows = frame.filter(pl.col("layer") == layer)
    if rows.is_empty():
        known = ", ".join(sorted(set(frame["layer"].to_list())))
        raise ProfileError(f"{path}: has no row with layer {layer!r}; it has {known}")
    return rows


def _us() -> pl.Expr:
    return pl.col("time_us") * MICRO
