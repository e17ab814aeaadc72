"""Batches of whole prompts whose layers run a few at a time: what lies between two layers is kept, given away, or taken over.

Knows rows of the residual stream and whose they are; not which layers run when, nor where a batch comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from squall.core.actions import RunLayers
from squall.core.types import RequestId
from squall.live.engine.interface import Activations, TokenOut

if TYPE_CHECKING:
    from squall.live.engine.torch_engine import Step, TorchEngine


class _Kept:
    """A batch between two of its layers.

    Attributes:
        step: as it was prepared.
        hidden: [num_tokens, hidden size], the prompts one after the other.
        requests: whose they are; num_tokens: of each; left: of these, requests that nobody has forgotten.
    """

    def __init__(self, step: Step, hidden: Tensor, requests: tuple[RequestId, ...], num_tokens: tuple[int, ...]) -> None:
        self.step = step
        self.hidden = hidden
        self.requests = requests
        self.num_tokens = num_tokens
        self.left = set(requests)


class Batches:
    """See the module.

    Args:
        engine: runs the layers. All methods in its thread, except `give`.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._kept: dict[int, _Kept] = {}

    def run(self, action: RunLayers, given: Activations | None) -> list[TokenOut]:
        """First tokens after the model's last layer, none before. See `LiveEngine.run_batch`."""
        engine = self._engine
        requests = tuple(chunk.request for chunk in action.chunks)
        kept = self._kept.pop(action.batch, None)
        if kept is not None and given is None and action.first_layer and kept.requests == requests:
            step = kept.step
            before: Tensor | None = kept.hidden
        else:
            step = engine.prepare(action.chunks)
            before = self._beginning(action, kept, given)
        hidden = engine.run_layers(step, action.first_layer, action.last_layer, before)
        if action.last_layer == engine.num_layers:
            return engine.finish(step, hidden)
        self._kept[action.batch] = _Kept(step, hidden, requests, tuple(chunk.num_tokens for chunk in action.chunks))
        return []

    def _beginning(self, action: RunLayers, kept: _Kept | None, given: Activations | None) -> Tensor | None:
        """The residual before the first of the layers; None: there are none before."""
        if not action.first_layer:
            return None
        if given is not None:
            hidden = self._engine.hidden_of(given.data, sum(given.num_tokens))
            requests, num_tokens = given.requests, given.num_tokens
        elif kept is not None:
            hidden, requests, num_tokens = kept.hidden, kept.requests, kept.num_tokens
        else:
            raise ValueError(f"layer {action.first_layer} of batch {action.batch} is to run, but nothing is kept of the batch")
        pieces = dict(zip(requests, torch.split(hidden, list(num_tokens)), strict=True))
        wanted = [(chunk.request, chunk.num_tokens) for chunk in action.chunks]
        for request, tokens in wanted:
            if request not in pieces or len(pieces[request]) != tokens:
                raise ValueError(f"{tokens} tokens of request {request} are not in what is known of batch {action.batch}")
        same = requests == tuple(request for request, _ in wanted)
        return hidden if same else torch.cat([pieces[request] for request, _ in wanted])

    def give(self, batch: int) -> Activations:
        """See `LiveEngine.activations`."""
        kept = self._kept.pop(batch)
        return Activations(kept.requests, kept.num_tokens, self._engine.hidden_to_bytes(kept.hidden))

    def drop(self, requests: Sequence[RequestId]) -> None:
        """A batch that nobody is left of is not kept."""
        for batch, kept in list(self._kept.items()):
            kept.left.difference_update(requests)
            if not kept.left:
                self._kept.pop(batch, None)
