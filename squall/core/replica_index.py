"""Which replica comes next, by the route policy: O(log R) comparisons where it ranks, the policy's own cost where it chooses.

Knows no queue, no request's life and no failure: the router adds, removes and counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
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
        num_waiting_tokens: prompt tokens of the waiting ones, but for places that are kept for others.
        num_held: of the running ones, those whose KV waits for another replica that is to decode them.
        open: it takes new requests (it is in the index then).
        blame: itself; nobody where it goes because it was asked to.
        standing: its place in the order of the index, by the policy's last word on it; None while it takes nothing.
    """

    __slots__ = ("blame", "block_size", "demand", "index", "num_blocks", "num_held", "num_preempted", "num_promised",
                 "num_running", "num_tokens", "num_waiting", "num_waiting_tokens", "open", "replica", "role",
                 "standing")  # fmt: skip

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
        self.num_waiting_tokens = 0
        self.num_running = 0
        self.num_preempted = 0
        self.num_held = 0
        self.num_tokens = 0
        self.open = True
        self.standing: Standing | None = None

    @property
    def capacity(self) -> int:
        """Tokens that its KV pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_outstanding(self) -> int:
        return self.num_waiting + self.num_running


Standing = tuple[float, ReplicaId, Backend]
"""A rank, the id that decides where ranks are equal, and whose they are."""


class Ranked:
    """The replicas in the order of the ranks that a policy gives.

    The policy is asked when a replica is wanted, and of those only that have changed since the last time.

    Attributes:
        replicas: in ascending id.
        changed: to be called with a replica that has.
    """

    __slots__ = ("_changed", "_only", "_order", "_rank", "changed", "replicas")

    def __init__(self, rank: Callable[[ReplicaView], float | None]) -> None:
        self.replicas: list[Backend] = []
        self._only: Backend | None = None  # the one of `replicas` where there is one: it needs no order
        self._rank = rank
        self._order: list[Standing] = []
        self._changed: set[Backend] = set()
        self.changed: Callable[[Backend], None] = self._changed.add

    def add(self, backend: Backend) -> None:
        insort(self.replicas, backend, key=_id)
        self._only = backend if len(self.replicas) == 1 else None
        self._changed.add(backend)

    def remove(self, backend: Backend) -> None:
        self.replicas.remove(backend)
        self._only = self.replicas[0] if len(self.replicas) == 1 else None
        self._changed.discard(backend)
        if backend.standing is not None:
            del self._order[bisect_left(self._order, backend.standing)]
            backend.standing = None

    def pick(self, _request: Request | None = None) -> Backend | None:
        rank_of, only = self._rank, self._only
        if only is not None:
            return None if rank_of(only) is None else only
        order, changed = self._order, self._changed
        for backend in changed:
            rank, before = rank_of(backend), backend.standing
            if before is not None:
                if before[0] == rank:
                    continue
                del order[bisect_left(order, before)]
            if rank != rank:
                raise self._no_number(backend)
            backend.standing = after = None if rank is None else (rank, backend.replica, backend)
            if after is not None:
                insort(order, after)
        changed.clear()
        return order[0][2] if order else None

    def _no_number(self, backend: Backend) -> ConfigError:
        """Nothing is before or behind a rank that is not a number: the order would be lost."""
        name = getattr(self._rank, "__qualname__", "rank")
        return ConfigError(f"{name} of replica {backend.replica} is nan; it may be a number, or None to get nothing")

    def pick_among(self, _request: Request | None, some: Sequence[Backend]) -> Backend | None:
        """As `pick`, of these only; O(R), for the rare request that not every replica may get."""
        ranked = [(rank, backend.replica, backend) for backend in some if (rank := self._rank(backend)) is not None]
        return min(ranked)[2] if ranked else None


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
        """`backend` got the request."""
        self.num_sent += 1
        if self._prefixes is not None:
            self._prefixes.record(backend.replica, request.block_hashes)

    def changed(self, backend: Backend) -> None:
        """To be called with a replica that has."""
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
