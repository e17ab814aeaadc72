"""What a table of measured times must be before anyone believes it: numbers, of the right unit, each once, growing with the work.

Knows no file format: importers give their rows the place that messages name. Every check raises ProfileError of one line: file,
row, what was wrong and what would be right.
"""

import polars as pl

from squall.errors import ProfileError
from squall.perf.hardware import Gpu
from squall.perf.tables.operations import OPERATIONS, Operation

ROW = "row"
"""The column with the line of the file that a row is from."""

_SAME = 1.5
"""Times of one point may differ by this factor; they are then one measurement repeated, of which the median is kept."""
_DIP = 3.0
"""A larger size may take less time, by another kernel; not less than a third."""
_STRAY = 0.02
"""Of a large table's points so many may break these two rules, and are settled (by the median) or left out: automatic
measurements have strays."""
_BEST = 0.99
"""Where the best rows begin; beyond lie strays."""
_RATES = {
    "gemm": (5e10, 5e16, 1e10, "FLOP/s"),
    "prefill_attention": (1e10, 5e16, 1e10, "FLOP/s"),
    "decode_attention": (2e9, 1e14, 1e8, "B/s"),
    "elementwise": (2e9, 1e14, 1e7, "B/s"),
    "all_reduce": (5e7, 1e13, 1e7, "B/s"),
}
"""What the best row of an operator reaches on any machine, least and most, if there is one of so much work."""


def checked(operation: Operation, rows: pl.DataFrame, place: str, gpu: Gpu | None = None, *, slow: bool = False) -> pl.DataFrame:
    """The rows of an operator, each point once.

    Args:
        rows: the operation's columns, `seconds` and `row`.
        place: the file, or files, for messages.
        gpu: what they were measured on, if known: its peaks tell milliseconds from microseconds better.
        slow: they are of a CPU, which may reach a hundredth of what the slowest GPU does.
    """
    if rows.is_empty():
        raise ProfileError(f"{place}: holds no row of {operation.name}; it should hold measured times")
    numbered(operation, rows, place)
    _unit(operation, rows, place, gpu, 0.01 if slow else 1.0)
    return _growing(operation, _once(operation, rows, place), place)


def numbered(operation: Operation, rows: pl.DataFrame, place: str) -> None:
    """Refuses times and sizes that are no numbers of the right kind."""
    seconds = pl.col("seconds")
    bad = rows.filter(seconds.is_null() | seconds.is_nan() | seconds.is_infinite() | (seconds <= 0))
    if not bad.is_empty():
        value = bad["seconds"][0]
        raise ProfileError(f"{place}: row {bad[ROW][0]}: the time of {operation.name} is {value}; it must be a number above 0")
    for name in operation.columns:
        if rows[name].null_count():
            at = rows.filter(pl.col(name).is_null())[ROW][0]
            raise ProfileError(f"{place}: row {at}: {name} is empty; {operation.name} needs it")
    for name in operation.sizes:
        bad = rows.filter(pl.col(name) < 0)
        if not bad.is_empty():
            raise ProfileError(f"{place}: row {bad[ROW][0]}: {name} is {bad[name][0]}; it must not be negative")


def _unit(operation: Operation, rows: pl.DataFrame, place: str, gpu: Gpu | None, share: float) -> None:
    """Whether the best row is as fast as a machine can be."""
    if operation.name not in _RATES:
        return
    least, most, enough, unit = _RATES[operation.name]
    if gpu is not None and unit == "FLOP/s":
        peaks = (gpu.flops, gpu.fp8_flops or 0.0, gpu.fp4_flops or 0.0, gpu.int8_flops or 0.0)
        least, most = 0.02 * gpu.flops, 1.5 * max(peaks)
    elif gpu is not None and operation.name == "decode_attention":
        least, most = 0.02 * gpu.bandwidth, 20 * gpu.bandwidth  # small caches are read from the L2 cache
    least *= share
    work = _work(operation, rows, 0 if unit == "FLOP/s" else 1)
    best = (work.filter(work >= enough) / rows["seconds"].filter(work >= enough)).quantile(_BEST)
    if best is None or least <= best <= most:
        return
    which, factor = ("short", "larger") if best > most else ("long", "smaller")
    raise ProfileError(
        f"{place}: {operation.name} would reach {best:.2g} {unit}, where {least:.2g} to {most:.2g} is possible: "
        f"its times are too {which}; are they in the unit that this format says, or a thousand times {factor}?"
    )


def _work(operation: Operation, rows: pl.DataFrame, which: int) -> pl.Series:
    """Arithmetic (0) or bytes (1) of every row."""
    numbered = rows.with_row_index("place")
    found = []
    for part in numbered.partition_by(operation.kinds) if operation.kinds else [numbered]:
        at = {name: part[name][0] for name in operation.kinds}
        at |= {name: part[name].to_numpy().astype(float) for name in operation.sizes}
        found.append(part.select("place", pl.Series("work", operation.law(at)[which], dtype=pl.Float64)))
    return pl.concat(found).sort("place")["work"]


def _once(operation: Operation, rows: pl.DataFrame, place: str) -> pl.DataFrame:
    seconds = pl.col("seconds")
    merged = (
        rows.group_by(operation.columns, maintain_order=True)
        .agg(seconds.median().alias("seconds"), (seconds.max() / seconds.min()).alias("apart"), pl.col(ROW))
        .sort(operation.columns)
    )
    bad = merged.filter(pl.col("apart") > _SAME)
    if len(bad) > _STRAY * len(merged):
        lines = ", ".join(str(row) for row in bad[ROW][0][:3])
        raise ProfileError(
            f"{place}: rows {lines} are the same {operation.name} ({_at(operation, bad)}), "
            f"but their times differ by a factor of {bad['apart'][0]:.1f}; keep the right one"
        )
    return merged.select(*operation.columns, "seconds", pl.col(ROW).list.first())


def _growing(operation: Operation, rows: pl.DataFrame, place: str) -> pl.DataFrame:
    """Without the rows that take several times as long as the next larger size; the rows are sorted."""
    *others, last = operation.columns
    same = pl.all_horizontal([pl.col(name) == pl.col(name).shift(-1) for name in others]) if others else pl.lit(value=True)
    following = rows.with_columns(
        pl.when(same).then(pl.col("seconds").shift(-1)).alias("after"), pl.col(last).shift(-1).alias("size"),
        pl.col(ROW).shift(-1).alias("next"),
    )  # fmt: skip
    stray = (pl.col("seconds") > _DIP * pl.col("after")).fill_null(value=False)
    bad = following.filter(stray)
    if len(bad) > _STRAY * len(rows):
        raise ProfileError(
            f"{place}: row {bad['next'][0]}: {operation.name} takes {bad['after'][0]:.3g} s at {last} {bad['size'][0]}, but "
            f"{bad['seconds'][0]:.3g} s at {bad[last][0]} (row {bad[ROW][0]}); more work does not take a third of the time: "
            "measure both again"
        )
    return following.filter(~stray).select(rows.columns)


def _at(operation: Operation, rows: pl.DataFrame) -> str:
    return ", ".join(f"{name} {rows[name][0]}" for name in operation.columns)


def known(name: str, place: str) -> Operation:
    """The operation of that name. Raises ProfileError."""
    if name not in OPERATIONS:
        raise ProfileError(f"{place}: operator {name!r} is unknown; known are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]
