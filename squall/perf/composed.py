"""A latency model put together from operators: each is asked of the most trustworthy source that knows it.

Knows no table and no datasheet: sources answer, `decompose` says what to ask. Prices are worked out when a size first occurs:
what every token passes on a grid of sizes (every one up to 16, then eight to a doubling) with straight lines between, attention
on a grid of sizes and contexts; where a source dips, the price stays. A step then costs two look-ups whatever it holds.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import hypot

from msgspec import Struct

from squall.core.actions import Chunk
from squall.core.types import Nanos
from squall.errors import ConfigError
from squall.perf.decompose import Collective, Layout, Operator, Stage, refuse_overlap_alone, stages
from squall.perf.efficiency import Efficiency
from squall.perf.latency import BatchShape, Progression
from squall.perf.model import ModelSpec
from squall.perf.operators import AttentionShape, Estimate, OperatorSource, Provenance
from squall.perf.prices import CurvePrices, PipelinePrices
from squall.perf.speculation import Speculation, speculative_prices

IN_A_STEP = 0.1
"""Added to the spread of what was measured alone when a whole step is told: in an engine kernels run otherwise. Chosen on half of
the groups (model, GPU, engine, TP) of dense deployments in `benchmarks/scoreboard/silicon.py`, of which 91 % then lie inside, and
88 % of the others; without it, 82 % and 68 %."""

OVERHEAD = 0.8
"""Spread of the terms that no kernel shows: overhead of a step, launching kernels, waiting for each other."""


class Line(Struct, frozen=True):
    """An operator of a step.

    Attributes:
        stage: of the pipeline, from 0.
        kind: "token", "sequence", "communication" or "step".
        count: how often it runs.
        seconds: all of them together.
        told: see `Estimate`.
        source: who said so.
        size: what one call works on: tokens, all prompts of a step together; of decode attention those that it attends to.
    """

    stage: int
    operator: str
    kind: str
    count: int
    seconds: float
    provenance: Provenance
    told: float | Callable[[], float]
    source: str
    size: int = 0

    @property
    def spread(self) -> float:
        """See `Estimate`."""
        return self.told() if callable(self.told) else self.told


class Composed:
    """A `LatencyModel` from operators.

    Args:
        model: the sizes.
        place: the GPU's name, for reports.
        layout: how the model lies on GPUs.
        sources: the most trustworthy first; the last one must know every operator.
        efficiency: the terms that no operator shows.
        overhead_s: replaces the efficiency's `step_s`.
        launch_s: what the CPU needs to start a kernel, for engines that capture no graphs; 0 where they do.
        speculation: several tokens are checked at once, drafted by `draft` or for free.

    Raises ConfigError for a layout that cannot be.
    """

    def __init__(
        self,
        model: ModelSpec,
        place: str,
        layout: Layout,
        sources: Sequence[OperatorSource],
        efficiency: Efficiency,
        overhead_s: float | None = None,
        launch_s: float = 0.0,
        speculation: Speculation | None = None,
        draft: "Composed | None" = None,
    ) -> None:
        refuse_overlap_alone(layout)
        if speculation is not None and layout.pp > 1:
            raise ConfigError(f"latency.speculation and replica.pp = {layout.pp} do not go together yet; use replica.pp = 1")
        self.model = model
        self.layout = layout
        self.sources = tuple(sources)
        self.num_stages = layout.pp
        self.terms = Terms(efficiency, layout, overhead_s, launch_s)
        self._cut = stages(model, layout)
        longest = model.max_position
        ask = self.sources
        self.curves = StageCurves(self._cut, ask, self.terms, longest, handing_on=True)
        self.source = self._name(place)
        if speculation is None:
            whole = CurvePrices(self.source, self.curves)
        else:
            self.source += f", {speculation.draft_tokens} tokens drafted a step"
            drafting = draft.curves if draft is not None else None
            whole = speculative_prices(self.source, self.curves, speculation, drafting)
        self.run: Callable[[BatchShape, int], list[Progression]] = whole.run
        """See `LatencyModel.run`. With several stages: the time that a step takes to pass all of them."""
        self.stages: Callable[[BatchShape], tuple[Nanos, ...]] = whole.stages
        """See `LatencyModel.stages`. With `overlap_send` handing on hides behind the stage's own work."""
        if layout.pp > 1:
            curves = [StageCurves([stage], ask, self.terms, longest, not layout.overlap_send, index == 0)
                      for index, stage in enumerate(self._cut)]  # fmt: skip
            attention = [list(own.attention.items()) for own in curves]  # in order: sums are to be equal to the last bit
            alike = [own == before for before, own in pairwise(attention)]
            prices = [CurvePrices(self.source, own) for own in curves]
            self.stages = PipelinePrices(prices, alike, self._sending if layout.overlap_send else None).stages

    def entry(self, num_tokens: int) -> Nanos:
        """What comes before the first layer: the step's overhead, and the embedding of so many tokens."""
        asks = (_asks(operator, num_tokens) for operator in self._cut[0].tokens if operator.name == "embedding")
        return round(1e9 * (self.terms.overhead_s + sum(_best(self.sources, ask)[0].seconds for ask in asks)))

    def _sending(self, tokens: int) -> Nanos:
        """How long handing on to any next stage takes."""
        send = self._cut[0].send
        return round(_best(self.sources, _asks(send, tokens))[0].seconds * 1e9) if send else 0

    # -- what it is made of

    def explain(self, shape: BatchShape) -> list[Line]:
        """Every operator of one step at its own size, and who said how long it takes."""
        return [line for index, stage in enumerate(self._cut) for line in self._lines(index, stage, shape)]

    def _lines(self, index: int, stage: Stage, shape: BatchShape) -> Iterator[Line]:
        decodes, chunks = shape.num_decodes, shape.chunks
        tokens = decodes + sum(chunk.num_tokens for chunk in chunks)
        rows = decodes + sum(1 for chunk in chunks if chunk.last)
        asked = [(operator, tokens) for operator in stage.tokens] + [(operator, rows) for operator in stage.rows if rows]
        asked += [(stage.send, tokens)] if stage.send else []
        for operator, size in asked:
            kind = "communication" if isinstance(operator, Collective) else "token"
            yield self._line(index, operator.name, kind, operator.count, _asks(operator, size), size)
        chunk = self._as_one(stage, chunks) if chunks else None
        for count, attention in stage.attention:
            seen = f" (window {attention.window})" if attention.window else ""
            if decodes:
                batch, context = self.terms.of_group(decodes), max(1, shape.decode_context // decodes)
                yield self._line(
                    index, f"decode attention{seen}", "sequence", count, _decode(batch, context, attention), shape.decode_context
                )
            if chunk is not None:
                ask = _prefill(*chunk, attention)
                yield self._line(index, f"prefill attention{seen}", "sequence", count, ask, tokens - decodes)
        busy = sum(operator.count * _best(self.sources, _asks(operator, size))[0].seconds
                   for operator, size in asked if operator not in stage.rows)  # fmt: skip
        for name, seconds in self.terms.named(stage, index == 0, busy):
            if seconds:
                yield Line(index, name, "step", 1, seconds, Provenance.ROOFLINE, OVERHEAD, "constants")

    def _as_one(self, stage: Stage, chunks: Sequence[Chunk]) -> tuple[int, int]:
        """(tokens, tokens before) of the chunk whose attention costs what that of all of them does: see `CurvePrices`."""
        sizes = [(chunk.num_tokens, chunk.offset) for chunk in chunks]
        together = round(hypot(*(tokens for tokens, _ in sizes)))
        sizes.append((together, sum(tokens * before for tokens, before in sizes) // together))
        return max(sizes, key=lambda size: self._prefill_s(stage, *size))

    def _prefill_s(self, stage: Stage, tokens: int, before: int) -> float:
        return sum(count * _best(self.sources, _prefill(tokens, before, shape))[0].seconds for count, shape in stage.attention)

    def _line(self, stage: int, name: str, kind: str, count: int, ask: "_Ask", size: int) -> Line:
        estimate, source = _best(self.sources, ask)
        return Line(stage, name, kind, count, count * estimate.seconds, estimate.provenance, estimate.told, source, size)

    def _name(self, place: str) -> str:
        layout = self.layout
        gpus = f"{max(layout.tp, layout.ep) * layout.pp} x {place}"
        what = f"({self.model.name} on {gpus}, {layout.weight_dtype})"
        if len(self.sources) == 1:
            return f"{self.sources[0].name} {what}"
        shares = ", ".join(f"{provenance} {share:.0%}" for provenance, share in shares_of(self.explain(_Typical())))
        return f"{shares} {what}"


class _Typical(Struct, frozen=True):
    """The step that shares are told of: 32 decodes over 1024 tokens each."""

    num_decodes: int = 32
    decode_context: int = 32 * 1024
    chunks: tuple[()] = ()


def shares_of(lines: Sequence[Line]) -> list[tuple[Provenance, float]]:
    """Parts of the time by provenance, the most trustworthy first; the terms of the step itself are left out."""
    kernels = [line for line in lines if line.kind != "step"]
    whole = sum(line.seconds for line in kernels) or 1.0
    shares = [(kind, sum(line.seconds for line in kernels if line.provenance == kind) / whole) for kind in Provenance]
    return [(kind, share) for kind, share in shares if share > 0]


def interval_of(lines: Sequence[Line]) -> tuple[float, float, float]:
    """(seconds, low, high) of the lines together: as if all of them erred in the same direction, the cautious case."""
    spreads = [line.spread + (0.0 if line.provenance is Provenance.ROOFLINE else IN_A_STEP) for line in lines]
    low = sum(line.seconds / (1 + spread) for line, spread in zip(lines, spreads, strict=True))
    high = sum(line.seconds * (1 + spread) for line, spread in zip(lines, spreads, strict=True))
    return sum(line.seconds for line in lines), low, high


# -- asking


_Ask = Callable[[OperatorSource], Estimate | None]


def _asks(operator: Operator, tokens: int) -> _Ask:
    return lambda source: operator.ask(source, tokens)


def _decode(batch: int, context: int, shape: AttentionShape) -> _Ask:
    return lambda source: source.decode_attention(batch, context, shape)


def _prefill(chunk: int, before: int, shape: AttentionShape) -> _Ask:
    return lambda source: source.prefill_attention(chunk, before, shape)


def _best(sources: Sequence[OperatorSource], ask: _Ask) -> tuple[Estimate, str]:
    for source in sources:
        estimate = ask(source)
        if estimate is not None:
            return estimate, source.name
    raise ConfigError("no source knows an operator of this model; use latency.kind = auto, which falls back on the datasheet")


# -- terms that are no operator


class Terms:
    """What a step costs beside its operators, in seconds."""

    def __init__(self, efficiency: Efficiency, layout: Layout, overhead_s: float | None, launch_s: float) -> None:
        self.launch_s = launch_s
        self.overhead_s = efficiency.step_s if overhead_s is None else overhead_s
        self.wait_s = efficiency.wait_s * (layout.tp - 1 if layout.groups == 1 else min(layout.ep, 8) - 1)
        self._groups = layout.groups

    def named(self, stage: Stage, first: bool, busy: float) -> Iterator[tuple[str, float]]:
        """Each with its name; the stage's operators for every token take `busy`."""
        waiting = self.wait_s * stage.meetings
        yield "overhead of the step", self.overhead_s if first else 0.0
        yield "waiting for each other", waiting
        if self.launch_s:
            yield "launching kernels", self.with_launches(stage, busy + waiting) - busy - waiting

    def with_launches(self, stage: Stage, seconds: float) -> float:
        """What GPU and CPU need together for operators that keep the GPU busy for so long: measured times of engines that launch
        every kernel lie near the root of the sum of squares of the two."""
        return hypot(seconds, self.launch_s * stage.launches) if self.launch_s else seconds

    def of_group(self, requests: int) -> int:
        """Requests of the fullest group of GPUs, where several share them."""
        return -(-requests // self._groups)


# -- curves


class StageCurves:
    """`prices.Curves` of some stages one after the other.

    Args:
        handing_on: sends to the next stage count.
        first: the first of the stages is the replica's first.

    Attributes:
        attention: how often each shape of it runs; of one model it says what attention costs.
        contexts, offsets: see `prices.Curves`.
    """

    def __init__(
        self,
        cut: Sequence[Stage],
        sources: Sequence[OperatorSource],
        terms: Terms,
        longest: int,
        handing_on: bool,
        first: bool = True,
    ) -> None:
        self._cut = cut
        self._sources = sources
        self._terms = terms
        self._handing_on = handing_on
        self._first = first
        self.attention: dict[AttentionShape, int] = {}
        for stage in cut:
            for count, shape in stage.attention:
                self.attention[shape] = self.attention.get(shape, 0) + count
        windows = {shape.window for shape in self.attention if shape.window}
        self.contexts = _knots(64, 2, longest, windows)
        self.offsets = _knots(256, 4, longest, windows)
        self._tokens = Surface(lambda size: [self._tokens_at(size)])
        self._rows = Surface(lambda size: [self._rows_at(size)])
        self._decodes = Surface(lambda size: [self._decode_at(size, context) for context in self.contexts])
        self._prefills = Surface(lambda size: [self._prefill_at(size, before) for before in self.offsets])

    def tokens_s(self, tokens: int) -> float:
        """See `prices.Curves`."""
        return self._tokens.first(tokens)

    def logits_s(self, rows: int) -> float:
        """See `prices.Curves`."""
        return self._rows.first(rows)

    def decode_s(self, batch: int) -> Sequence[float]:
        """See `prices.Curves`."""
        return self._decodes.row(self._terms.of_group(batch))

    def prefill_s(self, chunk: int) -> Sequence[float]:
        """See `prices.Curves`."""
        return self._prefills.row(chunk)

    def prompt_s(self, tokens: int) -> float:
        """See `prices.Curves`."""
        return self._prefills.first(tokens)

    def _tokens_at(self, size: int) -> float:
        total = 0.0
        for index, stage in enumerate(self._cut):
            sends = (stage.send,) if stage.send and self._handing_on else ()
            busy = sum(self._seconds(operator, size) for operator in (*stage.tokens, *sends))
            total += self._terms.with_launches(stage, busy + self._terms.wait_s * stage.meetings)
            total += self._terms.overhead_s if self._first and index == 0 else 0.0
        return total

    def _rows_at(self, size: int) -> float:
        return sum(self._seconds(operator, size) for stage in self._cut for operator in stage.rows)

    def _decode_at(self, batch: int, context: int) -> float:
        asks = ((count, _decode(batch, max(1, context), shape)) for shape, count in self.attention.items())
        return sum(count * _best(self._sources, ask)[0].seconds for count, ask in asks)

    def _prefill_at(self, chunk: int, before: int) -> float:
        asks = ((count, _prefill(chunk, before, shape)) for shape, count in self.attention.items())
        return sum(count * _best(self._sources, ask)[0].seconds for count, ask in asks)

    def _seconds(self, operator: Operator, tokens: int) -> float:
        return operator.count * _best(self._sources, _asks(operator, tokens))[0].seconds


def _knots(first: int, factor: int, longest: int, windows: set[int]) -> list[int]:
    """0, then from `first` by `factor` until beyond the longest; where windows are full, curves bend as well."""
    knots = {0, *windows}
    knot = first
    while knot < longest * factor:
        knots.add(knot)
        knot *= factor
    return sorted(knots)


class Surface:
    """Rows of seconds by size, worked out when they are first needed; none below the one of a smaller size, nor falling.

    Args:
        row_at: the row of a size as the sources say it.
    """

    def __init__(self, row_at: Callable[[int], list[float]]) -> None:
        self._row_at = row_at
        self._sizes: list[int] = []
        self._rows: list[list[float]] = []

    def row(self, size: int) -> list[float]:
        """The row of any size from 1 up: on the straight line between its neighbours on the grid."""
        high, share = self._place(size)
        if share == 1.0:
            return self._rows[high]
        return [a + share * (b - a) for a, b in zip(self._rows[high - 1], self._rows[high], strict=True)]

    def first(self, size: int) -> float:
        """The first of the row."""
        high, share = self._place(size)
        last = self._rows[high][0]
        if share == 1.0:
            return last
        begin = self._rows[high - 1][0]
        return begin + share * (last - begin)

    def _place(self, size: int) -> tuple[int, float]:
        """The row at or above a size, and how far from the one below it lies."""
        sizes = self._sizes
        while not sizes or sizes[-1] < size:
            self._extend()
        high = bisect_left(sizes, size)
        if sizes[high] == size:
            return high, 1.0
        low = sizes[high - 1]
        return high, (size - low) / (sizes[high] - low)

    def _extend(self) -> None:
        last = self._sizes[-1] if self._sizes else 0
        size = last + (1 if last < 16 else 1 << (last.bit_length() - 4))
        row = self._row_at(size)
        below = self._rows[-1] if self._rows else [0.0] * len(row)
        highest = 0.0
        for index, value in enumerate(row):
            highest = max(highest, value, below[index])
            row[index] = highest
        self._sizes.append(size)
        self._rows.append(row)
