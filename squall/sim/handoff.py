"""KV on its way from one replica to another: flows between their GPUs, or a fixed delay.

Every GPU of a replica sends its share to the GPU of the same rank at the other one. The flows share links with the weights, and
with everything else on the network. Knows no request's life and no block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from squall.core.actions import SendActivations, SendKv
from squall.core.events import ActivationsFailed, ActivationsSent, AnyEvent, KvFailed, KvSent
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.sim.fabric import Fabric
from squall.sim.network import Arrived, Network
from squall.sim.shares import FlowId

PATIENCE: Nanos = 10 * SECOND
"""A transport gives up what crosses a dead link for so long: a choice, of the order of the retries of a reliable connection."""

Told = tuple[ReplicaId, AnyEvent]
"""An event, and the replica that hears of it."""


class KvShape(NamedTuple):
    """How large the KV of a token is.

    Attributes:
        num_bytes: of one GPU, all layers together.
        num_layers: of the model.
        activation: bytes of a token's residual, of which every GPU has all.
    """

    num_bytes: int = 0
    num_layers: int = 1
    activation: int = 0

    def size(self, action: SendKv | SendActivations) -> int:
        """Bytes that one GPU sends; at least 1."""
        if isinstance(action, SendActivations):
            return max(1, self.activation * action.num_tokens)
        last = action.last_layer or self.num_layers
        return max(1, self.num_bytes * action.num_tokens * (last - action.first_layer) // self.num_layers)


def not_sent(action: SendKv | SendActivations) -> AnyEvent:
    """What the sender hears of a failure."""
    if isinstance(action, SendActivations):
        return ActivationsFailed(action.batch)
    return KvFailed(action.request, action.to, action.first_layer, action.last_layer)


class Sending:
    """One hand-off on its way; `flows`: those that have not ended; `given_up_at`: while one of its links is dead."""

    __slots__ = ("action", "began_at", "flows", "given_up_at", "num_bytes", "path", "source")

    def __init__(self, source: ReplicaId, action: SendKv | SendActivations, now: Nanos) -> None:
        self.source = source
        self.action = action
        self.began_at = now
        self.flows: set[FlowId] = set()
        self.given_up_at: Nanos | None = None
        self.num_bytes = 0
        self.path: tuple[str, ...] = ()

    def sent(self, now: Nanos) -> Told:
        action = self.action
        if isinstance(action, SendActivations):
            return self.source, ActivationsSent(action.batch)
        return self.source, KvSent(action.request, action.to, self.num_bytes, now - self.began_at, self.path)

    def failed(self) -> Told:
        return self.source, not_sent(self.action)


class Lanes(NamedTuple):
    """The network that KV travels on, shared with everything else.

    Attributes:
        gpus_of: the GPUs of a replica, in the order of its ranks; all replicas have as many.
        ids: numbers for flows, that nobody else on the network takes.
    """

    network: Network
    fabric: Fabric
    gpus_of: Callable[[ReplicaId], Sequence[int]]
    ids: Iterator[FlowId]


class Way(NamedTuple):
    """From a replica to another one.

    Attributes:
        paths: of each pair of GPUs.
        links: all links of these.
    """

    paths: list[tuple[str, ...]]
    links: tuple[str, ...]


class KvMoves:
    """All hand-offs of a simulation.

    Args:
        shape: of the model's KV.
        lanes: None: every hand-off takes `delay`.
        delay: so long, whatever the size and whoever else sends; None: as long as the network needs.
    """

    def __init__(self, shape: KvShape = KvShape(), lanes: Lanes | None = None, delay: Nanos | None = None) -> None:  # noqa: B008 - frozen
        self._shape = shape
        self._lanes = lanes if delay is None else None
        self._delay = delay or 0
        self._number = 0
        self._timers: list[tuple[Nanos, int, Sending]] = []
        self._sendings: dict[int, Sending] = {}  # in the order in which they began
        self._of_flow: dict[FlowId, int] = {}
        self._ways: dict[tuple[ReplicaId, ReplicaId], Way] = {}  # as far as anybody has sent

    def start(self, source: ReplicaId, action: SendKv | SendActivations, now: Nanos) -> None:
        """The long action begins."""
        self._number += 1
        sending = self._sendings[self._number] = Sending(source, action, now)
        size = self._shape.size(action)
        lanes = self._lanes
        if lanes is None:
            sending.num_bytes = size
            heappush(self._timers, (now + self._delay, self._number, sending))
            return
        way = self._ways.get((source, action.to)) or self._find_way(lanes, source, action.to)
        sending.num_bytes = size * len(way.paths)
        sending.path = way.links
        for path in way.paths:
            flow = next(lanes.ids)
            sending.flows.add(flow)
            self._of_flow[flow] = self._number
            lanes.network.start(flow, path, size, now)
        self._watch(self._number, sending, now)

    def links_changed(self, now: Nanos) -> None:
        """Some links have another bandwidth from now on."""
        for number, sending in self._sendings.items():
            self._watch(number, sending, now)

    def _watch(self, number: int, sending: Sending, now: Nanos) -> None:
        """Nothing moves across a dead link; it may come back."""
        if self._lanes is None:
            return
        links = self._lanes.network.links
        if all(links[name].bandwidth for name in sending.path):
            sending.given_up_at = None
        elif sending.given_up_at is None:
            sending.given_up_at = now + PATIENCE
            heappush(self._timers, (sending.given_up_at, number, sending))

    def _find_way(self, lanes: Lanes, source: ReplicaId, to: ReplicaId) -> Way:
        pairs = zip(lanes.gpus_of(source), lanes.gpus_of(to), strict=True)
        paths = [lanes.fabric.gpu_to_gpu(here, there) for here, there in pairs]
        way = self._ways[source, to] = Way(paths, tuple(dict.fromkeys(link for path in paths for link in path)))
        return way

    def next_end(self) -> Nanos | None:
        """When the next fixed delay, or the patience with a dead link, is over; the network says itself when flows end."""
        return self._timers[0][0] if self._timers else None

    def on(self, arrived: Iterable[Arrived], now: Nanos) -> list[Told]:
        """What has been sent, as the network reports it; flows of others are passed over."""
        told: list[Told] = []
        for event in arrived:
            number = self._of_flow.pop(event.flow, None) if event.ended else None
            if number is None:
                continue
            sending = self._sendings[number]
            sending.flows.discard(event.flow)
            if not sending.flows:
                del self._sendings[number]
                told.append(sending.sent(event.at))
        while self._timers and self._timers[0][0] <= now:
            at, number, sending = heappop(self._timers)
            if number not in self._sendings:
                continue
            if self._lanes is None:
                del self._sendings[number]
                told.append(sending.sent(at))
            elif sending.given_up_at == at:
                self._cancel(number, now)
                told.append(sending.failed())
        return told

    def _cancel(self, number: int, now: Nanos) -> None:
        for flow in sorted(self._sendings.pop(number).flows):
            del self._of_flow[flow]
            if self._lanes is not None:
                self._lanes.network.cancel(flow, now)

    def lose(self, replica: ReplicaId, now: Nanos) -> list[Told]:
        """The replica is gone. Whoever was sending to it hears that it failed; nobody hears of what it sent itself."""
        told: list[Told] = []
        for number, sending in list(self._sendings.items()):
            if replica not in (sending.source, sending.action.to):
                continue
            self._cancel(number, now)
            if sending.source != replica:
                told.append(sending.failed())
        return told
