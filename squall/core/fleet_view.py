"""Windows through which route and scale policies see the fleet, and what the machines expect of such a policy.

The router's and controller's own records satisfy the views: nothing is copied or wrapped. Knows no behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from squall.core.types import ReplicaId, Request


class ReplicaView(Protocol):
    """What the router knows of a replica that takes requests; it changes only at dispatch, first token, preemption and finish.

    Attributes:
        num_waiting: requests sent there that have no token from there yet.
        num_running: requests that have, and are unfinished.
        num_preempted: of the running ones, those that lost their KV since and wait again.
        num_tokens: prompt tokens of all its unfinished requests.
        num_blocks, block_size: its KV pool.
    """

    @property
    def replica(self) -> ReplicaId: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_preempted(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...


class RouteView(Protocol):
    """The replicas that may get the next request, in ascending id (at least one), and how many requests were sent so far."""

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...
    @property
    def num_sent(self) -> int: ...


class RankPolicy(Protocol):
    """The replica with the lowest rank gets the next request; on a tie the lowest id does. The router keeps the index.

    `rank` must depend on the replica alone. None: it takes nothing now, the request keeps waiting.
    """

    def rank(self, replica: ReplicaView, /) -> float | None: ...


class ChoosePolicy(Protocol):
    """Chooses one of `view.replicas` for `request`, by its id. None: the request keeps waiting."""

    def choose(self, request: Request, view: RouteView, /) -> ReplicaId | None: ...


RoutePolicy = RankPolicy | ChoosePolicy


class ScaleView(Protocol):
    """What a scale policy may see of the fleet.

    Attributes:
        num_configured: replicas that the fleet's configuration asks for.
        num_ready: replicas that take requests.
    """

    @property
    def num_configured(self) -> int: ...
    @property
    def num_ready(self) -> int: ...


class ScalePolicy(Protocol):
    """How many replicas there should be."""

    def __call__(self, view: ScaleView, /) -> int: ...
