"""Several fleets on one virtual clock: their drivers in the order of what is due, and what their controllers tell each other.

Within an instant the order of `core/machine.py` holds for all of them together; between fleets, where it leaves a choice, their
number decides. Knows no machine, no GPU and no network: who shares what is put together elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge

from squall.core.events import AnyEvent
from squall.core.types import CONTROLLER, FOREVER, MachineId, Nanos
from squall.sim.driver import Driver
from squall.sim.order import ARRIVAL, WAKE
from squall.sim.run import Body


def join(bodies: Sequence[Body]) -> None:
    """From now on they are on one cluster: of the same network, with the same nodes, and the GPUs of one are not another's."""
    for number, body in enumerate(bodies):
        others = [other for other in bodies if other is not body]
        body.loader.neighbours = [other.loader for other in others]
        body.driver.tell_neighbours = _telling([other.driver for other in others])
        if body.faults is not None and not number:
            body.faults.neighbours = [(other.loader, other.slots) for other in others]
    patience = max(body.driver.in_vain_after for body in bodies)
    for body in bodies:
        body.driver.in_vain_after = patience


def _telling(others: Sequence[Driver]) -> Callable[[AnyEvent, Nanos], None]:
    def tell(event: AnyEvent, now: Nanos) -> None:
        for driver in others:
            driver.hear(event, now)

    return tell


def run(bodies: Sequence[Body], until: Nanos = FOREVER) -> None:
    """As `Driver.run`, for all of them: it ends when none has anything left to happen."""
    drivers = [body.driver for body in bodies]
    for driver in drivers:
        driver.begin()
    _follow(drivers, (0, WAKE + 1))
    for at, number, event in merge(*(_numbered(number, body) for number, body in enumerate(bodies)), key=lambda each: each[:2]):
        if at >= until:
            break
        _follow(drivers, (at, ARRIVAL))
        _set_clocks(drivers, at)
        drivers[number].offer(event, at)
    else:
        if _follow(drivers, (until, ARRIVAL), last=True) or until == FOREVER:
            for driver in drivers:
                driver.refuse_who_waits()
            return
    _follow(drivers, (until, ARRIVAL))
    for driver in drivers:
        driver.stop(until)


def _numbered(number: int, body: Body) -> Iterator[tuple[Nanos, int, AnyEvent]]:
    for at, event in body.offered():
        yield at, number, event


def _follow(drivers: Sequence[Driver], until: tuple[Nanos, int], last: bool = False) -> bool:
    """Deliver all that is due before `until`, an instant and a priority in it; with `last` True where all was done before."""
    while (found := _next(drivers)) is not None and found[0][:2] < until:
        (at, priority, machine), driver = found
        if last and machine == CONTROLLER:
            done = [each.is_done(at) for each in drivers]  # each looks how far it has come
            if all(done):
                return True
        _set_clocks(drivers, at)
        driver.follow((at, priority + 1))
    return False


def _next(drivers: Sequence[Driver]) -> tuple[tuple[Nanos, int, MachineId], Driver] | None:
    """What is due next, of all; on a tie the first fleet's."""
    due = [(at, driver) for driver in drivers if (at := driver.next_due()) is not None]
    return min(due, key=lambda each: each[0][:2], default=None)


def _set_clocks(drivers: Sequence[Driver], now: Nanos) -> None:
    for driver in drivers:
        driver.now = now
