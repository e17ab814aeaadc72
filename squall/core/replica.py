"""The replica machine: a queue, a batch and KV blocks.

Decides what every step works on, who is preempted and how many steps may run before anything would be decided differently.
Does not know the clock, how long a step takes, nor when a request stops: the engine says so at the end of a run.

All that a run of k steps does is done when it ends, in the order in which k single steps would have done it: the blocks that
it took (evicting from the prefix cache), what its decodes leave behind, what its chunks complete.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from squall.core.actions import AnyAction, Chunk, Cut, Forget, Join, Preempt, RunLayers, RunSteps, Send
from squall.core.blocks import BlockPool
from squall.core.decodes import NEVER, Work, arrival
from squall.core.events import AnyEvent, Cancelled, Held, LivePaired, Progressed, StepsDone, Submitted, Woke
from squall.core.groups import Groups
from squall.core.handoff import Handoffs, seats_of
from squall.core.horizon import need, within, within_cache
from squall.core.live_batch import LIMITS
from squall.core.live_scaling import OF_PAIRS, LiveTarget, answer_late
from squall.core.live_source import LiveSource
from squall.core.types import ROUTER, BlockHash, Nanos, ReplicaId, Request, RequestId, RunId
from squall.core.views import BatchingPolicy, Plan, WorkView


class Replica:
    """One servable copy of the model. Satisfies `core.views.BatchingView`.

    Args:
        id: its machine id.
        policy: plans its steps.
        num_blocks, block_size: its KV pool, in blocks and tokens a block.

    Attributes:
        pool: the KV blocks.
        decodes: the requests that decode (in `PipelinedReplica` those that no run in progress has).
        waiting, prefilling: the other requests.
        handoffs: its part in hand-offs; None where it has none.
        num_preemptions: so far.
        num_prefix_queries, num_prefix_hits: tokens looked up in the prefix cache at admission, and those found there.
    """

    __slots__ = (
        "_batch", "_busy", "_cancelled", "_group", "_groups", "_grown", "_looked_at", "_open", "_run", "_running", "_taken",
        "block_size", "decodes", "free_blocks", "handoffs", "id", "limits", "live", "num_blocks", "num_decodes",
        "num_preemptions", "num_prefix_hits", "num_prefix_queries", "num_stages", "policy", "pool", "preempted", "prefilling",
        "steps_since_mark", "waiting", "wake_at",
    )  # fmt: skip

    def __init__(self, id: ReplicaId, policy: BatchingPolicy, num_blocks: int, block_size: int) -> None:
        self.id = id
        self.policy = policy
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_stages = 1
        self.pool = BlockPool(num_blocks)
        self._running: dict[RequestId, Work] = {}  # prefilling or decoding
        self._groups = Groups(block_size, self._running)
        self.decodes = self._groups.empty()
        self.waiting: deque[Work] = deque()
        self.prefilling: list[Work] = []
        self.handoffs: Handoffs | None = None
        self.wake_at: Nanos | None = None
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
        self.live: LiveTarget | LiveSource | None = None
        self.limits = LIMITS

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

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        if type(event) is StepsDone:
            return self._end_run(event)
        live = self.live
        if live is not None and (answer := live.handle(event, now)) is not None:
            return answer
        if type(event) is Submitted:
            return self._submit(event.request, now)
        if type(event) is Woke:
            self.wake_at = None
            if self._busy:
                return []
            gone = self._drop_cancelled() if self._cancelled else ()
            return self._begin_run((), gone, gone)
        if type(event) is Cancelled:
            return self._cancel(event.request, now)
        return self._hand_off(event, now) if type(event) not in OF_PAIRS else self._hear_of_pair(event, now)

    def _hear_of_pair(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        """About a pair, while there is none."""
        return self._pair(event, now) if type(event) is LivePaired else answer_late(event)

    def _submit(self, request: Request, now: Nanos) -> list[AnyAction]:
        self.enqueue(request)
        if self._busy:
            return self._cut() if self._open else []
        self.wake_at = now
        return []

    def enqueue(self, request: Request) -> None:
        """Into the queue. Raises ValueError for one that can never fit."""
        # The last token's KV is never needed.
        if request.num_prompt_tokens + request.max_output_tokens - 1 > self.num_blocks * self.block_size:
            raise ValueError(f"request {request.id} can never fit into the {self.num_blocks} blocks of replica {self.id}")
        if self.handoffs is not None:
            self.handoffs.begin_anew(request.id)
        generated = request.num_output_tokens
        hashes = request.block_hashes if self.policy.prefix_cache else ()
        self.waiting.append(Work(request, hashes, request.num_prompt_tokens + generated, generated))

    def _cancel(self, request: RequestId, now: Nanos) -> list[AnyAction]:
        if request in self._running:
            self._cancelled.append(request)
            if not self._busy:  # a policy that lets somebody wait who could run
                self.wake_at = now
            return self._cut()
        for work in self.waiting:
            if work.request.id == request:
                self.waiting.remove(work)
                gone = (request,)
                cut = self._cut()
                return [Send(ROUTER, Progressed(self.id, finished=gone)), Forget(gone), *cut]
        if self.handoffs is None:
            return []
        before = self.handoffs.stirred
        self.handoffs.cancel(request)
        return [] if before or not self.handoffs.stirred else self.nudge(now)  # once is enough

    def _hand_off(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        if self.handoffs is None:
            self.handoffs = Handoffs(self.id, self.pool, self._running, self.block_size, seats_of(self.policy))
        before = self.handoffs.stirred
        actions = self.handoffs.handle(event)
        if actions is None:
            raise TypeError(f"replica {self.id} cannot handle {type(event).__name__}")
        return actions if before or not self.handoffs.stirred else actions + self.nudge(now)

    def _cut(self) -> list[AnyAction]:
        self._open = False
        return [Cut(self._run)] if self._busy else []

    # -- live scaling (see core/live_scaling.py)

    @property
    def busy(self) -> bool:
        """Steps or layers run."""
        return self._busy

    def _pair(self, event: LivePaired, now: Nanos) -> list[AnyAction]:
        if event.target == self.id:
            self.live = LiveTarget(self, event, self.limits, now)
            return []
        self.live = source = LiveSource(self, event)
        return source.begin(now)

    def nudge(self, now: Nanos) -> list[AnyAction]:
        """Let a boundary come soon."""
        if not self._busy:
            self.wake_at = now
        return self._cut()

    def take_waiting(self) -> list[Work]:
        """All of the queue, out of it."""
        works = list(self.waiting)
        self.waiting.clear()
        return works

    def join(self, works: list[Work]) -> list[AnyAction]:
        """At a boundary: these have their KV and decode from now on. Empties the list."""
        for work in works:
            self._running[work.request.id] = work
            self.decodes.join(work)
        joined = tuple(work.request.id for work in works)
        works.clear()
        return [Join(joined, self.decodes.id)] if joined else []

    def settle_handoffs(self) -> list[AnyAction]:
        """What a boundary changes for hand-offs, while no steps are planned here."""
        if self.handoffs is None or self.handoffs.is_quiet:
            return []
        boundary = self.handoffs.at_boundary(self, False, ())
        if not boundary.held and not boundary.gone:
            return boundary.actions
        told = Progressed(self.id, finished=tuple(sorted(boundary.gone)), held=boundary.held)
        return [Send(ROUTER, told), *boundary.actions]

    @property
    def works_in_pair(self) -> bool:
        """See `handoff.Owner`."""
        return self.live is not None

    def give_up(self, request: RequestId) -> bool:
        """See `handoff.Owner`. Its blocks become free, or idle."""
        work = self._running.get(request)
        if work is not None:
            if work not in self.prefilling:
                return False
            self._drop(work)
            return True
        for work in self.waiting:
            if work.request.id == request:
                self.waiting.remove(work)
                return True
        return False

    @property
    def hands_off(self) -> bool:
        """Whoever has its first token decodes elsewhere."""
        return self.handoffs is not None and self.handoffs.holds

    def end_layers(
        self, first: Sequence[RequestId], finished: tuple[RequestId, ...], gone: tuple[RequestId, ...]
    ) -> list[AnyAction]:
        """The layers that ran in place of a step are done, and this is what they have changed."""
        self._busy = False
        dropped = self._drop_cancelled() if self._cancelled else ()
        return self._begin_run(first, tuple(sorted(finished + dropped)), gone + dropped)

    # -- the end of a run

    def _end_run(self, event: StepsDone) -> list[AnyAction]:
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
            return self._begin_run(first, tuple(sorted(stopped + gone)), gone)
        return self._begin_run(first, stopped, ())

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
        if self.handoffs is not None and self.handoffs.holds and request not in self._cancelled:
            self.handoffs.hold(work)
        else:
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

    def _begin_run(
        self, first: Sequence[RequestId], finished: tuple[RequestId, ...], gone: tuple[RequestId, ...]
    ) -> list[AnyAction]:
        """Start what the policy plans. Returns all actions of the call: what the last run changed is told here, too."""
        if gone or self.handoffs is not None or self.live is not None:
            return self._begin_among_others(first, finished, gone)
        preempted: list[RequestId] = []
        plan = self._plan(preempted)
        actions: list[AnyAction] = []
        if preempted:
            lost = tuple(preempted)
            actions += [Send(ROUTER, Progressed(self.id, tuple(first), finished, tuple(sorted(lost)))), Preempt(lost)]
        elif first or finished:
            actions.append(Send(ROUTER, Progressed(self.id, tuple(first), finished)))
        if self.num_decodes or plan.chunks or plan.admit:
            actions.append(self._launch(plan, plan.steps))
        return actions

    def _begin_among_others(
        self, first: Sequence[RequestId], finished: tuple[RequestId, ...], gone: tuple[RequestId, ...]
    ) -> list[AnyAction]:
        """As `_begin_run`, where a boundary may change hand-offs or a pair, or who was cancelled is to be forgotten."""
        held: tuple[Held, ...] = ()
        moves: list[AnyAction] | None = None
        if self.handoffs is not None and (gone or not self.handoffs.is_quiet):
            boundary = self.handoffs.at_boundary(self, self._has_preempted(), gone)
            held, moves = boundary.held, boundary.actions
            finished = tuple(sorted(finished + boundary.gone)) if boundary.gone else finished
        preempted: list[RequestId] = []
        redone: list[RequestId] = []
        told: list[AnyAction] | None = None
        layers: RunLayers | None = None
        live = self.live
        if live is not None:
            told, redone = live.at_boundary()
            layers = live.layers()
        plan = self._plan(preempted) if layers is None else Plan()
        preempted += redone
        actions: list[AnyAction] = []
        if first or finished or preempted or held:
            lost = tuple(sorted(preempted)) if preempted else ()
            actions.append(Send(ROUTER, Progressed(self.id, tuple(first), finished, lost, held)))
        if moves is not None:
            actions += moves
        elif gone:
            actions.append(Forget(gone))
        if told is not None:
            actions += told
        if preempted:
            actions.append(Preempt(tuple(preempted)))
        if layers is not None:
            self._busy = True
            actions.append(layers)
        elif self.num_decodes or plan.chunks or plan.admit:
            actions.append(self._launch(plan, plan.steps))
        return actions if live is None else actions + live.after()

    def _has_preempted(self) -> bool:
        """Somebody who decoded here waits for blocks."""
        return bool(self.waiting) and self.waiting[0].generated > self.waiting[0].request.num_output_tokens

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
            plan = self.policy(self)
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
                steps = within(group if decodes else None, self._batch, self.block_size, steps, blocks)
            else:
                steps = group.steps_within(blocks, steps) or 1
        self._run = run = self._run + 1
        self._busy = True
        self._open = steps > 1 and plan.open
        context = group.context if decodes else 0
        if group.id or self._groups.moved or (evictable and self.live is not None):
            # in a pair the engine has more that are free: what is set aside, or is still written to
            num_free = -1 if not evictable or self.live is None else pool.num_free
            return RunSteps(run, steps, decodes, context, chunks, evictable, group.id, self._groups.told(), 0, num_free)
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
