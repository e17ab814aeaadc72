"""From the prices of kinds of work to exact prices of steps: the one place where seconds become integers.

Knows no model and no hardware; `composed` and `profile` say what work costs. Why a run of k steps is made of arithmetic
progressions, to the unit: over a run the decodes' context grows by the number of decodes a step and the chunk's offset by the
chunk's length, nothing else changes; and a step's price rises by a whole number of units (sixteenths of a nanosecond) when one of
them does, by another number beyond each bend of the curve.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import isqrt
from typing import Protocol

from squall.core.actions import Chunk
from squall.core.types import Nanos
from squall.perf.latency import UNITS_PER_NANO, BatchShape, Progression, only_stage
from squall.perf.worked_out import WorkedOut

UNITS_PER_SECOND = UNITS_PER_NANO * 1_000_000_000


class Work(Protocol):
    """What each kind of work in a step costs, in seconds. No price falls when there is more work."""

    def step_s(self) -> float:
        """Whatever is in the step, once."""
        ...

    def tokens_s(self, tokens: int) -> float:
        """What every computed token passes: matrices, norms, communication. `tokens` is at least 1."""
        ...

    def logits_s(self, rows: int) -> float:
        """Head and sampling for `rows` tokens; 0 for none."""
        ...

    def context_s(self) -> float:
        """One decode's attention to one token of its context."""
        ...

    def chunk_s(self, tokens: int) -> tuple[float, float]:
        """A prefill chunk's attention: to itself, and to each token before it."""
        ...


def units(seconds: float) -> int:
    """Seconds as whole units."""
    return int(seconds * UNITS_PER_SECOND + 0.5)


class StepPrices:
    """A `LatencyModel` made of prices of work; each price is computed once."""

    def __init__(self, source: str, work: Work) -> None:
        self.source = source
        self.num_stages = 1
        self._context = units(work.context_s())
        step = work.step_s()
        self._tokens: dict[int, int] = WorkedOut(lambda tokens: max(UNITS_PER_NANO, units(step + work.tokens_s(tokens))))
        self._logits: dict[int, int] = WorkedOut(lambda rows: units(work.logits_s(rows)) if rows else 0)
        self._decodes: dict[int, int] = WorkedOut(lambda decodes: self._tokens[decodes] + self._logits[decodes])
        self._chunk: dict[int, tuple[int, int]] = WorkedOut(lambda tokens: _pair(work.chunk_s(tokens)))

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`. Always a single progression."""
        decodes = shape.num_decodes
        chunks = shape.chunks
        growth = self._context * decodes
        if not chunks:
            return [Progression(steps, self._decodes[decodes] + self._context * shape.decode_context, growth)]
        tokens = rows = decodes
        price = self._context * shape.decode_context
        for chunk in chunks:
            own, each_before = self._chunk[chunk.num_tokens]
            price += own + each_before * chunk.offset
            tokens += chunk.num_tokens
            rows += chunk.last
        if steps > 1:  # one chunk, whose offset advances by its length
            growth += each_before * chunk.num_tokens
        return [Progression(steps, price + self._tokens[tokens] + self._logits[rows], growth)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        return only_stage(self.run(shape, 1))


def _pair(seconds: tuple[float, float]) -> tuple[int, int]:
    own, each_before = seconds
    return units(own), units(each_before)


# -- prices that bend

_FAR = 1 << 62
"""Beyond every context."""

_Stretch = tuple[int, int, int, int, int]
"""Contexts from and to, the price at the first and its rise a step (attention alone), and units beside attention."""


class Curves(Protocol):
    """What each kind of work in a step costs, in seconds. No price falls when there is more work."""

    def tokens_s(self, tokens: int) -> float:
        """Whatever is in a step once, and what every computed token passes. `tokens` is at least 1."""
        ...

    def logits_s(self, rows: int) -> float:
        """Head and sampling for `rows` tokens, at least 1."""
        ...

    def decode_s(self, batch: int) -> tuple[Sequence[int], Sequence[float]]:
        """Attention of `batch` decodes: contexts of each of them, from 0 upwards, and seconds there; straight in between, and
        beyond the last as before it. Two contexts or more."""
        ...

    def prefill_s(self, chunk: int) -> tuple[Sequence[int], Sequence[float]]:
        """Attention of a prefill chunk: tokens before it, from 0 upwards, and seconds there."""
        ...

    def prompt_s(self, tokens: int) -> float:
        """Attention of a whole prompt: the first of `prefill_s`."""
        ...


class Ramp:
    """A price that rises with an amount, straight between knots. In steps of `stride` it rises by whole units.

    Args:
        knots: amounts, ascending from 0.
        seconds: the price at each; what falls is taken to stay.
        stride: at least 1.
    """

    def __init__(self, knots: Sequence[int], seconds: Sequence[float], stride: int) -> None:
        self.stride = stride
        self.knots = list(knots[:-1])
        self.bases: list[int] = []
        self.rises: list[int] = []
        base = units(seconds[0])
        for knot, after, price in zip(knots, knots[1:], seconds[1:], strict=False):
            width = after - knot
            rise = round((price * UNITS_PER_SECOND - base) * stride / width)
            if rise < 0:
                rise = 0
            self.bases.append(base)
            self.rises.append(rise)
            base += rise * width // stride

    def at(self, amount: int) -> int:
        """The price in units."""
        index = bisect_right(self.knots, amount) - 1
        return self.bases[index] + self.rises[index] * (amount - self.knots[index]) // self.stride


Beside = Callable[[int, int, int], int]
"""(decodes, tokens of chunks, chunks that are the last ones of their prompts) to units: what a step costs beside attention."""


def beside_attention(curves: Curves) -> Beside:
    """The step itself with what every token passes, and the logits; each worked out once a size."""
    passing: dict[int, int] = WorkedOut(lambda tokens: max(UNITS_PER_NANO, units(curves.tokens_s(tokens))))
    logits: dict[int, int] = WorkedOut(lambda rows: units(curves.logits_s(rows)) if rows else 0)
    return lambda decodes, tokens, last: passing[decodes + tokens] + logits[decodes + last]


def like(squares: int, before: int) -> tuple[int, int]:
    """(tokens, tokens before) of the one chunk that stands for several: as long as the root of the sum of their squares, and with
    as many pairs of tokens (Agrawal et al., Vidur, 2024). `before` is the sum of tokens times tokens before."""
    length = max(1, (isqrt(4 * squares) + 1) // 2)
    return length, before // length


class CurvePrices:
    """A `LatencyModel` with one stage, made of curves; each is read once a size.

    Attention of several chunks in a step costs what it does for one `like` them, but no less than for the most expensive of them
    alone. `beside` replaces `beside_attention`.
    """

    def __init__(self, source: str, curves: Curves, beside: Beside | None = None) -> None:
        self.source = source
        self.num_stages = 1
        self._curves = curves
        self.beside: Beside = beside_attention(curves) if beside is None else beside
        self._decode: dict[int, Ramp] = WorkedOut(self._decodes)
        self._chunk: dict[int, Ramp] = WorkedOut(self._prefill)
        self._prompt: dict[int, int] = WorkedOut(lambda tokens: units(curves.prompt_s(tokens)))
        self._recent: dict[int, _Stretch] = {}  # by the number of decodes: where their context was last

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`. A progression for each stretch between bends."""
        decodes = shape.num_decodes
        chunks = shape.chunks
        context = shape.decode_context
        if chunks:
            if steps > 1:  # the one chunk's offset advances by its length
                chunk = chunks[0]
                climbs = [(self._chunk[chunk.num_tokens], chunk.offset)]
                if decodes:
                    climbs.append((self._decode[decodes], context))
                return _stretches(self.beside(decodes, chunk.num_tokens, 0), climbs, steps)
            tokens = last = 0
            for chunk in chunks:
                tokens += chunk.num_tokens
                last += chunk.last
            return [Progression(1, self.beside(decodes, tokens, last) + self.attention(decodes, context, chunks), 0)]
        stretch = self._recent.get(decodes)
        if stretch is None or not stretch[0] <= context < stretch[1]:
            stretch = self._stretch(decodes, context)
        low, high, base, rise, fixed = stretch
        if context + (steps - 1) * decodes >= high:
            return _stretches(fixed, [(self._decode[decodes], context)], steps)
        return [Progression(steps, fixed + base + rise * (context - low) // decodes, rise)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        return only_stage(self.run(shape, 1))

    def attention(self, decodes: int, context: int, chunks: Sequence[Chunk]) -> int:
        """What attention of one step costs, in units."""
        price = 0
        if len(chunks) == 1:
            chunk = chunks[0]
            offset = chunk.offset
            price = self._chunk[chunk.num_tokens].at(offset) if offset else self._prompt[chunk.num_tokens]
        elif chunks:
            price = self._several(chunks)
        if decodes:
            stretch = self._recent.get(decodes)
            if stretch is None or not stretch[0] <= context < stretch[1]:
                stretch = self._stretch(decodes, context)
            price += stretch[2] + stretch[3] * (context - stretch[0]) // decodes
        return price

    def _several(self, chunks: Sequence[Chunk]) -> int:
        """Attention of several chunks."""
        squares = before = most = 0
        for chunk in chunks:
            length = chunk.num_tokens
            squares += length * length
            before += length * chunk.offset
            offset = chunk.offset
            alone = self._chunk[length].at(offset) if offset else self._prompt[length]
            if alone > most:
                most = alone
        length, offset = like(squares, before)
        together = self._chunk[length].at(offset) if offset else self._prompt[length]
        return most if most > together else together

    def _stretch(self, decodes: int, context: int) -> _Stretch:
        """Where the context of so many decodes is, from now on the first place to look."""
        ramp = self._decode[decodes]
        knots = ramp.knots
        after = bisect_right(knots, context)
        high = knots[after] if after < len(knots) else _FAR
        stretch = (knots[after - 1], high, ramp.bases[after - 1], ramp.rises[after - 1], self.beside(decodes, 0, 0))
        self._recent[decodes] = stretch
        return stretch

    def _decodes(self, batch: int) -> Ramp:
        contexts, seconds = self._curves.decode_s(batch)
        return Ramp([batch * context for context in contexts], seconds, batch)

    def _prefill(self, chunk: int) -> Ramp:
        before, seconds = self._curves.prefill_s(chunk)
        return Ramp(before, seconds, chunk)


def _stretches(fixed: int, climbs: Sequence[tuple[Ramp, int]], steps: int) -> list[Progression]:
    """`steps` steps, in each of which every ramp's amount grows by its stride; they start at the amounts given."""
    out: list[Progression] = []
    done = 0
    while done < steps:
        count, first, increment = steps - done, fixed, 0
        for ramp, start in climbs:
            knots, stride = ramp.knots, ramp.stride
            amount = start + done * stride
            after = bisect_right(knots, amount)
            rise = ramp.rises[after - 1]
            first += ramp.bases[after - 1] + rise * (amount - knots[after - 1]) // stride
            increment += rise
            if after < len(knots) and (until := -((amount - knots[after]) // stride)) < count:
                count = until
        out.append(Progression(count, first, increment))
        done += count
    return out
