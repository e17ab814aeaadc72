"""An engine of several pipeline stages, each a server that takes one batch after the other.

Knows when each stage is free: all ends of a batch are worked out when it is issued, and it is one event. Knows no machine and no
policy.
"""

from collections import deque

from squall.core.actions import RunSteps
from squall.core.events import LayersDone, StepsDone
from squall.core.types import Nanos, ReplicaId, RunId
from squall.errors import ConfigError
from squall.sim.engine import Engine
from squall.sim.world import World


class PipelinedEngine(Engine):
    """One replica's engine of `num_stages` stages. A batch passes them in order and overtakes none.

    Raises:
        ConfigError: the latency model has another number of stages.
    """

    __slots__ = ("_free_at", "_on_way")

    def __init__(self, world: World, replica: ReplicaId, num_stages: int) -> None:
        super().__init__(world, replica)
        latency = self.latency
        if latency.num_stages != num_stages:
            raise ConfigError(
                f"replica.pp is {num_stages}, but the times of steps ({latency.source}) are of "
                f"{latency.num_stages} pipeline stages"
            )
        self._free_at = [0] * num_stages
        self._on_way: deque[tuple[Nanos, RunSteps]] = deque()  # when the last stage will be done

    def start(self, run: RunSteps, now: Nanos) -> Nanos:
        """Issue the batch; returns when its last stage will be done."""
        if run.steps != 1:
            raise ValueError(f"replica {self._replica} asks for {run.steps} steps at once of a pipeline")
        if run.regrouped:
            self._regroup(run)
        free_at = self._free_at
        for chunk in run.chunks:
            if chunk.offset == chunk.num_cached:  # the first one
                self._schedule(chunk, free_at[0] if free_at[0] > now else now)
        for stage, busy in enumerate(self.latency.stages(run)):
            if free_at[stage] > now:
                now = free_at[stage]
            now += busy
            free_at[stage] = now
        if not self._on_way:
            self._ends_at = now
        self._on_way.append((now, run))
        return now

    def cut(self, run: RunId, now: Nanos) -> None:
        """There are single steps only."""

    def end(self, now: Nanos) -> StepsDone | LayersDone | None:
        """The batch that was issued first has passed the last stage; None where it was a batch of an engine that is no more."""
        if self._ends_at != now:
            return None
        on_way = self._on_way
        self._running = on_way.popleft()[1], 1, (), now
        done = Engine.end(self, now)
        if on_way:
            self._ends_at = on_way[0][0]
        return done
