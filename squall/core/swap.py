"""A replica that preempts by copying KV blocks to its host's memory where there is room, by recomputation where there is not.

Whoever was copied out waits apart from the queue and is served before it: the earliest arrival first, and nobody is admitted
meanwhile. Back in GPU memory it goes on where it was. Knows who waits where and what is copied; does not know how long that
takes: the run that follows says how many blocks are copied before its first step.

A copy takes all blocks that a request holds, cached ones too, and brings them back as its own; what others use or the prefix
cache keeps stays as it is.
"""

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from squall.core.actions import AnyAction, Forget, Join, Preempt, RunSteps, Send, SwapIn, SwapOut
from squall.core.decodes import Work, arrival
from squall.core.events import Progressed
from squall.core.handoff import seats_of
from squall.core.replica import Replica
from squall.core.types import ROUTER, Nanos, ReplicaId, RequestId
from squall.core.views import BatchingPolicy, Plan


class HostPool:
    """Blocks of host memory, by count.

    Attributes:
        num_blocks: in all.
        num_free: of them.
    """

    __slots__ = ("num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks

    def take(self, count: int) -> bool:
        """False, and nothing taken, where so many are not free."""
        if count > self.num_free:
            return False
        self.num_free -= count
        return True

    def release(self, count: int) -> None:
        self.num_free += count


class Swapped:
    """A request whose KV is in host memory.

    Attributes:
        work: its progress; `blocks` is how many it holds there, `target` the tokens in them once it decodes.
        decodes: it had its first token, and goes on with decoding.
    """

    __slots__ = ("decodes", "work")

    def __init__(self, work: Work, decodes: bool) -> None:
        self.work = work
        self.decodes = decodes


class SwappingReplica(Replica):
    """See the module and `Replica`.

    Args:
        num_host_blocks: blocks of host memory for those that are preempted.

    Attributes:
        host: these blocks.
    """

    __slots__ = ("_copied", "_moves", "_nobody", "_out", "_queue", "_seats", "_swapped", "host")

    def __init__(self, id: ReplicaId, policy: BatchingPolicy, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        super().__init__(id, policy, num_blocks, block_size)
        self.host = HostPool(num_host_blocks)
        self._swapped: list[Swapped] = []  # by arrival
        self._queue = self.waiting
        self._nobody: deque[Work] = deque()  # what the policy sees of the queue while somebody is in host memory
        self._seats = seats_of(policy)
        self._moves: list[AnyAction] = []  # of this boundary: who came back
        self._out: list[RequestId] = []  # and who was copied out
        self._copied = 0  # blocks, both ways, before the next step

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._swapped)

    def _has_preempted(self) -> bool:
        return bool(self._swapped) or super()._has_preempted()

    def _cancel(self, request: RequestId, now: Nanos) -> list[AnyAction]:
        for swapped in self._swapped:
            if swapped.work.request.id == request:
                self._swapped.remove(swapped)
                self.host.release(swapped.work.blocks)
                gone = (request,)
                return [Send(ROUTER, Progressed(self.id, finished=gone)), Forget(gone), *self.nudge(now)]
        return super()._cancel(request, now)

    def give_up(self, request: RequestId) -> bool:
        for swapped in self._swapped:
            if swapped.work.request.id == request:
                self._swapped.remove(swapped)
                self.host.release(swapped.work.blocks)
                return True
        return super().give_up(request)

    # -- between two runs

    def _begin_run(
        self, first: Sequence[RequestId], finished: tuple[RequestId, ...], gone: tuple[RequestId, ...]
    ) -> list[AnyAction]:
        """As of any replica; who comes back does so before anybody is preempted, as it was decided."""
        actions = super()._begin_run(first, finished, gone)
        if not self._moves and not self._out:
            return actions
        at = next((i for i, action in enumerate(actions) if isinstance(action, Preempt | RunSteps)), len(actions))
        moves, self._moves = self._moves, []
        if self._out:
            out = tuple(self._out)
            self._out.clear()
            moves.append(SwapOut(out))
            preempt = actions.pop(at)
            assert isinstance(preempt, Preempt)
            dropped = tuple(request for request in preempt.requests if request not in out)
            if dropped:
                moves.append(Preempt(dropped))
        actions[at:at] = moves
        return actions

    def _plan(self, preempted: list[RequestId]) -> Plan:
        if self._swapped:
            self._bring_back()
            if self._swapped:
                self.waiting = self._nobody
        plan = super()._plan(preempted)
        self.waiting = self._queue
        return plan

    def _preempt(self, work: Work) -> RequestId:
        decodes = work.group is not None
        self._drop(work)
        if not self.host.take(work.blocks):
            self.requeue(work)
            return work.request.id
        if decodes:
            work.target = work.request.num_prompt_tokens + work.generated - 1  # its last token has no KV yet
        work.shared = ()
        self._swapped.append(Swapped(work, decodes))
        self._swapped.sort(key=_arrival)
        self._copied += work.blocks
        self._out.append(work.request.id)
        self.num_preemptions += 1
        self.waiting = self._nobody
        return work.request.id

    def requeue(self, work: Work) -> None:
        self.waiting = self._queue
        super().requeue(work)
        if self._swapped:
            self.waiting = self._nobody

    def _bring_back(self) -> None:
        """As many as there is room for, in order: the first that does not fit keeps the others where they are."""
        pool = self.pool
        while self._swapped and self._fits(self._swapped[0]):
            swapped = self._swapped.pop(0)
            work = swapped.work
            request, blocks = work.request.id, work.blocks
            self.host.release(blocks)
            self._moves.append(SwapIn(request, blocks, pool.oldest(max(0, blocks - pool.num_free))))
            pool.take(blocks)
            self._copied += blocks
            self._running[request] = work
            if swapped.decodes:
                self.decodes.join(work)
                self._moves.append(Join((request,), self.decodes.id))
            else:
                self.prefilling.append(work)

    def _fits(self, swapped: Swapped) -> bool:
        """It gets a seat, and its blocks, its next step's and one more are free beside what the others need to go on.

        Free blocks only get fewer during a run, and so does what the begun prompts still need: who does not fit when a run
        begins does not fit at any boundary within it.
        """
        work, size = swapped.work, self.block_size
        needed = -(-(work.target + swapped.decodes) // size)
        if needed < work.blocks:
            needed = work.blocks
        if self._running:
            needed += 1
        free = self.pool.num_available - self.decodes.next_blocks()
        for other in self.prefilling:
            free -= other.new_blocks(other.target - other.computed, size)
        return needed <= free and len(self._running) < self._seats

    def _launch(self, plan: Plan, steps: int) -> RunSteps:
        copied, self._copied = self._copied, 0
        if copied or (self._swapped and self.preempted):
            steps = 1  # who was preempted may have left more room than was needed
        elif self._swapped:
            plan = replace(plan, open=False)  # nobody is admitted before them
        run = super()._launch(plan, steps)
        return replace(run, num_copied=copied) if copied else run


def _arrival(swapped: Swapped) -> tuple[Nanos, RequestId]:
    return arrival(swapped.work)


def host_blocks_of(policy: object) -> int:
    """Blocks of host memory that a batching policy has for those that are preempted; 0 where it lets them compute again."""
    blocks: int = getattr(policy, "swap_blocks", 0)
    return blocks if getattr(policy, "preemption", "recompute") == "swap" else 0
