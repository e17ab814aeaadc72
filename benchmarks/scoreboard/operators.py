"""How well operator times are told from half of the measured points: Vidur's profiles, interpolation and forest.

Each operator is learned by itself, as Vidur does it: element-wise ones of one width from their own points, not from all kernels
that move as many bytes. Points that were measured twice count once.
"""

import time
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl

from benchmarks.scoreboard.rows import Row, spread_rows
from squall.perf.operators import Kernel
from squall.perf.tables.forest import ForestCurve
from squall.perf.tables.operations import OPERATIONS
from squall.perf.tables.profile import VERSION, Header, OperatorProfile
from squall.perf.tables.table import Curve, OperatorTable
from squall.perf.tables.vidur import read_vidur

PLACES = ("a100", "h100", "network/a100_dgx_all_reduce.csv.gz", "network/h100_dgx_all_reduce.csv.gz")
GOALS = {"interpolation": 1.0, "forest": 10.0}
"""Seconds of training."""


class Learned:
    """Errors of the points that were held out, whether each lay inside its interval, and CPU seconds of training."""

    def __init__(self) -> None:
        self.off: list[float] = []
        self.inside: list[bool] = []
        self.seconds = 0.0

    def add(self, profile: OperatorProfile, curve: type[Curve], every: int) -> None:
        for name, rows in profile.rows.items():
            half = np.random.default_rng(0).permutation(len(rows)) < len(rows) // 2
            table = OperatorTable(OPERATIONS[name], rows.filter(half), curve)
            columns = OPERATIONS[name].columns
            kinds = len(OPERATIONS[name].kinds)
            began = time.process_time()
            asked = [row[:-1] for row in rows.filter(~half).select(*columns, "seconds").gather_every(every).iter_rows()]
            for made in table.curves.values():
                made.estimate(made.points[0][0])
                if isinstance(made, Curve) and curve is Curve:
                    _ = made.spreads
            self.seconds += time.process_time() - began
            truth = rows.filter(~half)["seconds"].gather_every(every).to_list()
            for row, seconds in zip(asked, truth, strict=True):
                estimate = table.estimate(row[:kinds], row[kinds:])
                if estimate is not None:
                    self.off.append(100 * abs(estimate.seconds / seconds - 1))
                    self.inside.append(
                        estimate.seconds / (1 + estimate.spread) <= seconds <= estimate.seconds * (1 + estimate.spread)
                    )


def compare(shared: Path, every: int = 1) -> list[Row]:
    """The lines of the scoreboard; `every` leaves out held-out points."""
    profiles = [read_vidur(shared / "data" / "vidur_profiles" / place) for place in PLACES]
    profiles = [
        OperatorProfile(p.header, {name: rows for name, rows in p.rows.items() if name not in get_args(Kernel)}) for p in profiles
    ]
    profiles += passes(shared)
    rows: list[Row] = []
    for name, curve in (("interpolation", Curve), ("forest", ForestCurve)):
        learned = Learned()
        for profile in profiles:
            learned.add(profile, curve, every)
        setup = f"Vidur's profiles, {name}, half of the points"
        rows += spread_rows(f"vidur.{name}", "operator time", setup, np.array(learned.off), 1.5, 10.0)
        count = len(learned.off)
        rows.append(
            Row(
                f"vidur.{name}.coverage",
                "held-out points inside the 90 % interval",
                setup,
                count,
                100 * float(np.mean(learned.inside)),
                88.0,
                "% inside",
            )
        )
        rows.append(Row(f"vidur.{name}.seconds", "training", setup, count, learned.seconds, GOALS[name], "CPU s"))
    return rows


def passes(shared: Path) -> list[OperatorProfile]:
    """Each element-wise operator of each table at TP 1, a profile of its own."""
    found = []
    for file in sorted((shared / "data" / "vidur_profiles").glob("*/*_mlp.csv.gz")):
        frame = pl.read_csv(file).filter(pl.col("num_tensor_parallel_workers") == 1)
        for name in ("input_layernorm", "post_attention_layernorm", "add", "attn_rope", "mlp_act", "emb"):
            rows = frame.select(
                (4 * pl.col("n_embd") * pl.col("num_tokens")).alias("bytes"),
                (pl.col(f"time_stats.{name}.median") / 1e3).alias("seconds"),
            )
            rows = rows.group_by("bytes", maintain_order=True).agg(pl.col("seconds").median()).sort("bytes")
            found.append(OperatorProfile(Header(VERSION, "", "", ""), {"elementwise": rows}))
    return found


def beyond(shared: Path) -> list[Row]:
    """Products of twice to eight times as many tokens as any that was learned from: never flat, never below."""
    rows = read_vidur(shared / "data" / "vidur_profiles" / "a100").rows["gemm"]
    few = OperatorTable(OPERATIONS["gemm"], rows.filter(pl.col("tokens") <= 512))
    far = rows.filter(pl.col("tokens") >= 1024)
    off = []
    for dtype, *sizes, seconds in far.select("dtype", "rows", "columns", "tokens", "seconds").iter_rows():
        estimate = few.estimate((dtype,), sizes)
        assert estimate is not None
        off.append(100 * abs(estimate.seconds / seconds - 1))
    return [
        Row(
            "vidur.beyond.median",
            "operator time, median error",
            "Vidur's A100 products of 1024 to 4096 tokens, from up to 512",
            len(off),
            float(np.median(off)),
        )
    ]
