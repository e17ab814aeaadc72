"""What some layers of a prefill cost, of a latency model that prices whole steps: for live scaling, which runs layer by layer.

The head (final norm, logits, sampling) counts with the last layer: it is what a step costs more when its chunks are their last
ones. What a model says of its `entry` (embedding, and what a step costs whatever is in it) counts with the first; layers share
the rest evenly. Whole nanoseconds, so that any ranges that make up the model cost together exactly what its step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from squall.core.actions import Chunk
from squall.core.types import Nanos
from squall.perf.latency import UNITS_PER_NANO, BatchShape, LatencyModel


class _Body:
    """A step without its head."""

    __slots__ = ("chunks", "decode_context", "num_decodes")

    def __init__(self, num_decodes: int, decode_context: int, chunks: Sequence[Chunk]) -> None:
        self.num_decodes = num_decodes
        self.decode_context = decode_context
        self.chunks = chunks


class LayerPrices:
    """What the layers of one batch cost: a step of it, that without the head, and of this what comes before the first layer."""

    __slots__ = ("body", "entry", "num_layers", "whole")

    def __init__(self, num_layers: int, whole: Nanos, body: Nanos, entry: Nanos) -> None:
        self.num_layers = num_layers
        self.whole = whole
        self.body = body
        self.entry = entry

    @classmethod
    def of(cls, latency: LatencyModel, shape: BatchShape, num_layers: int) -> LayerPrices:
        """Of a batch of complete prompts."""
        whole = latency.run(shape, 1)[0].first // UNITS_PER_NANO
        chunks = [replace(chunk, last=False) for chunk in shape.chunks]
        body = min(whole, latency.run(_Body(shape.num_decodes, shape.decode_context, chunks), 1)[0].first // UNITS_PER_NANO)
        before: Callable[[int], Nanos] | None = getattr(latency, "entry", None)
        entry = 0 if before is None else min(body, before(sum(chunk.num_tokens for chunk in chunks)))
        return cls(num_layers, whole, body, entry)

    def between(self, first: int, last: int) -> Nanos:
        """How long layers `first` up to (not including) `last` take."""
        return self._until(last) - self._until(first)

    def _until(self, layer: int) -> Nanos:
        if not layer:
            return 0
        return self.whole if layer == self.num_layers else self.entry + (self.body - self.entry) * layer // self.num_layers


def layers(latency: LatencyModel, shape: BatchShape, num_layers: int, first: int, last: int) -> Nanos:
    """How long layers `first` up to (not including) `last` of `num_layers` take, for a batch of complete prompts."""
    return LayerPrices.of(latency, shape, num_layers).between(first, last)
