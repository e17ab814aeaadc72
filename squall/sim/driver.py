"""The simulated driver: one heap, a virtual clock, and the duties of `core/machine.py`.

Decides the order of events and nothing else. Knows no policy, no block and no price: machines decide, the world answers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from heapq import heappop, heappush

from msgspec import Struct

from squall.core.actions import (
    AnyAction,
    Cut,
    Forget,
    LoadWeights,
    Preempt,
    Reply,
    RunSteps,
    Send,
    StartReplica,
    StopReplica,
    WarmReplica,
)  # fmt: skip
from squall.core.events import AnyEvent, Cancelled, ReplicaStarted, ReplicaStopped, Warmed, WeightsLoaded, Woke
from squall.core.machine import Machine
from squall.core.types import CONTROLLER, ROUTER, MachineId, Nanos, ReplicaId
from squall.sim.world import Engine, World

EventLog = Callable[[Nanos, MachineId, AnyEvent, Sequence[AnyAction]], None]
"""Called after every event with what it led to, before the actions are performed."""


class Priority(IntEnum):
    """The order within an instant. Ties are decided here: by priority, then by machine, then first come, first served."""

    END = 0  # of steps and of the controller's actions
    MESSAGE = 1  # between machines; these wait in a queue of their own, in the order in which they were sent
    ARRIVAL = 2  # of requests and cancellations, in the order given
    WAKE = 3


class Delays(Struct, frozen=True):
    """How long the controller's actions take, in nanoseconds. By default the fleet is up at the instant it is wanted."""

    start: Nanos = 0
    load: Nanos = 0
    warm: Nanos = 0
    stop: Nanos = 0


class Driver:
    """Runs machines on a virtual clock until nothing is left to happen.

    Args:
        machines: by id; ROUTER must be one of them.
        world: what their actions act upon.
        pools: of each replica, its KV blocks and their size.
        delays: of the controller's actions.
        log: see EventLog.

    Attributes:
        now: the virtual clock.
        num_events: events delivered.
    """

    def __init__(
        self,
        machines: Mapping[MachineId, Machine],
        world: World,
        pools: Mapping[ReplicaId, tuple[int, int]],
        delays: Delays = Delays(),  # noqa: B008 - frozen
        log: EventLog | None = None,
    ) -> None:
        self.now: Nanos = 0
        self.num_events = 0
        self._machines = machines
        self._world = world
        self._pools = pools
        self._delays = delays
        self._log = log
        self._engines = {replica: Engine(world, replica) for replica in pools}
        self._heap: list[tuple[Nanos, Priority, MachineId, int, AnyEvent | None]] = []
        self._messages: deque[tuple[MachineId, AnyEvent]] = deque()
        self._wakes: dict[MachineId, Nanos] = {}
        self._sequence = 0
        self._held_since: dict[ReplicaId, Nanos] = {}
        self._held: Nanos = 0

    @property
    def replica_nanos(self) -> Nanos:
        """Time for which replicas were held, over all of them, until now."""
        return self._held + sum(self.now - since for since in self._held_since.values())

    def run(self, offered: Iterable[tuple[Nanos, AnyEvent]] = ()) -> None:
        """Deliver the router's `offered` events, ascending in time, and everything that follows from them."""
        heap = self._heap
        messages = self._messages
        for id, machine in self._machines.items():
            if machine.wake_at is not None:
                self._set_wake(id, machine.wake_at)
        while messages or (heap and heap[0][0] <= self.now):  # who wants to be woken at 0 comes before the first arrival
            self._follow()
        for at, event in offered:
            while messages or (heap and heap[0] < (at, Priority.ARRIVAL)):
                self._follow()
            self._arrive(at, event)
        while messages or heap:
            self._follow()

    def _follow(self) -> None:
        """The next of what follows from earlier events."""
        heap = self._heap
        if self._messages and not (heap and heap[0][0] == self.now and heap[0][1] is Priority.END):
            self._deliver(*self._messages.popleft())
        else:
            self._happen(*heappop(heap))

    def _arrive(self, at: Nanos, event: AnyEvent) -> None:
        self.now = at
        if type(event) is Cancelled:
            self._world.cancel(event.request, at)
        self._deliver(ROUTER, event)

    def _happen(self, at: Nanos, priority: Priority, machine: MachineId, sequence: int, event: AnyEvent | None) -> None:
        """What stands in the heap, unless it was overtaken: a run that was cut, a wake-up that is not wanted any more."""
        if priority is Priority.WAKE:
            if self._wakes.get(machine) != at:
                return
            del self._wakes[machine]
            event = Woke()
        elif event is None:
            engine = self._engines[machine]
            if engine.run is None or engine.run.run != sequence or engine.ends_at != at:
                return
            event = engine.end(at)
        self.now = at
        if type(event) is ReplicaStopped:
            self._held += at - self._held_since.pop(event.replica)
        self._deliver(machine, event)

    def _deliver(self, id: MachineId, event: AnyEvent) -> None:
        machine = self._machines[id]
        now = self.now
        actions = machine.handle(event, now)
        self.num_events += 1
        if self._log is not None:
            self._log(now, id, event, actions)
        for action in actions:
            if type(action) is Send:
                self._messages.append((action.to, action.event))
            elif type(action) is RunSteps:
                heappush(self._heap, (self._engines[id].start(action, now), Priority.END, id, action.run, None))
            else:
                self._perform(id, action)
        wake_at = machine.wake_at
        if wake_at != self._wakes.get(id):
            self._set_wake(id, wake_at)

    def _set_wake(self, id: MachineId, at: Nanos | None) -> None:
        if at is None:
            del self._wakes[id]
            return
        self._wakes[id] = at
        self._sequence += 1
        heappush(self._heap, (max(at, self.now), Priority.WAKE, id, self._sequence, None))

    def _perform(self, id: MachineId, action: AnyAction) -> None:
        """The rarer actions."""
        match action:
            case Cut(run):
                engine = self._engines[id]
                if engine.cut(run, self.now):
                    heappush(self._heap, (engine.ends_at, Priority.END, id, run, None))
            case Preempt(requests):
                self._engines[id].preempt(requests, self.now)
            case Forget(requests):
                self._engines[id].forget(requests)
            case Reply(request, rejection):
                self._world.reject(request, rejection, self.now)
            case StartReplica(replica):
                self._held_since[replica] = self.now
                self._end_after(self._delays.start, ReplicaStarted(replica))
            case LoadWeights(replica):
                self._end_after(self._delays.load, WeightsLoaded(replica, *self._pools[replica]))
            case WarmReplica(replica):
                self._end_after(self._delays.warm, Warmed(replica))
            case StopReplica(replica):
                self._end_after(self._delays.stop, ReplicaStopped(replica))
            case _:
                raise TypeError(f"the simulated driver cannot perform {type(action).__name__}")

    def _end_after(self, delay: Nanos, event: AnyEvent) -> None:
        """A long action of the controller ends in `event`."""
        self._sequence += 1
        heappush(self._heap, (self.now + delay, Priority.END, CONTROLLER, self._sequence, event))
