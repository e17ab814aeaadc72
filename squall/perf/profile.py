"""A measured profile: step times of one model on one machine, the curve fitted to them, and the latency model it makes.

Knows no engine and how to measure nothing: `fit` gets points. The curve has the shape of the physics (whatever is done once, once
a token, once a decode, once a token of context, once a pair of tokens that attend to each other), every coefficient is at
least zero, so a price never falls when there is more work, and stays sensible outside the points.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from squall.core.types import Nanos
from squall.errors import ProfileError
from squall.files import replacing, write_and_sync
from squall.perf.latency import BatchShape, Progression
from squall.perf.prices import StepPrices

VERSION = 1
_CONTEXT, _PAIR = 3, 6  # columns of `_features`
_Array = NDArray[np.float64]


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """One measured step: `num_decodes` requests attending to `decode_context` tokens in all, and at most one prefill chunk.

    Attributes:
        chunk_tokens, chunk_offset: length of the chunk, and tokens before it; 0 tokens is no chunk.
        last: the chunk completes its prompt, so the step computes logits for it.
        seconds: what the step took, everything included.
    """

    num_decodes: int
    decode_context: int
    chunk_tokens: int
    chunk_offset: int
    last: bool
    seconds: float

    @property
    def tokens(self) -> int:
        return self.num_decodes + self.chunk_tokens

    @property
    def rows(self) -> int:
        return self.num_decodes + (self.last and self.chunk_tokens > 0)

    @property
    def pairs(self) -> float:
        """Pairs of a token of the chunk and a token that it attends to."""
        return self.chunk_tokens * (self.chunk_offset + (self.chunk_tokens + 1) / 2)


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds for each kind of work; none is negative.

    Attributes:
        step: once a step.
        knots, slopes: from `knots[i]` tokens in the step on, each further token costs `slopes[i]`; the first knot is 1.
        head, row: once a step with logits; each row of them.
        context: each token that a decode attends to.
        chunk, before, pair: each chunk; each token before it; each pair (see `Point.pairs`).
    """

    step: float
    knots: tuple[int, ...]
    slopes: tuple[float, ...]
    head: float
    row: float
    context: float
    chunk: float
    before: float
    pair: float


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, on what, and what was made of it.

    Attributes:
        model, num_params: the model's name and size.
        machine: the hardware and how many threads or GPUs of it were used.
        dtype: of the weights as they ran.
        median_error, p95_error: of the curve at the points, relative.
        tp, block_size: GPUs of a replica, and tokens of a KV block; None where an older profile does not say.
        share: of a core that an engine had; what it waited for the rest is in the times. None as above.
    """

    version: int
    model: str
    num_params: int
    machine: str
    dtype: str
    curve: Curve
    median_error: float
    p95_error: float
    points: tuple[Point, ...]
    tp: int | None = None
    block_size: int | None = None
    share: float | None = None


class ProfileModel:
    """A `LatencyModel` from a profile. `overhead_s` is added to every step."""

    def __init__(self, profile: Profile, overhead_s: float = 0.0) -> None:
        self.profile = profile
        self.source = f"profile ({profile.model} on {profile.machine}, {profile.dtype})"
        self._curve = profile.curve
        self._overhead_s = overhead_s
        self.num_stages = 1
        self._prices = StepPrices(self.source, self)

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`."""
        return self._prices.run(shape, steps)

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        return self._prices.stages(shape)

    # -- the times of `prices.Work`

    def step_s(self) -> float:
        return self._curve.step + self._overhead_s

    def tokens_s(self, tokens: int) -> float:
        curve = self._curve
        return sum(slope * amount for slope, amount in zip(curve.slopes, _segments(tokens, curve.knots), strict=True))

    def logits_s(self, rows: int) -> float:
        return self._curve.head + rows * self._curve.row

    def context_s(self) -> float:
        return self._curve.context

    def chunk_s(self, tokens: int) -> tuple[float, float]:
        curve = self._curve
        return curve.chunk + curve.pair * tokens * (tokens + 1) / 2, curve.before + curve.pair * tokens


# -- fitting


def fit(points: Sequence[Point], *, model: str, num_params: int, machine: str, dtype: str) -> Profile:
    """Fits the curve to measured steps, by relative error. Raises ProfileError where the points cannot tell.

    They must hold steps of decodes alone and prefill chunks; more sizes, contexts and offsets make the curve finer.
    """
    _check(points)
    knots = _knots({point.tokens for point in points})
    matrix = np.array([_features(point, knots) for point in points])
    alike = not any(point.chunk_offset for point in points)
    if alike:  # nothing tells attention from the rest of a chunk: a pair is taken to cost what it costs in a decode
        matrix[:, _CONTEXT] += matrix[:, _PAIR]
        matrix[:, _PAIR] = 0.0
    seconds = np.array([point.seconds for point in points])
    values = _non_negative_least_squares(matrix / seconds[:, None], np.ones(len(points)))
    errors = np.abs(matrix @ values / seconds - 1)
    if alike:
        values[_PAIR] = values[_CONTEXT]
    step, head, row, context, chunk, before, pair, *slopes = (float(value) for value in values)
    curve = Curve(step, knots, tuple(slopes), head, row, context, chunk, before, pair)
    median, p95 = float(np.median(errors)), float(np.quantile(errors, 0.95))
    return Profile(VERSION, model, num_params, machine, dtype, curve, median, p95, tuple(points))


def _check(points: Sequence[Point]) -> None:
    for index, point in enumerate(points):
        if not (math.isfinite(point.seconds) and point.seconds > 0):
            raise ProfileError(f"point {index} took {point.seconds} seconds; a step takes a finite time above 0")
        if point.tokens < 1 or min(point.num_decodes, point.decode_context, point.chunk_tokens, point.chunk_offset) < 0:
            raise ProfileError(f"point {index} is no step: {point}")
    if not any(point.num_decodes and not point.chunk_tokens for point in points):
        raise ProfileError("the points hold no step of decodes alone; measure some, at several batch sizes and contexts")
    if not any(point.chunk_tokens for point in points):
        raise ProfileError("the points hold no prefill chunk; measure some, of several lengths and offsets")


def _knots(tokens: set[int]) -> tuple[int, ...]:
    """Where the price a token may change: measured sizes, each a quarter more than the one before. The last stretch, which
    also serves beyond the points, spans at least a factor of two, so that noise does not bend it."""
    knots = [1]
    for size in sorted(tokens):
        if size >= 1.25 * knots[-1] and 2 * size <= max(tokens):
            knots.append(size)
    return tuple(knots)


def _segments(tokens: int, knots: Sequence[int]) -> list[int]:
    """How many of the tokens lie between each knot and the next; those up to the first knot are in the step itself."""
    ends = [*knots[1:], max(tokens, knots[-1])]
    return [max(0, min(tokens, end) - knot) for knot, end in zip(knots, ends, strict=True)]


def _features(point: Point, knots: Sequence[int]) -> list[float]:
    """How much of each kind of work a step holds, in the order that `fit` takes them apart again."""
    chunks = 1 if point.chunk_tokens else 0
    return [
        1, float(point.rows > 0), point.rows, point.decode_context, chunks, point.chunk_offset * chunks, point.pairs,
        *_segments(point.tokens, knots),
    ]  # fmt: skip


def _non_negative_least_squares(matrix: _Array, target: _Array) -> _Array:
    """The x >= 0 that minimises |matrix x - target| (Lawson and Hanson, Solving Least Squares Problems, 1974, algorithm 23.10).

    Columns are scaled first: their units differ by nine orders of magnitude.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    columns = matrix / scale
    x: _Array = np.zeros(columns.shape[1])
    free = np.zeros(len(x), dtype=bool)
    useless = np.zeros(len(x), dtype=bool)  # columns that rounding alone made look useful
    for _ in range(10 * len(x)):
        gradient = columns.T @ (target - columns @ x)
        gradient[free | useless] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        free[best] = True
        x = _solve_free(columns, target, x, free)
        useless = np.zeros(len(x), dtype=bool) if free[best] else useless | (np.arange(len(x)) == best)
    solution: _Array = x / scale
    return solution


def _solve_free(columns: _Array, target: _Array, x: _Array, free: NDArray[np.bool_]) -> _Array:
    """Least squares over the free columns; those that would turn negative are fixed at zero (`free` is changed)."""
    while True:
        solved = np.zeros_like(x)
        solved[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        negative = free & (solved <= 0)
        if not negative.any():
            return solved
        step = np.min(x[negative] / np.maximum(x[negative] - solved[negative], 1e-300))
        x = np.maximum(x + step * (solved - x), 0.0)
        free &= ~(negative & (x <= 1e-14))
        x[~free] = 0.0


# -- files


def save(profile: Profile, path: Path) -> None:
    """Writes the profile as JSON, whole or not at all."""
    try:
        with replacing(path) as beside:
            write_and_sync(beside, msgspec.json.format(msgspec.json.encode(profile), indent=1))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written ({error.strerror})") from None


def load(path: Path) -> Profile:
    """Reads a profile. Raises ProfileError, naming the file and what is wrong in it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror}); `squall profile` makes one") from None
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise ProfileError(
                f"{path}: is of version {version}, this squall reads version {VERSION}; measure again with `squall profile`"
            )
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{path}: is not a profile ({error}); measure again with `squall profile`") from None
    curve = profile.curve
    numbers = (curve.step, *curve.slopes, curve.head, curve.row, curve.context, curve.chunk, curve.before, curve.pair)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ProfileError(f"{path}: curve has a negative price; measure again with `squall profile`")
    if len(curve.knots) != len(curve.slopes) or curve.knots[:1] != (1,) or list(curve.knots) != sorted(set(curve.knots)):
        raise ProfileError(
            f"{path}: curve.knots must ascend from 1, one for each of curve.slopes; measure again with `squall profile`"
        )
    return profile


class _Versioned(Struct):
    version: int
