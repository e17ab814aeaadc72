"""The trend of an operator's times: a fixed cost, and arithmetic and memory traffic that overlap in part. Three numbers a curve.

Knows no file. The shape is the roofline's; what a GPU reaches of its peaks is learned from the rows. Interpolation bends along
the trend, and beyond the rows it says how times go on: they grow with every size and never reach zero.
"""

from collections.abc import Callable, Sequence
from math import hypot

import numpy as np
from msgspec import Struct

from squall.perf.tables.operations import Array, Operation, Sizes

_MOST = 4000
"""Rows that a trend is fitted to; more, evenly spread, change nothing that matters."""


class Trend(Struct, frozen=True):
    """`fixed + hypot(arithmetic * per_op, bytes * per_byte)` seconds; every coefficient is above 0."""

    operation: Operation
    fixed: float
    per_op: float
    per_byte: float

    def seconds(self, at: Sizes) -> float:
        """At one row's kinds and sizes."""
        arithmetic, traffic = self.operation.law(at)
        return self.fixed + hypot(arithmetic * self.per_op, traffic * self.per_byte)

    def along(self, kinds: Sizes) -> Callable[[Sequence[float]], float]:
        """The same as a function of the sizes alone, in the order of the operation."""
        law, names = self.operation.law, self.operation.sizes
        fixed, per_op, per_byte = self.fixed, self.per_op, self.per_byte

        def seconds(sizes: Sequence[float]) -> float:
            at = kinds.copy()
            at.update(zip(names, sizes, strict=True))
            arithmetic, traffic = law(at)
            return fixed + hypot(arithmetic * per_op, traffic * per_byte)

        return seconds


def fit_trend(operation: Operation, rows: Sizes, seconds: Array) -> Trend:
    """The trend that comes closest to the rows, by relative error.

    Args:
        rows: a value or an array of as many values as `seconds` for each column of the operation.
        seconds: all above 0.

    Levenberg and Marquardt's method on the logarithms of the three coefficients, which keeps them above 0.
    """
    arithmetic, traffic = (np.broadcast_to(np.asarray(part, dtype=float), seconds.shape) for part in operation.law(rows))
    keep = np.linspace(0, len(seconds) - 1, min(len(seconds), _MOST)).astype(int)
    arithmetic, traffic, target = arithmetic[keep], traffic[keep], np.log(seconds[keep])
    fixed = 0.5 * float(seconds.min())
    x = np.log([fixed, _least_rate(seconds[keep], arithmetic), _least_rate(seconds[keep], traffic)])
    damping, error = 1e-2, np.inf
    for _ in range(40):
        residual, slopes = _linearised(x, arithmetic, traffic, target)
        now = float(residual @ residual)
        if abs(error - now) < 1e-9 * now:
            break
        error = now
        for _ in range(8):
            normal = slopes.T @ slopes
            step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(3)), slopes.T @ residual)
            trial = x + np.clip(step, -2, 2)
            if float(np.sum(_linearised(trial, arithmetic, traffic, target)[0] ** 2)) < now:
                x, damping = trial, max(damping / 3, 1e-7)  # never so little that the matrix is singular
                break
            damping *= 4
    fixed, per_op, per_byte = (float(value) for value in np.exp(np.clip(x, -80, 5)))
    return Trend(operation, fixed, per_op, per_byte)


def _least_rate(seconds: Array, amount: Array) -> float:
    """Seconds for one unit of work where the GPU does best."""
    some = amount > 0
    return float(np.quantile(seconds[some] / amount[some], 0.05)) if some.any() else 1e-30


def _linearised(x: Array, arithmetic: Array, traffic: Array, target: Array) -> tuple[Array, Array]:
    """What is left of the logarithms, and their slopes in the logarithms of the coefficients."""
    fixed, per_op, per_byte = np.exp(x)
    work, bytes_ = arithmetic * per_op, traffic * per_byte
    both = np.hypot(work, bytes_)
    total = fixed + both
    safe = np.maximum(both, 1e-300)
    slopes = np.stack([fixed / total, work * work / safe / total, bytes_ * bytes_ / safe / total], axis=1)
    return target - np.log(total), slopes
