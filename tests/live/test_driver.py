"""The duties of a driver, kept on a real event loop."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from squall.core.actions import AnyAction, Cut, Forget, Send
from squall.core.events import AnyEvent, Arrived, Cancelled, DrainWanted, StepsDone, Warmed, Woke
from squall.core.types import MILLISECOND, ROUTER, MachineId, Nanos, Request
from squall.live.driver import Driver, Priority

REPLICA = 0
ARRIVED = Arrived(Request(id=1, arrived_at=0, num_prompt_tokens=1, max_output_tokens=1))


class Scripted:
    """A machine that answers each kind of event with the given actions, and remembers what it was told and when."""

    def __init__(self, **answers: Sequence[AnyAction]) -> None:
        self.wake_at: Nanos | None = None
        self.answers = answers
        self.told: list[tuple[str, Nanos]] = []
        self.on_event: Callable[[AnyEvent, Nanos], None] = lambda event, now: None

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        name = type(event).__name__
        self.told.append((name, now))
        if name == "Woke":
            self.wake_at = None
        self.on_event(event, now)
        return list(self.answers.get(name, ()))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.told]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_comes_in_one_turn_is_one_instant_in_the_documented_order() -> None:
    machine = Scripted()
    machine.on_event = lambda event, now: setattr(machine, "wake_at", now) if isinstance(event, StepsDone) else None
    driver = Driver({REPLICA: machine}, perform=lambda action: None)
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    driver.post(REPLICA, DrainWanted(), Priority.MESSAGE)
    driver.post(REPLICA, StepsDone(run=1, steps=1), Priority.END)
    await settle()
    assert machine.names == ["StepsDone", "DrainWanted", "Arrived", "Woke"]
    assert len({now for _, now in machine.told}) == 1


async def test_a_message_is_delivered_at_the_same_instant_after_all_actions_and_never_recursively() -> None:
    order: list[object] = []
    replica, router = Scripted(), Scripted(Arrived=[Cut(run=1), Send(REPLICA, Warmed(0)), Cut(run=2)])
    replica.on_event = lambda event, now: order.append(type(event))
    driver = Driver({ROUTER: router, REPLICA: replica}, perform=order.append)
    driver.post(ROUTER, ARRIVED, Priority.ARRIVAL)
    await settle()
    assert order == [Cut(run=1), Cut(run=2), Warmed]
    assert replica.told[0][1] == router.told[0][1]


async def test_messages_come_before_arrivals_of_the_same_instant() -> None:
    replica, router = Scripted(), Scripted(StepsDone=[Send(REPLICA, Warmed(0))])
    driver = Driver({ROUTER: router, REPLICA: replica}, perform=lambda action: None)
    driver.post(ROUTER, StepsDone(run=1, steps=1), Priority.END)
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    await settle()
    assert replica.names == ["Warmed", "Arrived"]


async def test_a_message_to_a_machine_elsewhere_goes_to_the_performer() -> None:
    performed: list[AnyAction] = []
    driver = Driver({ROUTER: Scripted(Arrived=[Send(7, Cancelled(1))])}, perform=performed.append)
    driver.post(ROUTER, ARRIVED, Priority.ARRIVAL)
    await settle()
    assert performed == [Send(7, Cancelled(1))]


async def test_instants_strictly_increase_even_when_the_clock_stands_still() -> None:
    machine = Scripted()
    driver = Driver({REPLICA: machine}, perform=lambda action: None, clock=lambda: 5)
    for _ in range(3):
        driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
        await settle()
    assert [now for _, now in machine.told] == [5, 6, 7]


async def test_a_machine_is_woken_when_it_asked_to_be_and_not_before() -> None:
    machine = Scripted()
    woken = asyncio.Event()
    wanted: list[Nanos] = []

    def on_event(event: AnyEvent, now: Nanos) -> None:
        if isinstance(event, Woke):
            woken.set()
        else:
            machine.wake_at = now + 20 * MILLISECOND
            wanted.append(machine.wake_at)

    machine.on_event = on_event
    driver = Driver({REPLICA: machine}, perform=lambda action: None)
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    await woken.wait()
    assert machine.names == ["Arrived", "Woke"]
    assert machine.told[1][1] >= wanted[0]


async def test_the_log_holds_every_event_with_what_it_led_to() -> None:
    log: list[tuple[MachineId, AnyEvent, list[AnyAction]]] = []
    replica, router = Scripted(Warmed=[Forget((1,))]), Scripted(Arrived=[Send(REPLICA, Warmed(0))])
    driver = Driver(
        {ROUTER: router, REPLICA: replica},
        perform=lambda action: None,
        record=lambda now, machine, event, actions: log.append((machine, event, list(actions))),
    )
    driver.post(ROUTER, ARRIVED, Priority.ARRIVAL)
    await settle()
    assert log == [(ROUTER, ARRIVED, [Send(REPLICA, Warmed(0))]), (REPLICA, Warmed(0), [Forget((1,))])]


async def test_an_event_posted_while_an_action_is_performed_belongs_to_the_same_instant() -> None:
    machine = Scripted(Arrived=[Cut(run=1)])
    driver = Driver({REPLICA: machine}, perform=lambda action: driver.post(REPLICA, StepsDone(run=1, steps=1), Priority.END))
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    await settle()
    assert machine.names == ["Arrived", "StepsDone"]
    assert machine.told[0][1] == machine.told[1][1]


async def test_a_stopped_driver_delivers_nothing() -> None:
    machine = Scripted()
    driver = Driver({REPLICA: machine}, perform=lambda action: None)
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    driver.stop()
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    await settle()
    assert machine.told == []


async def test_a_bug_in_a_machine_stops_its_driver_and_reaches_the_loops_handler() -> None:
    errors: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
    machine = Scripted()

    def explode(event: AnyEvent, now: Nanos) -> None:
        raise RuntimeError("a bug")

    machine.on_event = explode
    driver = Driver({REPLICA: machine}, perform=lambda action: None)
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    driver.post(REPLICA, ARRIVED, Priority.ARRIVAL)
    await settle()
    assert [str(error) for error in errors] == ["a bug"]
    assert driver.failed
    assert machine.names == ["Arrived"]


@pytest.mark.parametrize("priority", Priority)
async def test_events_of_one_kind_keep_the_order_in_which_they_came(priority: Priority) -> None:
    machine = Scripted()
    driver = Driver({REPLICA: machine}, perform=lambda action: None)
    runs: list[int] = []
    machine.on_event = lambda event, now: runs.append(event.run) if isinstance(event, StepsDone) else None
    for run in range(20):
        driver.post(REPLICA, StepsDone(run=run, steps=1), priority)
    await settle()
    assert runs == list(range(20))
