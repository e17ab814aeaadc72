"""Live pairs, as the router sees them: who stands aside for whom, and whose a request is when it changes hands within a pair.

A loading target takes the place of its source in the route policy's index: it gets what is meant for the source, which gets
nothing new until the pair ends. Knows no layer and no batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squall.core.actions import AnyAction, Send
from squall.core.events import Cancelled, Disowned, Surrendered, TakenOver, Unpaired
from squall.core.lifecycle import RequestPhase
from squall.core.replica_index import Backend, Chosen, Ranked, index_of
from squall.core.types import Nanos, ReplicaId, RequestId, Role

if TYPE_CHECKING:
    from squall.core.entries import Entry
    from squall.core.router import Router


class LiveRoutes:
    """See the module.

    Args:
        router: whose pairs; its records are used as the router itself does.
    """

    __slots__ = ("_aside", "_home", "_router")

    def __init__(self, router: Router) -> None:
        self._router = router
        self._aside: Ranked | Chosen = index_of(router.policy)  # nobody chooses from it
        self._home: dict[ReplicaId, Ranked | Chosen] = {}  # of those that stand aside

    def is_aside(self, backend: Backend) -> bool:
        """Its target has its place; what it takes over comes at any time."""
        return backend.replica in self._home

    def begin(self, source: Backend | None) -> None:
        """A target takes its place."""
        if source is None or self.is_aside(source):
            return
        self._home[source.replica] = source.index
        if source.open:
            source.index.remove(source)
            self._aside.add(source)
        source.index = self._aside

    def forget(self, backend: Backend) -> list[AnyAction]:
        """It is gone. What it took over begins anew, and whose first layers these were holds them for nobody."""
        self._home.pop(backend.replica, None)
        orphans: dict[ReplicaId, list[RequestId]] = {}
        for id, entry in self._router._entries.items():
            if entry.backend is backend and entry.taken_from is not None and backend.role is not Role.BOTH:
                orphans.setdefault(entry.taken_from, []).append(id)
                entry.taken_from = None
        return [Send(target, Disowned(tuple(sorted(ids)))) for target, ids in orphans.items()]

    def handle(self, event: Surrendered | TakenOver | Unpaired, now: Nanos) -> list[AnyAction]:
        match event:
            case Surrendered(replica, requests):
                return self._surrendered(replica, requests, now)
            case TakenOver():
                return self._taken_over(event)
            case Unpaired():
                return self._end(event)

    def _end(self, event: Unpaired) -> list[AnyAction]:
        """The source is back in its place. A target without its source takes nothing until it is announced anew."""
        router = self._router
        actions: list[AnyAction] = []
        target = router._backends.get(event.target)
        if event.lost and target is not None:  # so it is the source that is gone, as the next word will say
            return router._close(target)
        source = router._backends.get(event.source)
        home = self._home.pop(event.source, None)
        if source is not None and home is not None:
            if source.open:
                self._aside.remove(source)
                home.add(source)
            source.index = home
            if not source.open:
                actions += router._emptied(source)
        return actions + router._fleet_changed()

    def _surrendered(self, replica: ReplicaId, requests: tuple[RequestId, ...], now: Nanos) -> list[AnyAction]:
        """To the front of the queue, in their order; those that are elsewhere already stay there."""
        router = self._router
        backend = router._backends.get(replica)
        if backend is None:
            return []
        for id in sorted(requests, reverse=True):
            entry = router._entries.get(id)
            if entry is not None and entry.backend is backend:
                self._leave(entry, backend)
                self._give_back(entry, backend, now)
        if backend.open:
            backend.index.changed(backend)
            return router._settle()
        return router._settle() + router._emptied(backend)

    def _taken_over(self, event: TakenOver) -> list[AnyAction]:
        """The source has them, unless they are somebody else's by now."""
        router = self._router
        source, target = router._backends.get(event.replica), router._backends.get(event.target)
        actions: list[AnyAction] = []
        others: list[RequestId] = []
        for id in event.requests:
            entry = router._entries.get(id)
            if source is None or target is None or entry is None or entry.backend is not target:
                others.append(id)
                continue
            self._leave(entry, target)
            entry.backend, entry.taken_from = source, target.replica
            source.num_waiting += 1
            source.num_waiting_tokens += entry.request.num_prompt_tokens
            source.num_tokens += entry.request.num_prompt_tokens
            source.num_promised += entry.num_tokens
            if entry.phase is RequestPhase.CANCELLING:
                actions.append(Send(source.replica, Cancelled(id)))
        for backend in (source, target):
            if backend is not None and backend.open:
                backend.index.changed(backend)
        if others:
            actions.append(Send(event.replica, Disowned(tuple(others))))
        if target is not None and not target.open:
            actions += router._emptied(target)
        return actions

    def _give_back(self, entry: Entry, backend: Backend, now: Nanos) -> None:
        """To the front of the queue; nobody has lost it."""
        router = self._router
        router._step(entry.request.id, backend, "replica lost")
        entry.backend = None
        entry.started = False
        if entry.phase is RequestPhase.CANCELLED:
            del router._entries[entry.request.id]
            return
        router._enqueue(entry, now)
        router._queue.move_to_end(entry.request.id, last=False)

    @staticmethod
    def _leave(entry: Entry, backend: Backend) -> None:
        if entry.started:
            backend.num_running -= 1
        else:
            backend.num_waiting -= 1
            backend.num_waiting_tokens -= entry.request.num_prompt_tokens
        backend.num_tokens -= entry.request.num_prompt_tokens
        backend.num_promised -= entry.num_tokens
