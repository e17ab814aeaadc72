"""Which replica gets a request. Arithmetic on a read-only view; the configuration class is the policy.

A policy has either `rank(replica)` (the lowest gets it; the router keeps the index) or `choose(request, view)`; see
`core/fleet_view.py`. Knows no queues, failures or retries: the router does.
"""

from typing import Annotated

from msgspec import Meta, Struct

from squall.core.fleet_view import ReplicaView, RouteView
from squall.core.types import ReplicaId, Request

Count = Annotated[int, Meta(ge=1)]

MAX_WAITING = 256
"""As many as a batch has seats: enough that no step lacks work, few enough that the bound on the router's queue has a meaning."""


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

    output_tokens: Annotated[int, Meta(ge=0)] = 256
    max_waiting: Count = MAX_WAITING

    def rank(self, replica: ReplicaView) -> int | None:
        if replica.num_waiting >= self.max_waiting:
            return None
        return replica.num_tokens + self.output_tokens * (replica.num_waiting + replica.num_running)


class Pull(Struct, frozen=True, tag_field="kind", tag="pull", forbid_unknown_fields=True):
    """One shared queue; a replica takes the next request when it has fewer than `max_outstanding` unfinished ones."""

    max_outstanding: Count = 16

    def rank(self, replica: ReplicaView) -> int | None:
        outstanding = replica.num_waiting + replica.num_running
        return outstanding if outstanding < self.max_outstanding else None


Route = RoundRobin | LeastLoaded | Pull
