"""The replica machine: what it hears, and what it answers.

It is a `Batcher` that tells the router what has become of requests, drops those that are cancelled, and takes its part in
hand-offs (`core/handoff.py`) and in pairs (`core/live_scaling.py`). Does not know the clock, nor how long a step takes.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from squall.core.actions import AnyAction, Cut, Forget, Join, Preempt, RunLayers, Send
from squall.core.batcher import Batcher
from squall.core.decodes import Work
from squall.core.events import AnyEvent, Cancelled, Held, LivePaired, Progressed, StepsDone, Submitted, Woke
from squall.core.handoff import Handoffs, seats_of
from squall.core.live_batch import LIMITS
from squall.core.live_scaling import OF_PAIRS, LiveTarget, answer_late
from squall.core.live_source import LiveSource
from squall.core.types import ROUTER, Nanos, ReplicaId, Request, RequestId
from squall.core.views import BatchingPolicy, Plan


class Replica(Batcher):
    """One servable copy of the model.

    Args:
        id: its machine id.
        policy: plans its steps.
        num_blocks, block_size: its KV pool, in blocks and tokens a block.

    Attributes:
        handoffs: its part in hand-offs; None where it has none.
        live: its part in a pair; None where it is in none.
        limits: of what a pair takes at once.
    """

    __slots__ = ("_most_tokens", "_prefix_cache", "handoffs", "limits", "live", "wake_at")

    def __init__(self, id: ReplicaId, policy: BatchingPolicy, num_blocks: int, block_size: int) -> None:
        super().__init__(id, policy, num_blocks, block_size)
        self.wake_at: Nanos | None = None
        self.handoffs: Handoffs | None = None
        self.live: LiveTarget | LiveSource | None = None
        self.limits = LIMITS
        self._most_tokens = num_blocks * block_size + 1  # of a request: the last one's KV is never needed
        self._prefix_cache = policy.prefix_cache

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        if type(event) is StepsDone:
            first = self._end_run(event)
            if self._cancelled:
                gone = self._drop_cancelled()
                return self._begin_run(first, tuple(sorted(event.stopped + gone)), gone)
            return self._begin_run(first, event.stopped, ())
        live = self.live
        if live is not None and (answer := live.handle(event, now)) is not None:
            return answer
        if type(event) is Submitted:
            self.enqueue(event.request)
            if self._busy:
                return self._cut() if self._open else []
            self.wake_at = now
            return []
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

    def enqueue(self, request: Request) -> None:
        """Into the queue. Raises ValueError for one that can never fit."""
        target = request.num_prompt_tokens
        if target + request.max_output_tokens > self._most_tokens:
            raise ValueError(f"request {request.id} can never fit into the {self.num_blocks} blocks of replica {self.id}")
        if self.handoffs is not None:
            self.handoffs.begin_anew(request.id)
        generated = request.num_output_tokens
        hashes = request.block_hashes if self._prefix_cache else ()
        self.waiting.append(Work(request, hashes, target + generated, generated))

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

    # -- between two runs

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
            actions += [Send(ROUTER, Progressed(self.id, tuple(sorted(first)), finished, tuple(sorted(lost)))), Preempt(lost)]
        elif first or finished:
            actions.append(Send(ROUTER, Progressed(self.id, tuple(sorted(first)), finished)))
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
            actions.append(Send(ROUTER, Progressed(self.id, tuple(sorted(first)), finished, lost, held)))
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
            run = self._launch(plan, plan.steps)
            if live is not None and run.evictable:
                # in a pair the engine has more that are free: what is set aside, or is still written to
                run = replace(run, num_free=self.pool.num_free)
            actions.append(run)
        return actions if live is None else actions + live.after()

    def _has_preempted(self) -> bool:
        """Somebody who decoded here waits for blocks."""
        return bool(self.waiting) and self.waiting[0].generated > self.waiting[0].request.num_output_tokens

    def _decode(self, work: Work) -> None:
        if self.handoffs is not None and self.handoffs.holds and work.request.id not in self._cancelled:
            self.handoffs.hold(work)
        else:
            self._group.join(work)

    # -- what hand-offs and pairs ask of it

    @property
    def busy(self) -> bool:
        """Steps or layers run."""
        return self._busy

    @property
    def works_in_pair(self) -> bool:
        """See `handoff.Owner`."""
        return self.live is not None

    @property
    def hands_off(self) -> bool:
        """Whoever has its first token decodes elsewhere."""
        return self.handoffs is not None and self.handoffs.holds

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

    def end_layers(
        self, first: Sequence[RequestId], finished: tuple[RequestId, ...], gone: tuple[RequestId, ...]
    ) -> list[AnyAction]:
        """The layers that ran in place of a step are done, and this is what they have changed."""
        self._busy = False
        dropped = self._drop_cancelled() if self._cancelled else ()
        return self._begin_run(first, tuple(sorted(finished + dropped)), gone + dropped)
