"""The order in which things are due, for the heap of the simulated driver. Knows no event and no machine but by its id."""

from typing import Final

from squall.core.types import CONTROLLER, FOREVER, MachineId, Nanos

# The order within an instant. Ties are decided here: by priority, then by machine, then first come, first served.
END: Final = 0  # of steps and of the controller's actions
MESSAGE: Final = 1  # between machines; these wait in a queue of their own, in the order in which they were sent
ARRIVAL: Final = 2  # of requests and cancellations, in the order given
WAKE: Final = 3

LOWEST: Final = -CONTROLLER
"""What makes the least id of a machine 0."""


class Order:
    """What is due when: an instant, a priority and a machine as one integer, which a heap compares three times as fast as tuples.

    Args:
        highest: no machine's id is above it.

    Attributes:
        id, of_instant: the bits that say who it is, and those that say all but the instant.
        priority, at: how many bits are below the priority, and below the instant.
        message: what the first message of an instant has beside it.
        last: later than all that is ever due. A heap that holds it always has a first.
    """

    __slots__ = ("at", "id", "last", "message", "of_instant", "priority")

    def __init__(self, highest: MachineId) -> None:
        self.priority = (highest + LOWEST).bit_length()
        self.at = self.priority + WAKE.bit_length()
        self.id = (1 << self.priority) - 1
        self.of_instant = (1 << self.at) - 1
        self.message = MESSAGE << self.priority
        self.last = 2 * FOREVER << self.at

    def first(self, at: Nanos, priority: int) -> int:
        """The least of that instant with that priority."""
        return (at << self.at) + (priority << self.priority)

    def of(self, at: Nanos, priority: int, id: MachineId) -> int:
        return (at << self.at) + (priority << self.priority) + id + LOWEST

    def read(self, due: int) -> tuple[Nanos, int, MachineId]:
        return due >> self.at, due >> self.priority & WAKE, (due & self.id) - LOWEST
