"""What a replica works on: its queue, its batch, its KV blocks, and the runs of steps that they go through.

Ends a run and starts what the policy plans next: who is in every step, who is preempted, and how many steps may run before
anything would be decided differently. Does not know who else there is: no router, no hand-off, no pair; nor the clock, how long a
step takes, or when a request stops: the engine says so at the end of a run.

All that a run of k steps does is done when it ends, in the order in which k single steps would have done it: the blocks that
it took (evicting from the prefix cache), what its decodes leave behind, what its chunks complete.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from squall.core.actions import Chunk, RunSteps
from squall.core.blocks import BlockPool
from squall.core.decodes import NEVER, Work, arrival
from squall.core.events import StepsDone
from squall.core.groups import Groups
from squall.core.horizon import need, within, within_cache
from squall.core.types import BlockHash, ReplicaId, RequestId, RunId
from squall.core.views import BatchingPolicy, Plan, WorkView

Ended = tuple[Sequence[RequestId], tuple[RequestId, ...], tuple[RequestId, ...]]
"""What a run has led to: who got a first token, who has finished, and of these who was cancelled."""


class Batcher:
    """The part of a `Replica` that works. Satisfies `core.views.BatchingView`.

    Args:
        id: the replica's.
        policy: plans its steps.
        num_blocks, block_size: its KV pool, in blocks and tokens a block.

    Attributes:
        pool: the KV blocks.
        decodes: the requests that decode (in `PipelinedReplica` those that no run in progress has).
        waiting, prefilling: the other requests.
        num_preemptions: so far.
        num_prefix_queries, num_prefix_hits: tokens looked up in the prefix cache at admission, and those found there.
    """

    __slots__ = (
        "_answer", "_batch", "_busy", "_cancelled", "_group", "_groups", "_grown", "_looked_at", "_open", "_run", "_running",
        "_taken", "block_size", "decodes", "free_blocks", "id", "num_blocks", "num_decodes", "num_preemptions",
        "num_prefix_hits", "num_prefix_queries", "num_stages", "policy", "pool", "preempted", "prefilling", "steps_since_mark",
        "waiting",
    )  # fmt: skip

    def __init__(self, id: ReplicaId, policy: BatchingPolicy, num_blocks: int, block_size: int) -> None:
        self.id = id
        self.policy = policy
        self._answer = policy.__call__  # a call of the object finds it through its type each time: 200 ns, not 130
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_stages = 1
        self.pool = BlockPool(num_blocks)
        self._running: dict[RequestId, Work] = {}  # prefilling or decoding
        self._groups = Groups(block_size, self._running)
        self.decodes = self._groups.empty()
        self.waiting: deque[Work] = deque()
        self.prefilling: list[Work] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.steps_since_mark = 0
        self.preempted = False  # these three are the policy's view, brought up to date before it is asked
        self.free_blocks = num_blocks
        self.num_decodes = 0
        self._run: RunId = 0
        self._busy = False
        self._open = False  # an arrival cuts the run
        self._group = self.decodes  # of the run; `num_decodes` of it advance: all or none
        self._batch: list[tuple[Work, int]] = []  # the run's chunks: whose, and tokens a step
        self._taken = 0  # blocks that these take in the first step
        self._grown = 0  # and those that the run's decodes take in it
        self._cancelled: list[RequestId] = []  # in a run, to be dropped at its end
        self._looked_at: dict[WorkView, int] = {}  # whose cached blocks the policy asked for, and how many are held

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.pool.num_available

    @property
    def decode_blocks(self) -> int:
        """See BatchingView."""
        return self.pool.num_available - self.free_blocks

    def growth(self, run: RunId) -> list[int]:
        """Blocks that the decodes of a run in progress take at each of its next `block_size` steps, over and over."""
        if run != self._run:
            raise ValueError(f"replica {self.id} is not in run {run}")
        return self._group.growth() if self.num_decodes else [0] * self.block_size

    # -- the end of a run

    def _end_run(self, event: StepsDone) -> Ended:
        if event.run != self._run or not self._busy:
            raise ValueError(f"replica {self.id} is not in run {event.run}")
        self._busy = False
        steps = event.steps
        stopped = event.stopped
        batch = self._batch
        taken = 0
        if self.num_decodes:
            taken = self._group.advance(steps)
            self.steps_since_mark += steps
        if batch:
            taken += self._taken if steps == 1 else need(None, batch, self.block_size, steps)
        if taken:
            self.pool.take(taken)
        for request in stopped:
            work = self._running[request]
            if work.joined != NEVER:
                self._drop(work)
        first: list[RequestId] = []
        if batch:
            for work, tokens in batch:
                self._prefill(work, tokens * steps, stopped, first)
            batch.clear()
            first.sort()
        if self._group is not self.decodes:
            self.decodes = self._group = self._groups.unite(self.decodes, self._group)
        if self._cancelled:
            gone = self._drop_cancelled()
            return first, tuple(sorted(stopped + gone)), gone
        return first, stopped, ()

    def _drop_cancelled(self) -> tuple[RequestId, ...]:
        """Those that have not stopped by themselves."""
        gone = tuple(request for request in dict.fromkeys(self._cancelled) if request in self._running)
        self._cancelled.clear()
        for request in gone:
            self._drop(self._running[request])
        return gone

    def _prefill(self, work: Work, tokens: int, stopped: Sequence[RequestId], first: list[RequestId]) -> None:
        """`work` computed so many tokens; where that is the last of its prefill it produced one."""
        done = work.computed + tokens
        size = self.block_size
        blocks = -(-done // size)
        work.blocks = blocks if blocks > work.reserved else work.reserved
        if work.hashes:
            work.shared += self.pool.share(work.hashes[work.computed // size : done // size])
        work.computed = done
        if done < work.target:
            return
        request = work.request.id
        if work.generated == work.request.num_output_tokens:
            first.append(request)
        work.generated += 1
        if request in stopped:
            self._drop(work)
            return
        self.prefilling.remove(work)
        self._decode(work)

    def _decode(self, work: Work) -> None:
        """It has its first token."""
        self._group.join(work)

    def _drop(self, work: Work) -> None:
        """It leaves the batch and its blocks become free or idle."""
        del self._running[work.request.id]
        if work.group is None:
            self.prefilling.remove(work)
        else:
            done = work.target + work.group.leave(work)
            if work.hashes and len(work.hashes) > (first := work.computed // self.block_size):
                # they go on beyond the prompt only where the driver knows what is generated
                work.shared += self.pool.share(work.hashes[first : done // self.block_size])
        self.pool.release(work.blocks, work.shared)

    # -- the start of a run

    def _plan(self, preempted: list[RequestId]) -> Plan:
        """The policy's answer, after preempting until the next step of what runs has its blocks."""
        self.preempted = False
        while True:
            decodes = self.decodes
            self._grown = grown = decodes.next_blocks()
            self.free_blocks = free = self.pool.num_available - grown
            self.num_decodes = size = decodes.size
            if self._looked_at:
                self._looked_at.clear()
            plan = self._answer(self)
            if not plan.preempt:
                if plan.decodes < size:
                    self.num_decodes = plan.decodes
                    if not plan.decodes:
                        free += grown
                        self._grown = 0
                self._taken = taken = self._chunk_blocks(plan) if plan.chunks else 0
                if taken <= free:
                    return plan
            victim = self._victim()
            if victim is None:
                self.num_decodes = 0
                return Plan()
            preempted.append(self._preempt(victim))
            self.preempted = True

    def _chunk_blocks(self, plan: Plan) -> int:
        """Blocks that the next step's pieces of the requests in prefill take."""
        taken = 0
        for work, tokens in zip(self.prefilling, plan.chunks, strict=False):
            taken += work.new_blocks(tokens, self.block_size)
        return taken

    def cached(self, work: WorkView) -> tuple[int, int]:
        """See BatchingView. A prefill always computes at least one token."""
        if not work.hashes:
            return 0, 0
        found = self.pool.match(work.hashes, (work.target - 1) // self.block_size)
        self._looked_at[work] = found[0]
        return found

    def spans(self) -> Iterator[tuple[int, int]]:
        """See BatchingView."""
        step = self.decodes.step
        for work in self._groups.members(self.decodes):
            context = work.target + 1 + step - work.joined
            yield context, work.request.num_prompt_tokens + work.request.max_output_tokens - 1 - context

    def latest_grows(self) -> bool:
        """See BatchingView."""
        decodes = self.decodes
        return bool(decodes.size) and decodes.grows(max(self._groups.members(decodes), key=arrival))

    def _victim(self) -> Work | None:
        """Whom to preempt: the latest arrival, so that the first one always gets on. None is to wait for a run's end."""
        return max(self._running.values(), key=arrival)

    def _preempt(self, work: Work) -> RequestId:
        """Send it back to the head of the queue. It keeps its tokens and loses its blocks."""
        self._drop(work)
        self.requeue(work)
        return work.request.id

    def requeue(self, work: Work) -> None:
        """To the head of the queue, without its blocks."""
        work.target = work.request.num_prompt_tokens + work.generated
        work.computed = 0
        work.blocks = 0
        work.reserved = 0
        work.shared = ()
        work.started = True
        self.waiting.appendleft(work)
        self.num_preemptions += 1

    def _launch(self, plan: Plan, steps: int) -> RunSteps:
        """The run that the plan asks for, of `steps` steps at most."""
        decodes = self.num_decodes
        if decodes < self.decodes.size and decodes:  # where none takes part they only pause, and whoever is new joins them
            self.decodes, self._group = self._groups.part(self.decodes, decodes)
            self._grown = self._group.next_blocks()
        if plan.mark:
            self.steps_since_mark = 0
        group = self._group
        chunks: tuple[Chunk, ...] = ()
        if plan.chunks or plan.admit:
            chunks = self._take(plan)
            if plan.admit:
                steps = 1
        pool = self.pool
        evictable: tuple[BlockHash, ...] = ()
        if pool.idle:
            if steps > 1:
                advancing = group if decodes else None
                steps, evictable = within_cache(pool, advancing, self._batch, self.block_size, steps, plan.keep, self._looked_at)
            elif (evicted := self._taken + self._grown - pool.num_available + len(pool.idle)) > 0:
                evictable = pool.oldest(evicted)
        elif steps > 1:
            blocks = pool.num_available - plan.keep
            if self._batch or not decodes:
                steps, _ = within(group if decodes else None, self._batch, self.block_size, steps, blocks)
            else:
                steps = group.steps_within(blocks, steps) or 1
        self._run = run = self._run + 1
        self._busy = True
        self._open = steps > 1 and plan.open
        context = group.context if decodes else 0
        if group.id or self._groups.moved:
            return RunSteps(run, steps, decodes, context, chunks, evictable, group.id, self._groups.told())
        return RunSteps(run, steps, decodes, context, chunks, evictable)

    def _take(self, plan: Plan) -> tuple[Chunk, ...]:
        """The plan's prefill, as the run's batch."""
        chunks: list[Chunk] = []
        batch = self._batch
        size = self.block_size
        taken = self._taken
        for work, tokens in zip(self.prefilling, plan.chunks, strict=False):
            if tokens:
                done = work.computed
                batch.append((work, tokens))
                chunks.append(Chunk(work.request.id, done, tokens, 0, done + tokens == work.target))
        if plan.admit:
            reserve = plan.reserve
            for i, tokens in enumerate(plan.admit):
                work = self.waiting.popleft()
                cached = self._admit(work)
                if i < len(reserve):
                    work.reserve(reserve[i], size)
                batch.append((work, tokens))
                chunks.append(Chunk(work.request.id, cached, tokens, cached, cached + tokens == work.target, work.reserved))
                taken += work.new_blocks(tokens, size)
            self._taken = taken
            free = self.pool.num_available - self._grown
            if taken > free:
                raise ValueError(f"{type(self.policy).__name__} admitted more than the {free} free blocks can hold")
        return tuple(chunks)

    def _admit(self, work: Work) -> int:
        """Into the batch; returns how many of its tokens the prefix cache holds, which are its own from now on."""
        self._running[work.request.id] = work
        self.prefilling.append(work)
        if not work.hashes:
            return 0
        held = self._looked_at[work] if work in self._looked_at else self.cached(work)[0]
        work.shared = work.hashes[:held]
        self.pool.use(work.shared)
        work.blocks = held
        work.computed = held * self.block_size
        self.num_prefix_queries += work.target
        self.num_prefix_hits += work.computed
        return work.computed
