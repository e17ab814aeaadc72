"""The source's part of live scaling: an overloaded replica that runs the rest of what a loading one has begun.

See `live_scaling`. A pull sets blocks aside beforehand, so that whatever comes has its place; everything that changes the KV pool
or the decodes is done at a step boundary, so that it does not matter how many steps a run has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squall.core.actions import Abandon, AnyAction, Chunk, Evict, Forget, Hold, Reserve, RunLayers, Send
from squall.core.blocks import blocks_of
from squall.core.decodes import Work, arrival
from squall.core.events import (
    ActivationsArrived,
    ActivationsFailed,
    AnyEvent,
    BatchFormed,
    Cancelled,
    Disowned,
    HandedOver,
    KvArrived,
    KvFailed,
    LayersDone,
    LivePaired,
    NothingLeft,
    Progressed,
    PullWanted,
    Submitted,
    Surrendered,
    TakenOver,
    Unpaired,
)
from squall.core.live_batch import BATCH_TOKENS
from squall.core.types import ROUTER, Nanos, ReplicaId, RequestId

if TYPE_CHECKING:
    from squall.core.replica import Replica

FOR_SOURCES = frozenset((Submitted, Cancelled, Disowned, LayersDone, HandedOver, NothingLeft, BatchFormed, ActivationsArrived,
                         ActivationsFailed, KvArrived, KvFailed, LivePaired, Unpaired))  # fmt: skip
"""What a source may have a say in."""
ROUNDING = 16
"""Blocks set aside beyond those of a full batch of one prompt, since every prompt fills its last one in part."""


class Half:
    """A request of a batch that was taken over, until its KV is whole.

    Attributes:
        batch: the number of its batch.
        here: the target's layers have come (or it had none).
        told: its first token is out.
        over: it has ended; its blocks wait for what is still being written to them.
        broken: what the target ran will not come.
        layers: that the target ran; their KV stays with it (`head`) where requests decode elsewhere.
    """

    __slots__ = ("batch", "broken", "head", "here", "layers", "over", "told", "work")

    def __init__(self, work: Work, of: HandedOver, stays: bool) -> None:
        self.work = work
        self.batch = of.batch
        self.here = stays or not of.layer
        self.head = of.target if stays else None
        self.layers = of.layer
        self.told = False
        self.over = False
        self.broken = False


class LiveSource:
    """The part of a replica that helps a loading one. It ends when the pair has, and all that was taken over is its own.

    The replica goes on with what it had begun. Whenever it has no prompt of its own and no batch in hand it pulls; the rest of a
    batch runs at the next step boundary, in place of a step, and decodes get at least one step before the next batch.
    """

    def __init__(self, host: Replica, paired: LivePaired) -> None:
        self._host = host
        self._paired = paired
        self._open = True
        self._halves: dict[RequestId, Half] = {}
        self._batch: HandedOver | None = None  # in hand: coming, waiting for a boundary, or running
        self._arrived = False  # its activations
        self._running = False
        self._cancelled: list[RequestId] = []  # in the running batch; nobody is to hear of those in `_disowned`
        self._disowned: set[RequestId] = set()
        self._reserved = 0  # blocks set aside for a pull that has no answer yet
        self._pulling = False
        self._asking = False  # at this boundary
        self._starved = False  # nothing was left
        most = getattr(host.policy, "max_num_batched_tokens", BATCH_TOKENS)
        self._wanted = min(host.num_blocks, -(-most // host.block_size) + ROUNDING)
        self._least = 1  # blocks without which a pull is in vain
        self._freed = 0
        self._disowning: dict[ReplicaId, list[RequestId]] = {}  # whose part at a target is of no use
        self._joining: list[Work] = []
        self._restarting: list[Half] = []

    def begin(self, now: Nanos) -> list[AnyAction]:
        """Surrender what has never run here, and look for something to pull."""
        host = self._host
        works = host.take_waiting()
        host.waiting.extend(work for work in works if work.started)
        given = tuple(sorted(work.request.id for work in works if not work.started))
        actions: list[AnyAction] = [Abandon(given), Send(ROUTER, Surrendered(host.id, given))] if given else []
        return actions + host.nudge(now)

    def pair(self, paired: LivePaired, now: Nanos) -> list[AnyAction]:
        """With another target, while halves of an earlier one's are still here."""
        self._paired, self._open, self._starved, self._least = paired, True, False, 1
        return self.begin(now)

    # -- what the replica asks

    def at_boundary(self) -> tuple[list[AnyAction], list[RequestId]]:
        """Before the replica plans steps, blocks change hands: what the engine is to be told, and who is preempted by that."""
        host = self._host
        if self._freed:
            host.pool.release(self._freed, ())
            self._freed = 0
        lost = self._restart() if self._restarting else []
        actions = host.join(self._joining)
        actions += [Send(head, Disowned(tuple(sorted(gone)))) for head, gone in self._disowning.items()]
        self._disowning.clear()
        if self._may_pull():
            blocks = min(max(self._wanted, self._least), host.pool.num_available - host.decodes.next_blocks())
            if blocks >= self._least:
                if evicted := host.pool.oldest(max(0, blocks - host.pool.num_free)):
                    actions.append(Evict(evicted))
                host.pool.take(blocks)
                self._reserved = blocks
                self._pulling = self._asking = True
        return actions, lost

    def layers(self) -> RunLayers | None:
        """The rest of the batch in hand, instead of a step."""
        batch = self._batch
        if batch is None or not self._arrived:
            return None
        self._running = True
        chunks = tuple(Chunk(request.id, 0, self._halves[request.id].work.target, 0, last=True) for request in batch.requests)
        return RunLayers(batch.batch, batch.layer, self._paired.num_layers, chunks)

    def after(self) -> list[AnyAction]:
        """What else is to be said at a step boundary."""
        actions: list[AnyAction] = []
        if self._asking:
            self._asking = False
            actions.append(Send(self._paired.target, PullWanted(self._host.id, self._reserved)))
        if not (self._open or self._halves or self._batch or self._freed or self._pulling):
            self._host.live = None
        return actions

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction] | None:
        """None where the replica is to handle it as always."""
        if type(event) not in FOR_SOURCES:
            return None
        if type(event) is Submitted:
            if event.request.id in self._halves:
                self._disown((event.request.id,))  # the router's latest word: it begins anew
            return None
        return self._handle_rarer(event, now)

    def _handle_rarer(self, event: AnyEvent, now: Nanos) -> list[AnyAction] | None:
        match event:
            case Cancelled(request):
                return self._cancel(request, now) if request in self._halves else None
            case Disowned(requests) if any(request in self._halves for request in requests):
                return self._disown(requests) + self._nudge(now)
            case LayersDone():
                return self._layers_done(event)
            case HandedOver():
                return self._take(event, now)
            case NothingLeft(num_blocks):
                self._pulling = False
                self._freed += self._reserved
                self._reserved = 0
                self._starved = not num_blocks
                self._least = max(1, min(num_blocks, self._host.num_blocks))
            case BatchFormed():
                self._starved = False
            case ActivationsArrived(batch) if self._batch is not None and self._batch.batch == batch:
                self._arrived = True
            case ActivationsFailed(batch):
                self._give_up_batch(batch)
            case KvArrived(request) if request in self._halves:
                self._half_here(request)
            case KvFailed(request, to) if request in self._halves and to == self._host.id:
                self._half_lost(request)
            case LivePaired():
                return self.pair(event, now)
            case Unpaired():
                self._part(event.lost)
            case _:
                return None
        return self._nudge(now)

    # -- batches

    def _nudge(self, now: Nanos) -> list[AnyAction]:
        """Let a boundary come soon; layers that run end by themselves."""
        return [] if self._running else self._host.nudge(now)

    def _may_pull(self) -> bool:
        """It has nothing else to compute, but for its decodes."""
        idle = self._batch is None and not self._host.prefilling and not self._host.waiting
        return self._open and idle and not self._pulling and not self._starved

    def _take(self, event: HandedOver, now: Nanos) -> list[AnyAction]:
        """The batch is this replica's from now on, whatever becomes of the target."""
        if not self._open or event.target != self._paired.target:
            return []
        size, used = self._host.block_size, 0
        for request in event.requests:
            tokens = request.num_prompt_tokens + request.num_output_tokens
            work = Work(request, (), tokens, request.num_output_tokens)
            work.blocks = blocks_of(work.target, size)
            work.started = True
            used += work.blocks
            stays = self._host.hands_off and event.layer > 0
            self._halves[request.id] = Half(work, event, stays)
        self._pulling = False
        self._freed += self._reserved - used
        self._reserved = 0
        self._least = 1
        self._batch, self._arrived = event, not event.layer
        taken = TakenOver(self._host.id, event.target, tuple(sorted(request.id for request in event.requests)))
        reserved = [Reserve(request.id, self._halves[request.id].work.target) for request in event.requests]
        return [Send(ROUTER, taken), *reserved, *self._nudge(now)]

    def _layers_done(self, event: LayersDone) -> list[AnyAction]:
        """First tokens; whoever's KV is whole decodes from here on."""
        batch, self._batch = self._batch, None
        if batch is None or batch.batch != event.batch:
            raise ValueError(f"replica {self._host.id} runs no layers of batch {event.batch}")
        self._running = self._arrived = False
        gone = tuple(sorted({*self._cancelled} - {*event.stopped} - self._disowned))
        first: list[RequestId] = []
        finished: list[RequestId] = list(gone)
        for request in batch.requests:
            half = self._halves.get(request.id)
            if half is None or half.over:
                continue
            if request.id in self._disowned or request.id in gone:
                self._end(half)
                continue
            half.told = True
            first.append(request.id)
            if request.id in event.stopped:
                finished.append(request.id)
                self._end(half)
                continue
            half.work.generated += 1
            half.work.computed = half.work.target
            self._sort(half)
        disowned = tuple(sorted(self._disowned))
        self._cancelled.clear()
        self._disowned.clear()
        before: list[AnyAction] = [Abandon(disowned)] if disowned else []
        held = tuple(sorted(set(first) - set(finished)))
        if held and not self._host.hands_off:
            before.append(Hold(held))
        return before + self._host.end_layers(sorted(first), tuple(sorted(finished)), gone)

    def _give_up_batch(self, number: int) -> None:
        """Its activations will not come, nor KV for those who have left it meanwhile."""
        if self._batch is not None and self._batch.batch == number:
            self._batch = None
        for half in [half for half in self._halves.values() if half.batch == number and not half.told]:
            half.broken = True
            self._sort(half)

    # -- requests

    def _sort(self, half: Half) -> None:
        """Where it belongs, once its prefill has run, or will not."""
        if half.over:
            if half.here or half.broken:
                self._freed += half.work.blocks
                del self._halves[half.work.request.id]
        elif half.broken:
            if half.told or not self._is_in_batch(half.work.request.id):
                del self._halves[half.work.request.id]
                self._drop_head(half)
                self._restarting.append(half)
        elif half.here and half.told:
            del self._halves[half.work.request.id]
            if self._host.handoffs is not None and self._host.hands_off:
                self._host.handoffs.hold(half.work, half.head, half.layers if half.head is not None else 0)
            else:
                self._joining.append(half.work)

    def _end(self, half: Half) -> None:
        half.over = True
        self._drop_head(half)
        self._sort(half)

    def _drop_head(self, half: Half) -> None:
        """Nobody will ask the target for its part."""
        if half.head is not None:
            self._disowning.setdefault(half.head, []).append(half.work.request.id)

    def _is_in_batch(self, request: RequestId) -> bool:
        return self._batch is not None and any(each.id == request for each in self._batch.requests)

    def _half_here(self, request: RequestId) -> None:
        half = self._halves.get(request)
        if half is not None:
            half.here = True
            self._sort(half)

    def _half_lost(self, request: RequestId) -> None:
        half = self._halves.get(request)
        if half is not None and (not half.here or (half.head is not None and not half.told)):
            half.broken = True
            self._sort(half)

    def _restart(self) -> list[RequestId]:
        """Their prefill runs here once more, as of a preempted request."""
        host, halves = self._host, sorted(self._restarting, key=lambda half: arrival(half.work))
        self._restarting = []
        for half in reversed(halves):
            host.pool.release(half.work.blocks, ())
            host.requeue(half.work)
        return [half.work.request.id for half in halves]

    def _cancel(self, request: RequestId, now: Nanos) -> list[AnyAction]:
        half = self._halves[request]
        if half.over:
            return []
        if self._running and self._is_in_batch(request):
            self._cancelled.append(request)
            return []
        self._leave_batch(request)
        self._end(half)
        return [Send(ROUTER, Progressed(self._host.id, finished=(request,))), Forget((request,)), *self._nudge(now)]

    def _disown(self, requests: tuple[RequestId, ...]) -> list[AnyAction]:
        gone: list[RequestId] = []
        for request in requests:
            half = self._halves.get(request)
            if half is None or half.over:
                continue
            if self._running and self._is_in_batch(request):
                self._disowned.add(request)
                continue
            self._leave_batch(request)
            self._end(half)
            gone.append(request)
        return [Abandon(tuple(gone))] if gone else []

    def _leave_batch(self, request: RequestId) -> None:
        """It does not take part in the layers to come."""
        batch = self._batch
        if batch is not None and self._is_in_batch(request):
            left = tuple(each for each in batch.requests if each.id != request)
            self._batch = HandedOver(batch.target, batch.batch, batch.layer, left) if left else None

    def _part(self, lost: bool) -> None:
        """The pair has ended. What a lost target has not sent will not come."""
        self._open = False
        if not lost:
            return
        self._pulling = False
        self._freed += self._reserved
        self._reserved = 0
        if self._batch is not None and not self._arrived:
            self._give_up_batch(self._batch.batch)
        for request in list(self._halves):
            self._half_lost(request)
