"""What some layers of a prefill cost, of a latency model that prices whole steps: for live scaling, which runs layer by layer.

The head (final norm, logits, sampling) counts with the last layer: it is what a step costs more when its chunks are their last
ones. What a model says of its `entry` (embedding, and what a step costs whatever is in it) counts with the first; layers share
the rest evenly. Whole nanoseconds, so that any ranges that make up the model cost together exactly what its step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from squall.core.actions import Chunk
from squall.core.types import Nanos
from squall.perf.latency import UNITS_PER_NANO, BatchShape, LatencyModel


class _Body(Struct, frozen=True):
    """A step without its head."""

    num_decodes: int
    decode_context: int
    chunks: Sequence[Chunk]


def layers(latency: LatencyModel, shape: BatchShape, num_layers: int, first: int, last: int) -> Nanos:
    """How long layers `first` up to (not including) `last` of `num_layers` take, for a batch of complete prompts."""
    whole = latency.run(shape, 1)[0].first // UNITS_PER_NANO
    chunks = [replace(chunk, last=False) for chunk in shape.chunks]
    body = min(whole, latency.run(_Body(shape.num_decodes, shape.decode_context, chunks), 1)[0].first // UNITS_PER_NANO)
    tokens = sum(chunk.num_tokens for chunk in chunks)
    before: Callable[[int], Nanos] | None = getattr(latency, "entry", None)
    entry = 0 if before is None else min(body, before(tokens))

    def until(layer: int) -> Nanos:
        if not layer:
            return 0
        return whole if layer == num_layers else entry + (body - entry) * layer // num_layers

    return until(last) - until(first)
