"""What a simulation's engines do, seen through its event log: stretches of steps, KV blocks, phases, time at work.

`watched` lets several watchers look at one simulation. Knows the actions and events of a replica and what a step costs. Does not
know what is made of it (`report` does), and decides nothing: an observed run is, to the nanosecond, that which nobody looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Final, Protocol

from squall.core.actions import AnyAction, Chunk, Forget, Hold, Join, Preempt, RunLayers, RunSteps, Send, SwapIn, SwapOut
from squall.core.controller import Controller
from squall.core.events import AnyEvent, KvSent, LayersDone, ReplicaLost, StepsDone
from squall.core.machine import Machine
from squall.core.metrics import STRETCH, Observed, kv_delivered
from squall.core.replica import Replica
from squall.core.types import CONTROLLER, MachineId, Nanos, ReplicaId, RequestId, RunId
from squall.fleet_tables import SLOWEST
from squall.perf.latency import LatencyModel, Progression
from squall.perf.progressions import total
from squall.sim.seats import EventLog


class Watcher(Protocol):
    """Whoever looks on: told of every machine before its first event, and of every event with what it led to."""

    def created(self, now: Nanos, machine: MachineId, made: Machine) -> None: ...

    def record(self, now: Nanos, machine: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None: ...


NO_PREFILLS: Final = (0, 0, 0, 0)

stretch: Final = Struct(f"{len(STRETCH)}q").pack
"""A row of `Observed.stretches`, as bytes: an array takes them faster than numbers."""

Running = tuple[Nanos, RunSteps, int, int]
"""A run in progress: since when, and what it found: the blocks in use, and its entry in `Observed.growths`."""

Priced = tuple[int, Nanos, int, Progression]
"""A stretch: its stage, when it began, steps of its run before it, and the prices of its steps."""

Created = Callable[[Nanos, MachineId, Machine], None]


def watched(watchers: Sequence[Watcher]) -> tuple[EventLog | None, Created | None]:
    """`log` and `created` of `simulate` for all of them, told in this order; two None where nobody looks."""
    if not watchers:
        return None, None
    if len(watchers) == 1:
        return watchers[0].record, watchers[0].created
    records = [watcher.record for watcher in watchers]

    def record(now: Nanos, machine: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        for each in records:
            each(now, machine, event, actions)

    def created(now: Nanos, machine: MachineId, made: Machine) -> None:
        for watcher in watchers:
            watcher.created(now, machine, made)

    return record, created


class Decoded:
    """What a group of decodes has done.

    Attributes:
        time: how long its steps have lasted together; each passes every stage.
        steps: how many there were.
    """

    __slots__ = ("steps", "time")

    def __init__(self) -> None:
        self.time: Nanos = 0
        self.steps = 0

    def add(self, time: Nanos, steps: int) -> None:
        self.time += time
        self.steps += steps


class Observer:
    """A watcher that fills an `Observed`.

    Args:
        latency: prices the steps, as in the simulation.
        block_size: tokens of a KV block.
        latencies: of replicas whose steps `latency` does not price.

    Attributes:
        observed: complete once the simulation has ended.
    """

    def __init__(self, latency: LatencyModel, block_size: int, latencies: Mapping[ReplicaId, LatencyModel] | None = None) -> None:
        self._latency = latency
        self._latencies = latencies or {}
        self.observed = Observed(block_size, max(each.num_stages for each in (self._latencies or {0: latency}).values()))
        self._controller: Controller | None = None
        self._replicas: dict[ReplicaId, Replica] = {}
        self._phases: dict[ReplicaId, tuple[str, str]] = {}
        self._running: dict[tuple[ReplicaId, RunId], Running] = {}
        self._layers: dict[ReplicaId, tuple[Nanos, RunLayers]] = {}  # that run now, and since when
        self._stages_free_at: dict[ReplicaId, list[Nanos]] = {}
        self._groups: dict[tuple[ReplicaId, int], Decoded] = {}
        self._joined: dict[RequestId, tuple[ReplicaId, Decoded, Nanos, int]] = {}  # who decodes: where, and since when there
        self._reserved: dict[RequestId, int] = {}  # blocks that prompts in pieces hold from the first on
        self._generated: dict[RequestId, int] = {}  # by those that lost their KV or their replica
        self._preempted_at: dict[RequestId, Nanos] = {}

    def created(self, now: Nanos, machine: MachineId, made: Machine) -> None:  # noqa: ARG002 - the instant is every watcher's
        if isinstance(made, Replica):
            self._replicas[machine] = made
            self._stages_free_at.pop(machine, None)  # a process knows nothing of the one before it
            self.observed.pools[machine] = made.num_blocks
            self.observed.stages[machine] = made.num_stages
        elif isinstance(made, Controller):
            self._controller = made

    def record(self, now: Nanos, machine: MachineId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        if machine < 0:
            if machine == CONTROLLER:
                self._look_at_fleet(now, event, actions)
            return
        if type(event) is StepsDone:
            self._end(machine, event, now)
        elif type(event) is LayersDone:
            self._end_layers(machine, now)
        elif type(event) is KvSent:
            handed = kv_delivered(machine, event.to, event.request, event.path, event.num_bytes, now - event.took, event.took)
            self.observed.handoffs.append(handed)
        for action in actions:
            if type(action) is RunSteps:
                self._begin(machine, action, now)
            elif type(action) is RunLayers:
                self._resume(action.chunks, now)
                self._layers[machine] = now, action
            elif type(action) is Preempt:
                for request in action.requests:
                    self._preempt(request, now)
            elif type(action) is SwapOut:
                for request in action.requests:
                    self._swap_out(request, now)
            elif type(action) is SwapIn:
                self._end_pause(action.request, now)
            elif type(action) is Hold:
                for request in action.requests:
                    self._leave(request)
            elif type(action) is Join:
                group = self._group(machine, action.group)
                for request in action.requests:
                    self._generated.setdefault(request, 1)  # of layers: who joins has a token
                    self._joined[request] = machine, group, group.time, group.steps
            elif type(action) is Forget:
                for request in action.requests:
                    self._leave(request)

    def _resume(self, chunks: Sequence[Chunk], now: Nanos) -> None:
        """Whoever was preempted is worked on again."""
        for chunk in chunks if self._preempted_at else ():
            self._end_pause(chunk.request, now)

    def _begin(self, replica: ReplicaId, run: RunSteps, now: Nanos) -> None:
        self._resume(run.chunks, now)
        for chunk in run.chunks:
            if chunk.num_reserved:
                self._reserved[chunk.request] = chunk.num_reserved
        for moved in run.regrouped:
            group = self._group(replica, moved.group)
            for request in moved.requests:
                if self._leave(request):
                    self._joined[request] = replica, group, group.time, group.steps
        machine = self._replicas[replica]
        growth = -1
        if run.steps > 1:
            growths = self.observed.growths
            growth = len(growths) // self.observed.block_size
            growths.extend(machine.growth(run.run))
        self._running[replica, run.run] = now, run, machine.num_used_blocks, growth

    def cut_off(self, replica: ReplicaId, run: RunId, steps: int, at: Nanos) -> None:
        """The simulation ends in this run; see `Driver.cut_off`."""
        self._end(replica, StepsDone(run, steps), at)

    def _group(self, replica: ReplicaId, group: int) -> Decoded:
        found = self._groups.get((replica, group))
        if found is None:
            found = self._groups[replica, group] = Decoded()
        return found

    def _end(self, replica: ReplicaId, event: StepsDone, now: Nanos) -> None:
        """A run has ended after so many steps; write them down, and whose they were."""
        running = self._running.pop((replica, event.run))
        run = running[1]
        time = self._write(replica, running, event.steps, now)
        group = self._group(replica, run.group)
        if run.num_decodes:
            group.add(time, event.steps)
        for request in event.stopped:
            self._leave(request)
        execution = self.observed.execution
        for chunk in run.chunks:
            request = chunk.request
            execution[request] = execution.get(request, 0) + time
            if chunk.last:
                self._reserved.pop(request, None)
                self._generated[request] = self._generated.get(request, 0) + 1
                if request not in event.stopped:
                    self._joined[request] = replica, group, group.time, group.steps

    def _end_layers(self, replica: ReplicaId, now: Nanos) -> None:
        """Layers of live scaling worked on their requests, and are no step: no row tells of them."""
        began, run = self._layers.pop(replica)
        execution = self.observed.execution
        for chunk in run.chunks:
            execution[chunk.request] = execution.get(chunk.request, 0) + now - began

    def _write(self, replica: ReplicaId, running: Running, steps: int, now: Nanos) -> Nanos:
        """Rows of the first `steps` steps of the run, which ended at `now`; returns how long they were in stages together."""
        began, run, blocks, growth = running
        prefills, last, reserved = NO_PREFILLS, 0, 0
        if run.chunks:
            prefills, last = _prefills(run.chunks)
            reserved = self._reserved.get(run.chunks[0].request, 0) if steps > 1 else 0
        work = (
            run.num_decodes, run.decode_context, *prefills, run.num_decodes + last, blocks, growth if steps > 1 else -1, reserved,
        )  # fmt: skip
        latency = self._latency_of(replica)
        found = latency.run(run, steps) if latency.num_stages == 1 else ()
        if len(found) == 1 and began + total(found[0], steps) == now:
            price = found[0]
            row = stretch(replica, 0, run.run, began, steps, price.first, price.increment, 0, *work)
            self.observed.stretches.frombytes(row)
            return now - began
        prices = self._priced(replica, running, steps, now)
        for stage, at, offset, price in prices:
            row = stretch(replica, stage, run.run, at, price.count, price.first, price.increment, offset, *work)
            self.observed.stretches.frombytes(row)
        return sum([total(price, price.count) for _, _, _, price in prices])

    def _priced(self, replica: ReplicaId, running: Running, steps: int, now: Nanos) -> list[Priced]:
        """The steps' stretches: at the ordinary speed, or so many times as slow (always a whole number) that they end at `now`.

        One run has one speed: a change of it ends the run.
        """
        stages = self._latency_of(replica).num_stages
        place = self._stages if stages > 1 else self._in_a_row
        found, end = place(replica, running, steps, 1)
        times = 1
        while end < now and times < SLOWEST:
            times += 1
            found, end = place(replica, running, steps, times)
        if stages > 1:
            self._stages_free_at[replica] = [at + total(price, 1) for _, at, _, price in found]
        return found

    def _latency_of(self, replica: ReplicaId) -> LatencyModel:
        return self._latencies.get(replica, self._latency)

    def _in_a_row(self, replica: ReplicaId, running: Running, steps: int, times: int) -> tuple[list[Priced], Nanos]:
        found: list[Priced] = []
        at, run, _, _ = running
        offset = 0
        for price in self._latency_of(replica).run(run, steps):
            if times > 1:
                price = Progression(price.count, price.first * times, price.increment * times)
            found.append((0, at, offset, price))
            at += total(price, price.count)
            offset += price.count
        return found, at

    def _stages(self, replica: ReplicaId, running: Running, _: int, times: int) -> tuple[list[Priced], Nanos]:
        """One step through a pipeline whose stages are first come, first served."""
        latency = self._latency_of(replica)
        free_at = self._stages_free_at.get(replica, [0] * latency.num_stages)
        found: list[Priced] = []
        at, run, _, _ = running
        for stage, busy in enumerate(latency.stages(run)):
            at = max(at, free_at[stage])
            found.append((stage, at, 0, Progression(1, (busy * times) << 4, 0)))
            at += busy * times
        return found, at

    def _leave(self, request: RequestId) -> bool:
        """It decodes no more where it did, if it did."""
        joined = self._joined.pop(request, None)
        if joined is None:
            return False
        _, group, time, steps = joined
        self.observed.execution[request] += group.time - time
        self._generated[request] += group.steps - steps
        return True

    def _preempt(self, request: RequestId, now: Nanos) -> None:
        self._leave(request)
        self._reserved.pop(request, None)
        self._preempted_at[request] = now
        self.observed.regenerated[request] = self._generated.get(request, 0)

    def _swap_out(self, request: RequestId, now: Nanos) -> None:
        """It keeps what it has."""
        self._leave(request)
        self._preempted_at[request] = now

    def _end_pause(self, request: RequestId, now: Nanos) -> None:
        if (since := self._preempted_at.pop(request, None)) is not None:
            preempted = self.observed.preempted
            preempted[request] = preempted.get(request, 0) + now - since

    def _look_at_fleet(self, now: Nanos, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        """Write down who is in another phase than before; it is one of those that are spoken of, or nobody was in particular."""
        if type(event) is ReplicaLost:
            self._lose(event)
        assert self._controller is not None
        fleet = self._controller.fleet
        named = {of for said in (event, *(a.event if type(a) is Send else a for a in actions)) if (of := _replica(said)) in fleet}
        for replica in sorted(named) or fleet:
            member = fleet[replica]
            phase = member.life.phase.value, member.role.value
            if self._phases.get(replica) != phase:
                self._phases[replica] = phase
                self.observed.phases.append((now, replica, *phase))

    def _lose(self, event: ReplicaLost) -> None:
        """What it ran ends with the steps that are known to be done."""
        replica = event.replica
        self._layers.pop(replica, None)
        for key in [key for key in self._running if key[0] == replica]:
            running = self._running.pop(key)
            if event.steps:
                began, run, _, _ = running
                time = self._write(replica, running, event.steps, began)
                if run.num_decodes:
                    self._group(replica, run.group).add(time, event.steps)
        for request in [request for request, joined in self._joined.items() if joined[0] == replica]:
            self._leave(request)


def _replica(said: object) -> ReplicaId:
    """Whom an event or an action is about; -1 where it is about nobody."""
    replica: ReplicaId = getattr(said, "replica", -1)
    return replica


def _prefills(chunks: Sequence[Chunk]) -> tuple[tuple[int, int, int, int], int]:
    """Of a step's chunks: how many, their tokens, the tokens before them, pairs that attend; and how many are last ones."""
    tokens = context = pairs = last = 0
    for chunk in chunks:
        tokens += chunk.num_tokens
        context += chunk.offset
        pairs += chunk.num_tokens * (2 * chunk.offset + chunk.num_tokens + 1) // 2
        last += chunk.last
    return (len(chunks), tokens, context, pairs), last
