"""What goes wrong in a simulation: the script of `[[faults]]`, and chance (`[hazards]`).

Strikes through the loader, which knows what is there. Its dice are its own, and each hazard has some for itself: the same seed
breaks the same things, whatever else may break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import prod
from random import Random
from typing import NamedTuple

from squall.core.events import NodeDown, NodeUp
from squall.core.fleet_plan import Slots
from squall.core.types import SECOND, Nanos, ReplicaId
from squall.fleet_tables import SLOWEST, Fault, Hazards
from squall.sim.loading import Loader

HOUR = 3600 * SECOND
HAZARDS = tuple(name for name in Hazards.__struct_fields__ if name.endswith("_per_hour"))


class Stroke(NamedTuple):
    """Something that is to happen.

    Attributes:
        what: "notice", "replica", "node", "up", "link", "slow", "link over", "slow over", or a hazard.
    """

    at: Nanos
    number: int
    what: str
    which: int
    fault: Fault


class Faults:
    """Satisfies `loading.Breaker`.

    On a cluster that several fleets share, those of one of them break nodes and links, for all: the `neighbours` are hit, too.

    Args:
        script: what happens when.
        hazards: what may happen at any time.
        slots: which replica is on which node.
        seed: of the dice.
        set_speed: tells that a replica's steps run at so much of their speed.

    Attributes:
        neighbours: the other fleets' loaders and slots.
    """

    def __init__(
        self,
        script: Sequence[Fault],
        hazards: Hazards,
        slots: Slots,
        seed: int,
        set_speed: Callable[[ReplicaId, float, Nanos], None] = lambda *_: None,
    ) -> None:
        self.set_speed = set_speed
        self.neighbours: Sequence[tuple[Loader, Slots]] = ()
        self._hazards = hazards
        self._slots = slots
        self._number = 0
        self._strokes: list[Stroke] = []
        for fault in script:
            self._plan(fault, _nanos(fault.at_s))
        heapify(self._strokes)
        self._nodes = slots.node(slots.num - 1) + slots.nodes_per_slot if slots.num else 0
        self._down: set[int] = set()
        self._factors: dict[tuple[str, int], list[float]] = {}  # that hold now, of a node's links or a replica's steps
        self._whole: dict[str, int] = {}  # bandwidths of links as they were
        self._dice = {hazard: Random(f"faults {seed} {hazard}") for hazard in HAZARDS}
        for hazard in HAZARDS:
            self._roll(hazard, 0)

    def next_at(self) -> Nanos | None:
        return self._strokes[0].at if self._strokes else None

    def strike(self, loader: Loader, now: Nanos) -> None:
        while self._strokes and self._strokes[0].at <= now:
            stroke = heappop(self._strokes)
            self._strike(stroke, loader, now)

    def _strike(self, stroke: Stroke, loader: Loader, now: Nanos) -> None:
        fault = stroke.fault
        match stroke.what:
            case "notice":
                for each, _ in self._everybody(loader):
                    each.tell(NodeDown(stroke.which, now + _nanos(fault.notice_s)), now)
            case "replica":
                loader.kill(stroke.which, "a fault", now)
            case "node":
                self._down.add(stroke.which)
                for each, slots in self._everybody(loader):
                    each.tell(NodeDown(stroke.which, now), now)
                    for replica in [id for id in sorted(each.held) if stroke.which in slots.nodes(id)]:
                        each.kill(replica, f"node {stroke.which} is gone", now)
                    each.lose_host(stroke.which, now)
            case "up":
                self._down.discard(stroke.which)
                for each, _ in self._everybody(loader):
                    each.tell(NodeUp(stroke.which), now)
            case "link" | "link over":
                self._change_links(stroke, loader, now)
            case "slow" | "slow over":
                self._factor("slow", stroke)
                self.began(stroke.which, now)
            case _:
                self._roll(stroke.what, now)
                self._chance(stroke.what, loader, now)

    def _change_links(self, stroke: Stroke, loader: Loader, now: Nanos) -> None:
        factor = self._factor("link", stroke)
        if loader.roads is None:
            return
        network = loader.roads.network
        for name, link in list(network.links.items()):
            if name.startswith(f"node{stroke.which}."):
                whole = self._whole.setdefault(name, link.bandwidth)
                network.set_bandwidth(name, whole * factor, now)
        for each, _ in self._everybody(loader):
            each.links_changed(now)

    def _chance(self, hazard: str, loader: Loader, now: Nanos) -> None:
        """What is drawn depends on nothing that happens: chance would be another one with every change of the fleet."""
        dice, hazards = self._dice[hazard], self._hazards
        which = dice.randrange(self._num(hazard))
        match hazard:
            case "replica_per_hour":
                loader.kill(which, "a random fault", now)
            case "node_per_hour" if which not in self._down:
                self._plan(Fault(0, "node", which, hazards.node_back_s, hazards.notice_s), now)
            case "link_lost_per_hour":
                self._plan(Fault(0, "link", which, _lasting(dice, hazards.link_lost_s), factor=0.0), now)
            case "link_per_hour":
                self._plan(Fault(0, "link", which, _lasting(dice, hazards.link_s), factor=hazards.link_factor), now)
            case "slow_per_hour":
                self._plan(Fault(0, "slow", which, _lasting(dice, hazards.slow_s), factor=hazards.slow_factor), now)

    def _num(self, hazard: str) -> int:
        """Of things that it may strike."""
        return self._slots.num if hazard in ("replica_per_hour", "slow_per_hour") else self._nodes

    def _everybody(self, loader: Loader) -> Sequence[tuple[Loader, Slots]]:
        return ((loader, self._slots), *self.neighbours)

    def began(self, replica: ReplicaId, now: Nanos) -> None:
        """Whatever runs in its place is as slow as that."""
        if (factors := self._factors.get(("slow", replica))) is not None:
            self.set_speed(replica, max(prod(factors), 1 / SLOWEST), now)

    def _factor(self, kind: str, stroke: Stroke) -> float:
        """How much of its speed is left, of all faults that last together; exactly 1 where none does."""
        factors = self._factors.setdefault((kind, stroke.which), [])
        if stroke.what == kind:
            factors.append(stroke.fault.factor)
        else:
            factors.remove(stroke.fault.factor)
        return prod(factors)

    def _plan(self, fault: Fault, at: Nanos) -> None:
        """All that belongs to one fault."""
        until = None if fault.duration_s is None else at + _nanos(fault.notice_s) + _nanos(fault.duration_s)
        match fault.kind:
            case "replica":
                self._push(at, "replica", fault)
            case "node":
                if fault.notice_s:
                    self._push(at, "notice", fault)
                self._push(at + _nanos(fault.notice_s), "node", fault)
                if until is not None:
                    self._push(until, "up", fault)
            case "link" | "slow":
                self._push(at, fault.kind, fault)
                if until is not None:
                    self._push(until, f"{fault.kind} over", fault)

    def _push(self, at: Nanos, what: str, fault: Fault) -> None:
        self._number += 1
        heappush(self._strokes, Stroke(at, self._number, what, fault.which, fault))

    def _roll(self, hazard: str, now: Nanos) -> None:
        """When it strikes next: exponentially distributed."""
        if per_hour := self._num(hazard) * getattr(self._hazards, hazard):
            self._push(now + round(self._dice[hazard].expovariate(per_hour) * HOUR), hazard, Fault(0, "replica", 0))


def _lasting(dice: Random, mean_s: float) -> float:
    return max(dice.expovariate(1 / mean_s), 1 / SECOND)


def _nanos(seconds: float) -> Nanos:
    return round(seconds * SECOND)
