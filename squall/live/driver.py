"""The live driver: delivers events to machines on an asyncio loop and hands their actions to a performer.

Keeps the duties of `core/machine.py` with the wall's monotonic clock. Knows no network, no engine and no machine by name: the
head gives it Router and Controller, a worker a Replica.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from squall.core.actions import AnyAction, Send
from squall.core.events import AnyEvent, Woke
from squall.core.machine import Machine
from squall.core.types import SECOND, MachineId, Nanos


class Priority(IntEnum):
    """The order within an instant; wake-ups come after all of these."""

    END = 0  # of steps, loads and transfers
    MESSAGE = 1  # between machines
    ARRIVAL = 2  # of requests and cancellations


Perform = Callable[[AnyAction], None]
"""Begins an action and returns at once; what a long action ends in is posted later."""

Record = Callable[[Nanos, MachineId, AnyEvent, Sequence[AnyAction]], None]
"""Writes one line of the event log."""


class Driver:
    """Runs `machines` on the current loop.

    What is posted within one turn of the loop happens at one instant; instants strictly increase. Not thread-safe: other
    threads post through `loop.call_soon_threadsafe`. An exception out of a machine is a bug and goes to the loop's exception
    handler; the driver then stops, as the machine's state can no longer be trusted.

    Args:
        machines: by id.
        perform: called with every action but a Send to one of `machines`.
        record: called after every event with what it led to, before the actions are performed.
        clock: nanoseconds, never decreasing.
        after: called at the end of every instant, also of one in which a machine failed.
        before: called with every event just before its machine is.

    Attributes:
        now: the latest instant.
        failed: a machine (or the performer) raised.
    """

    def __init__(
        self,
        machines: Mapping[MachineId, Machine],
        perform: Perform,
        record: Record | None = None,
        clock: Callable[[], Nanos] = time.monotonic_ns,
        after: Callable[[], None] | None = None,
        before: Callable[[AnyEvent], None] | None = None,
    ) -> None:
        self.now: Nanos = 0
        self.failed = False
        self._machines = dict(machines)
        self._perform = perform
        self._record = record
        self._clock = clock
        self._after = after
        self._before = before
        self._pending: list[tuple[Priority, int, MachineId, AnyEvent]] = []
        self._posted = 0
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._stopped = False

    def start(self) -> None:
        """Give machines that want to be woken from the start their first instant."""
        self._turn = asyncio.get_running_loop().call_soon(self._pump)

    def post(self, machine: MachineId, event: AnyEvent, priority: Priority) -> None:
        """Deliver `event` at the next instant (at the current one, when called while an action is performed)."""
        if self._stopped:
            return
        self._posted += 1
        heapq.heappush(self._pending, (priority, self._posted, machine, event))
        if not self._pumping and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._pump)

    def hear(self, machine: MachineId, event: AnyEvent) -> None:
        """What a machine of another driver tells one of ours, which takes note of it at once and answers with nothing."""
        if self._stopped:
            return
        self.now = max(self.now + 1, self._clock())
        actions = self._machines[machine].handle(event, self.now)
        assert not actions
        if self._record is not None:
            self._record(self.now, machine, event, actions)
        self._set_timer()

    def stop(self) -> None:
        """Deliver nothing any more. Idempotent."""
        self._stopped = True
        self._pending.clear()
        for handle in (self._turn, self._timer):
            if handle is not None:
                handle.cancel()
        self._turn = self._timer = None

    def _pump(self) -> None:
        """One instant: everything pending, what that leads to, then the wake-ups that are due."""
        self._turn = None
        self.now = max(self.now + 1, self._clock())
        self._pumping = True
        try:
            self._run_instant()
        except BaseException:
            self.failed = True
            self.stop()
            if self._after is not None:
                self._after()
            raise
        finally:
            self._pumping = False
        if not self._stopped:
            self._set_timer()
        if self._after is not None:
            self._after()

    def _run_instant(self) -> None:
        while not self._stopped:
            if self._pending:
                _, _, machine, event = heapq.heappop(self._pending)
                self._deliver(machine, event)
            elif due := [id for id, m in self._machines.items() if m.wake_at is not None and m.wake_at <= self.now]:
                self._deliver(due[0], Woke())
            else:
                return

    def _deliver(self, machine: MachineId, event: AnyEvent) -> None:
        if self._before is not None:
            self._before(event)
        actions = self._machines[machine].handle(event, self.now)
        if self._record is not None:
            self._record(self.now, machine, event, actions)
        for action in actions:
            if isinstance(action, Send) and action.to in self._machines:
                self.post(action.to, action.event, Priority.MESSAGE)
            else:
                self._perform(action)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wakes = [m.wake_at for m in self._machines.values() if m.wake_at is not None]
        if wakes:
            delay = max(0, min(wakes) - self._clock()) / SECOND
            self._timer = asyncio.get_running_loop().call_later(delay, self._pump)
