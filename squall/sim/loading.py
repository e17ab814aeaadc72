"""How replicas come up and go in a simulation: processes, contexts, weights on their way, graphs; and what breaks on purpose.

Performs the controller's actions with named phases, and holds the cluster's network. The driver asks it for what has ended, as it
asks an engine. Knows no request and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from squall.core.actions import AnyAction, LoadWeights, SendActivations, SendKv, StartReplica, StopReplica, WarmReplica
from squall.core.events import AnyEvent, LayerArrived, ReplicaLost, ReplicaStarted, ReplicaStopped, Warmed, WeightsLoaded
from squall.core.fleet_view import Place, Transfer
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.sim.handoff import KvMoves, not_sent
from squall.sim.network import Arrived, Network
from squall.sim.weights import WeightFlows


class Delays(NamedTuple):
    """How long the phases of a replica take, in nanoseconds. By default the fleet is up at the instant it is wanted.

    Attributes:
        process: until it answers: container, interpreter, libraries; `context`: then, on its GPUs.
        load: its weights, where no network carries them.
        capture: graphs, after its weights; `jit`: then, kernels that are compiled just in time.
        stop: until its GPUs are free.
    """

    process: Nanos = 0
    context: Nanos = 0
    load: Nanos = 0
    capture: Nanos = 0
    jit: Nanos = 0
    stop: Nanos = 0

    @property
    def start(self) -> Nanos:
        """Before weights can come."""
        return self.process + self.context

    @property
    def warm(self) -> Nanos:
        """From the last weights on."""
        return self.capture + self.jit


class Roads(NamedTuple):
    """The network that weights travel on."""

    network: Network
    weights: WeightFlows


class Breaker(Protocol):
    """Something that breaks parts of the cluster at instants of its own."""

    def next_at(self) -> Nanos | None: ...
    def strike(self, loader: Loader, now: Nanos) -> None:
        """Do what is due."""
        ...

    def began(self, replica: ReplicaId, now: Nanos) -> None:
        """The replica's process is another one."""
        ...


class Loader:
    """See the module.

    Args:
        pools: of each replica, its KV blocks and their size.
        delays: of the phases.
        roads: None: weights take `delays.load`.
        breaker: breaks things.
        begins_up: what is started at the instant 0 is there at once, as of a fleet that has run for long.
        kv: KV on its way between replicas; at once by default.

    Attributes:
        highest: no replica's id is above it.
        push: set by the driver: it asks `end` at that instant.
        lost: set by the driver: the replica's engine is gone, with all that it did, since it died or was told to stop.
        tell_replica: set by the driver: a replica hears of it at this instant, as of a message.
        neighbours: loaders of other fleets, whose flows are on the same network.
    """

    def __init__(
        self,
        pools: Mapping[ReplicaId, tuple[int, int]],
        delays: Delays = Delays(),  # noqa: B008 - frozen
        roads: Roads | None = None,
        breaker: Breaker | None = None,
        begins_up: bool = False,
        kv: KvMoves | None = None,
    ) -> None:
        self.push: Callable[[Nanos], None] = lambda _at: None
        self.lost: Callable[[ReplicaId, Nanos], None] = lambda _replica, _now: None
        self.tell_replica: Callable[[ReplicaId, AnyEvent], None] = lambda _replica, _event: None
        self.neighbours: Sequence[Loader] = ()
        self.roads = roads
        self.num_started = 0
        self.highest = max(pools, default=0)
        self._pools = pools
        self._kv = KvMoves() if kv is None else kv
        self._delays = delays
        self._breaker = breaker
        self._begins_up = begins_up
        self._there: set[ReplicaId] = set()  # since the beginning
        self._timers: list[tuple[Nanos, int, ReplicaId, int, AnyEvent]] = []
        self._number = 0
        self._lives: dict[ReplicaId, int] = {}  # how often a replica began or ended: timers of another life are void
        self._held_since: dict[ReplicaId, Nanos] = {}
        self._stopping: set[ReplicaId] = set()
        self._live: set[ReplicaId] = set()  # whose single layers matter: they work while they load
        self._held: Nanos = 0
        self._ready: deque[AnyEvent] = deque()
        self._loaded: set[ReplicaId] = set()  # whose weights are said to be there in `_ready`
        self._arrived: list[Arrived] = []  # that a neighbour has been told of
        self._asked: set[Nanos] = set()  # when the network or the breaker is looked at

    def replica_nanos(self, now: Nanos) -> Nanos:
        """Time for which replicas were held, over all of them, until now."""
        return self._held + sum(now - since for since in self._held_since.values())

    @property
    def held(self) -> Mapping[ReplicaId, Nanos]:
        """The replicas that hold their GPUs, and since when."""
        return self._held_since

    # -- for the driver

    def begin(self) -> None:
        """Before anything happens."""
        self._ask(0)

    def perform(self, action: AnyAction, now: Nanos) -> None:
        delays = self._delays
        match action:
            case StartReplica(replica):
                self.num_started += 1
                self._held_since[replica] = now
                self._lives[replica] = self._lives.get(replica, 0) + 1
                if self._begins_up and now == 0:
                    self._there.add(replica)
                if self._breaker is not None:
                    self._breaker.began(replica, now)
                self._later(now + (0 if replica in self._there else delays.start), replica, ReplicaStarted(replica))
            case LoadWeights(replica, transfer):
                self._load(replica, transfer, now)
            case WarmReplica(replica):
                self._later(now + (0 if replica in self._there else delays.warm), replica, Warmed(replica))
                self._there.discard(replica)
            case StopReplica(replica):
                self._let_go(replica, now)
                self.lost(replica, now)  # one that loads may be at work for another one
                self._stopping.add(replica)
                self._later(now + delays.stop, replica, ReplicaStopped(replica))
            case _:
                raise TypeError(f"the simulated driver cannot perform {type(action).__name__}")
        self._ask(now)

    def send_kv(self, replica: ReplicaId, action: SendKv | SendActivations, now: Nanos) -> None:
        """`replica` sends KV, or the activations of a batch, to another one."""
        if action.to not in self._held_since:
            self.tell_replica(replica, not_sent(action))
            return
        self._kv.start(replica, action, now)
        self._ask(now)

    def end(self, now: Nanos) -> AnyEvent | None:
        """The next thing that has ended at this instant; None where nothing has, or it was undone."""
        self._asked.discard(now)
        self._collect(now)
        event = self._ready.popleft() if self._ready else None
        if self._ready:
            self.push(now)
        if type(event) is ReplicaStopped:
            self._end_hold(event.replica, now)
        elif type(event) is WeightsLoaded:
            self._loaded.discard(event.replica)
        self._ask(now)
        return event

    # -- for the breaker

    def kill(self, replica: ReplicaId, why: str, now: Nanos) -> None:
        """The replica's process dies, where there is one."""
        if replica not in self._held_since or replica in self._stopping:
            return
        self._let_go(replica, now)
        self._end_hold(replica, now)
        self._ready = deque(event for event in self._ready if getattr(event, "replica", None) != replica)
        self._loaded.discard(replica)
        self.lost(replica, now)
        self.tell(ReplicaLost(replica, why), now)

    def links_changed(self, now: Nanos) -> None:
        """Links of the network are slower or faster than they were."""
        self._kv.links_changed(now)
        self._ask(now)

    def lose_host(self, node: int, now: Nanos) -> None:
        """The node's memory is gone, and what was read from it."""
        if self.roads is not None:
            for place in (Place("host", node), Place("ssd", node)):
                self.roads.weights.lose(place, now)

    def tell(self, event: AnyEvent, now: Nanos) -> None:
        """The controller hears of it at this instant."""
        self._ready.append(event)
        self.push(now)

    # -- inside

    def _load(self, replica: ReplicaId, transfer: Transfer, now: Nanos) -> None:
        if replica in self._loaded:
            return  # another source is named at the very instant at which all is there, and its word is on its way
        loaded = WeightsLoaded(replica, *self._pools[replica])
        if replica in self._there:
            self._later(now, replica, loaded)
        elif transfer.kind == "mock":
            self._later(now + round((transfer.seconds or 0.0) * SECOND), replica, loaded)
        elif self.roads is None:
            self._later(now + self._delays.load, replica, loaded)
        else:
            if transfer.live_partner is not None and replica == transfer.path[-1]:  # who passes on what it gets works for nobody
                self._live.add(replica)
            self.roads.weights.load(replica, transfer, now, layers=replica in self._live)

    def _let_go(self, replica: ReplicaId, now: Nanos) -> None:
        """Whatever was on its way to it, or from it, is void."""
        self._lives[replica] = self._lives.get(replica, 0) + 1
        self._live.discard(replica)
        if self.roads is not None:
            self.roads.weights.lose(Place("gpu", replica), now)
        for source, event in self._kv.lose(replica, now):
            self.tell_replica(source, event)

    def _end_hold(self, replica: ReplicaId, now: Nanos) -> None:
        self._stopping.discard(replica)
        self._held += now - self._held_since.pop(replica, now)

    def _later(self, at: Nanos, replica: ReplicaId, event: AnyEvent) -> None:
        self._number += 1
        heappush(self._timers, (at, self._number, replica, self._lives.get(replica, 0), event))
        self.push(at)

    def _collect(self, now: Nanos) -> None:
        """What is due at this instant, in the order: what breaks, what has arrived, what has ended."""
        breaker, roads, timers = self._breaker, self.roads, self._timers
        if breaker is not None and (at := breaker.next_at()) is not None and at <= now:
            breaker.strike(self, now)
        arrived = [] if roads is None else self._advance(roads.network, now)
        for source, event in self._kv.on(arrived, now):
            self.tell_replica(source, event)
        if arrived and roads is not None:
            for found in roads.weights.on(arrived, now):
                replica, layer = found.replica, found.layer
                if layer is None:
                    self._ready.append(WeightsLoaded(replica, *self._pools[replica]))
                    self._loaded.add(replica)
                else:
                    self._ready.append(LayerArrived(replica, layer))
        while timers and timers[0][0] <= now:
            _, _, replica, life, event = heappop(timers)
            if self._lives.get(replica, 0) == life:
                self._ready.append(event)
                if type(event) is WeightsLoaded:
                    self._loaded.add(replica)

    def _advance(self, network: Network, now: Nanos) -> list[Arrived]:
        """What has arrived, whosever it is: the network says it once, to whom asks first."""
        arrived = network.advance(now)
        if self.neighbours:
            for other in self.neighbours if arrived else ():
                other._arrived += arrived
                other.push(now)
            arrived, self._arrived = [*self._arrived, *arrived], []
        return arrived

    def _ask(self, now: Nanos) -> None:
        """Be asked again when the network or the breaker has something."""
        at = self._kv.next_end()
        if self.roads is not None and (ends := self.roads.network.next_end()) is not None and (at is None or ends < at):
            at = ends
        if self._breaker is not None and (strikes := self._breaker.next_at()) is not None and (at is None or strikes < at):
            at = strikes
        if at is None:
            return
        at = max(at, now)
        if at not in self._asked:
            self._asked.add(at)
            self.push(at)
