"""Where the machines of a simulation sit: each with its engine, and with what the driver remembers of it.

One that is replaced leaves nothing behind. Knows no heap and no event but as something that a log is told of.
"""

from collections.abc import Callable, Sequence

from squall.core.actions import AnyAction
from squall.core.events import AnyEvent
from squall.core.machine import Machine
from squall.core.types import MachineId, Nanos
from squall.sim.engine import Engine

EventLog = Callable[[Nanos, MachineId, AnyEvent, Sequence[AnyAction]], None]
"""Called after every event with what it led to, before the actions are performed."""


class Gone:
    """A replica whose process has died: it hears nothing and does nothing."""

    wake_at: Nanos | None = None

    def handle(self, _event: AnyEvent, _now: Nanos) -> list[AnyAction]:
        return []


class Seat:
    """Where a machine is, and what the driver knows of it.

    Attributes:
        id: of the machine.
        machine: the one that is there now.
        handle: what it does with an event; whoever keeps a log is told of it.
        wakes_at: of what is due, when it is to be woken; stale where the machine does not want that any more.
        ends: what `Order` adds to the instant at which a run of its engine ends.
        engine: of a replica.
    """

    __slots__ = ("ends", "engine", "handle", "id", "machine", "wakes_at")

    engine: Engine
    machine: Machine
    handle: Callable[[AnyEvent, Nanos], list[AnyAction]]

    def __init__(self, id: MachineId, ends: int) -> None:
        self.id = id
        self.wakes_at: Nanos | None = None
        self.ends = ends

    def take(self, machine: Machine, log: EventLog | None) -> None:
        """The machine that is here from now on, as if none had been."""
        self.machine = machine
        self.wakes_at = None
        if log is None or type(machine) is Gone:
            self.handle = machine.handle
            return

        def logged(event: AnyEvent, now: Nanos) -> list[AnyAction]:
            actions = machine.handle(event, now)
            log(now, self.id, event, actions)
            return actions

        self.handle = logged
