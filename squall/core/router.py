"""The router machine: who is served, by which replica, and what becomes of a request whose replica dies.

Knows where every unfinished request is and what each replica was promised. Does not know how far a request has come beyond its
first token, what a token is, or how long anything takes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from squall.core.actions import AnyAction, Reply, Send
from squall.core.demand import Demand
from squall.core.entries import Entry
from squall.core.events import (
    AnyEvent,
    Arrived,
    Cancelled,
    DrainWanted,
    Emptied,
    Progressed,
    Rejection,
    ReplicaDown,
    ReplicaUp,
    Stirred,
    Submitted,
    Surrendered,
    TakenOver,
    Unpaired,
    Woke,
)
from squall.core.finish_rate import MIN_WAIT_S, UNKNOWN_WAIT_S, FinishRate
from squall.core.fleet_view import RoutePolicy
from squall.core.lifecycle import REQUEST, RequestHappening, RequestPhase
from squall.core.live_routes import LiveRoutes
from squall.core.replica_index import Backend, Chosen, Ranked, index_of
from squall.core.types import CONTROLLER, Nanos, ReplicaId, Request, RequestId, Role
from squall.errors import IllegalTransition

WAITING: Final = RequestPhase.WAITING  # a member looked up in its class takes as long as a call
RUNNING: Final = RequestPhase.RUNNING
PREEMPTED: Final = RequestPhase.PREEMPTED


class Router:
    """Admits, queues, routes and retries.

    Requests are served first come, first served. One that no replica takes now (the policy's None, or no replica is up) waits
    here, bound to none, in a queue of at most `max_queued_requests` requests and `max_queued_tokens` prompt tokens.

    When a replica is lost, its requests go back to the front of the queue in the order of their ids, up to `max_retries` times
    each; while another replica is up they do not return to one that lost them. A request that had tokens already is
    continued: the `Request` sent again is the one that arrived, and it is the **driver's duty** to set its `num_output_tokens`
    to the number of tokens delivered to the client (and to attach these tokens) when it performs the `Send`.

    When a replica that was withdrawn (`ReplicaDown(lost=False)`) has finished what it had, the controller gets `Emptied`. While
    the service drains, what is queued is still served: a withdrawal then takes effect once the queue is empty.

    What is asked of the fleet is counted here (`demand`), for the controller's scale policy. Where the fleet is `elastic`, the
    controller gets `Stirred` when a request comes and there was none. One that may grow beyond `max_model_len` tokens is refused.

    Of a `Progressed` the router expects ids that it sent to that replica and that were not in a `finished` of it before; a
    replica says `finished` of a cancelled request too. A `Cancelled` may cross with it, and of an unknown id is ignored.
    """

    __slots__ = ("_backends", "_chosen", "_closing", "_demand", "_draining", "_entries", "_index", "_largest", "_largest_ever",
                 "_pairs", "_queue", "_rate", "_smallest", "_welcome", "elastic", "max_model_len", "max_queued_requests",
                 "max_queued_tokens", "max_retries", "policy", "wake_at")  # fmt: skip

    def __init__(
        self, policy: RoutePolicy, max_queued_requests: int, max_queued_tokens: int, max_retries: int, elastic: bool = False,
        max_model_len: int | None = None,
    ) -> None:  # fmt: skip
        self.wake_at: Nanos | None = None
        self.policy = policy
        self.elastic = elastic
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.max_retries = max_retries
        self.max_model_len = max_model_len
        self._index = index = index_of(policy)
        self._chosen = index if isinstance(index, Chosen) else None  # it remembers what was sent
        self._backends: dict[ReplicaId, Backend] = {}  # all that are open or have unfinished requests
        self._entries: dict[RequestId, Entry] = {}
        self._queue: OrderedDict[RequestId, Entry] = OrderedDict()
        self._demand = Demand(self._oldest_queued_at)
        self._pairs = LiveRoutes(self)
        self._rate = FinishRate()
        self._draining = False
        self._closing: set[ReplicaId] = set()  # withdrawn, but still needed for the queue
        self._smallest = self._largest = 0  # KV pools of the open replicas, in tokens
        self._largest_ever = 0
        self._welcome = 0  # so many tokens need no second look

    @property
    def num_queued(self) -> int:
        """Requests that wait here, bound to no replica."""
        return len(self._queue)

    @property
    def unfinished(self) -> list[RequestId]:
        """Whoever waits for an answer, wherever it is."""
        return [request for request, entry in self._entries.items() if entry.phase is not RequestPhase.CANCELLING]

    @property
    def num_outstanding(self) -> int:
        """Requests that replicas have."""
        return len(self._entries) - len(self._queue)

    @property
    def num_open(self) -> int:
        """Replicas that take requests."""
        return len(self._index.replicas)

    def demand(self, role: Role) -> Demand:
        """What is asked of the replicas of that role, now."""
        return self._demand.sum_up(self._backends.values()) if role is Role.BOTH else Demand()

    def outstanding(self, replica: ReplicaId) -> tuple[int, int]:
        """Unfinished requests of a replica, and their prompt tokens; (0, 0) of one that has none."""
        backend = self._backends.get(replica)
        return (0, 0) if backend is None else (backend.num_outstanding, backend.num_tokens)

    def _oldest_queued_at(self) -> Nanos | None:
        return next(iter(self._queue.values())).queued_at if self._queue else None

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        """Of a `Progressed` the table is looked up for those only that do not go the usual way: waiting, running, gone."""
        if type(event) is not Progressed:
            return self._arrived(event.request, now) if type(event) is Arrived else self._handle_rarer(event, now)
        backend = self._backends.get(event.replica)
        if backend is None:
            raise IllegalTransition(f"replica {event.replica} reports {event}, but is not up")
        entries = self._entries
        for request in event.first:
            entry = entries.get(request)
            if entry is not None and entry.phase is WAITING and entry.backend is backend:
                entry.phase = RUNNING
            else:
                entry = self._step(request, backend, "first token")
                if entry.started:
                    continue
            entry.started = True
            backend.num_waiting -= 1
            backend.num_waiting_tokens -= entry.request.num_prompt_tokens
            backend.num_running += 1
        for request in event.preempted:
            self._step(request, backend, "preempted")
        for request in event.finished:
            entry = entries.get(request)
            if entry is None or entry.phase is not RUNNING or entry.backend is not backend:
                entry = self._step(request, backend, "finished")
            del entries[request]
            tokens = entry.request.num_prompt_tokens
            backend.num_tokens -= tokens
            backend.num_promised -= entry.num_tokens
            if entry.started:
                backend.num_running -= 1
            else:
                backend.num_waiting -= 1
                backend.num_waiting_tokens -= tokens
        if event.finished:
            self._rate.add(len(event.finished), now)
        if not backend.open:
            return self._emptied(backend)
        backend.index.changed(backend)
        return self._settle() if self._queue else []

    def _handle_rarer(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        match event:
            case Cancelled():
                return self._cancelled(event.request)
            case ReplicaUp():
                return self._replica_up(event)
            case ReplicaDown():
                return self._replica_down(event, now)
            case DrainWanted():
                self._draining = True
                self._set_welcome()
                return self._settle()
            case Surrendered() | TakenOver() | Unpaired():
                return self._pairs.handle(event, now)
            case Woke():
                return []
        raise IllegalTransition(f"the router got {type(event).__name__}, which is not for it")

    # -- requests come and go

    def _arrived(self, request: Request, now: Nanos) -> list[AnyAction]:
        entries = self._entries
        if request.id in entries:
            raise IllegalTransition(f"request {request.id} arrived twice: it is {entries[request.id].phase}")
        demand = self._demand
        demand.num_arrived += 1
        demand.num_arrived_tokens += request.num_prompt_tokens
        entry = Entry(request)
        if entry.num_tokens > self._welcome:
            refusal = self._refusal(entry)
            if refusal is not None:
                return [refusal]
            backend = None if self._queue else self._pick(entry)
        else:
            backend = None if self._queue else self._index.pick(request)
        if backend is None:
            return self._wait(entry, now)
        entries[request.id] = entry
        sent = self._send(entry, backend)
        return [sent, Send(CONTROLLER, Stirred())] if self.elastic and len(entries) == 1 else [sent]

    def _refusal(self, entry: Entry) -> Reply | None:
        """What is said to one that may not even wait."""
        if self._draining:
            return reply(entry.request, Rejection.DRAINING, "the service is shutting down", UNKNOWN_WAIT_S)
        if self.max_model_len is not None and entry.num_tokens > self.max_model_len:
            message = f"{entry.num_tokens} tokens, prompt and output together, are more than the {self.max_model_len} that may be"
            return reply(entry.request, Rejection.TOO_LARGE, message, 0.0)
        return self._too_large(entry) if entry.num_tokens > self._largest and self._index.replicas else None

    def _wait(self, entry: Entry, now: Nanos) -> list[AnyAction]:
        """It came, and nobody takes it now."""
        request, demand = entry.request, self._demand
        stirred: list[AnyAction] = [Send(CONTROLLER, Stirred())] if self.elastic and not self._entries else []
        room = len(self._queue) < self.max_queued_requests
        if not room or demand.num_queued_tokens + request.num_prompt_tokens > self.max_queued_tokens:
            message = f"{len(self._queue)} requests with {demand.num_queued_tokens} prompt tokens are waiting already"
            return [reply(request, Rejection.QUEUE_FULL, message, self._rate.wait_s(len(self._queue), now)), *stirred]
        self._entries[request.id] = entry
        self._enqueue(entry, now)
        return stirred

    def _step(self, request: RequestId, backend: Backend, happening: RequestHappening) -> Entry:
        """Follow the table for a request of `backend`."""
        entry = self._entries.get(request)
        if entry is None or entry.backend is not backend:
            where = "is unknown" if entry is None else f"is {entry.phase} elsewhere"
            raise IllegalTransition(f"replica {backend.replica} says {happening!r} of request {request}, which {where}")
        before = entry.phase
        after = REQUEST[before].get(happening)
        if after is None:
            raise IllegalTransition(f"replica {backend.replica} says {happening!r} of request {request}, which is {before}")
        if before is not after:
            entry.phase = after
            if before is PREEMPTED:
                backend.num_preempted -= 1
            elif after is PREEMPTED:
                backend.num_preempted += 1
        return entry

    def _cancelled(self, request: RequestId) -> list[AnyAction]:
        entry = self._entries.get(request)
        if entry is None or entry.phase is RequestPhase.CANCELLING:
            return []
        if entry.backend is None:
            self._forget(entry, "cancelled")
            return self._settle()
        self._step(request, entry.backend, "cancelled")
        return [Send(entry.backend.replica, Cancelled(request))]

    # -- replicas come and go

    def _replica_up(self, event: ReplicaUp) -> list[AnyAction]:
        backend = self._backends.get(event.replica)
        if backend is None:
            demand, index = self._place(event.role)
            backend = Backend(event.replica, event.num_blocks, event.block_size, event.role, demand, index)
            self._backends[event.replica] = backend
        elif backend.open:
            raise IllegalTransition(f"replica {event.replica} came up while it was up")
        if event.partner is not None:
            self._pairs.begin(self._backends.get(event.partner))
        backend.open = True
        backend.index.add(backend)
        return self._fleet_changed(backend)

    def _place(self, _role: Role) -> tuple[Demand, Ranked | Chosen]:
        """Where replicas of the role are counted and found."""
        return self._demand, self._index

    def _replica_down(self, event: ReplicaDown, now: Nanos) -> list[AnyAction]:
        backend = self._backends.get(event.replica)
        if backend is None:  # it was emptied at the instant it died
            return []
        if event.lost:
            if event.asked:
                backend.blame = ()
            return self._lose(backend, now)
        if self._draining and self._queue:
            self._closing.add(event.replica)
            return []
        return self._close(backend)

    def _close(self, backend: Backend) -> list[AnyAction]:
        """It takes nothing new from now on."""
        if not backend.open:
            return []
        backend.open = False
        backend.index.remove(backend)
        return self._fleet_changed() + self._emptied(backend)

    def _emptied(self, backend: Backend) -> list[AnyAction]:
        if backend.num_waiting or backend.num_running or self._pairs.is_aside(backend):
            return []
        del self._backends[backend.replica]
        return [Send(CONTROLLER, Emptied(backend.replica))]

    def _lose(self, backend: Backend, now: Nanos) -> list[AnyAction]:
        """Its requests go to the front of the queue, or are given up."""
        del self._backends[backend.replica]
        told = self._pairs.forget(backend)
        self._closing.discard(backend.replica)
        if backend.open:
            backend.index.remove(backend)
        actions: list[AnyAction] = []
        orphans = sorted(id for id, entry in self._entries.items() if entry.backend is backend)
        for id in reversed(orphans):
            actions += self._requeue(self._entries[id], backend, now)
        return told + actions[::-1] + self._fleet_changed()

    def _requeue(self, entry: Entry, backend: Backend, now: Nanos) -> list[AnyAction]:
        """`backend` has lost it: it goes to the front of the queue, or is given up."""
        id = entry.request.id
        self._step(id, backend, "replica lost")
        entry.backend = None
        entry.started = False
        entry.lost_by += backend.blame
        if entry.phase is RequestPhase.CANCELLED:
            del self._entries[id]
            return []
        self._enqueue(entry, now)
        self._queue.move_to_end(id, last=False)
        if len(entry.lost_by) <= self.max_retries:
            return []
        times = "once" if len(entry.lost_by) == 1 else f"{len(entry.lost_by)} times"
        return [self._reject(entry, Rejection.LOST, f"lost its replica {times}", MIN_WAIT_S)]

    def _fleet_changed(self, came: Backend | None = None) -> list[AnyAction]:
        """Measure the KV pools of the replicas that take requests, and judge by them what waits.

        Where all that has changed is that `came` takes requests, too, no other pool is looked at: fleets of a thousand begin so.
        """
        replicas = self._index.replicas
        if came is not None and came.index is self._index and len(replicas) > 1:
            self._smallest = min(self._smallest, came.capacity)
            self._largest = max(self._largest, came.capacity)
        else:
            pools = [backend.capacity for backend in replicas]
            self._smallest = min(pools, default=0)
            self._largest = max(pools, default=0)
        self._largest_ever = max(self._largest, self._largest_ever)
        self._set_welcome()
        too_large = [entry for entry in self._queue.values() if entry.num_tokens > self._largest] if replicas else []
        refused: list[AnyAction] = [self._too_large(entry) for entry in too_large]
        for entry in too_large:
            self._forget(entry, "rejected")
        return refused + self._settle()

    def _set_welcome(self) -> None:
        """How large a request may be that every replica may get, and nobody has anything to say against."""
        most = self._smallest if self.max_model_len is None else min(self._smallest, self.max_model_len)
        self._welcome = 0 if self._draining else most

    # -- the queue

    def _settle(self) -> list[AnyAction]:
        """Serve the queue as far as the policy lets."""
        actions: list[AnyAction] = []
        while self._queue:
            entry = next(iter(self._queue.values()))
            backend = self._pick(entry)
            if backend is None:
                break
            self._dequeue(entry)
            actions.append(self._send(entry, backend))
        return actions + self._settle_draining() if self._draining else actions

    def _settle_draining(self) -> list[AnyAction]:
        """Nothing can come up any more; withdrawals that waited for the queue take effect when it is empty."""
        actions: list[AnyAction] = []
        if not self._index.replicas:
            message = "the service is shutting down and no replica is left"
            actions += [self._reject(entry, Rejection.DRAINING, message, UNKNOWN_WAIT_S) for entry in list(self._queue.values())]
        if not self._queue:
            closing, self._closing = sorted(self._closing), set()
            for replica in closing:
                actions += self._close(self._backends[replica])
        return actions

    def _pick(self, entry: Entry) -> Backend | None:
        if not entry.lost_by and entry.num_tokens <= self._smallest:
            return self._index.pick(entry.request)
        large_enough = [backend for backend in self._index.replicas if backend.capacity >= entry.num_tokens]
        untried = [backend for backend in large_enough if backend.replica not in entry.lost_by]
        return self._index.pick_among(entry.request, untried or large_enough)

    def _send(self, entry: Entry, backend: Backend) -> Send:
        request = entry.request
        tokens = request.num_prompt_tokens
        entry.phase = WAITING
        entry.backend = backend
        backend.num_waiting += 1
        backend.num_waiting_tokens += tokens
        backend.num_tokens += tokens
        backend.num_promised += entry.num_tokens
        self._index.changed(backend)
        if self._chosen is not None:
            self._chosen.sent(request, backend)
        return Send(backend.replica, Submitted(request))

    def _enqueue(self, entry: Entry, now: Nanos) -> None:
        self._queue[entry.request.id] = entry
        entry.queued_at = now
        self._demand.num_queued += 1
        self._demand.num_queued_tokens += entry.request.num_prompt_tokens

    def _dequeue(self, entry: Entry) -> None:
        del self._queue[entry.request.id]
        self._demand.num_queued -= 1
        self._demand.num_queued_tokens -= entry.request.num_prompt_tokens

    def _forget(self, entry: Entry, happening: RequestHappening) -> None:
        """Out of the queue, for good."""
        entry.phase = REQUEST[entry.phase][happening]
        self._dequeue(entry)
        del self._entries[entry.request.id]

    def _reject(self, entry: Entry, rejection: Rejection, message: str, retry_after_s: float) -> Reply:
        """Out of the queue, with a reason."""
        self._forget(entry, "rejected")
        return reply(entry.request, rejection, message, retry_after_s)

    def _too_large(self, entry: Entry) -> Reply:
        request = entry.request
        need = f"{request.num_prompt_tokens} prompt tokens and up to {request.max_output_tokens} output tokens"
        if entry.num_tokens <= self._largest_ever:
            message = f"{need} fit only into the KV cache of a replica that is down"
            return reply(request, Rejection.NO_CAPACITY, message, UNKNOWN_WAIT_S)
        return reply(request, Rejection.TOO_LARGE, f"{need} do not fit into a KV cache of {self._largest} tokens", 0.0)


def reply(request: Request, rejection: Rejection, message: str, retry_after_s: float) -> Reply:
    return Reply(request.id, rejection, f"request {request.id}: {message}", retry_after_s)
