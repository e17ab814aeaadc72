"""The simulated driver: one heap, a virtual clock, and the duties of `core/machine.py`.

Decides the order of events and nothing else. Knows no policy, no block and no price: machines decide, the world answers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final

from msgspec.structs import replace

from squall.core.actions import (
    Abandon,
    AnyAction,
    Cut,
    Decided,
    Evict,
    Forget,
    Hold,
    Join,
    LoadWeights,
    Preempt,
    Reply,
    Reserve,
    RunLayers,
    RunSteps,
    Send,
    SendActivations,
    SendKv,
    StartReplica,
    StopReplica,
    SwapIn,
    SwapOut,
    TellNeighbours,
    WarmReplica,
)  # fmt: skip
from squall.core.events import AnyEvent, Cancelled, Rejection, Submitted, Woke
from squall.core.machine import Machine
from squall.core.types import CONTROLLER, FOREVER, ROUTER, MachineId, Nanos, ReplicaId, RunId
from squall.sim.engine import Engine
from squall.sim.layers import LayeredEngine
from squall.sim.loading import Loader
from squall.sim.order import ARRIVAL, END, LOWEST, MESSAGE, WAKE, Order
from squall.sim.pipeline import PipelinedEngine
from squall.sim.slowed import Slowed
from squall.sim.world import World

EventLog = Callable[[Nanos, MachineId, AnyEvent, Sequence[AnyAction]], None]
"""Called after every event with what it led to, before the actions are performed."""


WITHOUT_EFFECT: Final = frozenset((Abandon, Reserve, Evict, SwapIn))
"""Blocks are the machine's business: here they have no content. Whoever is swapped in goes on with the next `Join`, or chunk."""


class Driver:
    """Runs machines on a virtual clock until nothing is left to happen.

    Args:
        machines: by id; ROUTER must be one of them.
        world: what their actions act upon.
        loader: performs the controller's actions.
        log: see EventLog.
        num_stages: pipeline stages of every replica.
        num_layers: of the model, where replicas run single ones; 0 where they do not.
        make: a fresh machine for a replica that starts (again); it is told when. None: only those of `machines` do, once.
        stages: of replicas with another number of them than `num_stages`.

    Attributes:
        now: the virtual clock.
        num_events: events delivered.
        scale_ups, scale_downs: replicas added and removed by decisions.
        cut_off: told of every run that the end cuts off: replica, run, steps that are done, and when the last one was.
        tell_neighbours: the controllers of other fleets hear of it at this instant, before this returns.
        in_vain_after: who waits for a replica, with its KV held or without, is refused when for so long after the last arrival
            nobody but the controller has done anything, and that is the end.
    """

    def __init__(
        self,
        machines: Mapping[MachineId, Machine],
        world: World,
        loader: Loader,
        log: EventLog | None = None,
        num_stages: int = 1,
        num_layers: int = 0,
        make: Callable[[ReplicaId, Nanos], Machine] | None = None,
        stages: Mapping[ReplicaId, int] | None = None,
    ) -> None:
        self.now: Nanos = 0
        self.num_events = 0
        self.scale_ups = self.scale_downs = 0
        self.cut_off: Callable[[ReplicaId, RunId, int, Nanos], None] | None = None
        self.tell_neighbours: Callable[[AnyEvent, Nanos], None] = lambda *_: None
        self.in_vain_after: Nanos = FOREVER
        self._machines = dict(machines)
        self._world = world
        self._loader = loader
        self._log = log
        self._make = make
        self._num_stages = num_stages
        self._stages = stages or {}
        self._num_layers = num_layers
        self._engines: dict[ReplicaId, Engine] = {id: self._new_engine(id) for id in machines if id >= 0}
        self._order = Order(loader.highest)
        self._heap: list[int] = []
        self._coming: dict[Nanos, deque[AnyEvent]] = {}  # requests that arrive because another one has ended
        self._messages: deque[tuple[MachineId, AnyEvent]] = deque()
        self._wakes: dict[MachineId, Nanos] = {}
        self._past_steps = 0  # of engines that are no more
        self._fresh = set(self._engines)  # replicas whose machine has not been used
        self._in_vain = False  # nothing would ever come of those who wait
        self._progress: tuple[int, ...] = ()  # how far requests had come
        self._progress_at: Nanos = 0  # when that was found to have changed
        self._enders: dict[MachineId, Engine | Loader] = {**self._engines, CONTROLLER: loader}
        self._at_hand = (
            self._heap, self._messages, self._machines, self._engines, self._enders, self._wakes, log, world.released, world.left,
            self._order,
        )  # fmt: skip
        """What every event needs; `_follow` is called with each arrival."""
        loader.push = self._ask_loader
        loader.lost = self._lose
        loader.tell_replica = self._tell

    @property
    def num_steps(self) -> int:
        """Steps done by all engines."""
        return self._past_steps + sum(engine.num_steps for engine in self._engines.values())

    @property
    def replica_nanos(self) -> Nanos:
        """Time for which replicas were held, over all of them, until now."""
        return self._loader.replica_nanos(self.now)

    def run(self, offered: Iterable[tuple[Nanos, AnyEvent]] = (), until: Nanos = FOREVER) -> None:
        """Deliver the router's `offered` events, ascending in time, and everything that follows from them.

        At `until` all ends: steps that end at that very instant count, and what arrives at it does not come any more.
        """
        self.begin()
        self.follow((self.now, WAKE + 1))  # who wants to be woken at 0 comes before the first arrival
        for at, event in offered:
            if at >= until:
                break
            self.follow((at, ARRIVAL))
            self.offer(event, at)
        else:
            self.follow((until, ARRIVAL), last=True)
            if until == FOREVER or self._in_vain or self._is_over():
                self.refuse_who_waits()
                return
        self.follow((until, ARRIVAL))
        self.stop(until)

    # -- the parts of a run, for whoever has several drivers on one clock

    def begin(self) -> None:
        """Before anything happens."""
        for id, machine in self._machines.items():
            if machine.wake_at is not None:
                self._set_wake(id, machine.wake_at)
        self._loader.begin()

    def offer(self, event: AnyEvent, at: Nanos) -> None:
        """A client does something: it is next."""
        self.now = at
        if type(event) is Cancelled:
            self._world.cancel(event.request, at)
        self._messages.append((ROUTER, event))

    def next_due(self) -> tuple[Nanos, int, MachineId] | None:
        """What would be delivered next: when, with which priority, and to whom."""
        heap = self._heap
        if self._messages and not (heap and heap[0] < self._order.first(self.now, MESSAGE)):
            return self.now, MESSAGE, self._messages[0][0]
        return self._order.read(heap[0]) if heap else None

    def is_done(self, at: Nanos) -> bool:
        """Nothing is left to happen at `at` or later that is of any use; see `in_vain_after`."""
        return self._is_over() or self._is_in_vain(at)

    def hear(self, event: AnyEvent, now: Nanos) -> None:
        """What the controller of another fleet tells ours, which takes note of it."""
        controller = self._machines[CONTROLLER]
        actions = controller.handle(event, now)
        assert not actions
        self.num_events += 1
        if self._log is not None:
            self._log(now, CONTROLLER, event, actions)
        if controller.wake_at is not None or CONTROLLER in self._wakes:
            self._set_wake(CONTROLLER, controller.wake_at)

    def stop(self, now: Nanos) -> None:
        """The steps that engines have done by now count, and nothing else will happen."""
        self.now = now
        for id, engine in self._engines.items():
            cut_off = engine.lose(now)
            if cut_off is not None and self.cut_off is not None:
                self.cut_off(id, *cut_off)
        self._world.stop(now)

    def follow(self, until: tuple[Nanos, int], last: bool = False) -> None:
        """Deliver all that is due and what follows from it, up to an instant and a priority in it.

        With `last` nothing else will be offered, and no more is delivered than is needed to end.
        """
        heap, messages, machines, engines, enders, wakes, log, released, left, order = self._at_hand
        now, num_events = self.now, 0
        at_bits, id_bits, ids, message = order.at, order.priority, order.id, order.message  # no calls: every event passes here
        ended, limit = (now << at_bits) + message, order.first(until[0], until[1])
        event: AnyEvent | None
        while True:
            if messages and not (heap and heap[0] < ended):
                id, event = messages.popleft()
            elif heap and heap[0] < limit:
                due = heappop(heap)
                at, priority, id = due >> at_bits, due >> id_bits & WAKE, (due & ids) - LOWEST
                if last and id == CONTROLLER and (self._is_over() or self._is_in_vain(at)):
                    break
                if priority == END:
                    event = enders[id].end(at)
                elif priority == WAKE:
                    event = self._wake(id, at)
                else:
                    event = self._come(at)
                if event is None:
                    if messages:
                        now = at  # the loader had something for a replica
                        ended = (now << at_bits) + message
                    continue
                if at != now:
                    now = at
                    ended = (now << at_bits) + message
            else:
                break
            machine = machines[id]
            actions = machine.handle(event, now)
            num_events += 1
            if log is not None and type(machine) is not Gone:
                log(now, id, event, actions)
            for action in actions:
                if type(action) is RunSteps:
                    heappush(heap, (engines[id].start(action, now) << at_bits) + (id + LOWEST))  # as `order.of` an END
                elif type(action) is Send:
                    sent = action.event
                    if left and type(sent) is Submitted:
                        sent = self._continued(sent)
                    messages.append((action.to, sent))
                elif type(action) not in WITHOUT_EFFECT:
                    self._perform(id, action, now)
            if machine.wake_at is not None or id in wakes:
                self._set_wake(id, machine.wake_at)
            if released:
                self._let_go(now)
        self.now = now
        self.num_events += num_events

    def _let_go(self, now: Nanos) -> None:
        """Requests that waited for the end of another one arrive once their clients have thought."""
        for offered in self._world.released:
            at = now + offered.think
            self._coming.setdefault(at, deque()).append(self._world.arrival(offered, at))
            heappush(self._heap, self._order.of(at, ARRIVAL, ROUTER))
        self._world.released.clear()

    def _come(self, at: Nanos) -> AnyEvent:
        coming = self._coming[at]
        event = coming.popleft()
        if not coming:
            del self._coming[at]
        return event

    def _wake(self, id: MachineId, at: Nanos) -> Woke | None:
        """None where it is not wanted any more."""
        if self._wakes.get(id) != at:
            return None
        del self._wakes[id]
        return Woke()

    def _set_wake(self, id: MachineId, at: Nanos | None) -> None:
        if at is None:
            del self._wakes[id]
        elif self._wakes.get(id) != at:
            self._wakes[id] = at
            heappush(self._heap, self._order.of(at, WAKE, id))

    def _perform(self, id: MachineId, action: AnyAction, now: Nanos) -> None:
        """The rarer actions, of these the most frequent first."""
        if type(action) is Cut:
            ends_at = self._engines[id].cut(action.run, now)
            if ends_at is not None:
                heappush(self._heap, self._order.of(ends_at, END, id))
        elif type(action) is SendKv:
            self._loader.send_kv(id, action, now)
        elif type(action) is Join:
            self._engines[id].join(action.requests, action.group)
        elif type(action) is Hold:
            self._engines[id].hold(action.requests)
        elif type(action) is RunLayers:
            heappush(self._heap, self._order.of(self._start_layers(id, action, now), END, id))
        else:
            self._perform_rarer(id, action, now)

    def _perform_rarer(self, id: MachineId, action: AnyAction, now: Nanos) -> None:
        match action:
            case SendActivations():
                self._loader.send_kv(id, action, now)
            case Preempt(requests) | SwapOut(requests):
                self._engines[id].preempt(requests)
            case Forget(requests):
                self._engines[id].forget(requests)
            case Reply(request, rejection):
                self._world.reject(request, rejection, now)
            case StartReplica(replica):
                self._begin_replica(replica, now)
                self._loader.perform(action, now)
            case LoadWeights() | WarmReplica() | StopReplica():
                self._loader.perform(action, now)
            case TellNeighbours(event):
                self.tell_neighbours(event, now)
            case Decided(_, before, after):
                self.scale_ups += max(0, after - before)
                self.scale_downs += max(0, before - after)
            case _:
                raise TypeError(f"the simulated driver cannot perform {type(action).__name__}")

    # -- replicas that come and go

    def _tell(self, replica: ReplicaId, event: AnyEvent) -> None:
        """After the ends of this instant, so that a step which ends now has ended."""
        self._messages.append((replica, event))

    def _ask_loader(self, at: Nanos) -> None:
        heappush(self._heap, self._order.of(at, END, CONTROLLER))

    def _begin_replica(self, replica: ReplicaId, now: Nanos) -> None:
        """A process knows nothing of the one before it: machine and engine are new."""
        if replica in self._fresh or self._make is None:
            self._fresh.discard(replica)
            return
        if replica in self._engines:
            self._past_steps += self._engines[replica].num_steps
        self._machines[replica] = self._make(replica, now)
        self._engines[replica] = self._enders[replica] = self._new_engine(replica)
        self._wakes.pop(replica, None)
        if self._messages:  # to the one before it, which died at this very instant
            others = [message for message in self._messages if message[0] != replica]
            self._messages.clear()
            self._messages.extend(others)

    def _start_layers(self, id: MachineId, action: RunLayers, now: Nanos) -> Nanos:
        engine = self._engines[id]
        if not isinstance(engine, LayeredEngine):
            raise TypeError(f"the engine of replica {id} runs whole steps only")
        return engine.start_layers(action, now)

    def _new_engine(self, replica: ReplicaId) -> Engine:
        if self._num_layers:
            return LayeredEngine(self._world, replica, self._num_layers)
        stages = self._stages.get(replica, self._num_stages)
        return Engine(self._world, replica) if stages == 1 else PipelinedEngine(self._world, replica, stages)

    def _lose(self, replica: ReplicaId, now: Nanos) -> None:
        """What its engine had done counts; whatever else is on its way to it is for nobody."""
        engine = self._engines[replica]
        engine.lose(now)
        self._past_steps += engine.num_steps
        self._machines[replica] = Gone()
        self._engines[replica] = self._enders[replica] = self._new_engine(replica)
        self._wakes.pop(replica, None)

    def set_speed(self, replica: ReplicaId, factor: float, now: Nanos) -> None:
        """Its steps take 1 / `factor` times as long, in whole numbers, from the next boundary on."""
        engine = self._engines.get(replica)
        if engine is None:
            return
        times = max(1, round(1 / factor))
        latency = self._world.latency_of(replica)
        engine.latency = latency if times == 1 else Slowed(latency, times)
        if (ends_at := engine.cut_now(now)) is not None:
            heappush(self._heap, self._order.of(ends_at, END, replica))

    def _continued(self, event: Submitted) -> Submitted:
        """A request whose replica died goes on with the tokens that its client has."""
        left = self._world.left.get(event.request.id)
        if left is None:
            return event
        return Submitted(replace(event.request, num_output_tokens=self._world.outputs[event.request.id] - left))

    def _is_over(self) -> bool:
        """All requests have ended, and nothing is left to happen but what the controller does about an empty fleet."""
        router = self._machines[ROUTER]
        idle = not (getattr(router, "num_queued", 0) or getattr(router, "num_outstanding", 0))
        return idle and not self._others_act()

    def _others_act(self) -> bool:
        """Something is to come that is not the controller's, nor an end or a wake-up that was called off."""
        return any(
            id != CONTROLLER
            and (self._engines[id].ends(at) if priority == END else priority != WAKE or self._wakes.get(id) == at)
            for at, priority, id in map(self._order.read, self._heap)
        )

    def _is_in_vain(self, at: Nanos) -> bool:
        """Whether nothing will ever come of those who wait."""
        router = self._machines[ROUTER]
        progress = getattr(router, "num_queued", 0), getattr(router, "num_outstanding", 0), self.num_steps
        if self._progress != progress or self._others_act():
            self._progress, self._progress_at = progress, at
        self._in_vain = at - self._progress_at >= self.in_vain_after
        return self._in_vain

    def refuse_who_waits(self) -> None:
        waiting = list(getattr(self._machines[ROUTER], "unfinished", ()))
        while waiting:
            for request in waiting:
                self._world.reject(request, Rejection.NO_CAPACITY, self.now)
            waiting = [self._world.arrival(offered, self.now).request.id for offered in self._world.released]
            self._world.released.clear()


class Gone:
    """A replica whose process has died: it hears nothing and does nothing."""

    wake_at: Nanos | None = None

    def handle(self, _event: AnyEvent, _now: Nanos) -> list[AnyAction]:
        return []
