"""What a comparison says: a line of the scoreboard. Knows no data."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class Row(Struct, frozen=True):
    """One figure.

    Attributes:
        key: its name in the summary, which never changes.
        metric, setup: what was compared, in which circumstances.
        count: points compared.
        value: of the figure: an error in per cent unless `unit` says otherwise.
        goal: at most this (for "coverage": at least); None where there is none.
    """

    key: str
    metric: str
    setup: str
    count: int
    value: float
    goal: float | None = None
    unit: str = "%"

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        met = self.value >= self.goal if self.unit == "% inside" else self.value <= self.goal
        return "met" if met else "missed"


def errors(predicted: Sequence[float], measured: Sequence[float]) -> NDArray[np.float64]:
    """Relative errors in per cent, without their sign."""
    off: NDArray[np.float64] = 100 * np.abs(np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1)
    return off


def spread_rows(
    key: str, metric: str, setup: str, off: NDArray[np.float64], median: float | None, p95: float | None = None
) -> list[Row]:
    """The median and the 95th percentile of errors."""
    return [
        Row(f"{key}.median", f"{metric}, median error", setup, len(off), float(np.median(off)), median),
        Row(f"{key}.p95", f"{metric}, 95th percentile", setup, len(off), float(np.quantile(off, 0.95)), p95),
    ]
