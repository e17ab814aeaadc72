"""Live scaling: a replica that still loads (the target) and one that is overloaded (the source) share batches, layer by layer.

The machines of the two replicas delegate to the parts below while they are a pair. The target's part is here, the source's in
`live_source`. The target forms batches of whole prompts from its queue and runs one layer at a time, always of the earliest
batch whose next layer has arrived; the source, whenever it is idle, pulls the earliest batch with its activations and runs what
is left. The split is never computed: it is wherever the target happens to be (BlitzScale, OSDI 2025, section 5.2).

KV of the layers that the target ran follows the activations, a request each, into blocks that the source has set aside. Where
requests decode elsewhere it stays: the source tells the router of both halves, and they go to one decode replica (`handoff`).
Knows no clock, no price and no link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squall.core.actions import Abandon, AnyAction, Forget, Hold, RunLayers, Send, SendActivations, SendKv
from squall.core.blocks import blocks_of
from squall.core.events import (
    ActivationsArrived,
    ActivationsFailed,
    ActivationsSent,
    AnyEvent,
    BatchFormed,
    Cancelled,
    Disowned,
    HandedOver,
    KvArrived,
    KvFailed,
    KvSent,
    LayerArrived,
    LayersDone,
    LivePaired,
    NothingLeft,
    Progressed,
    PullWanted,
    Submitted,
    Surrendered,
    Unpaired,
    Warmed,
    WeightsLoaded,
    Woke,
)
from squall.core.live_batch import BATCH_TOKENS, Batch, LiveLimits, first_of, without
from squall.core.types import CONTROLLER, ROUTER, Nanos, RequestId

if TYPE_CHECKING:
    from squall.core.decodes import Work
    from squall.core.replica import Replica


OF_PAIRS = frozenset((LivePaired, PullWanted, HandedOver, NothingLeft, BatchFormed, ActivationsArrived, ActivationsFailed,
                      Unpaired, LayerArrived, WeightsLoaded, Warmed))  # fmt: skip
"""What is about a pair, and may come to a replica that is in none (any more)."""


FOR_TARGETS = frozenset((Woke, Submitted, Cancelled, LayersDone, PullWanted, LayerArrived, WeightsLoaded, Warmed, ActivationsSent,
                         ActivationsFailed, KvSent, KvFailed, Unpaired))  # fmt: skip
"""What a target has a say in; not in these of it, where it plans for itself again."""
OF_REQUESTS = frozenset((Woke, Submitted, Cancelled))


def answer_late(event: AnyEvent) -> list[AnyAction]:
    """Words that crossed with the end of a pair. A batch that comes too late is one of a lost target's: the router has it."""
    return [Send(event.source, NothingLeft())] if isinstance(event, PullWanted) else []


class LiveTarget:
    """The part of a replica that loads. It ends once the weights are in, nothing is left to share, and all KV is with the source.

    While layers arrive the replica plans nothing itself: its queue is the live queue. Whoever gets a first token here waits for
    the replica to be ready. A batch whose first layer cannot run here is given whole, and its blocks are returned.

    Args:
        host: the replica's machine.
        paired: with whom.
        limits: what it takes on at once.
        now: when the pair began.
    """

    def __init__(self, host: Replica, paired: LivePaired, limits: LiveLimits, now: Nanos) -> None:
        self._host = host
        self._paired = paired
        self._limits = limits
        self._began_at = now
        self._layers = 0  # that have arrived
        self._whole = False  # with what comes after the last layer
        self._warm = False
        self._plain = False  # the replica plans for itself again
        self._alone = False  # the source is lost
        self._pending: list[Batch] = []
        self._running: Batch | None = None
        self._num_batches = 0
        self._sent: dict[int, Batch] = {}  # whose activations are on their way
        self._heads: set[RequestId] = set()  # whose first layers' KV waits here for a decode replica
        self._kept: dict[RequestId, tuple[Work, int]] = {}  # whose KV, of so many layers, is still to be sent
        self._pull: PullWanted | None = None
        self._hungry = False  # the source was told that nothing is left
        self._cancelled: set[RequestId] = set()  # in the running batch
        self._freed = 0  # blocks to be given back at the next boundary
        self._complete: list[Work] = []  # all of whose layers ran here: they decode from the first step on

    # -- what the replica asks

    def at_boundary(self) -> tuple[list[AnyAction], list[RequestId]]:
        """Before the replica plans steps: what the engine is to be told, and who is preempted (nobody)."""
        self._give_back()
        return self._host.join(self._complete), []

    def layers(self) -> RunLayers | None:
        """Nothing: a target that plans steps has no layers to run."""
        return None

    def after(self) -> list[AnyAction]:
        """What else is to be said at a step boundary."""
        return self._end_pair()

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction] | None:
        """None where the replica is to handle it as always."""
        if type(event) not in FOR_TARGETS or (self._plain and type(event) in OF_REQUESTS):
            return None  # whoever is cancelled before it has joined the decodes does so first
        if type(event) is LayersDone:
            return self._turn(self._layer_done(event), now)
        if type(event) is LayerArrived:
            self._layers = max(self._layers, event.layer + 1)
            return self._turn([], now)
        if type(event) is Woke:
            self._host.wake_at = None
            return self._host.settle_handoffs() + self._run_next(now)
        if type(event) is Submitted:
            self._host.enqueue(event.request)
            return self._turn([], now)
        if type(event) is KvSent or type(event) is KvFailed:
            return self._turn(self._kv_left(event, now), now) if event.request in self._kept else None
        return self._handle_rarer(event, now)

    def _handle_rarer(self, event: AnyEvent, now: Nanos) -> list[AnyAction] | None:
        match event:
            case Cancelled(request):
                told = self._cancel(request)
                return None if told is None else self._turn(told, now)
            case PullWanted():
                self._pull = event
                return self._turn([], now)
            case WeightsLoaded():
                self._layers, self._whole = self._paired.num_layers, True
                return self._turn([], now)
            case Warmed():
                return self._turn(self._be_warm(), now)
            case ActivationsSent(batch):
                return self._turn(self._send_kv(self._sent.pop(batch)), now)
            case ActivationsFailed(batch) if batch in self._sent:  # else it is a word about one that was confirmed
                return self._turn(self._keep_not(self._sent.pop(batch), event), now)
            case Unpaired() if not self._alone:
                return self._turn(self._be_alone(now), now)
        return None

    # -- batches

    def _run_next(self, now: Nanos) -> list[AnyAction]:
        """One layer, of the earliest batch whose next one has arrived; all that are left, once none has to be waited for."""
        if self._running is not None:
            return []
        for batch in self._pending:
            if self._may_run(batch):
                break
        else:
            formed = self._form(now)
            if formed is None or not self._may_run(formed):
                return []
            batch = formed
        self._running = batch
        return [batch.run(self._paired.num_layers if self._warm else batch.done + 1)]

    def _may_run(self, batch: Batch) -> bool:
        done = batch.done
        if done >= self._layers or (done == self._paired.num_layers - 1 and not self._whole):
            return False
        return done > 0 or self._has_slot()

    def _has_slot(self) -> bool:
        return sum(batch.done > 0 for batch in self._pending) + len(self._sent) < self._limits.slots

    def _may_form(self, now: Nanos) -> bool:
        """Its first layer could run, there is room for one more, and there are blocks for the first prompt at least."""
        host = self._host
        if not self._layers or self._warm or self._alone or not host.waiting or not self._has_slot():
            return False
        enough = blocks_of(host.waiting[0].target, host.block_size) <= host.pool.num_available
        return enough and len(self._pending) < self._limits.pending(now - self._began_at)

    def _form(self, now: Nanos) -> Batch | None:
        """A batch for which there are blocks."""
        if not self._may_form(now):
            return None
        batch = self._gather(self._host.pool.num_available)
        if batch is not None:
            for work in batch.works:
                work.blocks = blocks_of(work.target, self._host.block_size)
                self._host.pool.take(work.blocks)
            self._pending.append(batch)
        return batch

    def _gather(self, blocks: int) -> Batch | None:
        """The first of the queue that fit into a batch and so many blocks; None where not even the first does."""
        host = self._host
        most = getattr(host.policy, "max_num_batched_tokens", BATCH_TOKENS)
        works = first_of(host.waiting, most, blocks, host.block_size)
        if not works:
            return None
        self._num_batches += 1
        return Batch(self._num_batches, works)

    def _layer_done(self, event: LayersDone) -> list[AnyAction]:
        batch, self._running = self._running, None
        if batch is None or batch.id != event.batch:
            raise ValueError(f"replica {self._host.id} runs no layers of batch {event.batch}")
        batch.done = event.last_layer
        if batch.done == self._paired.num_layers:
            return self._end_batch(batch, event.stopped)
        gone = tuple(sorted(self._cancelled))
        self._cancelled.clear()
        actions: list[AnyAction] = []
        for request in gone:
            actions += self._cancel(request) or ()
        if self._alone and not self._warm:
            actions += self._surrender(self._take_back())
        return actions

    def _end_batch(self, batch: Batch, stopped: tuple[RequestId, ...]) -> list[AnyAction]:
        """Every layer ran here: first tokens. Nobody decodes before the replica is ready."""
        self._pending.remove(batch)
        host = self._host
        gone = self._cancelled - set(stopped)
        for work in batch.works:
            if work.request.id in stopped or work.request.id in gone:
                host.pool.release(work.blocks, ())
                continue
            work.generated += 1
            work.computed = work.target
            if host.handoffs is not None and host.hands_off:
                host.handoffs.hold(work)
            else:
                self._complete.append(work)
        self._cancelled.clear()
        ended = tuple(sorted((*stopped, *gone)))
        first = tuple(sorted(request for request in batch.requests if request not in gone))
        actions: list[AnyAction] = [Send(ROUTER, Progressed(host.id, first, ended))]
        if gone:
            actions.append(Forget(tuple(sorted(gone))))
        held = tuple(request for request in first if request not in stopped)
        if host.hands_off:
            return actions + host.settle_handoffs()
        return [*actions, Hold(held)] if held else actions

    # -- the source pulls

    def _answer(self, now: Nanos) -> list[AnyAction]:
        """Exactly one answer a pull; none yet where the earliest batch is in a layer, or about to run one.

        Once the weights are in, the batch that runs ends here, and the source gets the one after it.
        """
        pull = self._pull
        if pull is None:
            return []
        free = [batch for batch in self._pending if not (self._warm and batch is self._running)]
        batch = free[0] if free else None
        if batch is None and not self._warm and self._host.waiting and not self._may_form(now):
            batch = self._gather(self._host.num_blocks)
            if batch is not None:
                self._pending.append(batch)
        if batch is None:
            if self._host.waiting and not self._warm:
                return []  # a batch is formed at the end of this instant
            self._pull, self._hungry = None, True
            return [Send(pull.source, NothingLeft())]
        if batch is self._running or (not batch.done and self._will_run(batch)):
            return []
        needed = sum(blocks_of(work.target, self._host.block_size) for work in batch.works)
        if needed > pull.num_blocks:
            self._pull = None
            if not batch.done:
                self._return(batch)
            return [Send(pull.source, NothingLeft(needed))]
        self._pull = None
        self._pending.remove(batch)
        return self._hand_over(batch, pull)

    def _will_run(self, batch: Batch) -> bool:
        """It has blocks here, and its first layer runs next."""
        return batch.works[0].blocks > 0 and self._may_run(batch)

    def _hand_over(self, batch: Batch, pull: PullWanted) -> list[AnyAction]:
        requests = tuple(work.request for work in batch.works)
        told = Send(pull.source, HandedOver(self._host.id, batch.id, batch.done, requests))
        if not batch.done:
            for work in batch.works:
                self._host.pool.release(work.blocks, ())
            return [told, Abandon(batch.requests)]
        self._sent[batch.id] = batch
        handoffs = self._host.handoffs
        if handoffs is not None and self._host.hands_off:
            for work in batch.works:
                handoffs.hold_part(work)
            self._heads.update(batch.requests)
        return [told, SendActivations(batch.id, pull.source, batch.num_tokens)]

    def _send_kv(self, batch: Batch) -> list[AnyAction]:
        """The activations are there; now what the layers left behind."""
        source = self._paired.source
        if self._alone:
            return self._keep_not(batch, None)
        actions: list[AnyAction] = [Send(source, ActivationsArrived(batch.id))]
        if self._heads.issuperset(batch.requests):
            return actions
        for work in batch.works:
            self._kept[work.request.id] = work, batch.done
            actions.append(SendKv(work.request.id, source, 0, batch.done, work.target))
        return actions

    def _keep_not(self, batch: Batch, failed: ActivationsFailed | None) -> list[AnyAction]:
        """The source does not get it: whatever it does about that, nothing of the batch is needed here."""
        told: list[AnyAction] = []
        if not self._heads.issuperset(batch.requests):  # those go when the source says so
            self._freed += sum(work.blocks for work in batch.works)
            told.append(Abandon(batch.requests))
        return told if failed is None or self._alone else [Send(self._paired.source, failed), *told]

    def _kv_left(self, event: KvSent | KvFailed, now: Nanos) -> list[AnyAction]:
        request = event.request
        work, layers = self._kept.pop(request)
        self._freed += work.blocks
        actions: list[AnyAction] = [Abandon((request,))]
        if not self._alone:
            told = KvArrived(request, 0, layers) if isinstance(event, KvSent) else KvFailed(request, event.to, 0, layers)
            actions.append(Send(self._paired.source, told))
        return actions + (self._host.nudge(now) if self._plain else [])

    # -- beginnings and ends

    def _turn(self, actions: list[AnyAction], now: Nanos) -> list[AnyAction]:
        """What follows from any event."""
        if not (self._plain and self._host.busy):
            self._give_back()
        actions += self._answer(now)
        if self._hungry and self._host.waiting and not self._warm and not self._alone:
            self._hungry = False
            actions.append(Send(self._paired.source, BatchFormed()))
        if self._alone and not self._warm and self._host.waiting:
            actions += self._surrender([work.request.id for work in self._host.take_waiting()])
        if self._running is None and not self._plain and (self._pending or self._host.waiting):
            self._host.wake_at = now
        return actions + self._settle(now)

    def _settle(self, now: Nanos) -> list[AnyAction]:
        """Where nothing is left to share, plan steps."""
        if not self._plain and (self._warm or self._alone) and not self._pending and self._running is None:
            self._plain = True
            self._host.wake_at = now
        return self._end_pair()

    def _end_pair(self) -> list[AnyAction]:
        """Nothing is left to be sent. One that has lost its source tells the controller only: all is given back, and what it is
        sent from now on stays."""
        if not self._plain or self._sent or self._kept or self._freed or self._complete:
            return []
        self._host.live = None
        pair = Unpaired(self._paired.target, self._paired.source, lost=self._alone)
        listeners = (CONTROLLER,) if self._alone else (self._paired.source, ROUTER, CONTROLLER)
        return [Send(to, pair) for to in listeners]

    def _give_back(self) -> None:
        if self._freed:
            self._host.pool.release(self._freed, ())
            self._freed = 0

    def _be_warm(self) -> list[AnyAction]:
        """The replica is as good as any: what has not begun is its own."""
        self._warm = self._whole = True
        self._layers = self._paired.num_layers
        for batch in [batch for batch in reversed(self._pending) if not batch.done and batch is not self._running]:
            self._return(batch)
        return []

    def _return(self, batch: Batch) -> None:
        """Back to the head of the queue."""
        self._pending.remove(batch)
        for work in reversed(batch.works):
            self._host.pool.release(work.blocks, ())
            work.blocks = 0
            work.hashes = work.request.block_hashes if self._host.policy.prefix_cache else ()
            self._host.waiting.appendleft(work)

    def _be_alone(self, now: Nanos) -> list[AnyAction]:
        """The source is lost. What has no token yet goes back to the router, unless the replica can serve it."""
        self._alone = True
        self._pull, self._hungry = None, False
        gone = [request for batch in self._sent.values() for request in batch.requests if request not in self._heads]
        gone += [*self._kept, *self._heads]
        if self._heads and self._host.handoffs is not None:
            self._host.handoffs.handle(Disowned(tuple(sorted(self._heads))))
            self._host.wake_at = now
        if not self._warm:
            gone += self._take_back()
            gone += [work.request.id for work in self._host.take_waiting()]
        return self._surrender(gone)

    def _take_back(self) -> list[RequestId]:
        """Pending batches that no layer is running of."""
        taken: list[RequestId] = []
        for batch in [batch for batch in self._pending if batch is not self._running]:
            self._pending.remove(batch)
            self._freed += sum(work.blocks for work in batch.works)
            taken += batch.requests
        return taken

    def _surrender(self, requests: list[RequestId]) -> list[AnyAction]:
        if not requests:
            return []
        ids = tuple(sorted(requests))
        return [Abandon(ids), Send(ROUTER, Surrendered(self._host.id, ids))]

    def _cancel(self, request: RequestId) -> list[AnyAction] | None:
        """None where it is in no batch: it is held for somebody who decodes it, or with the source already."""
        host = self._host
        if self._running is not None and request in self._running.requests:
            self._cancelled.add(request)
            return []
        work = without((host.waiting, self._complete, *(batch.works for batch in self._pending)), request)
        if work is None:
            return None
        host.pool.release(work.blocks, ())
        self._pending = [batch for batch in self._pending if batch.works]
        return [Send(ROUTER, Progressed(host.id, finished=(request,))), Forget((request,))]
