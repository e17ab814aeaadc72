"""A replica of several pipeline stages: as many runs in progress as there are stages, each of one step and of other requests.

Everything that one run does is as in `Replica`, which always sees the run that just begins or ends. Knows which runs are under
way and whom they work on; does not know how long a stage takes. What every run passes calls `Replica` by its name: a `super()`
costs as much as the call.
"""

from collections.abc import Sequence

from squall.core.actions import AnyAction, RunSteps
from squall.core.decodes import DecodeGroup, Work
from squall.core.events import StepsDone
from squall.core.horizon import Piece
from squall.core.replica import Replica
from squall.core.swap import SwappingReplica, host_blocks_of
from squall.core.types import ReplicaId, RequestId, RunId
from squall.core.views import BatchingPolicy, Plan

Flight = tuple[DecodeGroup, int, list[Piece]]
"""A run in progress, as `Batcher` knows the only one: its group of decodes, how many of them advance, and its chunks."""


class PipelinedReplica(Replica):
    """See `Replica`. The policy sees neither the requests nor the blocks of runs in progress.

    Args:
        num_stages: pipeline stages, at least 2.
    """

    __slots__ = ("_flights", "_num_runs")

    def __init__(self, id: ReplicaId, policy: BatchingPolicy, num_blocks: int, block_size: int, num_stages: int) -> None:
        super().__init__(id, policy, num_blocks, block_size)
        self.num_stages = num_stages
        self._flights: dict[RunId, Flight] = {}
        self._num_runs = 0

    def growth(self, run: RunId) -> list[int]:
        group, num_decodes, _ = self._flights[run]
        return group.growth() if num_decodes else [0] * self.block_size

    def _cut(self) -> list[AnyAction]:
        return []  # single steps only

    def _end_run(self, event: StepsDone) -> list[RequestId]:
        flight = self._flights.pop(event.run, None)
        if flight is None:
            raise ValueError(f"replica {self.id} is not in run {event.run}")
        self._run = event.run
        self._busy = True
        self._group, self.num_decodes, self._batch = flight
        self._taken = 0  # its blocks were taken when it began
        for work, _, _ in self._batch:
            self.prefilling.append(work)
        return Replica._end_run(self, event)

    def _drop_cancelled(self) -> tuple[RequestId, ...]:
        """Only those that no run works on."""
        flying = self._flying()
        later = [request for request in self._cancelled if request in flying]
        self._cancelled = [request for request in self._cancelled if request not in flying]
        gone = super()._drop_cancelled()
        self._cancelled = later
        return gone

    def _begin_run(
        self, first: Sequence[RequestId], finished: tuple[RequestId, ...], gone: tuple[RequestId, ...]
    ) -> list[AnyAction]:
        """As many runs as there is room for."""
        before = self._num_runs
        actions = Replica._begin_run(self, first, finished, gone)
        while before != self._num_runs and not self._busy:
            before = self._num_runs
            actions += Replica._begin_run(self, (), (), ())
        return actions

    def _launch(self, plan: Plan, steps: int) -> RunSteps:  # noqa: ARG002 - single steps only
        self._run = self._num_runs
        if self.num_decodes == self.decodes.size:
            self.decodes, self._group = self._groups.empty(), self.decodes
        elif not self.num_decodes:
            self._group = self._groups.empty()
        action = Replica._launch(self, plan, 1)
        self._num_runs = self._run
        if self._taken:
            self.pool.take(self._taken)
        for work, _, _ in self._batch:
            self.prefilling.remove(work)
        self._flights[self._run] = self._group, self.num_decodes, self._batch
        self._batch = []
        self._busy = len(self._flights) >= self.num_stages
        return action

    def _victim(self) -> Work | None:
        """None where the latest arrival is in a run: whoever came before it waits for that, and is not preempted in its place."""
        work = super()._victim()
        assert work is not None
        return None if work.request.id in self._flying() else work

    def _flying(self) -> set[RequestId]:
        """Whom the runs in progress work on."""
        groups = {group.id for group, num_decodes, _ in self._flights.values() if num_decodes}
        chunks = {work.request.id for _, _, batch in self._flights.values() for work, _, _ in batch}
        return chunks | {id for id, work in self._running.items() if work.group is not None and work.group.id in groups}


def replica_of(id: ReplicaId, policy: BatchingPolicy, num_blocks: int, block_size: int, num_stages: int) -> Replica:
    """A replica of any number of pipeline stages, and of the kind that preempts as its policy says.

    Raises:
        ValueError: several stages and a policy that copies KV to host memory.
    """
    host_blocks = host_blocks_of(policy)
    if num_stages == 1:
        if host_blocks:
            return SwappingReplica(id, policy, num_blocks, block_size, host_blocks)
        return Replica(id, policy, num_blocks, block_size)
    if host_blocks:
        raise ValueError('batching.preemption = "swap" is for replicas of one pipeline stage')
    return PipelinedReplica(id, policy, num_blocks, block_size, num_stages)
