"""Bytes on links that are shared: every flow gets its max-min fair share, worked out anew where flows begin and end.

A flow crosses all links of its path at one rate. A *follower* forwards what its upstream flow has brought, one chunk behind it,
and no faster than that brings more once it has caught up: a chain of n hops ends n - 1 chunks after the first of them, without
an event for each chunk. Time is integer nanoseconds, amounts are nanobytes (a rate of one byte a second moves one in a
nanosecond) and rates whole bytes a second, so that nothing is lost and every run is the same.

Knows no topology (`sim.fabric` has links and paths), no weights and no KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from squall.core.types import Nanos

FlowId = int

NANO: Final = 1_000_000_000
UNLIMITED: Final = 1 << 80
"""Bytes a second of a path without links: within one memory."""


class Arrived(NamedTuple):
    """`num_bytes` of a flow are there: one of its marks, or (`ended`) all of it."""

    at: Nanos
    flow: FlowId
    num_bytes: int
    ended: bool


class Link:
    """One direction of a link.

    Attributes:
        bandwidth: whole bytes a second; 0 while it is broken.
        rate: of all its flows together.
        series: (instant, rate) from each change of the rate on, where they are recorded.
    """

    __slots__ = ("at", "bandwidth", "demand", "flows", "moved", "name", "rate", "series")

    def __init__(self, name: str, bandwidth: int) -> None:
        self.name = name
        self.bandwidth = bandwidth
        self.rate = 0
        self.moved = 0  # nanobytes, until `at`
        self.at: Nanos = 0
        self.flows: dict[Flow, None] = {}  # in order of arrival
        self.demand = 0  # what they would take if each were alone; a link with enough for that slows nobody down
        self.series: list[tuple[Nanos, int]] = []


class Flow:
    """See `Network.start`. Amounts in nanobytes.

    Attributes:
        targets: what is to be reported when it has arrived, in ascending order; the last is all of it.
        lag: how much of the upstream must be there before this one starts, and stays ahead of it.
        tied: it has caught up with the upstream and is no faster.
        narrowest: the least bandwidth on its path.
    """

    __slots__ = ("at", "due", "followers", "id", "lag", "moved", "narrowest", "path", "rate", "reached", "started", "targets",
                 "tied", "upstream")  # fmt: skip

    def __init__(self, id: FlowId, path: tuple[Link, ...], targets: list[int], upstream: Flow | None, lag: int) -> None:
        self.id = id
        self.path = path
        self.targets = targets
        self.upstream = upstream
        self.lag = lag
        self.followers: list[Flow] = []
        self.narrowest = min((link.bandwidth for link in path), default=UNLIMITED)
        self.started = False
        self.tied = False
        self.reached = 0  # of the targets
        self.moved = 0  # until `at`
        self.at: Nanos = 0
        self.rate = 0
        self.due: Nanos | None = None  # the next thing that happens to it

    def settle(self, now: Nanos) -> None:
        self.moved += self.rate * (now - self.at)
        self.at = now

    def next_due(self) -> Nanos | None:
        """When something happens to it, if no rate changes. It and its upstream may have been settled at different instants."""
        upstream = self.upstream
        if not self.started:
            return None if upstream is None else upstream.reaches(self.lag)
        due = self.reaches(self.targets[self.reached])
        if upstream is None or self.tied or self.rate <= upstream.rate:
            return due
        at = max(self.at, upstream.at)
        ahead = upstream.moved + upstream.rate * (at - upstream.at) - self.moved - self.rate * (at - self.at) - self.lag
        caught = at + max(-(-ahead // (self.rate - upstream.rate)), 0)
        return caught if due is None or caught < due else due

    def reaches(self, amount: int) -> Nanos | None:
        if amount <= self.moved:
            return self.at
        return self.at - (self.moved - amount) // self.rate if self.rate else None


class Network:
    """Links, and the flows on them.

    Args:
        links: bytes a second of each; less than one is none.
        record: keep for each link how its rate changed.
    """

    __slots__ = ("_arrived", "_flows", "_heap", "_links", "_now", "_number", "_record")

    def __init__(self, links: Mapping[str, float], record: bool = False) -> None:
        for name, bandwidth in links.items():
            if not bandwidth >= 0:
                raise ValueError(f"link {name}: its bandwidth must be at least 0 bytes/s, not {bandwidth}")
        self._links = {name: Link(name, int(bandwidth)) for name, bandwidth in links.items()}
        self._flows: dict[FlowId, Flow] = {}
        self._heap: list[tuple[Nanos, int, Flow]] = []
        self._number = 0
        self._now: Nanos = 0
        self._arrived: list[Arrived] = []
        self._record = record

    # -- what may be asked

    @property
    def links(self) -> Mapping[str, Link]:
        return self._links

    def rate(self, flow: FlowId) -> int:
        """Bytes a second now; 0 for one that waits for its upstream, or is none of the network's (any more)."""
        return self._flows[flow].rate if flow in self._flows else 0

    def arrived(self, flow: FlowId) -> int:
        """Whole bytes that have come, as of the latest instant that the network was told."""
        known = self._flows[flow]
        return (known.moved + known.rate * (self._now - known.at)) // NANO

    def expected_at(self, flow: FlowId, num_bytes: int) -> Nanos | None:
        """When so many bytes will be there, if nothing changes; None where that is never, or waits for an upstream."""
        known = self._flows[flow]
        at = known.reaches(num_bytes * NANO)
        return None if at is None else max(at, self._now)

    def moved(self, link: str) -> int:
        """Nanobytes that the link has carried until now."""
        known = self._links[link]
        return known.moved + known.rate * (self._now - known.at)

    def next_end(self) -> Nanos | None:
        """When `advance` is to be called next: something arrives, or shares change of themselves. None: never."""
        heap = self._heap
        while heap and heap[0][2].due != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    # -- what may happen

    def start(
        self, flow: FlowId, path: Sequence[str], num_bytes: int, now: Nanos, *, marks: Sequence[int] = (),
        after: FlowId | None = None, chunk: int = 0,
    ) -> None:  # fmt: skip
        """A flow begins.

        Args:
            flow: a number that no flow of the network has.
            path: the links that it crosses, each once; none where it stays within one memory.
            num_bytes: at least 1.
            marks: ascending numbers of bytes, at most `num_bytes`, that are reported, too, when they have come.
            after: the upstream flow whose bytes it forwards; one that has ended has brought them all.
            chunk: it starts when so many bytes of the upstream are there, and stays so far behind it. Less than 0 where the
                upstream began so many bytes after what this one brings.
        """
        self._run(now)
        if flow in self._flows:
            raise ValueError(f"there is a flow {flow} already")
        if num_bytes < 1 or any(mark < 1 or mark > num_bytes for mark in marks) or list(marks) != sorted(marks):
            raise ValueError(f"flow {flow}: num_bytes must be at least 1 and its marks ascend to it, not {num_bytes} and {marks}")
        upstream = self._flows.get(after) if after is not None else None
        links = tuple(self._links[name] for name in path)
        targets = [mark * NANO for mark in marks] + [num_bytes * NANO]
        new = self._flows[flow] = Flow(flow, links, targets, upstream, chunk * NANO)
        new.at = now
        if upstream is None:
            self._open(new)
            return
        upstream.followers.append(new)
        self._schedule(new)

    def cancel(self, flow: FlowId, now: Nanos) -> dict[FlowId, int]:
        """End it, and those that follow it, which have no source any more; returns the whole bytes that each has brought.

        Nothing is reported of them from now on; what has arrived until now is.
        """
        self._run(now)
        ended: dict[FlowId, int] = {}
        leaving = [self._flows[flow]] if flow in self._flows else []
        while leaving:
            gone = leaving.pop()
            leaving += gone.followers
            ended[gone.id] = self._close(gone) // NANO
        return ended

    def set_bandwidth(self, link: str, bandwidth: float, now: Nanos) -> None:
        """The link slows down, breaks (0) or recovers. Flows on a broken link stand still until it does, or are cancelled."""
        if not bandwidth >= 0:
            raise ValueError(f"link {link}: its bandwidth must be at least 0 bytes/s, not {bandwidth}")
        self._run(now)
        changed = self._links[link]
        concerned = self._concerned(changed.flows)
        changed.bandwidth = int(bandwidth)
        for flow in changed.flows:
            narrowest = min(on.bandwidth for on in flow.path)
            for on in flow.path:
                on.demand += narrowest - flow.narrowest
            flow.narrowest = narrowest
        for waiting in self._flows.values():
            if not waiting.started and changed in waiting.path:
                waiting.narrowest = min(on.bandwidth for on in waiting.path)
        self._share(self._concerned(concerned))

    def advance(self, now: Nanos) -> list[Arrived]:
        """Let time pass until `now`, which never decreases; returns what has arrived since the last call, in order."""
        self._run(now)
        arrived, self._arrived = self._arrived, []
        return arrived

    # -- time

    def _run(self, now: Nanos) -> None:
        if now < self._now:
            raise ValueError(f"time goes back from {self._now} to {now}")
        while (due := self.next_end()) is not None and due <= now:
            _, _, flow = heappop(self._heap)
            flow.due = None
            self._now = due
            self._happens(flow)
        self._now = now

    def _happens(self, flow: Flow) -> None:
        """Its start, a target or the end, or that it has caught up with its upstream."""
        if not flow.started:
            self._open(flow)
            return
        flow.settle(self._now)
        while flow.reached < len(flow.targets) and flow.moved >= flow.targets[flow.reached]:
            target = flow.targets[flow.reached]
            flow.reached += 1
            self._arrived.append(Arrived(self._now, flow.id, target // NANO, flow.reached == len(flow.targets)))
        if flow.reached == len(flow.targets):
            self._close(flow)
            return
        upstream = flow.upstream
        if upstream is not None and not flow.tied and flow.rate > upstream.rate:
            upstream.settle(self._now)
            if upstream.moved - flow.moved <= flow.lag:
                flow.tied = True
                self._share(self._concerned((flow,)))
        self._schedule(flow)

    def _schedule(self, flow: Flow) -> None:
        due = flow.next_due()
        if due is not None and due < self._now:
            due = self._now
        if due != flow.due:
            flow.due = due
            if due is not None:
                self._number += 1
                heappush(self._heap, (due, self._number, flow))

    def _open(self, flow: Flow) -> None:
        """It takes its place on its links."""
        flow.started = True
        flow.at = self._now
        if flow.upstream is not None:
            flow.upstream.settle(self._now)
            flow.tied = flow.upstream.moved <= flow.lag
        for link in flow.path:
            link.flows[flow] = None
            link.demand += flow.narrowest
        if flow.tied or is_narrow(flow.path):
            self._share(self._concerned((flow,)))
            return
        flow.rate = flow.narrowest  # what most flows of a calm network get, at the least cost
        self._add_rate(flow.path, flow.rate)
        self._schedule(flow)
        for follower in flow.followers:
            self._schedule(follower)

    def _close(self, flow: Flow) -> int:
        """It leaves the network; returns the nanobytes that it has moved, of which none is more than it had."""
        flow.settle(self._now)
        beyond = max(flow.moved - flow.targets[-1], 0)  # ends are whole nanoseconds: of the last one a part is not needed
        flow.moved -= beyond
        concerned: dict[Flow, None] = {}
        if flow.upstream is not None:
            flow.upstream.followers.remove(flow)
        if flow.started:
            if flow.followers or is_narrow(flow.path):
                concerned = self._concerned((flow,))
                del concerned[flow]
            self._add_rate(flow.path, -flow.rate)
            for link in flow.path:
                del link.flows[flow]
                link.demand -= flow.narrowest
                link.moved -= beyond
        flow.due = None
        flow.rate = 0
        del self._flows[flow.id]
        for follower in flow.followers:
            follower.upstream = None
            follower.tied = False
        for follower in flow.followers:
            if not follower.started:
                self._open(follower)  # the upstream had less than a chunk
            elif follower not in concerned:
                self._schedule(follower)
        if concerned:
            self._share(self._concerned(concerned))
        return flow.moved

    # -- shares

    def _concerned(self, flows: Iterable[Flow]) -> dict[Flow, None]:
        """Those, and all whose shares may depend on theirs: over links that are too narrow for all, and along chains."""
        found: dict[Flow, None] = dict.fromkeys(flows)
        queue = list(found)
        for flow in queue:
            for link in flow.path:
                if link.demand > link.bandwidth:
                    for other in link.flows:
                        if other not in found:
                            found[other] = None
                            queue.append(other)
            for follower in flow.followers:
                if follower.tied and follower not in found:
                    found[follower] = None
                    queue.append(follower)
            if flow.tied and flow.upstream is not None and flow.upstream not in found:
                found[flow.upstream] = None
                queue.append(flow.upstream)
        return found

    def _share(self, flows: dict[Flow, None]) -> None:
        """Set the rates of `flows`, a closed set: nobody else shares a narrow link with them."""
        rates = fair_rates(flows)
        for flow, rate in rates.items():
            if rate != flow.rate:
                flow.settle(self._now)
                self._add_rate(flow.path, rate - flow.rate)
                flow.rate = rate
        for flow in rates:
            if flow.tied and flow.upstream is not None and flow.rate < flow.upstream.rate:
                flow.tied = False  # it falls behind, and may be faster for a while afterwards
            self._schedule(flow)
            for follower in flow.followers:
                if follower not in rates:
                    self._schedule(follower)

    def _add_rate(self, path: tuple[Link, ...], rate: int) -> None:
        now = self._now
        for link in path:
            link.moved += link.rate * (now - link.at)
            link.at = now
            link.rate += rate
        if self._record:
            for link in path:
                if link.series and link.series[-1][0] == now:
                    link.series.pop()
                link.series.append((now, link.rate))


def is_narrow(path: tuple[Link, ...]) -> bool:
    """Whether one of the links cannot give all its flows what they would take alone."""
    for link in path:  # noqa: SIM110 - a loop is faster than a generator, and this is asked for every flow
        if link.demand > link.bandwidth:
            return True
    return False


def fair_rates(flows: Iterable[Flow]) -> dict[Flow, int]:
    """Max-min fair rates by progressive filling: all grow together; where a link is full, those on it have their share.

    A flow that is tied to its upstream stops growing with it. (Bertsekas and Gallager, Data Networks, section 6.5.2.)
    """
    growing = dict.fromkeys(flows)
    rates: dict[Flow, int] = {}
    if len(growing) == 1:  # nobody to share with
        [flow] = growing
        return {flow: flow.narrowest}
    left: dict[Link, int] = {}
    sharing: dict[Link, int] = {}
    for flow in growing:
        for link in flow.path:
            if link.demand > link.bandwidth:
                left[link] = link.bandwidth
                sharing[link] = sharing.get(link, 0) + 1
    shares = [(left[link] // number, place, link) for place, (link, number) in enumerate(sharing.items())]
    heapify(shares)
    slowest_first, at = sorted(growing, key=_narrowest), 0
    while growing:
        full, level = _fullest(shares, left, sharing)
        before = at
        while at < len(slowest_first) and slowest_first[at].narrowest <= level:  # these leave the links no fuller for the others
            _stop(slowest_first[at], slowest_first[at].narrowest, growing, rates, left, sharing)
            at += 1
        if full is not None and at == before:
            for flow in full.flows:
                _stop(flow, level, growing, rates, left, sharing)
    return rates


def _fullest(shares: list[tuple[int, int, Link]], left: dict[Link, int], sharing: dict[Link, int]) -> tuple[Link | None, int]:
    """The link whose growing flows get least, and what each gets. `shares` is a heap with old shares, which only ever grow."""
    while shares:
        share, place, link = shares[0]
        number = sharing[link]
        if not number:
            heappop(shares)
        elif left[link] // number > share:
            heapreplace(shares, (left[link] // number, place, link))
        else:
            return link, share
    return None, UNLIMITED


def _stop(
    flow: Flow, level: int, growing: dict[Flow, None], rates: dict[Flow, int], left: dict[Link, int], sharing: dict[Link, int]
) -> None:  # fmt: skip
    """It has its rate, and those that are tied to it grow no more."""
    stopping = [flow]
    for stopped in stopping:
        if stopped not in growing:
            continue
        del growing[stopped]
        rates[stopped] = level
        for link in stopped.path:
            if link in sharing:
                left[link] -= level
                sharing[link] -= 1
        stopping += [follower for follower in stopped.followers if follower.tied]


def _narrowest(flow: Flow) -> int:
    return flow.narrowest
