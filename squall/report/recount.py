"""What became of a fleet's requests, counted again out of its event log.

Knows the events and actions of either body; no files, and no machine's workings. What no line tells is not here: when each step
of a run ended (a run of many steps is one line, so single gaps between tokens are unknown), and what never reached the router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from squall.core.actions import (
    Abandon,
    AnyAction,
    Chunk,
    Decided,
    Forget,
    Hold,
    Join,
    Preempt,
    Reply,
    RunLayers,
    RunSteps,
    StartReplica,
    SwapOut,
)
from squall.core.events import (
    AnyEvent,
    Arrived,
    Cancelled,
    LayersDone,
    LivePaired,
    Progressed,
    ReplicaLost,
    ReplicaStopped,
    StepsDone,
    Submitted,
)
from squall.core.metrics import UNSET, Gaps, Outcome, RequestRow, RunRecord
from squall.core.types import CONTROLLER, ROUTER, Nanos, ReplicaId, RequestId, RunId
from squall.eventlog import Record

Clock = Callable[[Nanos], Nanos]
"""From a log's instants to those of the run."""


class Recounted(Struct):
    """What a log tells.

    Attributes:
        record: its `gpu_nanos` are those of replicas of one GPU.
        num_uncounted: completed requests of whose last step no line tells, as the log of a worker is missing, or was cut off
            when that was killed: they may have more tokens than were counted.
    """

    record: RunRecord
    num_uncounted: int


def recount(records: Iterable[Record], world: str, source: str, time_dilation: float = 1.0) -> Recounted:
    """The run that `records` tell of, in the order of a log; the first one is its beginning.

    Args:
        world, source: of the record: in which world it was, and where its times are from.
        time_dilation: instants are divided by it.
    """
    began: Nanos | None = None
    now: Nanos = 0
    num_events = 0
    rows: dict[RequestId, RequestRow] = {}

    def at(instant: Nanos) -> Nanos:
        return round((instant - (began or 0)) / time_dilation)

    clients, engines, fleet = _Clients(rows, at), _Engines(rows, at), _Fleet()
    for line in records:
        now = line.now
        if began is None:
            began = now
        if line.created is not None:
            engines.end(line.machine)
        if line.event is None:
            continue
        num_events += 1
        if line.machine == ROUTER:
            clients.record(now, line.event, line.actions)
        elif line.machine == CONTROLLER:
            fleet.record(now, line.event, line.actions)
            if isinstance(line.event, ReplicaLost):
                engines.end(line.event.replica, line.event.steps)
        else:
            engines.record(now, line.machine, line.event, line.actions)
    for replica in list(engines.replicas):
        engines.end(replica)
    record = RunRecord(
        world, list(rows.values()), Gaps(), ended_at=at(now), num_steps=engines.num_steps, num_events=num_events,
        scale_ups=fleet.ups, scale_downs=fleet.downs, gpu_nanos=round(fleet.held(now) / time_dilation), latency_source=source,
    )  # fmt: skip
    uncounted = [row for row in rows.values() if row.outcome is Outcome.COMPLETED and row.id not in engines.stopped]
    return Recounted(record, len(uncounted))


class _Clients:
    """What the router's clients saw, written into `rows`."""

    def __init__(self, rows: dict[RequestId, RequestRow], at: Clock) -> None:
        self._rows = rows
        self._at = at

    def record(self, now: Nanos, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        match event:
            case Arrived(request):
                self._rows[request.id] = RequestRow(request.id, self._at(request.arrived_at), request.num_prompt_tokens)
            case Cancelled(request):
                self._end(request, now, Outcome.CANCELLED)
            case Progressed(_, first, finished):
                for request in first:
                    if (row := self._rows.get(request)) is not None and row.first_token_at == UNSET:
                        row.first_token_at = self._at(now)
                for request in finished:
                    self._end(request, now, Outcome.COMPLETED)
        for action in actions:
            if isinstance(action, Reply):
                begun = action.request in self._rows and self._rows[action.request].first_token_at != UNSET
                self._end(action.request, now, Outcome.FAILED if begun else Outcome.REJECTED, action.rejection.value)

    def _end(self, request: RequestId, now: Nanos, outcome: Outcome, error: str = "") -> None:
        """The first end is the one that its client saw."""
        row = self._rows.get(request)
        if row is not None and row.outcome is Outcome.UNFINISHED:
            row.outcome, row.error, row.finished_at = outcome, error, self._at(now)


class _Replica:
    """Who decodes at a replica, and the runs that it has asked for.

    Attributes:
        runs: that have not ended.
        steps: of each group of decodes, how many there were.
        joined: who decodes in which group, and how many steps that had had before.
        layers: the prompts of the batch that goes through layers (live scaling), and `num_layers` of the model.
    """

    def __init__(self) -> None:
        self.runs: dict[RunId, RunSteps] = {}
        self.steps: Counter[int] = Counter()
        self.joined: dict[RequestId, tuple[int, int]] = {}
        self.layers: tuple[Chunk, ...] = ()
        self.num_layers = 0


class _Engines:
    """When replicas began with each request and how many tokens it has got, written into `rows`.

    Attributes:
        stopped: requests of whose last step a replica told.
    """

    def __init__(self, rows: dict[RequestId, RequestRow], at: Clock) -> None:
        self.replicas: dict[ReplicaId, _Replica] = {}
        self.stopped: set[RequestId] = set()
        self.num_steps = 0
        self._rows = rows
        self._at = at

    def record(self, now: Nanos, id: ReplicaId, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        replica = self.replicas.setdefault(id, _Replica())
        match event:
            case StepsDone(run, steps, stopped):
                self._end_run(replica, run, steps, stopped)
            case LayersDone(_, last_layer, stopped):
                self._end_layers(replica, last_layer, stopped)
            case LivePaired(_, _, num_layers):
                replica.num_layers = num_layers
            case Submitted(request):  # after the loss of another replica, with what its client has
                if (row := self._rows.get(request.id)) is not None:
                    row.num_output_tokens = request.num_output_tokens
        for action in actions:
            self._follow(now, id, replica, action)

    def end(self, id: ReplicaId, steps: int = 0) -> None:
        """The replica is gone, after so many steps of what it ran."""
        if (replica := self.replicas.pop(id, None)) is not None:
            for run in list(replica.runs) if steps else ():
                self._end_run(replica, run, steps, ())
            for request in list(replica.joined):
                self._leave(replica, request)

    def _follow(self, now: Nanos, id: ReplicaId, replica: _Replica, action: AnyAction) -> None:
        match action:
            case RunSteps():
                self._begin(now, id, action.chunks)
                for moved in action.regrouped:
                    for request in moved.requests:
                        if self._leave(replica, request):
                            replica.joined[request] = moved.group, replica.steps[moved.group]
                replica.runs[action.run] = action
            case RunLayers():
                self._begin(now, id, action.chunks)
                replica.layers = action.chunks
            case Join(requests, group):
                for request in requests:
                    replica.joined[request] = group, replica.steps[group]
            case Preempt(requests) | SwapOut(requests):
                for request in requests:
                    self._leave(replica, request)
                    if (row := self._rows.get(request)) is not None:
                        row.preemptions += 1
            case Hold(requests) | Abandon(requests) | Forget(requests):
                for request in requests:
                    self._leave(replica, request)

    def _begin(self, now: Nanos, id: ReplicaId, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            row = self._rows.get(chunk.request)
            if row is None:
                continue
            if row.scheduled_at == UNSET:
                row.scheduled_at, row.num_cached_tokens = self._at(now), chunk.num_cached
            row.replica = id

    def _end_run(self, replica: _Replica, id: RunId, steps: int, stopped: Sequence[RequestId]) -> None:
        run = replica.runs.pop(id, None)
        if run is None:
            return
        self.num_steps += steps
        if run.num_decodes:
            replica.steps[run.group] += steps
        for chunk in run.chunks:
            if chunk.last:
                self._add(chunk.request, 1)
                replica.joined[chunk.request] = run.group, replica.steps[run.group]
        self._stop(replica, stopped)

    def _end_layers(self, replica: _Replica, last_layer: int, stopped: Sequence[RequestId]) -> None:
        if last_layer == replica.num_layers:
            for chunk in replica.layers:
                self._add(chunk.request, 1)
            replica.layers = ()
        self._stop(replica, stopped)

    def _stop(self, replica: _Replica, stopped: Sequence[RequestId]) -> None:
        self.stopped.update(stopped)
        for request in stopped:
            self._leave(replica, request)

    def _leave(self, replica: _Replica, request: RequestId) -> bool:
        """It decodes no more there, if it did."""
        joined = replica.joined.pop(request, None)
        if joined is None:
            return False
        group, steps = joined
        self._add(request, replica.steps[group] - steps)
        return True

    def _add(self, request: RequestId, tokens: int) -> None:
        if (row := self._rows.get(request)) is not None:
            row.num_output_tokens += tokens


class _Fleet:
    """For how long replicas were held, and how often their number was changed.

    Attributes:
        ups, downs: replicas added and removed by decisions.
    """

    def __init__(self) -> None:
        self.ups = self.downs = 0
        self._past: Nanos = 0
        self._since: dict[ReplicaId, Nanos] = {}

    def record(self, now: Nanos, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        if isinstance(event, ReplicaLost | ReplicaStopped):
            self._past += now - self._since.pop(event.replica, now)
        for action in actions:
            match action:
                case StartReplica(replica):
                    self._since.setdefault(replica, now)
                case Decided(_, before, after):
                    self.ups += max(0, after - before)
                    self.downs += max(0, before - after)

    def held(self, now: Nanos) -> Nanos:
        """Over all replicas, until now."""
        return self._past + sum(now - since for since in self._since.values())
