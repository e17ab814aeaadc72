"""What is asked of the replicas of one role, in numbers. The router counts, the controller and its policies read.

Knows no request. What is at replicas is counted there, once; here is the sum of that, made when somebody looks. Where requests
are handed on, one may be known at two replicas, or count for others than the one that has it: the sum is put right for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from squall.core.types import Nanos

if TYPE_CHECKING:
    from squall.core.replica_index import Backend


class Demand:
    """Satisfies `fleet_view.DemandView`, which tells what each number means.

    Args:
        oldest: since when the first of the queued requests waits; None where none does.

    Attributes:
        num_places: kept at replicas for requests that still run on another one.
        num_unplaced_tokens: KV that requests which are held may come to need, less that of those with a place elsewhere.
    """

    __slots__ = ("_oldest", "num_arrived", "num_arrived_tokens", "num_places", "num_promised_tokens", "num_queued",
                 "num_queued_tokens", "num_running", "num_unplaced_tokens", "num_waiting", "num_waiting_tokens")  # fmt: skip

    def __init__(self, oldest: Callable[[], Nanos | None] = lambda: None) -> None:
        self.num_queued = 0
        self.num_queued_tokens = 0
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.num_running = 0
        self.num_promised_tokens = 0
        self.num_arrived = 0
        self.num_arrived_tokens = 0
        self.num_places = 0
        self.num_unplaced_tokens = 0
        self._oldest = oldest

    @property
    def oldest_queued_at(self) -> Nanos | None:
        return self._oldest()

    def sum_up(self, backends: Iterable[Backend]) -> Demand:
        """What is at replicas, as it is now; of `backends` those count whose `demand` this is."""
        waiting, waiting_tokens, running, promised = -self.num_places, 0, 0, self.num_unplaced_tokens
        for backend in backends:
            if backend.demand is self:
                waiting += backend.num_waiting
                waiting_tokens += backend.num_waiting_tokens
                running += backend.num_running - backend.num_held
                promised += backend.num_promised
        self.num_waiting, self.num_waiting_tokens = waiting, waiting_tokens
        self.num_running, self.num_promised_tokens = running, promised
        return self
