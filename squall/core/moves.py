"""Requests that decode on replicas which are to be empty, and those of them that have a place elsewhere.

A request goes on decoding until it has a place (`HandoffQueue.place`); then its replica is asked to hold it, and from there on it
is a hand-off like any other. Knows no route and no replica's insides.
"""

from __future__ import annotations

from collections.abc import Iterable

from squall.core.entries import Entry
from squall.core.lifecycle import RequestPhase
from squall.core.replica_index import Backend
from squall.core.types import ReplicaId, RequestId


class Moves:
    """See the module.

    Attributes:
        emptying: replicas that are to be empty.
        waiting: requests without a place, in the order in which they are to leave.
        asked: requests that have one (`Entry.to`), and whose replica was told to hold them.
    """

    __slots__ = ("asked", "emptying", "waiting")

    def __init__(self) -> None:
        self.emptying: set[ReplicaId] = set()
        self.waiting: dict[RequestId, Entry] = {}
        self.asked: dict[RequestId, Entry] = {}

    def add(self, entry: Entry) -> None:
        """It decodes on a replica that is to be empty, and is wanted."""
        if entry.phase is not RequestPhase.CANCELLING:
            self.waiting[entry.request.id] = entry

    def ask(self, entry: Entry) -> None:
        """It has a place."""
        del self.waiting[entry.request.id]
        self.asked[entry.request.id] = entry

    def leave(self, entry: Entry) -> bool:
        """It ends, is held, or leaves otherwise. Whether it had been asked to."""
        self.waiting.pop(entry.request.id, None)
        return self.asked.pop(entry.request.id, None) is not None

    def meant_for(self, target: Backend) -> list[Entry]:
        """Those that have their place there."""
        return [entry for entry in self.asked.values() if entry.to is target]

    def of(self, backend: Backend) -> list[Entry]:
        """Those that decode there."""
        return [entry for entry in (*self.waiting.values(), *self.asked.values()) if entry.backend is backend]

    def stop(self, replica: ReplicaId) -> None:
        """It is not to be empty any more; who has a place already may still leave."""
        self.emptying.discard(replica)
        for id in [id for id, entry in self.waiting.items() if _is_at(entry, replica)]:
            del self.waiting[id]


def _is_at(entry: Entry, replica: ReplicaId) -> bool:
    return entry.backend is not None and entry.backend.replica == replica


def by_holder(entries: Iterable[Entry]) -> list[tuple[ReplicaId, tuple[RequestId, ...]]]:
    """Requests, by the replica that has them, both in the order given."""
    found: dict[ReplicaId, list[RequestId]] = {}
    for entry in entries:
        assert entry.backend is not None
        found.setdefault(entry.backend.replica, []).append(entry.request.id)
    return [(replica, tuple(requests)) for replica, requests in found.items()]
