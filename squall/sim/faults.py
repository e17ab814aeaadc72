"""What goes wrong in a simulation: the script of `[[faults]]`, and chance (`[hazards]`).

Strikes through the loader, which knows what is there. Its dice are its own; the same seed breaks the same things.
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
from squall.fleet_tables import Fault, Hazards
from squall.sim.loading import Loader

HOUR = 3600 * SECOND


class Stroke(NamedTuple):
    """Something that is to happen.

    Attributes:
        what: "notice", "replica", "node", "up", "link", "slow", and "link over", "slow over".
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
        self._dice = Random(f"faults {seed}")
        self._number = 0
        self._strokes: list[Stroke] = []
        for fault in script:
            self._plan(fault, _nanos(fault.at_s))
        heapify(self._strokes)
        self._nodes = slots.node(slots.num - 1) + slots.nodes_per_slot if slots.num else 0
        self._down: set[int] = set()
        self._factors: dict[tuple[str, int], list[float]] = {}  # that hold now, of a node's links or a replica's steps
        self._whole: dict[str, int] = {}  # bandwidths of links as they were
        self._roll("replica", slots.num * hazards.replica_per_hour, 0)
        self._roll("node", self._nodes * hazards.node_per_hour, 0)

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
            case "link" | "link over" if loader.roads is not None:
                factor = self._factor("link", stroke)
                network = loader.roads.network
                for name, link in list(network.links.items()):
                    if name.startswith(f"node{stroke.which}."):
                        whole = self._whole.setdefault(name, link.bandwidth)
                        network.set_bandwidth(name, whole * factor, now)
                for each, _ in self._everybody(loader):
                    each.links_changed(now)
            case "slow" | "slow over":
                self.set_speed(stroke.which, self._factor("slow", stroke), now)
            case "replica by chance":
                self._roll("replica", self._slots.num * self._hazards.replica_per_hour, now)
                loader.kill(self._dice.randrange(self._slots.num), "a random fault", now)
            case "node by chance":
                self._roll("node", self._nodes * self._hazards.node_per_hour, now)
                node = self._dice.randrange(self._nodes)
                if node not in self._down:
                    hazards = self._hazards
                    self._plan(Fault(0, "node", node, hazards.node_back_s, hazards.notice_s), now)

    def _everybody(self, loader: Loader) -> Sequence[tuple[Loader, Slots]]:
        return ((loader, self._slots), *self.neighbours)

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

    def _roll(self, what: str, per_hour: float, now: Nanos) -> None:
        """When chance strikes next: exponentially distributed."""
        if per_hour:
            at = now + round(self._dice.expovariate(per_hour) * HOUR)
            self._push(at, f"{what} by chance", Fault(0, "replica", 0))


def _nanos(seconds: float) -> Nanos:
    return round(seconds * SECOND)
