"""The simulated driver: one heap, a virtual clock, and the duties of `core/machine.py`.

Decides the order of events and nothing else. Knows no policy, no block and no price: machines decide, the world answers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
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
from squall.sim.order import ARRIVAL, END, MESSAGE, WAKE, Order
from squall.sim.pipeline import PipelinedEngine
from squall.sim.seats import EventLog, Gone, Seat
from squall.sim.slowed import Slowed
from squall.sim.world import World

WOKE: Final = Woke()

NOBODY: Final[tuple[Nanos, AnyEvent]] = (2 * FOREVER, WOKE)
"""Comes after the last one that is offered."""

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
        self._world = world
        self._loader = loader
        self._log = log
        self._make = make
        self._num_stages = num_stages
        self._stages = stages or {}
        self._num_layers = num_layers
        self._order = Order(loader.highest)
        self._seats: dict[MachineId, Seat] = {}
        self._ending: list[Seat | None] = [None] * (self._order.of_instant + 1)  # whose engine's run ends, by `Seat.ends`
        for id, machine in machines.items():
            self._sit(id, machine)
        self._heap: list[int] = [self._order.last]
        self._coming: dict[Nanos, deque[AnyEvent]] = {}  # requests that arrive because another one has ended
        self._messages: deque[Send] = deque()
        self._past_steps = 0  # of engines that are no more
        self._fresh = {id for id in machines if id >= 0}  # replicas whose machine has not been used
        self._in_vain = False  # nothing would ever come of those who wait
        self._progress: tuple[int, ...] = ()  # how far requests had come
        self._progress_at: Nanos = 0  # when that was found to have changed
        loader.push = self._ask_loader
        loader.lost = self._lose
        loader.tell_replica = self._tell

    @property
    def num_steps(self) -> int:
        """Steps done by all engines."""
        return self._past_steps + sum(seat.engine.num_steps for seat in self._seats.values() if seat.id >= 0)

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
        all_came = self.follow((until, ARRIVAL), offered, last=True)
        if all_came and (until == FOREVER or self._in_vain or self._is_over()):
            self.refuse_who_waits()
        else:
            self.stop(until)

    # -- the parts of a run, for whoever has several drivers on one clock

    def begin(self) -> None:
        """Before anything happens."""
        for seat in self._seats.values():
            if seat.machine.wake_at is not None:
                self._wake_later(seat, seat.machine.wake_at)
        self._loader.begin()

    def offer(self, event: AnyEvent, at: Nanos) -> None:
        """A client does something: it is next."""
        self.now = at
        if type(event) is Cancelled:
            self._world.cancel(event.request, at)
            self._let_go(at)
        self._messages.append(Send(ROUTER, event))

    def next_due(self) -> tuple[Nanos, int, MachineId] | None:
        """What would be delivered next: when, with which priority, and to whom."""
        first = self._heap[0]
        if self._messages and first >= self._order.first(self.now, MESSAGE):
            return self.now, MESSAGE, self._messages[0].to
        return self._order.read(first) if first != self._order.last else None

    def is_done(self, at: Nanos) -> bool:
        """Nothing is left to happen at `at` or later that is of any use; see `in_vain_after`."""
        return self._is_over() or self._is_in_vain(at)

    def hear(self, event: AnyEvent, now: Nanos) -> None:
        """What the controller of another fleet tells ours, which takes note of it."""
        seat = self._seats[CONTROLLER]
        actions = seat.handle(event, now)
        assert not actions
        self.num_events += 1
        if seat.machine.wake_at is not None:
            self._wake_later(seat, seat.machine.wake_at)

    def stop(self, now: Nanos) -> None:
        """The steps that engines have done by now count, and nothing else will happen."""
        self.now = now
        for seat in self._seats.values():
            cut_off = seat.engine.lose(now) if seat.id >= 0 else None
            if cut_off is not None and self.cut_off is not None:
                self.cut_off(seat.id, *cut_off)
        self._world.stop(now)

    def follow(self, until: tuple[Nanos, int], offered: Iterable[tuple[Nanos, AnyEvent]] = (), last: bool = False) -> bool:
        """Deliver all that is due and what follows from it, and what is `offered`, up to an instant and a priority in it.

        With `last` nothing else will be offered, and no more is delivered than is needed to end. Returns whether all that was
        offered has been delivered.
        """
        heap, messages, seats, ending = self._heap, self._messages, self._seats, self._ending
        released, router = self._world.released, seats[ROUTER]
        order = self._order
        at_bits, of_instant, message, arrival = order.at, order.of_instant, order.message, order.first(0, ARRIVAL)  # no calls
        now, num_events, end = self.now, 0, order.first(until[0], until[1])
        clients = iter(offered)
        comes_at, coming = next(clients, NOBODY)
        limit = min((comes_at << at_bits) + arrival, end)
        seat: Seat | None
        event: AnyEvent | None
        while True:
            while messages and heap[0] >= (now << at_bits) + message:
                sent = messages.popleft()
                seat = seats[sent.to]
                num_events += 1
                for action in seat.handle(sent.event, now):
                    self._perform(seat, action, now)
                if seat.machine.wake_at is not None:
                    self._wake_later(seat, seat.machine.wake_at)
            if heap[0] < limit:
                due = heappop(heap)
                at = due >> at_bits
                seat = ending[due & of_instant]
                if seat is not None:
                    event = seat.engine.end(at)
                    if released:
                        self._let_go(at)
                else:
                    _, priority, id = order.read(due)
                    if last and comes_at > FOREVER and id == CONTROLLER and self.is_done(at):
                        break
                    seat = seats[id]
                    event = self._come_due(seat, priority, at)
                if event is None:
                    if messages:
                        now = at  # the loader had something for a replica
                    continue
                now = at
            elif limit < end:
                seat, now, event = router, comes_at, coming
                comes_at, coming = next(clients, NOBODY)
                limit = (comes_at << at_bits) + arrival
                if limit > end:
                    limit = end
                if type(event) is Cancelled:  # who was queued behind it may go on with what it has, like after any message
                    self.offer(event, now)
                    continue
            else:
                break
            num_events += 1
            for action in seat.handle(event, now):
                if type(action) is RunSteps:
                    heappush(heap, (seat.engine.start(action, now) << at_bits) + seat.ends)
                elif type(action) is Send:
                    messages.append(action)
                else:
                    self._perform(seat, action, now)
            if seat.machine.wake_at is not None:
                self._wake_later(seat, seat.machine.wake_at)
        self.now = now
        self.num_events += num_events
        return comes_at > FOREVER

    def _come_due(self, seat: Seat, priority: int, at: Nanos) -> AnyEvent | None:
        """What is due, but for the end of a run: None where it is not wanted any more."""
        if priority == WAKE:
            if seat.wakes_at == at:
                seat.wakes_at = None
            return WOKE if seat.machine.wake_at == at else None
        if priority == END:
            return self._loader.end(at)
        coming = self._coming[at]
        event = coming.popleft()
        if not coming:
            del self._coming[at]
        return event

    def _let_go(self, now: Nanos) -> None:
        """Requests that waited for the end of another one arrive once their clients have thought."""
        for offered in self._world.released:
            at = now + offered.think
            self._coming.setdefault(at, deque()).append(self._world.arrival(offered, at))
            heappush(self._heap, self._order.of(at, ARRIVAL, ROUTER))
        self._world.released.clear()

    def _wake_later(self, seat: Seat, at: Nanos) -> None:
        if seat.wakes_at != at:
            seat.wakes_at = at
            heappush(self._heap, self._order.of(at, WAKE, seat.id))

    def _perform(self, seat: Seat, action: AnyAction, now: Nanos) -> None:
        """Any action, the most frequent ones first."""
        if type(action) is Cut:
            ends_at = seat.engine.cut(action.run, now)
            if ends_at is not None:
                heappush(self._heap, self._order.of(ends_at, END, seat.id))
        elif type(action) is Send:
            if self._world.paused and type(action.event) is Submitted:
                action = self._continued(action, action.event)
            self._messages.append(action)
        elif type(action) is RunSteps:
            heappush(self._heap, self._order.of(seat.engine.start(action, now), END, seat.id))
        elif type(action) is SendKv:
            self._loader.send_kv(seat.id, action, now)
        elif type(action) is Join:
            seat.engine.join(action.requests, action.group)
        elif type(action) is Hold:
            seat.engine.hold(action.requests)
        elif type(action) is RunLayers:
            heappush(self._heap, self._order.of(self._start_layers(seat, action, now), END, seat.id))
        elif type(action) not in WITHOUT_EFFECT:
            self._perform_rarer(seat, action, now)

    def _perform_rarer(self, seat: Seat, action: AnyAction, now: Nanos) -> None:
        match action:
            case SendActivations():
                self._loader.send_kv(seat.id, action, now)
            case Preempt(requests) | SwapOut(requests):
                seat.engine.preempt(requests)
            case Forget(requests):
                seat.engine.forget(requests)
            case Reply(request, rejection):
                self._world.reject(request, rejection, now)
                self._let_go(now)
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
        self._messages.append(Send(replica, event))

    def _ask_loader(self, at: Nanos) -> None:
        heappush(self._heap, self._order.of(at, END, CONTROLLER))

    def _sit(self, id: MachineId, machine: Machine) -> None:
        """A machine that knows nothing of the one that was in its place, with an engine of the same kind."""
        seat = self._seats.get(id)
        if seat is None:
            seat = self._seats[id] = Seat(id, self._order.of(0, END, id))
        seat.take(machine, self._log)
        if id >= 0:
            seat.engine = self._new_engine(id)
            self._ending[seat.ends] = seat

    def _begin_replica(self, replica: ReplicaId, now: Nanos) -> None:
        """A process knows nothing of the one before it: machine and engine are new."""
        if replica in self._fresh or self._make is None:
            self._fresh.discard(replica)
            return
        if replica in self._seats:
            self._past_steps += self._seats[replica].engine.num_steps
        self._sit(replica, self._make(replica, now))
        if self._messages:  # to the one before it, which died at this very instant
            others = [message for message in self._messages if message.to != replica]
            self._messages.clear()
            self._messages.extend(others)

    def _start_layers(self, seat: Seat, action: RunLayers, now: Nanos) -> Nanos:
        if not isinstance(seat.engine, LayeredEngine):
            raise TypeError(f"the engine of replica {seat.id} runs whole steps only")
        return seat.engine.start_layers(action, now)

    def _new_engine(self, replica: ReplicaId) -> Engine:
        if self._num_layers:
            return LayeredEngine(self._world, replica, self._num_layers)
        stages = self._stages.get(replica, self._num_stages)
        return Engine(self._world, replica) if stages == 1 else PipelinedEngine(self._world, replica, stages)

    def _lose(self, replica: ReplicaId, now: Nanos) -> None:
        """What its engine had done counts; whatever else is on its way to it is for nobody."""
        engine = self._seats[replica].engine
        engine.lose(now)
        self._past_steps += engine.num_steps
        self._sit(replica, Gone())

    def set_speed(self, replica: ReplicaId, factor: float, now: Nanos) -> None:
        """Its steps take 1 / `factor` times as long, in whole numbers, from the next boundary on."""
        seat = self._seats.get(replica)
        if seat is None:
            return
        times = max(1, round(1 / factor))
        latency = self._world.latency_of(replica)
        seat.engine.latency = latency if times == 1 else Slowed(latency, times)
        if (ends_at := seat.engine.cut_now(now)) is not None:
            heappush(self._heap, self._order.of(ends_at, END, replica))

    def _continued(self, sent: Send, event: Submitted) -> Send:
        """A request whose replica died goes on with the tokens that its client has."""
        generated = self._world.generated(event.request.id)
        if generated is None:
            return sent
        return Send(sent.to, Submitted(replace(event.request, num_output_tokens=generated)))

    def _is_over(self) -> bool:
        """All requests have ended, and nothing is left to happen but what the controller does about an empty fleet."""
        router = self._seats[ROUTER].machine
        idle = not (getattr(router, "num_queued", 0) or getattr(router, "num_outstanding", 0))
        return idle and not self._others_act()

    def _others_act(self) -> bool:
        """Something is to come that is not the controller's, nor an end or a wake-up that was called off."""
        order = self._order
        return any(self._acts(*order.read(due)) for due in self._heap if due != order.last)

    def _acts(self, at: Nanos, priority: int, id: MachineId) -> bool:
        if id == CONTROLLER:
            return False
        seat = self._seats[id]
        return seat.engine.ends(at) if priority == END else priority != WAKE or seat.machine.wake_at == at

    def _is_in_vain(self, at: Nanos) -> bool:
        """Whether nothing will ever come of those who wait."""
        router = self._seats[ROUTER].machine
        progress = getattr(router, "num_queued", 0), getattr(router, "num_outstanding", 0), self.num_steps
        if self._progress != progress or self._others_act():
            self._progress, self._progress_at = progress, at
        self._in_vain = at - self._progress_at >= self.in_vain_after
        return self._in_vain

    def refuse_who_waits(self) -> None:
        waiting = list(getattr(self._seats[ROUTER].machine, "unfinished", ()))
        while waiting:
            for request in waiting:
                self._world.reject(request, Rejection.NO_CAPACITY, self.now)
            waiting = [self._world.arrival(offered, self.now).request.id for offered in self._world.released]
            self._world.released.clear()
