"""The seam: what a driver may ask of a machine, and what it owes it. Knows no machine and no driver.

Duties of a driver (`sim/driver.py`, `live/driver.py`):

1. deliver events one at a time, `now` never decreasing;
2. perform every returned action, in order;
3. end every long action in exactly one event;
4. honour `wake_at`: deliver `Woke` when the instant has come;
5. deliver a `Send` as an event at the same `now`, after all actions of the current call, never recursively. A `TellNeighbours`
   is taken note of at once, by all whom it is for: they answer with no action, and ask with `wake_at` for their turn.

Within one instant: ends of steps, loads and transfers first; then messages between machines; then arrivals (and cancellations
by clients); then wake-ups. An idle replica plans at the end of the instant.
"""

from typing import Protocol

from squall.core.actions import AnyAction
from squall.core.events import AnyEvent
from squall.core.types import Nanos


class Machine(Protocol):
    """A decider without clock, dice, sockets or tensors: the same calls give the same actions.

    Attributes:
        wake_at: when it wants to be woken; None for never. Read after every `handle`.
    """

    wake_at: Nanos | None

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        """Take in what happened at `now` and say what to do."""
        ...
