"""From the prices of kinds of work to exact prices of steps: the one place where seconds become integers.

Knows no model and no hardware; `composed` and `profile` say what work costs. Why a run of k steps is made of arithmetic
progressions, to the unit: over a run the decodes' context grows by the number of decodes a step and the chunk's offset by the
chunk's length, nothing else changes; and a step's price rises by a whole number of units (sixteenths of a nanosecond) when one of
them does, by another number beyond each bend of the curve.
"""

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
"""Beyond every amount."""


class Curves(Protocol):
    """What each kind of work in a step costs, in seconds. No price falls when there is more work."""

    @property
    def contexts(self) -> Sequence[int]:
        """Where attention of decodes is told: contexts of each of them, from 0 upwards; two or more. It is straight in between,
        and beyond the last as before it."""
        ...

    @property
    def offsets(self) -> Sequence[int]:
        """Where attention of a chunk is told: tokens before it, from 0 upwards."""
        ...

    def tokens_s(self, tokens: int) -> float:
        """Whatever is in a step once, and what every computed token passes. `tokens` is at least 1."""
        ...

    def logits_s(self, rows: int) -> float:
        """Head and sampling for `rows` tokens, at least 1."""
        ...

    def decode_s(self, batch: int) -> Sequence[float]:
        """Attention of `batch` decodes at each of `contexts`."""
        ...

    def prefill_s(self, chunk: int) -> Sequence[float]:
        """Attention of a prefill chunk at each of `offsets`."""
        ...

    def prompt_s(self, tokens: int) -> float:
        """Attention of a whole prompt: the first of `prefill_s`."""
        ...


_Piece = tuple[int, int, int]
"""(end, base, rise): before `end`, and from the end of the piece before it, an amount costs `(base + rise * amount) // stride`
units, so `rise` more a stride."""

_Stretch = tuple[int, int, int, int, int]
"""(begin, end, base, rise, alone): a piece of what decodes cost; with `alone` for its base a step of nothing else costs that, all
in all."""


def _pieces(knots: Sequence[int], seconds: Sequence[float], stride: int) -> list[_Piece]:
    """A price that rises with an amount, straight between knots and beyond the last as before it; what falls is taken to stay.

    Args:
        knots: amounts, ascending from 0.
        seconds: the price at each.
        stride: at least 1; in steps of it the price rises by whole units.
    """
    out: list[_Piece] = []
    price = units(seconds[0])
    for knot, after, there in zip(knots, knots[1:], seconds[1:], strict=False):
        width = after - knot
        rise = max(0, round((there * UNITS_PER_SECOND - price) * stride / width))
        out.append((after, price * stride - rise * knot, rise))
        price += rise * width // stride
    _, base, rise = out[-1]
    out[-1] = (_FAR, base, rise)
    return out


Beside = Callable[[int, int, int], int]
"""(decodes, tokens of chunks, chunks that are the last ones of their prompts) to units: what a step costs beside attention."""


class CurvePrices:
    """A `LatencyModel` with one stage, made of curves; each is read once a size.

    Attention of several chunks in a step costs what it does for one as long as the root of the sum of their squares, behind as
    many tokens as keep the pairs of tokens (Agrawal et al., Vidur, 2024), but no less than for the most expensive of them alone.

    Args:
        beside: what a step costs beside attention, where that is not what its tokens and its logits cost.

    Attributes:
        tokens: units of the step itself and what every token passes, by number of tokens.
        logits: units by rows.
    """

    def __init__(self, source: str, curves: Curves, beside: Beside | None = None) -> None:
        self.source = source
        self.num_stages = 1
        self.tokens: dict[int, int] = WorkedOut(lambda tokens: max(UNITS_PER_NANO, units(curves.tokens_s(tokens))))
        self.logits: dict[int, int] = WorkedOut(lambda rows: units(curves.logits_s(rows)) if rows else 0)
        self._curves = curves
        self._beside = beside
        self._decode: dict[int, list[_Stretch]] = WorkedOut(self._stretches)
        self._recent: dict[int, _Stretch] = WorkedOut(lambda decodes: self._decode[decodes][0])
        """By the number of decodes: where their context was last. What comes next mostly lies there, too."""
        self._chunk: dict[int, list[_Piece]] = WorkedOut(lambda tokens: _pieces(curves.offsets, curves.prefill_s(tokens), tokens))
        self._prompt: dict[int, int] = WorkedOut(lambda tokens: units(curves.prompt_s(tokens)))

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        """See `LatencyModel.run`. A progression for each stretch between bends."""
        chunks = shape.chunks
        decodes = shape.num_decodes
        if decodes:
            context = shape.decode_context
            begin, end, base, growth, alone = self._recent[decodes]
            if context < begin or context + (steps - 1) * decodes >= end:
                begin, end, base, growth, alone = self._stretch(decodes, context)
                if context + (steps - 1) * decodes >= end:
                    return self._bent(shape, steps)
            if not chunks:
                return [Progression(steps, (alone + growth * context) // decodes, growth)]
            price = (base + growth * context) // decodes
        else:
            price = growth = 0
        if steps > 1:
            return self._advance(decodes, chunks[0].num_tokens, chunks[0].offset, steps, price, growth)
        tokens, last, attention = self._prefill(chunks)
        price += attention
        if self._beside is not None:
            return [Progression(1, price + self._beside(decodes, tokens, last), 0)]
        return [Progression(1, price + self.tokens[decodes + tokens] + self.logits[decodes + last], 0)]

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        return only_stage(self.run(shape, 1))

    def step(self, shape: BatchShape) -> tuple[int, int, int]:
        """Of one step: its tokens, how many of them the head sees, and units of attention."""
        tokens = rows = decodes = shape.num_decodes
        attention = 0
        if decodes:
            context = shape.decode_context
            begin, end, base, growth, _ = self._recent[decodes]
            if not begin <= context < end:
                _, _, base, growth, _ = self._stretch(decodes, context)
            attention = (base + growth * context) // decodes
        chunks = shape.chunks
        if not chunks:
            return tokens, rows, attention
        prefilled, last, prefill = self._prefill(chunks)
        return tokens + prefilled, rows + last, attention + prefill

    def _prefill(self, chunks: Sequence[Chunk]) -> tuple[int, int, int]:
        """Of a step's chunks: their tokens, how many are the last ones of their prompts, and units of attention."""
        most = 0
        if len(chunks) == 1:
            chunk = chunks[0]
            tokens = length = chunk.num_tokens
            offset = chunk.offset
            last: int = chunk.last
        else:
            tokens = last = squares = pairs = 0
            for chunk in chunks:
                length = chunk.num_tokens
                offset = chunk.offset
                tokens += length
                if chunk.last:
                    last += 1
                squares += length * length
                if offset:  # a whole prompt costs no more than the chunk that stands for all, which is longer
                    pairs += length * offset
                    most = max(most, self._behind(offset, length))
            length = (isqrt(4 * squares) + 1) // 2  # the root of the sum of their squares
            offset = pairs // length
        attention = self._behind(offset, length) if offset else self._prompt[length]
        return tokens, last, attention if attention > most else most

    def _behind(self, offset: int, length: int) -> int:
        """Attention of a chunk of that length behind so many tokens."""
        for piece in self._chunk[length]:  # the last one ends beyond all
            if offset < piece[0]:
                break
        _, base, rise = piece
        return (base + rise * offset) // length

    def _advance(self, decodes: int, length: int, offset: int, steps: int, price: int, growth: int) -> list[Progression]:
        """Several steps with a chunk whose offset advances by its length. Attention of decodes costs `price` in the first of them
        and `growth` more in each further."""
        if self._beside is not None:
            price += self._beside(decodes, length, 0)
        else:
            price += self.tokens[decodes + length] + self.logits[decodes]
        out: list[Progression] = []
        for end, base, rise in self._chunk[length]:
            if offset < end:
                first = price + (base + rise * offset) // length
                count = -((offset - end) // length)
                if count >= steps:
                    out.append(Progression(steps, first, growth + rise))
                    break
                out.append(Progression(count, first, growth + rise))
                steps -= count
                price += count * growth
                offset += count * length
        return out

    def _bent(self, shape: BatchShape, steps: int) -> list[Progression]:
        """Several steps in which what decodes cost bends."""
        decodes = shape.num_decodes
        context = shape.decode_context
        out: list[Progression] = []
        done = 0
        while done < steps:
            _, end, base, growth, alone = self._stretch(decodes, context)
            count = min(steps - done, -((context - end) // decodes))
            if shape.chunks:
                chunk = shape.chunks[0]
                offset = chunk.offset + done * chunk.num_tokens
                out += self._advance(decodes, chunk.num_tokens, offset, count, (base + growth * context) // decodes, growth)
            else:
                out.append(Progression(count, (alone + growth * context) // decodes, growth))
            done += count
            context += count * decodes
        return out

    def _stretch(self, decodes: int, context: int) -> _Stretch:
        """Where the context of so many decodes is, from now on the first place to look."""
        for stretch in self._decode[decodes]:
            if context < stretch[1]:
                break
        self._recent[decodes] = stretch
        return stretch

    def _stretches(self, batch: int) -> list[_Stretch]:
        knots = [batch * context for context in self._curves.contexts]
        beside = self.tokens[batch] + self.logits[batch] if self._beside is None else self._beside(batch, 0, 0)
        pieces = _pieces(knots, self._curves.decode_s(batch), batch)
        return [(begin, end, base, rise, base + beside * batch) for begin, (end, base, rise) in zip(knots, pieces, strict=False)]


class PipelinePrices:
    """How long a step keeps each stage of a pipeline busy.

    Args:
        stages: prices of each, the first stage first.
        alike: of each but the first whether its attention costs what that of the stage before it does.
        sending: how long handing on so many tokens takes, which hides behind the work of every stage but the last; None where
            the stages' prices have it.
    """

    def __init__(self, stages: Sequence[CurvePrices], alike: Sequence[bool], sending: Callable[[int], Nanos] | None) -> None:
        self._first = stages[0]
        others = [None, *(None if same else prices for prices, same in zip(stages[1:], alike, strict=True))]
        self._parts: dict[int, dict[int, list[tuple[CurvePrices | None, int]]]] = WorkedOut(
            lambda tokens: WorkedOut(
                lambda rows: [(new, own.tokens[tokens] + own.logits[rows]) for new, own in zip(others, stages, strict=True)]
            )
        )
        """By tokens and rows, of each stage: whose attention is another than that of the stage before, and units beside it."""
        self._sending: dict[int, Nanos] | None = None if sending is None else WorkedOut(sending)

    def stages(self, shape: BatchShape) -> tuple[Nanos, ...]:
        """See `LatencyModel.stages`."""
        tokens, rows, attention = self._first.step(shape)
        busy: list[Nanos] = []
        for prices, beside in self._parts[tokens][rows]:
            if prices is not None:
                _, _, attention = prices.step(shape)
            busy.append((attention + beside) // UNITS_PER_NANO)
        if self._sending is not None:
            sending = self._sending[tokens]
            busy[:-1] = [max(own, sending) for own in busy[:-1]]
        return tuple(busy)
