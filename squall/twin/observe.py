"""Proof that the code that decided is the code that is here: a log fed to fresh machines must reproduce every action.

Works on the log of any world. Knows no driver and no clock: instants come from the log.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from squall.core.actions import AnyAction
from squall.core.controller import Controller
from squall.core.disaggregated import DisaggregatedRouter
from squall.core.events import AnyEvent
from squall.core.fleet_plan import FleetPlan
from squall.core.handoff_router import HandoffRouter
from squall.core.machine import Machine
from squall.core.pipeline import PipelinedReplica
from squall.core.replica import Replica
from squall.core.router import Router
from squall.core.types import CONTROLLER, ROUTER, MachineId, Nanos
from squall.errors import ConfigError
from squall.eventlog import Created, Record
from squall.policies.batching import Batching
from squall.policies.load import Load
from squall.policies.route import Route
from squall.policies.scale import Scale

KINDS: Mapping[str, tuple[Callable[..., Machine], Mapping[str, Any]]] = {
    "Router": (Router, {"policy": Route}),
    "HandoffRouter": (HandoffRouter, {"policy": Route}),
    "DisaggregatedRouter": (DisaggregatedRouter, {"policy": Route, "decode_policy": Route}),
    "Controller": (Controller, {"scale": Scale, "load": Load | None, "plan": FleetPlan}),
    "Replica": (Replica, {"policy": Batching}),
    "PipelinedReplica": (PipelinedReplica, {"policy": Batching}),
}
"""A machine's class, and the kinds of those of its parameters that are more than numbers."""


class Mismatch(Struct, frozen=True):
    """The first event after which a fresh machine wanted something else than the logged one.

    Attributes:
        number: of the machine's events, from 1.
        expected: the logged actions.
        actual: what the fresh machine wanted, or the error that it raised.
    """

    machine: MachineId
    number: int
    now: Nanos
    event: AnyEvent
    expected: Sequence[AnyAction]
    actual: Sequence[AnyAction] | str

    def __str__(self) -> str:
        where = f"{name(self.machine)}, event {self.number}, at {self.now} ns: {self.event}"
        return f"{where}\n  expected {_listed(self.expected)}\n  actual   {_listed(self.actual)}"


class Observation(Struct):
    """What was checked, and what differed.

    Attributes:
        num_events: reproduced exactly, of each machine (over all its lives).
        mismatches: at most one for each life of a machine: after the first its state is another one, and it is not asked further.
    """

    num_events: dict[MachineId, int] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not self.mismatches


def observe(records: Iterable[Record], make: Callable[[Created], Machine] | None = None) -> Observation:
    """Feed the records of a log (`eventlog.read`, `read_merged`) to fresh machines.

    Args:
        records: a machine's own in the order in which they happened.
        make: makes a machine; `rebuild` where none is given.

    Raises:
        ConfigError: a machine acts that the log does not tell how to make.
    """
    make = make or rebuild
    machines: dict[MachineId, Machine | None] = {}
    observation = Observation()
    for record in records:
        if record.created is not None:
            made = machines[record.machine] = make(record.created)
            if isinstance(made, Controller) and isinstance(router := machines.get(ROUTER), Router):
                made.traffic = router  # whose counts it reads
        if record.event is None:
            continue
        if record.machine not in machines:
            raise ConfigError(
                f"event log: {name(record.machine)} acts at {record.now} ns, but how it was made is not logged before"
            )
        machine = machines[record.machine]
        if machine is None:
            continue
        number = observation.num_events.setdefault(record.machine, 0)
        actual = _ask(machine, record.event, record.now)
        if actual == list(record.actions):
            observation.num_events[record.machine] = number + 1
        else:
            machines[record.machine] = None
            observation.mismatches.append(Mismatch(record.machine, number + 1, record.now, record.event, record.actions, actual))
    return observation


def rebuild(created: Created) -> Machine:
    """A machine as it was when it was logged.

    Raises:
        ConfigError: its kind, its policy or its parameters are not known here.
    """
    if created.kind not in KINDS:
        raise ConfigError(f"event log: unknown machine {created.kind!r}; one of {', '.join(KINDS)}")
    machine, structured = KINDS[created.kind]
    parameters = dict(created.parameters)
    try:
        for name, kinds in structured.items():
            parameters[name] = _struct(parameters[name], kinds)
        return machine(**parameters)
    except (KeyError, TypeError, AttributeError, ImportError, msgspec.ValidationError) as error:
        raise ConfigError(f"event log: {created.kind} of {created.parameters} cannot be made: {error}") from None


def _struct(table: dict[str, Any] | None, kinds: Any) -> Any:
    module, colon, attribute = str((table or {}).get("kind", "")).partition(":")
    if table is None or not colon:
        return msgspec.convert(table, kinds)
    fields = {key: value for key, value in table.items() if key != "kind"}
    return msgspec.convert(fields, getattr(importlib.import_module(module), attribute))


def _ask(machine: Machine, event: AnyEvent, now: Nanos) -> list[AnyAction] | str:
    try:
        return machine.handle(event, now)
    except Exception as error:  # a machine that is in another state than the logged one may well raise
        return f"{type(error).__name__}: {error}"


def name(machine: MachineId) -> str:
    """For people."""
    return {ROUTER: "the router", CONTROLLER: "the controller"}.get(machine, f"replica {machine}")


def _listed(actions: Sequence[AnyAction] | str) -> str:
    return actions if isinstance(actions, str) else ", ".join(map(str, actions)) or "nothing"
