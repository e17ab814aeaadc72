"""Which replica gets a request. Arithmetic on a read-only view; the configuration class is the policy.

A policy has `rank(replica)` (the lowest gets it; the router keeps the index), or `choose(request, view)`, or both: then
`view.lowest` is what the rank puts first, and those with both fall back to it, so that no request waits while a replica has
room. See `core/fleet_view.py`, and docs/policies.md for writing one. Knows no queues, failures or retries: the router does. What
looks like dice is a hash of what is known: the same request has the same fate in every run.
"""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from squall.core.fleet_view import ReplicaView, RouteView
from squall.core.types import ReplicaId, Request
from squall.quantities import Count, NotNegative

MAX_WAITING = 256
"""As many as a batch has seats: enough that no step lacks work, few enough that the bound on the router's queue has a meaning."""

OUTPUT_TOKENS = 256
"""What a request counts for beside its prompt: its output is not known."""

MAX_HOMES = 8
"""A session looks at so many replicas of its own before it goes where everybody goes."""

_BITS_64 = (1 << 64) - 1


class RoundRobin(Struct, frozen=True, tag_field="kind", tag="round_robin", forbid_unknown_fields=True):
    """Each replica in turn. While the one whose turn it is has `max_waiting` requests without a token, the queue waits for it."""

    max_waiting: Count = MAX_WAITING

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:  # noqa: ARG002 - any request
        replica = view.replicas[view.num_sent % len(view.replicas)]
        return replica.replica if replica.num_waiting < self.max_waiting else None


class LeastLoaded(Struct, frozen=True, tag_field="kind", tag="least_loaded", forbid_unknown_fields=True):
    """The replica with the fewest tokens promised: prompts of its unfinished requests, and a share for what they generate.

    Attributes:
        output_tokens: the share of one request.
        max_waiting: a replica with so many requests without a token takes no more; the next wait at the router for any replica.
    """

    output_tokens: NotNegative = OUTPUT_TOKENS
    max_waiting: Count = MAX_WAITING

    def rank(self, replica: ReplicaView) -> int | None:
        if replica.num_waiting >= self.max_waiting:
            return None
        return replica.num_tokens + self.output_tokens * (replica.num_waiting + replica.num_running)


class LeastKv(Struct, frozen=True, tag_field="kind", tag="least_kv", forbid_unknown_fields=True):
    """The replica with the smallest part of its KV pool promised; in a fleet of equal pools `least_loaded` until one is full.

    A preempted request counts for a whole pool: its replica has promised more than it has.

    Attributes:
        output_tokens: what a request counts for beside its prompt.
        max_share: a replica that has promised this part of its pool takes no more; the next wait at the router for any replica.
            More than 1 makes sense where prompts share prefixes, or outputs are short.
        max_waiting: as for `least_loaded`.
    """

    output_tokens: NotNegative = OUTPUT_TOKENS
    max_share: Annotated[float, Meta(gt=0)] = 1.0
    max_waiting: Count = MAX_WAITING

    def rank(self, replica: ReplicaView) -> float | None:
        tokens = replica.num_tokens + self.output_tokens * (replica.num_waiting + replica.num_running)
        share = tokens / (replica.num_blocks * replica.block_size)
        full = share >= self.max_share or replica.num_waiting >= self.max_waiting
        return None if full else share + replica.num_preempted


class LeastOutstanding(Struct, frozen=True, tag_field="kind", tag="least_outstanding", forbid_unknown_fields=True):
    """The replica with the fewest unfinished requests, however long they are."""

    max_waiting: Count = MAX_WAITING

    def rank(self, replica: ReplicaView) -> int | None:
        return replica.num_waiting + replica.num_running if replica.num_waiting < self.max_waiting else None


class Pull(Struct, frozen=True, tag_field="kind", tag="pull", forbid_unknown_fields=True):
    """One shared queue; a replica takes the next request when it has fewer than `max_outstanding` unfinished ones."""

    max_outstanding: Count = 16

    def rank(self, replica: ReplicaView) -> int | None:
        outstanding = replica.num_waiting + replica.num_running
        return outstanding if outstanding < self.max_outstanding else None


class Random(Struct, frozen=True, tag_field="kind", tag="random", forbid_unknown_fields=True):
    """Any replica, by a hash of `seed` and the request's id; instead of a full one that with the fewest unfinished requests."""

    seed: NotNegative = 0
    max_waiting: Count = MAX_WAITING

    def rank(self, replica: ReplicaView) -> int | None:
        return replica.num_waiting + replica.num_running if replica.num_waiting < self.max_waiting else None

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        drawn = view.replicas[spread(self.seed, request.id) % len(view.replicas)]
        return drawn.replica if drawn.num_waiting < self.max_waiting else _id(view.lowest)


class PowerOfTwo(Struct, frozen=True, tag_field="kind", tag="power_of_two", forbid_unknown_fields=True):
    """The one with fewer tokens promised (see `least_loaded`) of two replicas drawn by a hash of `seed` and the request's id.

    Nearly as even as the least loaded of all, and many routers with old news do not all run to the same replica.
    """

    seed: NotNegative = 0
    output_tokens: NotNegative = OUTPUT_TOKENS
    max_waiting: Count = MAX_WAITING

    def rank(self, replica: ReplicaView) -> int | None:
        return promised(replica, self.output_tokens, self.max_waiting)

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        replicas, drawn = view.replicas, spread(self.seed, request.id)
        one = drawn % len(replicas)
        other = one - (drawn >> 32) % (len(replicas) - 1) - 1 if len(replicas) > 1 else one
        return _id(self._lower(replicas[one], replicas[other]) or view.lowest)

    def _lower(self, one: ReplicaView, other: ReplicaView) -> ReplicaView | None:
        rank, other_rank = self.rank(one), self.rank(other)
        if rank is None:
            return None if other_rank is None else other
        return one if other_rank is None or rank <= other_rank else other


class Affine(Struct, frozen=True):
    """When affinity gives way. The load is the tokens promised, as for `least_loaded`.

    A replica is hot when its load exceeds `max_ratio` times that of the least loaded by more than `max_excess` tokens; until it
    has cooled down it gets nothing for affinity's sake, and only as the least loaded anything at all.
    """

    max_ratio: Annotated[float, Meta(ge=1)] = 1.5
    max_excess: NotNegative = 16_384
    output_tokens: NotNegative = OUTPUT_TOKENS
    max_waiting: Count = MAX_WAITING

    def rank(self, replica: ReplicaView) -> int | None:
        return promised(replica, self.output_tokens, self.max_waiting)

    def bound(self, lowest: ReplicaView) -> float:
        """The load above which a replica is hot."""
        return self.max_ratio * (self.rank(lowest) or 0) + self.max_excess


class Session(Affine, frozen=True, tag_field="kind", tag="session", forbid_unknown_fields=True):
    """The requests of one session go to one replica, by a hash of the session; those of none to the least loaded.

    When that replica is down or hot, they go to the session's second, third, ... replica; other sessions stay where they are, and
    this one comes back when its first does. A new replica takes over as many sessions as are its due, and no others move.
    """

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        lowest = view.lowest
        if lowest is None or not request.session:
            return _id(lowest)
        bound = self.bound(lowest)
        for home in homes(request.session, view.replicas[-1].replica + 1):
            replica = view.get(home)
            if replica is not None and _at_most(self.rank(replica), bound):
                return home
        return lowest.replica


class PrefixAffinity(Affine, frozen=True, tag_field="kind", tag="prefix_affinity", forbid_unknown_fields=True):
    """The replica that was sent the longest beginning of the prompt (of several the least loaded); for a miss the least loaded.

    Attributes:
        prefix_apart: beginnings are told apart by so many tokens (whole blocks, at least one). As many places are remembered as
            the KV pools have tokens / `prefix_apart`.
    """

    prefix_apart: Count = 256

    def choose(self, request: Request, view: RouteView) -> ReplicaId | None:
        lowest = view.lowest
        if lowest is None:
            return None
        bound = self.bound(lowest)
        _, holders = view.longest_prefix(request)
        cool = [(rank, holder.replica) for holder in holders if (rank := self.rank(holder)) is not None and rank <= bound]
        return min(cool)[1] if cool else lowest.replica


class LeastPromised(Struct, frozen=True, tag_field="kind", tag="least_promised", forbid_unknown_fields=True):
    """The smallest part of its KV pool promised, by prompts and longest outputs: of hand-offs it is what is known for sure."""

    def rank(self, replica: ReplicaView) -> float:
        return replica.num_promised / (replica.num_blocks * replica.block_size)


Route = (
    RoundRobin | LeastLoaded | LeastKv | LeastOutstanding | LeastPromised | Random | PowerOfTwo | Session | PrefixAffinity | Pull
)


def promised(replica: ReplicaView, output_tokens: int, max_waiting: int) -> int | None:
    """Tokens of its unfinished requests: their prompts, and a share for what they generate. None where it is full."""
    if replica.num_waiting >= max_waiting:
        return None
    return replica.num_tokens + output_tokens * (replica.num_waiting + replica.num_running)


def spread(key: int, number: int) -> int:
    """64 bits that look drawn by lot and depend on the two alone.

    Two rounds of multiplying by an odd number and folding the upper half onto the lower, as in MurmurHash3's last step.
    """
    mixed = (number * 0x9E3779B97F4A7C15 + key * 0xD1B54A32D192ED03 + 1) & _BITS_64
    mixed = (mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9 & _BITS_64
    mixed = (mixed ^ (mixed >> 29)) * 0x94D049BB133111EB & _BITS_64
    return mixed ^ (mixed >> 32)


def homes(session: int, span: int) -> Iterator[ReplicaId]:
    """Where a session wants to be, best first: ids below `span`, some perhaps twice.

    Each is drawn by "jump consistent hashing" (Lamping and Veach, 2014): as `span` grows from n to n + 1, one session in n + 1
    moves, to the new id. Needs no table, and takes ln(span) draws.
    """
    for attempt in range(MAX_HOMES):
        home = candidate = 0
        draw = spread(attempt, session)
        while candidate < span:
            home = candidate
            draw = (
                draw * 6364136223846793005 + 1442695040888963407
            ) & _BITS_64  # Knuth's MMIX generator; its upper bits are good
            candidate = ((home + 1) << 32) // ((draw >> 32) + 1)
        yield home


def _at_most(rank: int | None, bound: float) -> bool:
    return rank is not None and rank <= bound


def _id(replica: ReplicaView | None) -> ReplicaId | None:
    return None if replica is None else replica.replica
