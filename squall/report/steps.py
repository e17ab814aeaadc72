"""Steps one by one: from the stretches that a simulation was observed in to columns, a file and sums over them.

Knows the columns of `core.metrics.STRETCH`. Does not know what a step is good for, nor who decoded in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from squall.core.metrics import STRETCH, Observed
from squall.report.sample import Int64s

if TYPE_CHECKING:
    import polars

ROWS_AT_ONCE = 1 << 20
"""Steps that are in memory together while a file is written: some hundred megabytes."""

COLUMNS = (
    "replica", "stage", "run", "started_at", "duration", "num_decodes", "decode_context", "num_prefills", "num_prefill_tokens",
    "prefill_context", "kv_blocks",
)  # fmt: skip
WIDE = ("started_at", "duration", "decode_context", "prefill_context", "run")
"""Of `steps.parquet`; those of `WIDE` in 64 bits, the others in 32."""

Columns = dict[str, Int64s]


class Stretches:
    """The stretches of an observed run, column by column.

    Args:
        observed: what was seen.

    Attributes:
        columns: an array for each name in `STRETCH`.
        num_steps: steps in all; one that passes several stages counts once a stage.
    """

    def __init__(self, observed: Observed) -> None:
        table = np.frombuffer(observed.stretches, dtype=np.int64).reshape(-1, len(STRETCH))
        self.columns: Columns = {name: table[:, i] for i, name in enumerate(STRETCH)}
        self.num_steps = int(self.columns["count"].sum())
        self._block_size = observed.block_size
        growths = np.frombuffer(observed.growths, dtype=np.int64).reshape(-1, observed.block_size)
        self._grown = np.concatenate((np.zeros((len(growths), 1), np.int64), np.cumsum(growths, axis=1)), axis=1)

    def __len__(self) -> int:
        return len(self.columns["count"])

    def steps(self, rows_at_once: int = ROWS_AT_ONCE) -> Iterator[Columns]:
        """Every step as a row, in the order of the stretches, in pieces of about so many rows (never less than a stretch).

        The columns are those of docs/metrics.md; instants and durations in nanoseconds.
        """
        ends = np.cumsum(self.columns["count"])
        begin = 0
        while begin < len(self):
            before = ends[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + rows_at_once, side="right")))
            yield self._expand({name: column[begin:end] for name, column in self.columns.items()})
            begin = end

    def _expand(self, part: Columns) -> Columns:
        counts = part["count"]
        firsts = np.cumsum(counts) - counts  # the row of each stretch's first step
        row = {name: np.repeat(column, counts) for name, column in part.items()}
        within = np.arange(len(row["run"])) - np.repeat(firsts, counts)
        duration = (row["first"] + within * row["increment"]) >> 4
        ends = np.cumsum(duration)
        started = row["started_at"] + ends - duration - np.repeat(ends[firsts] - duration[firsts], counts)
        step = within + row["offset"]  # of its run
        return {
            "replica": row["replica"],
            "stage": row["stage"],
            "run": row["run"],
            "started_at": started,
            "duration": duration,
            "num_decodes": row["num_decodes"],
            "decode_context": row["decode_context"] + step * row["num_decodes"],
            "num_prefills": row["num_prefills"],
            "num_prefill_tokens": row["num_prefill_tokens"],
            "prefill_context": row["prefill_context"] + step * row["num_prefill_tokens"],
            "kv_blocks": row["kv_blocks"] + self._taken(row, step),
        }

    def _taken(self, row: Columns, step: Int64s) -> Int64s:
        """Blocks that the steps of a run before this one took: its decodes' in cycles, its chunk's as it grows."""
        if not len(self._grown):
            return np.zeros_like(step)
        size = self._block_size
        which = np.maximum(row["growth"], 0)
        cycles, rest = np.divmod(step, size)
        decodes = cycles * self._grown[which, -1] + self._grown[which, rest]
        before, least = row["prefill_context"], row["reserved"]
        after = before + step * row["num_prefill_tokens"]
        chunk = np.maximum(-(-after // size), least) - np.maximum(-(-before // size), least)
        return np.where(row["growth"] >= 0, decodes + chunk, 0)

    # -- sums over whole stretches, which need no step written out

    def durations(self) -> Int64s:
        """How long each stretch lasted, in nanoseconds."""
        c = self.columns
        return total(c["count"], c["first"], c["increment"])


def total(count: Int64s, first: Int64s, increment: Int64s) -> Int64s:
    """How long `count` steps last together, exactly as `perf.progressions.total` says, for arrays."""
    exact = count * first + increment * (count * (count - 1) // 2)
    lost = np.zeros_like(exact)
    lost_by_16 = np.zeros_like(exact)  # rounding takes the same again every 16 steps
    rest = count % 16
    for j in range(16):
        remainder = (first + j * increment) & 15
        lost_by_16 += remainder
        lost += np.where(j < rest, remainder, 0)
    sums: Int64s = (exact - lost - count // 16 * lost_by_16) >> 4
    return sums


def write_steps(stretches: Stretches, path: Path) -> None:
    """Write `steps.parquet`: a row a step, without ever holding all of them."""
    import polars as pl
    from polars.io.plugins import register_io_source

    schema = {name: pl.Int64() if name in WIDE else pl.Int32() for name in COLUMNS}

    def pieces(*_: object) -> Iterator[polars.DataFrame]:
        """It is never asked for less than all of its rows and columns."""
        for columns in stretches.steps():
            yield pl.DataFrame(columns).cast(schema)  # type: ignore[arg-type]

    register_io_source(pieces, schema=schema).sink_parquet(path)
