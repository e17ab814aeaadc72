"""One replica's session with the head that wants it now.

Knows engines, machines and messages; not how the messages travel. The engine and its weights outlive a session: a head that
comes back finds them loaded. How they come is told by `arrival`, who works in which thread by `errands`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from squall.core.actions import (
    Abandon,
    AnyAction,
    Cut,
    Evict,
    Forget,
    Hold,
    Join,
    LoadWeights,
    Preempt,
    Reserve,
    RunLayers,
    RunSteps,
    Send,
    SendActivations,
    SendKv,
    StopReplica,
    WarmReplica,
)
from squall.core.events import (
    AnyEvent,
    HandedOver,
    LayersDone,
    LivePaired,
    NoticeGiven,
    Offered,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    RoleChanged,
    StepsDone,
    Submitted,
    Unpaired,
    Warmed,
)
from squall.core.replica import Replica
from squall.core.types import CONTROLLER, SECOND, MachineId, RequestId, RunId
from squall.live.activations import ActivationsOffer
from squall.live.arrival import Arrival, one_line
from squall.live.driver import Driver, Priority
from squall.live.engine.interface import Job, LayersEnded, LiveEngine, RunEnded, TokenOut
from squall.live.errands import Errands
from squall.live.handoffs import Handoffs
from squall.live.host import Host
from squall.live.layers import Layers
from squall.live.rpc import convert
from squall.live.rpc.convert import Peer, ReplicaLoad, WeightsMoved
from squall.live.rpc.generated import squall_pb2 as pb
from squall.live.transport.kv import KvOffer

LOAD_EVERY_S = 0.5

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """A head's conversation about one replica.

    Args:
        host: where the replica lives; its `session` is this one until `close`.
        put: sends a message to the head.
        settled: see `Open` in squall.proto.

    Attributes:
        over: the head has asked the replica to stop, or the engine has failed.
    """

    def __init__(self, host: Host, put: Callable[[pb.FromReplica], None], *, settled: bool = False) -> None:
        self.over = asyncio.Event()
        self._host = host
        self._engine = host.engine
        self._put = put
        self._errands = Errands(host.thread)
        self._arrival = Arrival(host, self._errands, settled, partial(self.tell, CONTROLLER), self._weights_moved)
        self._driver: Driver | None = None
        self._machine: Replica | None = None
        self._coming: deque[tuple[Job, ...]] = deque()  # of the requests that the machine has yet to hear of, event by event
        self._known: dict[RequestId, Job] = {}  # requests that the engine knows
        self._waiting: set[RequestId] = set()  # of these, not begun
        self._handed: dict[RequestId, Job] = {}  # of the batch that was handed over last, without blocks
        self._anew: dict[RequestId, Job] = {}  # of requests that begin once more when the layers that run have ended
        self._layers_of: frozenset[RequestId] = frozenset()  # that run
        self._handoffs = None if host.kv is None else Handoffs(host.replica, host.kv, self)
        self._layers = None if host.activations is None else Layers(host.replica, host.activations, self)
        self._run: RunId = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._closed = False
        self._stopped = False  # the head wants it off, and its weights gone

    @property
    def idle(self) -> bool:
        """It has no request."""
        return not self._known and not self._coming

    def open(self) -> None:
        self._host.session = self
        if self._host.way.addresses:
            self._put(pb.FromReplica(peer=convert.to_message(Peer(self._host.replica, self._host.way.addresses))))
        self.tell(CONTROLLER, ReplicaStarted(self._host.replica))
        self._beat()

    def give_notice(self, seconds: float) -> None:
        """The process ends, in so many seconds at the latest."""
        self.tell(CONTROLLER, NoticeGiven(self._host.replica, round(seconds * SECOND)))

    def close(self) -> None:
        """The head is gone: end the run, free everything, keep the weights (what there is of them). Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._errands.close()
        self._host.session = None
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._driver is not None:
            self._driver.stop()
        self._engine.cut(self._run)
        if self._layers is not None:
            self._layers.close()
        if self._handoffs is not None:
            self._host.thread.call(self._handoffs.close())
        self._host.thread.call(self._engine.reset)
        self._host.loads.stop(partial(self._host.thread.call, self._host.forget) if self._stopped else None)

    def receive(self, message: pb.ToReplica) -> None:
        """Raises ValueError for what makes no sense here."""
        if message.WhichOneof("message") == "event":
            self._deliver(convert.event_from_message(message.event), message)
            return
        if message.WhichOneof("message") == "kv_offer":
            self._moving(message).take(convert.from_message(message.kv_offer, KvOffer))
            return
        if message.WhichOneof("message") == "activations_offer":
            self._sharing(message).take(convert.from_message(message.activations_offer, ActivationsOffer))
            return
        match convert.action_from_message(message.action):
            case LoadWeights() as load:
                self._arrival.order(load, [convert.from_message(peer, Peer) for peer in message.peers])
            case WarmReplica():
                self.in_engine(self._engine.warm, lambda _: self.tell(CONTROLLER, Warmed(self._host.replica)))
            case StopReplica():
                self.tell(CONTROLLER, ReplicaStopped(self._host.replica))
                self._stopped = True
                self.over.set()
            case other:
                raise ValueError(f"a head does not ask for {type(other).__name__}")

    # -- events

    def _deliver(self, event: AnyEvent, message: pb.ToReplica) -> None:
        if self._driver is None:
            if not isinstance(event, LivePaired | RoleChanged):
                raise ValueError(f"{type(event).__name__} before the weights were loaded")
            self._arrival.prepare()
            self._make_machine()
        match event:
            case Submitted():
                if not message.HasField("job"):
                    raise ValueError(f"request {event.request.id} came without its tokens")
                self._coming.append((convert.from_message(message.job, Job),))
            case Offered():
                self._moving(event)
                self._coming.append((convert.from_message(message.job, Job),))
            case HandedOver():
                self._coming.append(tuple([convert.from_message(job, Job) for job in message.jobs]))
        if self._lets_pass(event):
            assert self._driver is not None
            self._driver.post(self._host.replica, event, Priority.MESSAGE)
            self._passed(event)

    def _about_to_hear(self, event: AnyEvent) -> None:
        """What came with requests is taken in when the machine hears of them: it may drop others of the same name before."""
        match event:
            case Submitted():
                self._submit(*self._coming.popleft())
            case Offered(request, num_tokens):
                self._moving(event).expect(request.id, num_tokens, *self._coming.popleft())
            case HandedOver(_, _, layer):
                self._handed = {job.request: job for job in self._coming.popleft()}
                self._waiting.update(self._handed if not layer else ())
        if self._handoffs is not None:
            self._handoffs.about_to_be_heard(event)

    def _submit(self, job: Job) -> None:
        """Where the engine knows the request already, it begins once more, and what was is forgotten first."""
        request = job.request
        if request in self._layers_of:
            self._anew[request] = job
            return
        if request in self._known:
            self._free((request,))
        self._known[request] = job
        self._waiting.add(request)
        self.in_engine(lambda: self._engine.add(job))

    def _lets_pass(self, event: AnyEvent) -> bool:
        layers, handoffs = self._layers, self._handoffs
        return (layers is None or layers.lets_pass(event)) and (handoffs is None or handoffs.lets_pass(event))

    def _passed(self, event: AnyEvent) -> None:
        """The machine will be given it."""
        if self._handoffs is not None:
            self._handoffs.heard(event)
        if isinstance(event, Unpaired) and event.lost and self._layers is not None and self._handoffs is not None:
            partner = event.source if event.target == self._host.replica else event.target
            self._layers.lose(partner)
            self._handoffs.lose(partner)

    def _moving(self, what: object) -> Handoffs:
        if self._handoffs is None:
            where = "neither is fleet.mode 'disaggregated' nor fleet.drain 'move'"
            raise ValueError(f"{type(what).__name__}: KV does not move here; {where}")
        return self._handoffs

    def _sharing(self, what: object) -> Layers:
        if self._layers is None:
            raise ValueError(f"{type(what).__name__}: batches do not change hands here; load.live is not set")
        return self._layers

    def tell(self, to: MachineId, event: AnyEvent) -> None:
        jobs = []
        if isinstance(event, HandedOver):
            jobs = [convert.to_message(replace(self._known[request.id], block_hashes=())) for request in event.requests]
        self._put(pb.FromReplica(send=pb.Send(to=to, event=convert.event_to_message(event)), jobs=jobs))

    # -- actions

    def _perform(self, action: AnyAction) -> None:
        match action:
            case RunSteps():
                self._run = action.run
                self._tell_begun(action)
                self.in_engine(lambda: self._engine.run(action, self._emit), self._run_ended)
            case Send():
                self.tell(action.to, action.event)
            case Cut():
                self._engine.cut(action.run)
            case Preempt():
                self._let_go(action.requests)
                self.in_engine(lambda: self._engine.preempt(action.requests))
            case Forget() | Abandon():
                self._drop(action.requests)
            case Hold() | Join() | SendKv():
                self._moving(action).perform(action)
            case Reserve():
                self._reserve(action)
            case RunLayers():
                self._run_layers(action)
            case SendActivations():
                self._sharing(action).send(action)
            case Evict():
                engine = self._live_engine(action)
                self.in_engine(lambda: engine.evict(action.blocks))
            case _:
                raise TypeError(f"a replica cannot ask for {type(action).__name__}")

    def _reserve(self, action: Reserve) -> None:
        handoffs, request = self._moving(action), action.request
        if (job := self._handed.pop(request, None)) is not None:
            handoffs.expect(request, action.num_tokens, job)
        self._known[request] = handoffs.job_of(action)
        handoffs.perform(action)

    def _drop(self, requests: tuple[RequestId, ...]) -> None:
        """Whoever has been submitted once more begins now."""
        for request in requests:
            self._known.pop(request, None)
        self._waiting.difference_update(requests)
        self._free(requests)
        for request in requests:
            if (job := self._anew.pop(request, None)) is not None:
                self._submit(job)

    def _free(self, requests: tuple[RequestId, ...]) -> None:
        self._let_go(requests)
        self.in_engine(lambda: self._engine.forget(requests))

    def _let_go(self, requests: tuple[RequestId, ...]) -> None:
        if self._handoffs is not None:
            self.in_engine(self._handoffs.let_go(requests))

    # -- layers (see layers.py)

    def _live_engine(self, what: object) -> LiveEngine:
        self._sharing(what)
        assert self._host.activations is not None
        return self._host.activations.engine

    def _run_layers(self, action: RunLayers) -> None:
        engine = self._live_engine(action)
        given = self._sharing(action).given(action)
        if not action.first_layer:
            self._tell_begun(action)
        self._layers_of = frozenset(chunk.request for chunk in action.chunks)
        self.in_engine(
            lambda: engine.run_batch(action, self._emit, None if given is None else given.result()), self._layers_ended
        )

    def _layers_ended(self, ended: LayersEnded) -> None:
        self._layers_of = frozenset()
        if ended.stopped:
            self._drop(ended.stopped)
        self.ended(LayersDone(ended.batch, ended.last_layer, ended.stopped))

    def offer_activations(self, offer: ActivationsOffer) -> None:
        self._put(pb.FromReplica(activations_offer=convert.to_message(offer)))

    # -- for hand-offs and layers

    def in_engine(self, call: Callable[[], T], done: Callable[[T], None] | None = None) -> None:
        self._errands.run(call, done, self._fail)

    def on_loop(self, call: Callable[[T], None], argument: T) -> None:
        self._errands.on_loop(call, argument)

    def ended(self, event: AnyEvent) -> None:
        if self._driver is not None:
            self._driver.post(self._host.replica, event, Priority.END)

    def awaits(self, request: RequestId) -> bool:
        moving = None if self._machine is None else self._machine.handoffs
        return moving is not None and moving.awaits(request)

    def offer(self, offer: KvOffer) -> None:
        self._put(pb.FromReplica(kv_offer=convert.to_message(offer)))

    def _tell_begun(self, action: RunSteps | RunLayers) -> None:
        begun = [chunk.request for chunk in action.chunks if chunk.request in self._waiting]
        if begun:
            self._waiting.difference_update(begun)
            self._put(pb.FromReplica(begun=pb.Begun(requests=begun)))

    # -- the machine, and how its runs end

    def _weights_moved(self, moved: WeightsMoved) -> None:
        self._make_machine()
        self._put(pb.FromReplica(moved=convert.to_message(moved)))

    def _make_machine(self) -> None:
        """Once: with the weights, or before them where it is to work meanwhile."""
        if self._driver is not None:
            return
        engine, replica, log = self._engine, self._host.replica, self._host.log
        self._machine = Replica(replica, self._host.policy, engine.num_blocks, engine.block_size)
        self._driver = Driver(
            {replica: self._machine}, self._perform, log.record if log is not None else None, before=self._about_to_hear
        )
        if log is not None:
            log.created(time.monotonic_ns(), replica, self._machine)

    def _run_ended(self, ended: RunEnded) -> None:
        for request in ended.stopped:
            self._known.pop(request, None)
        if self._driver is not None:
            self._driver.post(self._host.replica, StepsDone(ended.run, ended.steps, ended.stopped), Priority.END)

    def _fail(self, error: BaseException) -> None:
        """An engine that raised in the middle of its work is in no known state."""
        self._host.failed = error
        self.tell(CONTROLLER, ReplicaLost(self._host.replica, one_line(error)))
        self.over.set()
        _log.error("the engine failed", exc_info=error)

    def _emit(self, tokens: Sequence[TokenOut]) -> None:
        self.on_loop(lambda out: self._put(pb.FromReplica(output=convert.tokens_to_message(out))), tokens)

    # -- heartbeat

    def _beat(self) -> None:
        self._put(pb.FromReplica(load=convert.to_message(self._measure())))
        if self._host.log is not None:
            self._host.log.flush()  # a worker that is killed loses no more than what came since
        self._heartbeat = asyncio.get_running_loop().call_later(LOAD_EVERY_S, self._beat)

    def _measure(self) -> ReplicaLoad:
        machine = self._machine
        if machine is None:
            return ReplicaLoad(0, 0, 0, 0, 0, 0)
        return ReplicaLoad(
            num_running=machine.num_running,
            num_waiting=machine.num_waiting,
            num_blocks=machine.num_blocks,
            num_used_blocks=machine.num_used_blocks,
            num_prefix_cache_queries=machine.num_prefix_queries,
            num_prefix_cache_hits=machine.num_prefix_hits,
        )
