"""What no scheduling can beat: the highest rate that a deployment could sustain, and the shortest times that requests could take.

Found by asking the latency model for prices of steps at the sizes where its curves may bend. It rests on one property of prices
that every source here has: more work in a step never costs less. From it, whatever the curves look like (experts that a step's
tokens share, tables that dip, drafts that are checked):

- a replica computes every token of a prompt once, at best in steps of the size at which a token is cheapest; decodes pass the
  same matrices in the same steps, unless prices are those of speculative decoding, which count a decode's pass by its share;
- where prompts are never computed beside decodes, both take their time, one after the other;
- every decode is in some step, at best together with as many others as makes it cheapest, `max_num_seqs` at most;
- the contexts of a step's decodes lie in the KV pool, so there are at least (all context ever attended to) / (tokens of the
  pool) steps with decodes; prompts that may begin alike lie there once for many, and are left out;
- context is read at its own price, on top, at best in the batch where a token of it is cheapest.

Each stage of a pipeline has all of that to do for its part of the layers. Knows no queue: real capacity is lower, often by much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from squall.core.actions import Chunk, RunSteps
from squall.core.types import SECOND, Nanos
from squall.perf.latency import LatencyModel
from squall.search.sample import Sample
from squall.search.spec import Limit

UNBOUNDED = 1 << 16
"""Tokens of a step, where a policy does not say how many it takes: no GPU's price of a token still falls there."""

PIECE = 16
"""Tokens of a chunk so short that its attention to itself is next to nothing."""

MOST_PIECES = 128
"""Into which a step is cut; of more tokens, pieces are longer."""

LONGEST = 1 << 20
"""Tokens of context, beyond which no price of a token of it is asked."""


APART = ("vllm_v0", "lightllm", "faster_transformer", "blitz")
"""Policies of which no step computes prompts beside decodes."""

WHOLE_PROMPTS = (*APART, "orca")
"""Those that cut no prompt, so that a step may be as long as one."""

SEATS_BY_STAGE = ("vllm_v0", "sarathi", "orca", "faster_transformer", "blitz")
"""Those of which one batch of a pipeline has its share of `max_num_seqs`, and no more."""


class Room(Struct, frozen=True):
    """What one replica has room for.

    Attributes:
        tokens: that a step computes at most.
        seqs: that decode in a step at most.
        kv_tokens: of the KV pool.
        apart: whether no step computes prompts beside decodes.
    """

    tokens: int
    seqs: int
    kv_tokens: int
    apart: bool = False


class Least(Struct, frozen=True):
    """The least that work costs in steps of a given room: nanoseconds, of each stage.

    Attributes:
        token: one that a prompt, or a decode, has computed.
        decode: one decode without any context.
        step: with a decode in it.
        context: one token of it, attended to by a decode.
        speculative: prices are those of speculative decoding.
    """

    token: tuple[float, ...]
    decode: tuple[float, ...]
    step: tuple[float, ...]
    context: tuple[float, ...]
    speculative: bool = False


def room(batching: Struct, kv_tokens: int, stages: int = 1) -> Room:
    """From a batching policy's bounds, as far as it has the usual ones; without them the pool alone is a bound."""
    kind = batching.__struct_config__.tag
    seqs = min(getattr(batching, "max_num_seqs", kv_tokens), kv_tokens)
    tokens = getattr(batching, "max_num_batched_tokens", None) or getattr(batching, "chunk_size", None) or UNBOUNDED
    if kind in WHOLE_PROMPTS:
        tokens = UNBOUNDED  # one that is longer than the bound is computed alone
    if kind in SEATS_BY_STAGE:
        seqs = max(1, seqs // stages)
    return Room(min(max(tokens, seqs), UNBOUNDED), seqs, kv_tokens, kind in APART)


class Prices:
    """What work costs at least in the steps of one latency model, each size asked for once.

    Sizes are those between which curves are straight: `perf.composed.Surface` has them.
    """

    def __init__(self, latency: LatencyModel, *, speculative: bool = False) -> None:
        self._latency = latency
        self._speculative = speculative
        self._full: dict[int, tuple[float, ...]] = {}
        self._decode: dict[int, tuple[float, ...]] = {}
        self._context: dict[int, tuple[float, ...]] = {}

    def least(self, room: Room) -> Least:
        """In steps of that room."""
        seqs = _knots(min(room.seqs, UNBOUNDED))
        for size in _knots(room.tokens):
            if size not in self._full:
                self._full[size] = _each(_full(self._latency, size), size)
        for size in seqs:
            if size not in self._decode:
                alone = self._latency.stages(_shape(size, 0, 0))
                self._decode[size] = _each(alone, size)
                self._context[size] = _context(self._latency, size, alone)
        return Least(
            token=_lowest(self._full[size] for size in _knots(room.tokens)),
            decode=_lowest(self._decode[size] for size in seqs),
            step=self._decode[1] if room.seqs > 1 else self._decode[room.seqs],
            context=_lowest(self._context[size] for size in seqs),
            speculative=self._speculative,
        )


def highest_rate(least: Least, room: Room, sample: Sample, replicas: int) -> float:
    """Requests a second like those of the sample that so many replicas could serve at most, for ever."""
    return replicas * len(sample.requests) * SECOND / max(1.0, busy(least, room, sample))


def busy(least: Least, room: Room, sample: Sample) -> float:
    """Nanoseconds for which one replica is busy with the sample at least."""
    decodes = sample.num_gaps
    prompts = 0 if sample.has_blocks else sample.num_prompt_tokens  # what is cached costs nothing at all
    tokens = prompts + (0 if least.speculative else decodes)
    steps = sample.own_context / room.kv_tokens

    def of(token: float, decode: float, step: float, context: float) -> float:
        steps_with_decodes = max(decodes * decode, steps * step)
        if room.apart:
            return prompts * token + steps_with_decodes + sample.context * context
        return max(tokens * token, steps_with_decodes) + sample.context * context

    return max(of(*each) for each in zip(least.token, least.decode, least.step, least.context, strict=True))


def impossible(latency: LatencyModel, sample: Sample, warm_up: int, limits: Sequence[Limit]) -> str:
    """The name of a limit that does not even hold for requests that have a replica for themselves; empty where there is none."""
    for limit in limits:
        if limit.metric in ("tbt", "tpot") and _pass(latency, 1, 1, 0) > limit.limit:
            return limit.name
        if limit.metric in ("ttft", "e2e") and not sample.has_blocks:
            prompts = sorted(request.num_prompt_tokens for request in sample.requests[warm_up:])
            needed = limit.needed(len(prompts))  # a longer prompt never takes less: the longest that must keep it says it all
            if needed and _pass(latency, 0, 0, prompts[needed - 1]) > limit.limit:
                return limit.name
    return ""


def _knots(most: int) -> list[int]:
    """Sizes up to `most`, itself among them: every one up to 16, then eight to a doubling."""
    found = [size for size in range(1, 17) if size < most]
    size = 16
    while (size := size + (1 << (size.bit_length() - 4))) < most:
        found.append(size)
    return [*found, most]


def _lowest(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The least of each column: of each stage."""
    return tuple(min(column) for column in zip(*rows, strict=True))


def _each(prices: Sequence[float], size: int) -> tuple[float, ...]:
    return tuple(price / size for price in prices)


def _full(latency: LatencyModel, tokens: int) -> tuple[Nanos, ...]:
    """A step full of prompts, almost without attention: in short pieces, or as one chunk where a piece has its own price."""
    one = latency.stages(_shape(0, 0, tokens))
    piece = max(PIECE, tokens // MOST_PIECES)
    pieces, rest = divmod(tokens, piece)
    if pieces < 2 or rest:
        return one
    cut = latency.stages(RunSteps(0, 1, 0, 0, (Chunk(0, 0, piece, 0, False),) * pieces))
    return tuple(min(pair) for pair in zip(one, cut, strict=True))


def _context(latency: LatencyModel, size: int, alone: Sequence[Nanos]) -> tuple[float, ...]:
    """The least price of a token of context over its lengths, in a batch of `size` that costs `alone` without any."""
    priced = []
    for power in range(6, LONGEST.bit_length(), 2):
        length = 1 << power
        total = latency.stages(_shape(size, size * length, 0))
        priced.append([(with_it - without) / (size * length) for with_it, without in zip(total, alone, strict=True)])
    return _lowest(priced)


def _pass(latency: LatencyModel, decodes: int, context: int, chunk: int) -> Nanos:
    """One step through all stages. A prompt in one piece: cut into several, it takes longer."""
    return sum(latency.stages(_shape(decodes, context, chunk)))


def _shape(decodes: int, context: int, chunk: int) -> RunSteps:
    chunks = (Chunk(0, 0, chunk, 0, False),) if chunk else ()
    return RunSteps(0, 1, decodes, context, chunks)
