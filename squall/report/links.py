"""How much crossed each link of a simulated network over time, and of how many flows. Knows no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from squall.core.metrics import LinkLevels
from squall.core.types import SECOND
from squall.report.sample import Int64s

if TYPE_CHECKING:
    import polars

    from squall.report.series import Floats


def link_series(links: Sequence[LinkLevels], edges: Int64s) -> polars.DataFrame:
    """A row for each link and bin in which there was something on it, in order of time; means over the bin.

    `utilisation` is of what the link carries when nothing is wrong with it.
    """
    import polars as pl

    schema = {
        "at_s": pl.Float64, "link": pl.String, "bytes_per_s": pl.Float64, "utilisation": pl.Float64, "flows": pl.Float64,
    }  # fmt: skip
    frames = [pl.DataFrame(schema=schema)]
    for link in links:
        at, rate, flows = np.array(link.levels, dtype=np.int64).T
        carried, crossing = _mean(at, rate, edges), _mean(at, flows, edges)
        busy = crossing > 0
        columns = {
            "at_s": edges[:-1][busy] / SECOND, "link": [link.name] * int(busy.sum()), "bytes_per_s": carried[busy],
            "utilisation": carried[busy] / max(1, link.bandwidth), "flows": crossing[busy],
        }  # fmt: skip
        frames.append(pl.DataFrame(columns, schema=schema))
    return pl.concat(frames).sort("at_s", "link")


def _mean(at: Int64s, level: Int64s, edges: Int64s) -> Floats:
    """Of what has the `level` from each instant on, 0 before the first: its mean in each bin."""
    end = max(int(edges[-1]), int(at[-1]))
    corners = np.append(at, end)
    area = np.concatenate(([0.0], np.cumsum(level * np.diff(corners).astype(np.float64))))
    means: Floats = np.diff(np.interp(edges, corners, area)) / np.diff(edges)
    return means
