"""An engine that runs single layers, for live scaling: beside runs of steps it does some layers of a batch of whole prompts.

Whoever gets a first token from its layers is held until its KV is whole and it joins the decodes. Knows no pair and no queue.
"""

from __future__ import annotations

from squall.core.actions import Chunk, RunLayers
from squall.core.events import LayersDone, StepsDone
from squall.core.metrics import UNSET
from squall.core.types import Nanos, ReplicaId, RequestId, RunId
from squall.perf.latency import LatencyModel
from squall.perf.layer_range import LayerPrices
from squall.sim.engine import Engine
from squall.sim.world import World


class LayeredEngine(Engine):
    """See the module. Layers and steps never run at the same time.

    Args:
        num_layers: of the model.
    """

    __slots__ = ("_batch", "_batch_ends_at", "_num_layers", "_priced")

    def __init__(self, world: World, replica: ReplicaId, num_layers: int) -> None:
        super().__init__(world, replica)
        self._num_layers = num_layers
        self._batch: RunLayers | None = None
        self._batch_ends_at: Nanos = UNSET
        self._priced: dict[int, tuple[LatencyModel, tuple[Chunk, ...], LayerPrices]] = {}  # by batch: most run a layer at a time

    def start_layers(self, run: RunLayers, now: Nanos) -> Nanos:
        """Begin these layers; returns when they will be done."""
        if self._batch is not None:
            raise ValueError(f"replica {self._replica} asks for layers of batch {run.batch} while others run")
        for chunk in run.chunks:
            self._schedule(chunk, now)
        self._batch = run
        self._batch_ends_at = now + self._layer_prices(run).between(run.first_layer, run.last_layer)
        return self._batch_ends_at

    def _layer_prices(self, run: RunLayers) -> LayerPrices:
        latency, chunks, prices = self._priced.get(run.batch, (None, (), None))
        if prices is None or latency is not self.latency or chunks != run.chunks:
            prices = LayerPrices.of(self.latency, run, self._num_layers)
            self._priced[run.batch] = self.latency, run.chunks, prices
        if run.last_layer == self._num_layers:
            del self._priced[run.batch]
        return prices

    def ends(self, at: Nanos) -> bool:
        return (self._batch is not None and self._batch_ends_at == at) or super().ends(at)

    def end(self, now: Nanos) -> StepsDone | LayersDone | None:
        """The run of steps, or the layers, that end now."""
        if self._batch is None or self._batch_ends_at != now:
            return super().end(now)
        run, self._batch = self._batch, None
        if run.last_layer < self._num_layers:
            return LayersDone(run.batch, run.last_layer)
        self._pauses += 1
        world = self._world
        stopped: list[RequestId] = []
        for chunk in run.chunks:
            left = world.first_token(chunk.request, now)
            if left:
                world.paused[chunk.request] = left, now  # until it joins
            else:
                stopped.append(chunk.request)
                world.finish(chunk.request, now)
        return LayersDone(run.batch, run.last_layer, tuple(sorted(stopped)))

    def lose(self, now: Nanos) -> tuple[RunId, int, Nanos] | None:
        """As of any engine; the layers that run come to nothing."""
        self._batch = None
        return super().lose(now)
