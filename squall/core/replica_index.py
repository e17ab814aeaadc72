"""Which replica comes next, by the route policy: O(log R) for one that ranks, the policy's own cost for one that chooses.

Knows no queue, no request's life and no failure: the router adds, removes and counts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import NoReturn

from squall.core.demand import Demand
from squall.core.fleet_view import ChoosePolicy, RankPolicy, ReplicaView, RoutePolicy
from squall.core.prefix_index import PrefixIndex
from squall.core.types import ReplicaId, Request, Role
from squall.errors import ConfigError


class Backend:
    """The router's record of a replica; satisfies `ReplicaView`.

    Attributes:
        role: what it serves; `demand`: what is asked of all of that role; `index`: where they are found.
        num_promised: KV, in tokens, that its requests may come to need, and those that are on their way to it.
        open: it takes new requests (it is in the index then).
        blame: itself; nobody where it goes because it was asked to.
        rank: the policy's last word on it; None while it takes nothing.
    """

    __slots__ = ("blame", "block_size", "demand", "index", "num_blocks", "num_preempted", "num_promised", "num_running",
                 "num_tokens", "num_waiting", "open", "rank", "replica", "role")  # fmt: skip

    def __init__(
        self, replica: ReplicaId, num_blocks: int, block_size: int, role: Role, demand: Demand, index: Ranked | Chosen
    ) -> None:
        self.replica = replica
        self.blame: tuple[ReplicaId, ...] = (replica,)
        self.role = role
        self.demand = demand
        self.index = index
        self.num_promised = 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_waiting = 0
        self.num_running = 0
        self.num_preempted = 0
        self.num_tokens = 0
        self.open = True
        self.rank: float | None = None

    @property
    def capacity(self) -> int:
        """Tokens that its KV pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_outstanding(self) -> int:
        return self.num_waiting + self.num_running


class Ranked:
    """A heap over the ranks that a policy gives. An entry is stale when its replica's rank has changed since; it is skipped.

    The policy is asked when a replica is wanted, and of those only that have changed since the last time.

    Attributes:
        replicas: in ascending id.
        changed: to be called with a replica that has.
    """

    __slots__ = ("_changed", "_heap", "_rank", "changed", "replicas")

    def __init__(self, rank: Callable[[ReplicaView], float | None]) -> None:
        self.replicas: list[Backend] = []
        self._rank = rank
        self._heap: list[tuple[float, ReplicaId, Backend]] = []
        self._changed: set[Backend] = set()
        self.changed: Callable[[Backend], None] = self._changed.add

    def add(self, backend: Backend) -> None:
        insort(self.replicas, backend, key=_id)
        self._changed.add(backend)

    def remove(self, backend: Backend) -> None:
        self.replicas.remove(backend)
        self._changed.discard(backend)
        backend.rank = None
        self._rebuild()

    def pick(self, _request: Request | None = None) -> Backend | None:
        if len(self.replicas) == 1:
            only = self.replicas[0]
            return None if self._rank(only) is None else only
        if self._changed:
            self._rank_changed()
        heap = self._heap
        while heap:
            rank, _, backend = heap[0]
            if rank == backend.rank:
                return backend
            heappop(heap)
        return None

    def pick_among(self, _request: Request | None, some: Sequence[Backend]) -> Backend | None:
        """As `pick`, of these only; O(R), for the rare request that not every replica may get."""
        self._rank_changed()
        ranked = [(backend.rank, backend.replica, backend) for backend in some if backend.rank is not None]
        return min(ranked)[2] if ranked else None

    def sent(self, _request: Request, backend: Backend) -> None:
        """`backend` got the request."""
        self._changed.add(backend)

    def _rank_changed(self) -> None:
        for backend in self._changed:
            rank = self._rank(backend)
            if rank != backend.rank:
                backend.rank = rank
                if rank is not None:
                    heappush(self._heap, (rank, backend.replica, backend))
        self._changed.clear()
        if len(self._heap) > 64 + 8 * len(self.replicas):
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(backend.rank, backend.replica, backend) for backend in self.replicas if backend.rank is not None]
        heapify(self._heap)


class Among:
    """Some of the replicas; satisfies `RouteView`, in O(R)."""

    __slots__ = ("_all", "_by_id", "num_sent", "replicas")

    def __init__(self, some: Sequence[Backend], all: Chosen) -> None:
        self.replicas = some
        self.num_sent = all.num_sent
        self._by_id = {backend.replica: backend for backend in some}
        self._all = all

    @property
    def lowest(self) -> Backend | None:
        return self._all.lowest_among(self.replicas)

    def get(self, replica: ReplicaId) -> Backend | None:
        return self._by_id.get(replica)

    def longest_prefix(self, request: Request) -> tuple[int, Sequence[Backend]]:
        num_blocks, holders = self._all.longest_prefix(request)
        among = [backend for backend in holders if backend.replica in self._by_id]
        return (num_blocks, among) if among else (0, ())


class Chosen:
    """Asks the policy each time; satisfies `RouteView`."""

    __slots__ = ("_by_id", "_policy", "_prefixes", "_ranked", "num_sent", "replicas")

    def __init__(self, policy: ChoosePolicy) -> None:
        apart: int | None = getattr(policy, "prefix_apart", None)
        self.replicas: list[Backend] = []  # in ascending id
        self.num_sent = 0
        self._by_id: dict[ReplicaId, Backend] = {}
        self._policy = policy
        self._ranked = Ranked(policy.rank) if isinstance(policy, RankPolicy) else None
        self._prefixes = None if apart is None else PrefixIndex(apart)

    @property
    def lowest(self) -> Backend | None:
        return None if self._ranked is None else self._ranked.pick()

    def lowest_among(self, some: Sequence[Backend]) -> Backend | None:
        return None if self._ranked is None else self._ranked.pick_among(None, some)

    def get(self, replica: ReplicaId) -> Backend | None:
        return self._by_id.get(replica)

    def longest_prefix(self, request: Request) -> tuple[int, Sequence[Backend]]:
        if self._prefixes is None:
            return 0, ()
        num_blocks, holders = self._prefixes.longest(request.block_hashes)
        return num_blocks, [self._by_id[replica] for replica in holders]

    def add(self, backend: Backend) -> None:
        insort(self.replicas, backend, key=_id)
        self._by_id[backend.replica] = backend
        if self._ranked is not None:
            self._ranked.add(backend)
        if self._prefixes is not None:
            self._prefixes.add(backend.replica, backend.num_blocks, backend.block_size)

    def remove(self, backend: Backend) -> None:
        self.replicas.remove(backend)
        del self._by_id[backend.replica]
        if self._ranked is not None:
            self._ranked.remove(backend)
        if self._prefixes is not None:
            self._prefixes.forget(backend.replica)

    def pick(self, request: Request) -> Backend | None:
        if not self.replicas:
            return None
        choice = self._policy.choose(request, self)
        return None if choice is None else self._by_id.get(choice) or self._wrong(choice, self.replicas)

    def pick_among(self, request: Request, some: Sequence[Backend]) -> Backend | None:
        if not some:
            return None
        among = Among(some, self)
        choice = self._policy.choose(request, among)
        return None if choice is None else among.get(choice) or self._wrong(choice, some)

    def sent(self, request: Request, backend: Backend) -> None:
        self.num_sent += 1
        if self._ranked is not None:
            self._ranked.sent(request, backend)
        if self._prefixes is not None:
            self._prefixes.record(backend.replica, request.block_hashes)

    def changed(self, backend: Backend) -> None:
        if self._ranked is not None:
            self._ranked.changed(backend)

    def _wrong(self, choice: ReplicaId, some: Sequence[Backend]) -> NoReturn:
        ids = ", ".join(str(backend.replica) for backend in some)
        policy = type(self._policy).__name__
        raise ConfigError(f"route policy {policy} chose replica {choice!r}; it may choose one of {ids}, or None to keep waiting")


def index_of(policy: RoutePolicy) -> Ranked | Chosen:
    """An empty index."""
    return Chosen(policy) if isinstance(policy, ChoosePolicy) else Ranked(policy.rank)


def _id(backend: Backend) -> ReplicaId:
    return backend.replica
