"""What the engines are in the live body: it knows how long each request's output is, and prices steps.

Ends a run at its first finished sequence, as an engine does, and writes down what happened to every request. Knows no machine,
no queue and no event order.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from squall.core.actions import RunSteps
from squall.core.events import Rejection, StepsDone
from squall.core.metrics import UNSET, Gaps, Outcome, RequestRow, RunRecord
from squall.core.types import FOREVER, Nanos, ReplicaId, RequestId, RunId
from squall.perf.latency import LatencyModel, Progression, steps_until, total
from squall.workload.spec import OfferedRequest


class World:
    """The truth about the requests, and the record of what became of them.

    Args:
        requests: the workload.
        latency: prices steps.
        max_steps: the longest run that an engine makes of what it is asked for.
    """

    def __init__(self, requests: Iterable[OfferedRequest], latency: LatencyModel, max_steps: int = FOREVER) -> None:
        self.latency = latency
        self.max_steps = max_steps
        self.num_steps = 0
        self.gaps = Gaps()
        self.rows: dict[RequestId, RequestRow] = {}
        self.outputs: dict[RequestId, int] = {}
        for request in requests:
            self.rows[request.id] = RequestRow(request.id, request.arrived_at, request.num_prompt_tokens)
            self.outputs[request.id] = request.num_output_tokens
        self.left: dict[RequestId, int] = {}  # tokens that a preempted request still has to generate
        self.last_token_at: dict[RequestId, Nanos] = {}  # of preempted requests

    def reject(self, request: RequestId, rejection: Rejection, now: Nanos) -> None:
        row = self.rows[request]
        row.outcome = Outcome.REJECTED
        row.error = rejection.value
        row.finished_at = now

    def cancel(self, request: RequestId, now: Nanos) -> None:
        """The client goes away. What the request still generates is counted as its output."""
        row = self.rows[request]
        if row.outcome is Outcome.UNFINISHED:
            row.outcome = Outcome.CANCELLED
            row.finished_at = now

    def finish(self, request: RequestId, now: Nanos) -> None:
        row = self.rows[request]
        row.num_output_tokens = self.outputs[request]
        if row.outcome is Outcome.UNFINISHED:
            row.outcome = Outcome.COMPLETED
            row.finished_at = now

    def first_token(self, request: RequestId, now: Nanos) -> int:
        """A prefill ended and yielded a token. Returns how many tokens the request has left."""
        row = self.rows[request]
        if row.first_token_at == UNSET:
            row.first_token_at = now
            return self.outputs[request] - 1
        self.gaps.add(now - self.last_token_at.pop(request))
        return self.left.pop(request) - 1

    def record(self, now: Nanos) -> RunRecord:
        return RunRecord(
            "simulated",
            list(self.rows.values()),
            self.gaps,
            ended_at=now,
            num_steps=self.num_steps,
            latency_source=self.latency.source,
        )


class Engine:
    """One replica's engine.

    Attributes:
        run: the run in progress, or None.
        ends_at: when it will end.
    """

    __slots__ = ("_ends", "_last_step", "_prices", "_replica", "_started_at", "_step", "_steps", "_world", "ends_at", "run")

    def __init__(self, world: World, replica: ReplicaId) -> None:
        self.run: RunSteps | None = None
        self.ends_at: Nanos = UNSET
        self._world = world
        self._replica = replica
        self._started_at: Nanos = UNSET
        self._steps = 0  # of the run in progress
        self._prices: Sequence[Progression] = ()
        self._step = 0  # steps done since the beginning
        self._last_step: dict[RequestId, int] = {}  # of every decoding request: the step after which it stops
        self._ends: list[tuple[int, RequestId]] = []  # heap of the same; entries that `_last_step` does not confirm are stale

    def start(self, action: RunSteps, now: Nanos) -> Nanos:
        """Begin the run; returns when it will end."""
        world = self._world
        for chunk in action.chunks:
            row = world.rows[chunk.request]
            if row.scheduled_at == UNSET:
                row.scheduled_at = now
                row.num_cached_tokens = chunk.num_cached
            row.replica = self._replica
        ends = self._ends
        while ends and self._last_step.get(ends[0][1]) != ends[0][0]:
            heappop(ends)
        steps = min(action.steps, world.max_steps)
        if ends and ends[0][0] - self._step < steps:
            steps = ends[0][0] - self._step
        self.run = action
        self._started_at = now
        self._steps = steps
        self._prices = prices = world.latency.run(action, steps)
        for price in prices:
            now += total(price, price.count)
        self.ends_at = now
        return now

    def cut(self, run: RunId, now: Nanos) -> bool:
        """End run `run` at the first boundary strictly after now. False: that changes nothing."""
        if self.run is None or self.run.run != run:
            return False
        kept: list[Progression] = []
        steps = 0
        at = self._started_at
        for price in self._prices:
            end = at + total(price, price.count)
            if end > now:
                count = steps_until(price, now - at)
                kept.append(Progression(count, price.first, price.increment))
                steps += count
                at += total(price, count)
                break
            kept.append(price)
            steps += price.count
            at = end
        if steps == self._steps:
            return False
        self._prices = kept
        self._steps = steps
        self.ends_at = at
        return True

    def end(self, now: Nanos) -> StepsDone:
        """The run is over."""
        action = self.run
        assert action is not None
        world = self._world
        steps = self._steps
        self.run = None
        self._step = step = self._step + steps
        world.num_steps += steps
        if action.num_decodes:
            for price in self._prices:
                world.gaps.add_run(action.num_decodes, price.count, price.first, price.increment)
        stopped: list[RequestId] = []
        ends = self._ends
        while ends and ends[0][0] <= step:
            last, request = heappop(ends)
            if self._last_step.get(request) == last:
                del self._last_step[request]
                stopped.append(request)
        for chunk in action.chunks:
            if chunk.last:
                left = world.first_token(chunk.request, now)
                if left:
                    self._last_step[chunk.request] = step + left
                    heappush(ends, (step + left, chunk.request))
                else:
                    stopped.append(chunk.request)
        for request in stopped:
            world.finish(request, now)
        return StepsDone(action.run, steps, tuple(sorted(stopped)))

    def preempt(self, requests: Sequence[RequestId], now: Nanos) -> None:
        """They lose their KV at this step boundary."""
        world = self._world
        for request in requests:
            world.rows[request].preemptions += 1
            last = self._last_step.pop(request, None)
            if last is not None:
                world.left[request] = last - self._step
                world.last_token_at[request] = now

    def forget(self, requests: Sequence[RequestId]) -> None:
        """They are cancelled; what they have generated so far is their output."""
        world = self._world
        for request in requests:
            last = self._last_step.pop(request, None)
            left = world.left.pop(request, None) if last is None else last - self._step
            world.last_token_at.pop(request, None)
            if left is not None:
                world.rows[request].num_output_tokens = world.outputs[request] - left
