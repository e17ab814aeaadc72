"""Operators of an observed simulation: on how much each kind worked, how often, and how long it took over the whole run.

Every step that was seen is asked of `perf.composed`, operator by operator; steps that are nearly alike are asked for once. Knows
no engine and no file. Where a step computes pieces of several prompts, only their sums are known: they are taken to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from squall.config import Config
from squall.core.actions import Chunk, RunSteps
from squall.core.metrics import Observed
from squall.perf.build import joined, operators_model
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.hardware import resolve_gpu
from squall.pools import alike
from squall.report.sample import Int64s
from squall.report.steps import Columns, Stretches

if TYPE_CHECKING:
    import polars

    from squall.report.deployed import Floats

MOST_SHAPES: Final = 2_000
"""Steps that are asked for: a second or so. Beyond, contexts are rounded more coarsely."""

FIRST_GRID: Final = 16  # tokens

Shape = tuple[int, int, int, int, int, int]
"""Decodes, the context of each, prompts, their tokens together, tokens before those of each, and prompts that end."""


def explainers(config: Config) -> list[Composed]:
    """What tells the operators of a step apart: of each of `[[fleet.pools]]`, or of all replicas.

    Raises:
        ConfigError: steps are priced as wholes, as a profile of this machine does.
    """
    found = []
    for part in alike(config):
        gpu, links = joined(resolve_gpu(part.cluster.gpu), part.cluster, part.replica.tp)
        found.append(operators_model(part.latency, resolve_model(part.model.name), gpu, part.replica, links))
    return found


def operators(observed: Observed, config: Config, asked: Sequence[Composed]) -> polars.DataFrame:
    """A row for each pool, stage and operator; the columns are those of docs/metrics.md."""
    import polars as pl

    columns = Stretches(observed).columns
    columns = {name: column[columns["stage"] == 0] for name, column in columns.items()}  # `explain` tells all stages
    rows = []
    first = 0
    for pool, (part, composed) in enumerate(zip(alike(config), asked, strict=True)):
        last = first + part.fleet.num_maximum
        its = (columns["replica"] >= first) & (columns["replica"] < last)
        rows += _pool(pool, {name: column[its] for name, column in columns.items()}, composed)
        first = last
    names = ("pool", "stage", "operator", "kind", "steps", "calls", "size_mean", "size_max", "seconds", "provenance")
    return pl.DataFrame(rows, schema=names, orient="row")


def _pool(pool: int, columns: Columns, composed: Composed) -> list[tuple[object, ...]]:
    sums: dict[tuple[int, str], list[float]] = {}
    told: dict[tuple[int, str], tuple[str, str]] = {}
    for shape, steps in _shapes(columns).items():
        seen = set()
        for line in composed.explain(_run(shape)):
            key = line.stage, line.operator
            told[key] = line.kind, line.provenance.value
            found = sums.setdefault(key, [0, 0, 0, 0, 0.0])
            found[0] += 0 if key in seen else steps  # a line for each kind of layer
            seen.add(key)
            found[1] += steps * line.count
            found[2] += steps * line.count * line.size
            found[3] = max(found[3], line.size)
            found[4] += steps * line.seconds
    return [
        (pool, stage, operator, told[stage, operator][0], int(steps), int(calls), total / max(1, calls), int(most), seconds,
         told[stage, operator][1])
        for (stage, operator), (steps, calls, total, most, seconds) in sums.items()
    ]  # fmt: skip


def _run(shape: Shape) -> RunSteps:
    decodes, context, prompts, tokens, before, ending = shape
    pieces = [tokens // prompts + (i < tokens % prompts) for i in range(prompts)]
    chunks = tuple(Chunk(i, before, piece, 0, i < ending) for i, piece in enumerate(pieces) if piece)
    return RunSteps(0, 1, decodes, decodes * context, chunks)


def _shapes(columns: Columns) -> dict[Shape, int]:
    """How many steps there were of each shape. A stretch counts with the contexts of its middle step."""
    decodes, prompts = columns["num_decodes"], columns["num_prefills"]
    middle = columns["offset"] + (columns["count"] - 1) / 2
    context = columns["decode_context"] / np.maximum(decodes, 1) + middle
    tokens = columns["num_prefill_tokens"] / np.maximum(prompts, 1)
    # such equal pieces as have the same pairs of tokens that attend to each other
    pairs = columns["prefill_pairs"] + middle * columns["num_prefill_tokens"] ** 2
    before = np.maximum(pairs / np.maximum(columns["num_prefill_tokens"], 1) - (tokens + 1) / 2, 0)
    ending = columns["num_logits"] - decodes
    grid = FIRST_GRID
    while True:
        keys = np.stack(
            (
                decodes, np.where(decodes, _rounded(context, grid), 0), prompts,
                _rounded(columns["num_prefill_tokens"], grid // FIRST_GRID),
                np.where(prompts, _rounded(before, grid), 0), ending,
            ),
            axis=1,
        ).astype(np.int64)  # fmt: skip
        shapes, which = np.unique(keys, axis=0, return_inverse=True)
        if len(shapes) <= MOST_SHAPES or grid > 1 << 20:
            break
        grid *= 2
    steps: Int64s = np.bincount(which.reshape(-1), columns["count"], len(shapes)).astype(np.int64)
    return {tuple(map(int, shape)): int(count) for shape, count in zip(shapes, steps, strict=True)}  # type: ignore[misc]


def _rounded(values: Floats | Int64s, grid: int) -> Int64s:
    rounded: Int64s = np.rint(values / max(1, grid)).astype(np.int64) * max(1, grid)
    return rounded
