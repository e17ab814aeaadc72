"""What share of their links flows get: max-min fair, by progressive filling.

Knows links, the flows on them and which flow follows which; no time passes here, and nothing starts or ends (`sim.network`).
Amounts are nanobytes and rates whole bytes a second.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heapreplace
from operator import attrgetter
from typing import Final

from squall.core.types import Nanos

FlowId = int

Progress = list[tuple[Nanos, int, int]]
"""Of a flow: from each instant on, with what it had moved by then (nanobytes), at which rate."""

NANO: Final = 1_000_000_000
UNLIMITED: Final = 1 << 80
"""Bytes a second of a path without links: within one memory."""


class Link:
    """One direction of a link.

    Attributes:
        bandwidth: whole bytes a second; 0 while it is broken.
        flows: in order of arrival; `demand`: what they would take if each were alone. One with enough for that slows nobody down.
        rate, moved: of all its flows together, and nanobytes until `at`, where that is recorded.
        series: (instant, rate, number of flows) from each change on, where they are recorded.
    """

    __slots__ = ("at", "bandwidth", "demand", "flows", "moved", "name", "rate", "series")

    def __init__(self, name: str, bandwidth: int) -> None:
        self.name = name
        self.bandwidth = bandwidth
        self.rate = 0
        self.moved = 0
        self.at: Nanos = 0
        self.flows: dict[Flow, None] = {}
        self.demand = 0
        self.series: list[tuple[Nanos, int, int]] = []


class Flow:
    """See `Network.start`. Amounts in nanobytes.

    Attributes:
        targets: what is to be reported when it has arrived, in ascending order; the last is all of it.
        lag: how much of the upstream must be there before this one starts, and stays ahead of it.
        tied: it has caught up with the upstream and is no faster.
        narrowest: the least bandwidth on its path.
        progress: how far it was when, where that is recorded.
    """

    __slots__ = ("at", "due", "followers", "id", "lag", "moved", "narrowest", "path", "progress", "rate", "reached", "started",
                 "targets", "tied", "upstream")  # fmt: skip

    def __init__(
        self, id: FlowId, path: tuple[Link, ...], narrowest: int, targets: list[int], upstream: Flow | None, lag: int, now: Nanos
    ) -> None:  # fmt: skip
        self.id = id
        self.path = path
        self.targets = targets
        self.upstream = upstream
        self.lag = lag
        self.followers: list[Flow] = []
        self.narrowest = narrowest
        self.started = False
        self.tied = False
        self.reached = 0  # of the targets
        self.moved = 0  # until `at`
        self.at = now
        self.rate = 0
        self.due: Nanos | None = None  # the next thing that happens to it
        self.progress: Progress = []

    def settle(self, now: Nanos) -> None:
        self.moved += self.rate * (now - self.at)
        self.at = now

    def next_due(self) -> Nanos | None:
        """When something happens to it, if no rate changes. It and its upstream may have been settled at different instants."""
        upstream = self.upstream
        if upstream is None:  # it has started: who has nobody to wait for does so at once
            left = self.targets[self.reached] - self.moved
            return self.at if left <= 0 else self.at - -left // self.rate if self.rate else None
        if not self.started:
            return upstream.reaches(self.lag)
        due = self.reaches(self.targets[self.reached])
        if self.tied or self.rate <= upstream.rate:
            return due
        at = max(self.at, upstream.at)
        ahead = upstream.moved + upstream.rate * (at - upstream.at) - self.moved - self.rate * (at - self.at) - self.lag
        caught = at + max(-(-ahead // (self.rate - upstream.rate)), 0)
        return caught if due is None or caught < due else due

    def reaches(self, amount: int) -> Nanos | None:
        if amount <= self.moved:
            return self.at
        return self.at - (self.moved - amount) // self.rate if self.rate else None


def narrowest(path: tuple[Link, ...]) -> int:
    """The least bandwidth of it."""
    least = UNLIMITED
    for link in path:
        if link.bandwidth < least:
            least = link.bandwidth
    return least


def fair_rates(flows: Collection[Flow]) -> dict[Flow, int]:
    """Max-min fair rates by progressive filling: all grow together; where a link is full, those on it have their share.

    A flow that is tied to its upstream stops growing with it, and does not begin to while that one waits for its own start.
    (Bertsekas and Gallager, Data Networks, section 6.5.2.)
    """
    if len(flows) == 1:  # nobody to share with
        [flow] = flows
        return {flow: flow.narrowest}
    growing = dict.fromkeys(flows)
    rates: dict[Flow, int] = {}
    rooms: dict[Link, Room] = {}
    waiting: list[Flow] = []
    for flow in growing:
        if not flow.started:
            waiting.append(flow)
            continue
        for link in flow.path:
            if link.demand > link.bandwidth:
                room = rooms.get(link)
                if room is None:
                    rooms[link] = [link.bandwidth, 1]
                else:
                    room[1] += 1
    for flow in waiting:
        _stop(flow, 0, growing, rates, rooms)
    shares = [(left // number, place, link) for place, (link, (left, number)) in enumerate(rooms.items())]
    heapify(shares)
    slowest_first, at = sorted(growing, key=attrgetter("narrowest")), 0
    while growing:
        full, level = _fullest(shares, rooms)
        before = at
        while at < len(slowest_first) and slowest_first[at].narrowest <= level:  # these leave the links no fuller for the others
            _stop(slowest_first[at], slowest_first[at].narrowest, growing, rates, rooms)
            at += 1
        if full is not None and at == before:
            for flow in full.flows:
                if flow in growing:
                    _stop(flow, level, growing, rates, rooms)
    return rates


Room = list[int]
"""Of a link: the bytes a second that are left for flows that still grow, and how many these are."""


def _fullest(shares: list[tuple[int, int, Link]], rooms: dict[Link, Room]) -> tuple[Link | None, int]:
    """The link whose growing flows get least, and what each gets. `shares` is a heap with old shares, which only ever grow."""
    while shares:
        share, place, link = shares[0]
        left, number = rooms[link]
        if not number:
            heappop(shares)
        elif left // number > share:
            heapreplace(shares, (left // number, place, link))
        else:
            return link, share
    return None, UNLIMITED


def _stop(flow: Flow, level: int, growing: dict[Flow, None], rates: dict[Flow, int], rooms: dict[Link, Room]) -> None:
    """It has its rate, and those that are tied to it grow no more."""
    stopping = [flow]
    for stopped in stopping:
        if stopped not in growing:
            continue
        del growing[stopped]
        rates[stopped] = level
        for link in stopped.path if stopped.started else ():
            if (room := rooms.get(link)) is not None:
                room[0] -= level
                room[1] -= 1
        if stopped.followers:
            stopping += [follower for follower in stopped.followers if follower.tied]
