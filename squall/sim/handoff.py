"""KV on its way from one replica to another: flows between their GPUs, or a fixed delay.

Every GPU of a replica sends its share to the GPU of the same rank at the other one. The flows share links with the weights, and
with everything else on the network. First come, first sent: a replica sends, and receives, a few hand-offs at once, and the
others wait. All at once would end no sooner for the last one, and later for everybody else. Knows no request's life and no block.
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

End = int
"""One end of hand-offs: a replica as the one that sends is its id, and as the one that receives ~id."""


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
        if isinstance(action, SendKv):
            last = action.last_layer or self.num_layers
            return max(1, self.num_bytes * action.num_tokens * (last - action.first_layer) // self.num_layers)
        return max(1, self.activation * action.num_tokens)


def not_sent(action: SendKv | SendActivations) -> AnyEvent:
    """What the sender hears of a failure."""
    if isinstance(action, SendActivations):
        return ActivationsFailed(action.batch)
    return KvFailed(action.request, action.to, action.first_layer, action.last_layer)


class Sending:
    """One hand-off.

    Attributes:
        way: its links; None where it takes a fixed time.
        size: bytes of one GPU.
        flows: those that have not ended; none while it waits for its turn.
        ends: who sends and who receives.
        began_at: when its turn came.
        given_up_at: while one of its links is dead.
    """

    __slots__ = ("action", "began_at", "ends", "flows", "given_up_at", "num_bytes", "size", "source", "way")

    def __init__(self, source: ReplicaId, action: SendKv | SendActivations, size: int, way: Way | None, now: Nanos) -> None:
        self.source = source
        self.action = action
        self.ends: tuple[End, End] = source, ~action.to
        self.size = size
        self.way = way
        self.num_bytes = size if way is None else size * len(way.paths)
        self.began_at = now
        self.flows: set[FlowId] = set()
        self.given_up_at: Nanos | None = None

    def sent(self, now: Nanos) -> Told:
        action = self.action
        if isinstance(action, SendKv):
            path = () if self.way is None else self.way.links
            return self.source, KvSent(action.request, action.to, self.num_bytes, now - self.began_at, path)
        return self.source, ActivationsSent(action.batch)

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


class Turns:
    """Whose turn it is: every replica sends so many at once, and receives so many; whoever cannot be served lets others pass."""

    __slots__ = ("_busy", "_most", "_waiting")

    def __init__(self, most: int) -> None:
        self._most = most
        self._busy: dict[End, int] = {}
        self._waiting: dict[End, dict[int, Sending]] = {}  # by either end, in the order in which they came

    def take(self, number: int, sending: Sending) -> bool:
        """Whether its turn is now; otherwise it waits."""
        if self._begins(sending.ends):
            return True
        for end in sending.ends:
            self._waiting.setdefault(end, {})[number] = sending
        return False

    def give_back(self, number: int, sending: Sending) -> list[tuple[int, Sending]]:
        """It has ended, or does not wait any more; returns whose turn has come."""
        found: list[tuple[int, Sending]] = []
        if self._waiting and self._forget(number, sending.ends):
            return found
        for end in sending.ends:
            self._busy[end] -= 1
        if not self._waiting:
            return found
        for end in sending.ends:
            for other, waiting in self._waiting.get(end, {}).items():
                if self._begins(waiting.ends):
                    self._forget(other, waiting.ends)
                    found.append((other, waiting))
                    break
        return found

    def _begins(self, ends: tuple[End, End]) -> bool:
        """Take a place at both ends, where both have one."""
        busy, (sends, receives) = self._busy, ends
        sent, received = busy.get(sends, 0), busy.get(receives, 0)
        if sent >= self._most or received >= self._most:
            return False
        busy[sends], busy[receives] = sent + 1, received + 1
        return True

    def _forget(self, number: int, ends: tuple[End, End]) -> bool:
        """False where it does not wait."""
        waited = False
        for end in ends:
            if queue := self._waiting.get(end):
                waited = queue.pop(number, None) is not None or waited
                if not queue:
                    del self._waiting[end]
        return waited


class KvMoves:
    """All hand-offs of a simulation.

    Args:
        shape: of the model's KV.
        lanes: None: every hand-off takes `delay`.
        delay: so long, whatever the size and whoever else sends; None: as long as the network needs.
        max_transfers: hand-offs that a replica sends, and receives, at once over the network. Activations do not wait: they
            are small, and somebody is idle until they are there.
    """

    def __init__(
        self, shape: KvShape = KvShape(), lanes: Lanes | None = None, delay: Nanos | None = None, max_transfers: int = 4  # noqa: B008 - frozen
    ) -> None:  # fmt: skip
        self._shape = shape
        self._lanes = lanes if delay is None else None
        self._delay = delay or 0
        self._turns = Turns(max_transfers)
        self._number = 0
        self._timers: list[tuple[Nanos, int, Sending]] = []
        self._sendings: dict[int, Sending] = {}  # in the order in which they were asked for
        self._of_flow: dict[FlowId, int] = {}
        self._ways: dict[tuple[ReplicaId, ReplicaId], Way] = {}  # as far as anybody has sent

    def start(self, source: ReplicaId, action: SendKv | SendActivations, now: Nanos) -> None:
        """The long action begins."""
        self._number = number = self._number + 1
        size, lanes = self._shape.size(action), self._lanes
        if lanes is None:
            sending = self._sendings[number] = Sending(source, action, size, None, now)
            heappush(self._timers, (now + self._delay, number, sending))
            return
        way = self._ways.get((source, action.to)) or self._find_way(lanes, source, action.to)
        sending = self._sendings[number] = Sending(source, action, size, way, now)
        if type(action) is SendActivations or self._turns.take(number, sending):
            self._begin(lanes, number, sending, now)
        if lanes.network.is_broken:
            self._watch(lanes, number, sending, now)

    def _begin(self, lanes: Lanes, number: int, sending: Sending, now: Nanos) -> None:
        """Its turn has come."""
        assert sending.way is not None
        sending.began_at = now
        for path in sending.way.paths:
            flow = next(lanes.ids)
            sending.flows.add(flow)
            self._of_flow[flow] = number
            lanes.network.start(flow, path, sending.size, now)

    def links_changed(self, now: Nanos) -> None:
        """Some links have another bandwidth from now on."""
        if self._lanes is not None:
            for number, sending in self._sendings.items():
                self._watch(self._lanes, number, sending, now)

    def _watch(self, lanes: Lanes, number: int, sending: Sending, now: Nanos) -> None:
        """Nothing moves across a dead link; it may come back."""
        assert sending.way is not None
        links = lanes.network.links
        if all(links[name].bandwidth for name in sending.way.links):
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
                self._end(number, now)
                told.append(sending.sent(event.at))
        while self._timers and self._timers[0][0] <= now:
            at, number, sending = heappop(self._timers)
            if number not in self._sendings:
                continue
            if sending.way is None:
                del self._sendings[number]
                told.append(sending.sent(at))
            elif sending.given_up_at == at:
                self._cancel(number, now)
                self._end(number, now)
                told.append(sending.failed())
        return told

    def _cancel(self, number: int, now: Nanos) -> None:
        """Nothing of it moves any more."""
        flows = self._sendings[number].flows
        for flow in sorted(flows):
            del self._of_flow[flow]
            if self._lanes is not None:
                self._lanes.network.cancel(flow, now)
        flows.clear()

    def _end(self, number: int, now: Nanos) -> None:
        """It is no more, and lets others have their turn."""
        sending = self._sendings.pop(number)
        if self._lanes is not None and type(sending.action) is not SendActivations:
            for other, waiting in self._turns.give_back(number, sending):
                self._begin(self._lanes, other, waiting, now)

    def lose(self, replica: ReplicaId, now: Nanos) -> list[Told]:
        """The replica is gone. Whoever was sending to it hears that it failed; nobody hears of what it sent itself."""
        lost = [number for number, sending in self._sendings.items() if replica in (sending.source, sending.action.to)]
        told = [sending.failed() for number in lost if (sending := self._sendings[number]).source != replica]
        for number in sorted(lost, key=lambda number: bool(self._sendings[number].flows)):  # nobody of these is to begin
            self._cancel(number, now)
            self._end(number, now)
        return told
