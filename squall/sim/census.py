"""How many replicas of each role a simulated fleet has had and why, how long new ones took, and on a shared cluster its GPUs.

Knows no policy and decides nothing.
"""

from __future__ import annotations

from squall.core.actions import AnyAction, Decided, LoadWeights
from squall.core.controller import Controller
from squall.core.events import AnyEvent, Warmed, WeightsLoaded
from squall.core.fleet_view import Transfer
from squall.core.metrics import Decision, Delivery, FleetUse, GpuLevel, RoleUse, weights_delivered
from squall.core.types import Nanos, ReplicaId, Role
from squall.sim.loading import Delays


class Census:
    """The controller, counted after every event. A machine as it is itself.

    Args:
        delays: of the phases of its replicas; weights take the rest of the time until they are ready.

    Attributes:
        decisions: that it took.
        mocked: loads that took a fixed time, of which no network knows.
    """

    def __init__(self, controller: Controller, delays: Delays) -> None:
        self.wake_at = controller.wake_at
        self.decisions: list[Decision] = []
        self.mocked: list[Delivery] = []
        self._mocks: dict[ReplicaId, tuple[Transfer, Nanos]] = {}
        self._controller = controller
        self._counted_at: Nanos = 0
        self._now = dict.fromkeys(controller.states, 0)
        self._fewest: dict[Role, int] = {}
        self._most = dict.fromkeys(controller.states, 0)
        self._sum = dict.fromkeys(controller.states, 0)  # of replicas times nanoseconds
        self._delays = delays
        self._ready_after: list[Nanos] = []
        self._shares = controller.plan.slots.shared is not None
        self._gpus: list[GpuLevel] = []

    def handle(self, event: AnyEvent, now: Nanos) -> list[AnyAction]:
        actions = self._controller.handle(event, now)
        self.wake_at = self._controller.wake_at
        if actions:
            self._remember(actions, now)
        counted = {role: len(state.ready) for role, state in self._controller.states.items()}
        if counted != self._now:
            self._count(counted, now)
        if self._shares:
            self._look_at_gpus(now)
        if type(event) is Warmed:
            member = self._controller.fleet[event.replica]
            if member.launched_at and not member.stopping:
                self._ready_after.append(now - member.launched_at)
        elif type(event) is WeightsLoaded and event.replica in self._mocks:
            transfer, since = self._mocks.pop(event.replica)
            if now > since:  # else it was there from the beginning
                self.mocked.append(weights_delivered(event.replica, transfer, 0, since, now - since))
        return actions

    def _remember(self, actions: list[AnyAction], now: Nanos) -> None:
        for action in actions:
            if type(action) is Decided:
                self.decisions.append(Decision(now, action.role.value, action.before, action.after, action.why))
            elif type(action) is LoadWeights and action.transfer.kind == "mock":
                self._mocks[action.replica] = action.transfer, now

    def _look_at_gpus(self, now: Nanos) -> None:
        held, awaited = self._controller.gpus
        if self._gpus and (self._gpus[-1].held, self._gpus[-1].awaited) == (held, awaited):
            return
        if self._gpus and self._gpus[-1].at == now:
            self._gpus.pop()
        self._gpus.append(GpuLevel(now, held, awaited))

    def _count(self, counted: dict[Role, int], now: Nanos) -> None:
        """The count until now lasted until now. One that lasted no time was never there."""
        if now > self._counted_at:
            for role, count in self._now.items():
                self._sum[role] += count * (now - self._counted_at)
                self._fewest[role] = min(count, self._fewest.get(role, count))
                self._most[role] = max(count, self._most[role])
        self._counted_at, self._now = now, counted

    def use(self, now: Nanos) -> FleetUse:
        """Until now, which ends the run."""
        self._count(self._now, now)
        roles = (
            RoleUse(role.value, self._fewest.get(role, 0), self._sum[role] / now if now else 0.0, self._most[role])
            for role in self._now
        )
        ready = tuple(self._ready_after)
        return FleetUse(tuple(roles), ready, tuple(self._gpus), self._controller.capacity, self._phases(ready))

    def _phases(self, ready_after: tuple[Nanos, ...]) -> dict[str, Nanos]:
        delays, num = self._delays, len(ready_after)
        weights = sum(ready_after) - num * (delays.start + delays.warm)
        each = {"process": delays.process, "context": delays.context, "capture": delays.capture, "jit": delays.jit}
        together = {phase: num * time for phase, time in each.items()} | {"weights": weights}
        return {phase: together[phase] for phase in ("process", "context", "weights", "capture", "jit")} if num else {}
