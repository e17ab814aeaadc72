"""What no scheduling can beat: the highest rate that a deployment could sustain, and the shortest times that requests could take.

Found by asking the latency model for prices of a few steps. It rests on two properties of prices that every source here has: more
work in a step never costs less, and no token becomes dearer for sharing a step with others. From these:

- a replica computes every token once, at best in steps as full as the policy allows;
- every decode is in some step, with at most `max_num_seqs` others;
- the contexts of a step's decodes lie in the KV pool, so there are at least (all context ever attended to) / (tokens of the
  pool) steps with decodes;
- context is read at its own price, on top.

A pipeline starts a step when its slowest stage is free. Knows no queue: real capacity is lower, often by much.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Room(Struct, frozen=True):
    """What one replica has room for.

    Attributes:
        tokens: that a step computes at most.
        seqs: that decode in a step at most.
        kv_tokens: of the KV pool.
    """

    tokens: int
    seqs: int
    kv_tokens: int


def room(batching: object, kv_tokens: int) -> Room:
    """From a batching policy's bounds, as far as it has the usual ones; without them the pool alone is a bound."""
    seqs = min(getattr(batching, "max_num_seqs", kv_tokens), kv_tokens)
    tokens = getattr(batching, "max_num_batched_tokens", None) or getattr(batching, "chunk_size", None) or UNBOUNDED
    return Room(min(max(tokens, seqs), UNBOUNDED), seqs, kv_tokens)


def highest_rate(latency: LatencyModel, room: Room, sample: Sample, replicas: int) -> float:
    """Requests a second like those of the sample that so many replicas could serve at most, for ever."""
    return replicas * len(sample.requests) * SECOND / max(1.0, busy(latency, room, sample))


def busy(latency: LatencyModel, room: Room, sample: Sample) -> float:
    """Nanoseconds for which one replica is busy with the sample at least."""
    decodes = sample.num_gaps
    cached = any(request.block_hashes for request in sample.requests)  # then prompts may cost nothing at all
    tokens = decodes + (0 if cached else sample.num_prompt_tokens)
    per_token = _slowest(latency, decodes=room.tokens) if cached else _prefill_price(latency, room.tokens)
    full = tokens * per_token / room.tokens
    together = decodes * _slowest(latency, decodes=room.seqs) / room.seqs
    apart = sample.context / room.kv_tokens * _slowest(latency, decodes=1)
    reading = sample.context * context_price(latency)
    return max(full, together, apart) + reading


def context_price(latency: LatencyModel) -> float:
    """Nanoseconds for each token of context that a decode attends to, on the stage that is slowest without any."""
    many = 1 << 20
    return max(0.0, (_slowest(latency, decodes=1, context=many) - _slowest(latency, decodes=1)) / many)


def impossible(latency: LatencyModel, sample: Sample, warm_up: int, limits: Sequence[Limit]) -> str:
    """The name of a limit that does not even hold for requests that have a replica for themselves; empty where there is none."""
    for limit in limits:
        if limit.metric in ("tbt", "tpot") and _pass(latency, 1, 1, 0) > limit.limit:
            return limit.name
        if limit.metric in ("ttft", "e2e") and not any(request.block_hashes for request in sample.requests):
            counted = sample.requests[warm_up:]
            kept = sum(_pass(latency, 0, 0, request.num_prompt_tokens) <= limit.limit for request in counted)
            if kept < limit.needed(len(counted)):
                return limit.name
    return ""


def _prefill_price(latency: LatencyModel, tokens: int) -> float:
    """Of a step full of prompts, without their attention."""
    pieces = max(1, tokens // PIECE)
    chunks = tuple(Chunk(piece, 0, PIECE, 0, False) for piece in range(pieces))
    return max(latency.stages(RunSteps(0, 1, 0, 0, chunks))) * tokens / (pieces * PIECE)


def _slowest(latency: LatencyModel, decodes: int, context: int = 0) -> float:
    return float(max(latency.stages(_shape(decodes, context, 0))))


def _pass(latency: LatencyModel, decodes: int, context: int, chunk: int) -> Nanos:
    """One step through all stages. A prompt in one piece: cut into several, it takes longer."""
    return sum(latency.stages(_shape(decodes, context, chunk)))


def _shape(decodes: int, context: int, chunk: int) -> RunSteps:
    chunks = (Chunk(0, 0, chunk, 0, False),) if chunk else ()
    return RunSteps(0, 1, decodes, context, chunks)
