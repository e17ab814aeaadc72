"""The simulated driver: one heap, a virtual clock, and the duties of `core/machine.py`.

Decides the order of events and nothing else. Knows no policy, no block and no price: machines decide, the world answers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

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
from squall.core.types import CONTROLLER, FOREVER, ROUTER, MachineId, Nanos, ReplicaId
from squall.sim.pipeline import PipelinedEngine
from squall.sim.world import Engine, World

EventLog = Callable[[Nanos, MachineId, AnyEvent, Sequence[AnyAction]], None]
"""Called after every event with what it led to, before the actions are performed."""


# The order within an instant. Ties are decided here: by priority, then by machine, then first come, first served.
END: Final = 0  # of steps and of the controller's actions
MESSAGE: Final = 1  # between machines; these wait in a queue of their own, in the order in which they were sent
ARRIVAL: Final = 2  # of requests and cancellations, in the order given
WAKE: Final = 3


class Delays(NamedTuple):
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
        num_stages: pipeline stages of every replica.

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
        num_stages: int = 1,
    ) -> None:
        self.now: Nanos = 0
        self.num_events = 0
        self._machines = machines
        self._world = world
        self._pools = pools
        self._delays = delays
        self._log = log
        pipelined = num_stages > 1
        self._engines: dict[ReplicaId, Engine] = {
            replica: PipelinedEngine(world, replica, num_stages) if pipelined else Engine(world, replica) for replica in pools
        }
        self._heap: list[tuple[Nanos, int, MachineId, int, AnyEvent | None]] = []
        self._messages: deque[tuple[MachineId, AnyEvent]] = deque()
        self._wakes: dict[MachineId, Nanos] = {}
        self._sequence = 0
        self._held_since: dict[ReplicaId, Nanos] = {}
        self._held: Nanos = 0

    @property
    def num_steps(self) -> int:
        """Steps done by all engines."""
        return sum(engine.num_steps for engine in self._engines.values())

    @property
    def replica_nanos(self) -> Nanos:
        """Time for which replicas were held, over all of them, until now."""
        return self._held + sum(self.now - since for since in self._held_since.values())

    def run(self, offered: Iterable[tuple[Nanos, AnyEvent]] = ()) -> None:
        """Deliver the router's `offered` events, ascending in time, and everything that follows from them."""
        for id, machine in self._machines.items():
            if machine.wake_at is not None:
                self._set_wake(id, machine.wake_at)
        self._follow((self.now, WAKE + 1))  # who wants to be woken at 0 comes before the first arrival
        for at, event in offered:
            self._follow((at, ARRIVAL))
            self.now = at
            if type(event) is Cancelled:
                self._world.cancel(event.request, at)
            self._messages.append((ROUTER, event))
        self._follow((FOREVER, ARRIVAL))

    def _follow(self, until: tuple[Nanos, int]) -> None:
        """Deliver all that is due and what follows from it, up to an instant and a priority in it."""
        heap, messages, machines, engines, wakes, log, released = (
            self._heap, self._messages, self._machines, self._engines, self._wakes, self._log, self._world.released,
        )  # fmt: skip
        now = self.now
        event: AnyEvent | None
        while True:
            if messages and not (heap and heap[0][0] == now and heap[0][1] == END):
                id, event = messages.popleft()
            elif heap and heap[0] < until:
                at, priority, id, _, event = heappop(heap)
                if event is None:
                    event = engines[id].end(at) if priority == END else self._wake(id, at)
                    if event is None:
                        continue
                now = at
            else:
                self.now = now
                return
            machine = machines[id]
            actions = machine.handle(event, now)
            self.num_events += 1
            if log is not None:
                log(now, id, event, actions)
            for action in actions:
                if type(action) is Send:
                    messages.append((action.to, action.event))
                elif type(action) is RunSteps:
                    heappush(heap, (engines[id].start(action, now), END, id, action.run, None))
                else:
                    self._perform(id, action, now)
            if machine.wake_at is not None or id in wakes:
                self._set_wake(id, machine.wake_at)
            if released:
                self._let_go(now)

    def _let_go(self, now: Nanos) -> None:
        """Requests that waited for the end of another one arrive once their clients have thought."""
        for offered in self._world.released:
            self._sequence += 1
            at = now + offered.think
            heappush(self._heap, (at, ARRIVAL, ROUTER, self._sequence, self._world.arrival(offered, at)))
        self._world.released.clear()

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
            self._sequence += 1
            heappush(self._heap, (at, WAKE, id, self._sequence, None))

    def _perform(self, id: MachineId, action: AnyAction, now: Nanos) -> None:
        """The rarer actions."""
        match action:
            case Cut(run):
                ends_at = self._engines[id].cut(run, now)
                if ends_at is not None:
                    heappush(self._heap, (ends_at, END, id, run, None))
            case Preempt(requests):
                self._engines[id].preempt(requests)
            case Forget(requests):
                self._engines[id].forget(requests)
            case Reply(request, rejection):
                self._world.reject(request, rejection, now)
            case StartReplica(replica):
                self._held_since[replica] = now
                self._end_at(now + self._delays.start, ReplicaStarted(replica))
            case LoadWeights(replica):
                self._end_at(now + self._delays.load, WeightsLoaded(replica, *self._pools[replica]))
            case WarmReplica(replica):
                self._end_at(now + self._delays.warm, Warmed(replica))
            case StopReplica(replica):
                self._held += now + self._delays.stop - self._held_since.pop(replica)
                self._end_at(now + self._delays.stop, ReplicaStopped(replica))
            case _:
                raise TypeError(f"the simulated driver cannot perform {type(action).__name__}")

    def _end_at(self, at: Nanos, event: AnyEvent) -> None:
        """A long action of the controller ends in `event`."""
        self._sequence += 1
        heappush(self._heap, (at, END, CONTROLLER, self._sequence, event))
