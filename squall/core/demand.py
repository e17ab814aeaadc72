"""What is asked of the replicas of one role, in numbers. The router counts, the controller and its policies read.

Knows no request and no replica. A deliberate plain object: every request passes it three times.
"""

from collections.abc import Callable

from squall.core.types import Nanos


class Demand:
    """Satisfies `fleet_view.DemandView`, which tells what each number means.

    Args:
        oldest: since when the first of the queued requests waits; None where none does.
    """

    __slots__ = ("_oldest", "num_arrived", "num_arrived_tokens", "num_promised_tokens", "num_queued", "num_queued_tokens",
                 "num_running", "num_waiting", "num_waiting_tokens")  # fmt: skip

    def __init__(self, oldest: Callable[[], Nanos | None] = lambda: None) -> None:
        self.num_queued = 0
        self.num_queued_tokens = 0
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.num_running = 0
        self.num_promised_tokens = 0
        self.num_arrived = 0
        self.num_arrived_tokens = 0
        self._oldest = oldest

    @property
    def oldest_queued_at(self) -> Nanos | None:
        return self._oldest()

    @property
    def is_quiet(self) -> bool:
        """Nobody wants anything of the role."""
        return not (self.num_queued or self.num_waiting or self.num_running)
