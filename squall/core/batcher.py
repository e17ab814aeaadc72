"""What a replica works on: its queue, its batch, its KV blocks, and the runs of steps that they go through.

Ends a run and starts what the policy plans next: who is in every step, who is preempted, and how many steps may run before
anything would be decided differently. Does not know who else there is: no router, no hand-off, no pair; nor the clock, how long a
step takes, or when a request stops: the engine says so at the end of a run.

All that a run of k steps does is done when it ends, in the order in which k single steps would have done it: the blocks that
it took (evicting from the prefix cache), what its decodes leave behind, what its chunks complete.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from squall.core.actions import Chunk, RunSteps
from squall.core.blocks import BlockPool
from squall.core.decodes import Work, arrival
from squall.core.events import StepsDone
from squall.core.groups import Groups
from squall.core.horizon import Piece, within, within_cache
from squall.core.types import BlockHash, ReplicaId, RequestId, RunId
from squall.core.views import BatchingPolicy, Plan, WorkView


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
        "_answer", "_batch", "_busy", "_cancelled", "_chunks", "_group", "_groups", "_looked_at", "_open", "_run", "_running",
        "_taken", "block_size", "decode_blocks", "decodes", "free_blocks", "id", "num_blocks", "num_decodes",
        "num_preemptions", "num_prefix_hits", "num_prefix_queries", "num_stages", "policy", "pool", "preempted", "prefilling",
        "steps_since_mark", "waiting",
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
        self.preempted = False  # these four are the policy's view, brought up to date before it is asked
        self.free_blocks = num_blocks
        self.num_decodes = 0
        self.decode_blocks = 0
        self._run: RunId = 0
        self._busy = False
        self._open = False  # an arrival cuts the run
        self._group = self.decodes  # of the run; `num_decodes` of it advance: all or none
        self._batch: list[Piece] = []  # the run's chunks
        self._chunks: list[Chunk] = []  # the same for the engine, until it is told
        self._taken = 0  # blocks that the run takes in its first step
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

    def growth(self, run: RunId) -> list[int]:
        """Blocks that the decodes of a run in progress take at each of its next `block_size` steps, over and over."""
        if run != self._run:
            raise ValueError(f"replica {self.id} is not in run {run}")
        return self._group.growth() if self.num_decodes else [0] * self.block_size

    # -- the end of a run

    def _end_run(self, event: StepsDone) -> list[RequestId]:
        """What the run has led to; who was cancelled in it is still there. Returns who got a first token."""
        if event.run != self._run or not self._busy:
            raise ValueError(f"replica {self.id} is not in run {event.run}")
        self._busy = False
        steps = event.steps
        stopped = event.stopped
        taken = self._taken if steps == 1 else self._lengthen(steps)
        if self.num_decodes:
            self._group.step += steps
            self.steps_since_mark += steps
        if taken:
            self.pool.take(taken)
        for request in stopped:
            work = self._running[request]
            if work.group is not None:
                self._drop(work)
        first: list[RequestId] = []
        if self._batch:
            for work, tokens, blocks in self._batch:
                work.blocks = blocks
                work.computed += tokens
                if work.hashes:
                    self._share(work, tokens)
                if work.computed >= work.target:
                    self._complete(work, stopped, first)
            self._batch.clear()
        if self._group is not self.decodes:
            self.decodes = self._group = self._groups.unite(self.decodes, self._group)
        return first

    def _drop_cancelled(self) -> tuple[RequestId, ...]:
        """Those that have not stopped by themselves."""
        gone = tuple(request for request in dict.fromkeys(self._cancelled) if request in self._running)
        self._cancelled.clear()
        for request in gone:
            self._drop(self._running[request])
        return gone

    def _lengthen(self, steps: int) -> int:
        """The run had several steps: what each chunk computed in all of them. Returns the blocks that the run took."""
        taken = self._group.blocks(steps) if self.num_decodes else 0
        for i, (work, tokens, _) in enumerate(self._batch):
            blocks = work.new_blocks(tokens * steps, self.block_size)
            self._batch[i] = work, tokens * steps, work.blocks + blocks
            taken += blocks
        return taken

    def _share(self, work: Work, tokens: int) -> None:
        """The blocks that its last so many tokens have filled are cached."""
        size = self.block_size
        work.shared += self.pool.share(work.hashes[(work.computed - tokens) // size : work.computed // size])

    def _complete(self, work: Work, stopped: Sequence[RequestId], first: list[RequestId]) -> None:
        """Its prefill is done and it produced a token."""
        request = work.request
        if work.generated == request.num_output_tokens:
            first.append(request.id)
        work.generated += 1
        if request.id in stopped:
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
        group = work.group
        if group is None:
            self.prefilling.remove(work)
        else:
            tokens = group.leave(work)
            if work.hashes and len(work.hashes) > (first := work.computed // self.block_size):
                # they go on beyond the prompt only where the driver knows what is generated
                work.shared += self.pool.share(work.hashes[first : tokens // self.block_size])
        self.pool.release(work.blocks, work.shared)

    # -- the start of a run

    def _plan(self, preempted: list[RequestId]) -> Plan:
        """The policy's answer, after preempting until the next step of what runs has its blocks."""
        self.preempted = False
        size = self.block_size
        while True:
            decodes = self.decodes
            self.num_decodes = decodes.size
            self.decode_blocks = taken = decodes.growth_at[decodes.step % size]
            available = self.pool.num_available
            self.free_blocks = available - taken
            if self._looked_at:
                self._looked_at.clear()
            plan = self._answer(self)
            if plan.decodes < decodes.size:
                self.num_decodes = plan.decodes
                if not plan.decodes:
                    taken = 0
            if plan.chunks:
                for work, tokens in zip(self.prefilling, plan.chunks, strict=False):
                    if tokens:
                        done = work.computed + tokens
                        blocks = work.blocks  # all that it has reserved, if it has
                        if done > blocks * size:
                            blocks = -(-done // size)
                            taken += blocks - work.blocks
                        self._batch.append((work, tokens, blocks))
                        self._chunks.append(Chunk(work.request.id, work.computed, tokens, 0, done == work.target))
            self._taken = taken
            if taken <= available and not plan.preempt:
                return plan
            self._batch.clear()
            self._chunks.clear()
            victim = self._victim()
            if victim is None:
                self.num_decodes = 0
                return Plan()
            preempted.append(self._preempt(victim))
            self.preempted = True

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
            context = work.ahead + step + 1
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
            self._taken += self._group.next_blocks() - self.decode_blocks
        if plan.mark:
            self.steps_since_mark = 0
        group = self._group
        chunks: tuple[Chunk, ...] = ()
        if plan.admit:
            self._admit(plan)
            steps = 1
        if self._chunks:
            chunks = tuple(self._chunks)
            self._chunks.clear()
        pool = self.pool
        evictable: tuple[BlockHash, ...] = ()
        if pool.idle:
            if steps > 1:
                advancing = group if decodes else None
                steps, evictable = within_cache(pool, advancing, self._batch, self.block_size, steps, plan.keep, self._looked_at)
            elif (evicted := self._taken - pool.num_available + len(pool.idle)) > 0:
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
        context = group.base + decodes * group.step if decodes else 0
        if group.id or self._groups.moved:
            return RunSteps(run, steps, decodes, context, chunks, evictable, group.id, self._groups.told())
        return RunSteps(run, steps, decodes, context, chunks, evictable)

    def _admit(self, plan: Plan) -> None:
        """Whom the plan admits, into the batch."""
        size = self.block_size
        taken = self._taken
        for tokens, reserved in zip(plan.admit, chain(plan.reserve, repeat(0)), strict=False):
            work = self.waiting.popleft()
            request = work.request.id
            self._running[request] = work
            self.prefilling.append(work)
            cached = self._reuse(work) if work.hashes else 0
            done = cached + tokens
            blocks = -(-done // size)
            if reserved:
                work.reserve(reserved, size)
                if blocks < reserved:
                    blocks = reserved
            taken += blocks - work.blocks
            self._batch.append((work, tokens, blocks))
            self._chunks.append(Chunk(request, cached, tokens, cached, done == work.target, reserved))
        self._taken = taken
        if taken > self.pool.num_available:
            free = self.pool.num_available - (self._group.next_blocks() if self.num_decodes else 0)
            raise ValueError(f"{type(self.policy).__name__} admitted more than the {free} free blocks can hold")

    def _reuse(self, work: Work) -> int:
        """What the prefix cache holds of it becomes its own. Returns the tokens in that."""
        held = self._looked_at[work] if work in self._looked_at else self.cached(work)[0]
        work.shared = work.hashes[:held]
        self.pool.use(work.shared)
        work.blocks = held
        work.computed = held * self.block_size
        self.num_prefix_queries += work.target
        self.num_prefix_hits += work.computed
        return work.computed
