"""What is asked of the replicas of one role, in numbers. The router counts, the controller and its policies read.

Knows no request. What is at replicas is counted there, once; here is the sum of that, made when somebody asks. Where requests are
handed on, one may be known at two replicas, or count for others than the one that has it: the sum is put right for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from squall.core.types import Nanos, ReplicaId

if TYPE_CHECKING:
    from squall.core.replica_index import Backend


class Demand:
    """Satisfies `fleet_view.DemandView`, which tells what each number means.

    Args:
        backends: the replicas, of these those count whose `demand` this is; None for none.
        oldest: since when the first of the queued requests waits; None where none does.

    Attributes:
        num_places: kept at replicas for requests that still run on another one.
        num_unplaced_tokens: KV that requests which are held may come to need, less that of those with a place elsewhere.
    """

    __slots__ = ("_backends", "_oldest", "num_arrived", "num_arrived_tokens", "num_places", "num_queued", "num_queued_tokens",
                 "num_unplaced_tokens")  # fmt: skip

    def __init__(
        self, backends: Mapping[ReplicaId, Backend] | None = None, oldest: Callable[[], Nanos | None] = lambda: None
    ) -> None:
        self.num_queued = 0
        self.num_queued_tokens = 0
        self.num_arrived = 0
        self.num_arrived_tokens = 0
        self.num_places = 0
        self.num_unplaced_tokens = 0
        self._backends: Mapping[ReplicaId, Backend] = {} if backends is None else backends
        self._oldest = oldest

    @property
    def oldest_queued_at(self) -> Nanos | None:
        return self._oldest()

    @property
    def num_waiting(self) -> int:
        return sum(at.num_waiting for at in self._backends.values() if at.demand is self) - self.num_places

    @property
    def num_waiting_tokens(self) -> int:
        return sum(at.num_waiting_tokens for at in self._backends.values() if at.demand is self)

    @property
    def num_running(self) -> int:
        return sum(at.num_running - at.num_held for at in self._backends.values() if at.demand is self)

    @property
    def num_promised_tokens(self) -> int:
        return sum(at.num_promised for at in self._backends.values() if at.demand is self) + self.num_unplaced_tokens
