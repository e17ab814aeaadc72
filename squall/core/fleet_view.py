"""Windows through which route and scale policies see the fleet, and what the machines expect of such a policy.

The router's and controller's own records satisfy the views: nothing is copied or wrapped. Knows no behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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
    """The replicas that may get the next request, and what the router remembers for the policy.

    Attributes:
        replicas: in ascending id; at least one.
        num_sent: requests sent so far, to any replica.
        lowest: of a policy that has `rank` too, the replica that it puts first, in O(log R); None where it takes none.
    """

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...
    @property
    def num_sent(self) -> int: ...
    @property
    def lowest(self) -> ReplicaView | None: ...

    def get(self, replica: ReplicaId, /) -> ReplicaView | None:
        """The one of `replicas` with this id, where there is one."""

    def longest_prefix(self, request: Request, /) -> tuple[int, Sequence[ReplicaView]]:
        """The longest beginning of the prompt that is known to have been sent: how many blocks, and the few that got it last.

        Kept for a policy that says `prefix_apart`: how many tokens from one remembered place to the next. Otherwise (0, ()).
        """


@runtime_checkable
class RankPolicy(Protocol):
    """The replica with the lowest rank gets the next request; on a tie the lowest id does. The router keeps the index.

    `rank` must depend on the replica alone. None: it takes nothing now, the request keeps waiting.
    """

    def rank(self, replica: ReplicaView, /) -> float | None: ...


@runtime_checkable
class ChoosePolicy(Protocol):
    """Chooses one of `view.replicas` for `request`, by its id. None: the request keeps waiting.

    It may have `rank` as well, for `view.lowest`, and `prefix_apart`, for `view.longest_prefix`.
    """

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
