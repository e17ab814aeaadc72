"""Bytes on links that are shared: every flow gets its max-min fair share, worked out anew where flows begin and end.

A flow crosses all links of its path at one rate. A *follower* forwards what its upstream flow has brought, one chunk behind it,
and no faster than that brings more once it has caught up: a chain of n hops ends n - 1 chunks after the first of them, without
an event for each chunk. Time is integer nanoseconds, amounts are nanobytes (a rate of one byte a second moves one in a
nanosecond) and rates whole bytes a second, so that nothing is lost and every run is the same.

Knows no topology (`sim.fabric` has links and paths), no weights and no KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from squall.core.types import Nanos
from squall.sim.shares import NANO, UNLIMITED, Flow, FlowId, Link, Progress, fair_rates, narrowest


class Arrived(NamedTuple):
    """`num_bytes` of a flow are there: one of its marks, or (`ended`) all of it."""

    at: Nanos
    flow: FlowId
    num_bytes: int
    ended: bool


class Network:
    """Links, and the flows on them.

    Args:
        links: bytes a second of each; less than one is none.
        record: keep for each link what it carried, how its rate changed and of how many flows it was; for each flow its progress.
    """

    __slots__ = ("_arrived", "_flows", "_heap", "_links", "_now", "_num_broken", "_number", "_paths", "_record")

    def __init__(self, links: Mapping[str, float], record: bool = False) -> None:
        for name, bandwidth in links.items():
            if not bandwidth >= 0:
                raise ValueError(f"link {name}: its bandwidth must be at least 0 bytes/s, not {bandwidth}")
        self._links = {name: Link(name, int(bandwidth)) for name, bandwidth in links.items()}
        self._num_broken = sum(not link.bandwidth for link in self._links.values())
        self._paths: dict[tuple[str, ...], tuple[tuple[Link, ...], int]] = {}  # that were taken, and their least bandwidths
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

    @property
    def records(self) -> bool:
        return self._record

    @property
    def is_broken(self) -> bool:
        """Nothing moves across some link."""
        return self._num_broken > 0

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
        """Nanobytes that the link has carried until now, where that is recorded."""
        known = self._links[link]
        return known.moved + known.rate * (self._now - known.at)

    def progress(self, flow: FlowId) -> Progress:
        """How far the flow was when, where that is recorded; it grows until the flow has ended."""
        return self._flows[flow].progress

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
        if num_bytes < 1 or (marks and (marks[0] < 1 or marks[-1] > num_bytes or list(marks) != sorted(marks))):
            raise ValueError(f"flow {flow}: num_bytes must be at least 1 and its marks ascend to it, not {num_bytes} and {marks}")
        upstream = self._flows.get(after) if after is not None else None
        links, least = self._paths.get(names := tuple(path)) or self._find(names)
        targets = [mark * NANO for mark in marks] if marks else []
        targets.append(num_bytes * NANO)
        new = self._flows[flow] = Flow(flow, links, least, targets, upstream, chunk * NANO, now)
        if upstream is None:
            self._open(new)
            return
        upstream.followers.append(new)
        self._schedule(new)

    def _find(self, names: tuple[str, ...]) -> tuple[tuple[Link, ...], int]:
        links = tuple(self._links[name] for name in names)
        found = self._paths[names] = links, narrowest(links)
        return found

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
        concerned, _ = self._concerned(changed.flows)
        self._num_broken += (not int(bandwidth)) - (not changed.bandwidth)
        changed.bandwidth = int(bandwidth)
        self._paths.clear()
        for flow in changed.flows:
            least = narrowest(flow.path)
            for on in flow.path:
                on.demand += least - flow.narrowest
            flow.narrowest = least
        for waiting in self._flows.values():
            if not waiting.started and changed in waiting.path:
                waiting.narrowest = narrowest(waiting.path)
        self._share(concerned)

    def advance(self, now: Nanos) -> list[Arrived]:
        """Let time pass until `now`, which never decreases; returns what has arrived since the last call, in order."""
        self._run(now)
        arrived, self._arrived = self._arrived, []
        return arrived

    # -- time

    def _run(self, now: Nanos) -> None:
        if now < self._now:
            raise ValueError(f"time goes back from {self._now} to {now}")
        heap = self._heap
        while heap and heap[0][0] <= now:
            due, _, flow = heappop(heap)
            if flow.due != due:
                continue
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
        targets, last = flow.targets, len(flow.targets) - 1
        while flow.moved >= (target := targets[flow.reached]):
            ended = flow.reached == last
            self._arrived.append(Arrived(self._now, flow.id, target // NANO, ended))
            if ended:
                self._close(flow)
                return
            flow.reached += 1
        upstream = flow.upstream
        if upstream is not None and not flow.tied and flow.rate > upstream.rate:
            upstream.settle(self._now)
            if upstream.moved - flow.moved <= flow.lag:
                flow.tied = True
                self._share((flow,))
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
        flow.due = None
        if flow.upstream is not None:
            flow.upstream.settle(self._now)
            flow.tied = flow.upstream.moved <= flow.lag
        own = flow.narrowest
        narrow = flow.tied or any(follower.tied for follower in flow.followers)  # these stood still until now
        for link in flow.path:
            link.flows[flow] = None
            link.demand = demand = link.demand + own
            if demand > link.bandwidth:
                narrow = True
        if self._record:
            self._add_rate(flow, 0)  # it is there, though it may get nothing
        if narrow:
            self._share((flow,))
            return
        if self._record:
            self._add_rate(flow, flow.narrowest)
        flow.rate = flow.narrowest  # what most flows of a calm network get, at the least cost
        self._schedule(flow)
        for follower in flow.followers:
            self._schedule(follower)

    def _close(self, flow: Flow) -> int:
        """It leaves the network; returns the nanobytes that it has moved, of which none is more than it had."""
        flow.settle(self._now)
        beyond = max(flow.moved - flow.targets[-1], 0)  # ends are whole nanoseconds: of the last one a part is not needed
        flow.moved -= beyond
        beside: dict[Flow, None] = {}
        if flow.upstream is not None:
            flow.upstream.followers.remove(flow)
        if flow.started:
            for link in flow.path:
                if link.demand > link.bandwidth:
                    beside.update(link.flows)
                del link.flows[flow]
                link.demand -= flow.narrowest
            beside.update((follower, None) for follower in flow.followers if follower.tied)
            if flow.tied and flow.upstream is not None:
                beside[flow.upstream] = None
            beside.pop(flow, None)
            if self._record:
                self._add_rate(flow, -flow.rate)
                for link in flow.path:
                    link.moved -= beyond
        flow.due = None
        flow.rate = 0
        del self._flows[flow.id]
        if flow.followers:
            self._set_free(flow.followers)
        if beside:
            self._share(beside)
        return flow.moved

    def _set_free(self, followers: list[Flow]) -> None:
        """Their upstream has ended."""
        for follower in followers:
            follower.upstream = None
            follower.tied = False
        for follower in followers:
            if not follower.started:
                self._open(follower)  # the upstream had less than a chunk
            else:
                self._schedule(follower)

    # -- shares

    def _concerned(self, flows: Iterable[Flow]) -> tuple[dict[Flow, None], Link | None]:
        """Those, and all whose shares may depend on theirs: over links that are too narrow for all, and along chains.

        Also the link of which each gets an equal share where nothing else holds any of them back: the most frequent case.
        """
        found: dict[Flow, None] = dict.fromkeys(flows)
        queue = list(found)
        seen: set[Link] = set()
        fullest, share, least = None, UNLIMITED, UNLIMITED
        for flow in queue:
            for link in flow.path:
                if link.demand > link.bandwidth and link not in seen:
                    seen.add(link)
                    others = link.flows
                    if link.bandwidth // len(others) < share:
                        fullest, share = link, link.bandwidth // len(others)
                    for other in others:
                        if other not in found:
                            found[other] = None
                            queue.append(other)
            if flow.followers:
                for follower in flow.followers:
                    if follower.tied and follower not in found:
                        found[follower] = None
                        queue.append(follower)
            if flow.tied:
                least = 0
                if flow.upstream is not None and flow.upstream not in found:
                    found[flow.upstream] = None
                    queue.append(flow.upstream)
            elif flow.narrowest < least:
                least = flow.narrowest
        equal = fullest is not None and share < least and len(fullest.flows) == len(found)
        return found, fullest if equal else None

    def _share(self, flows: Iterable[Flow]) -> None:
        """Set the rates of all that are concerned by a change to `flows`."""
        now = self._now
        concerned, equal = self._concerned(flows)
        if equal is None:
            rates = fair_rates(concerned)
        else:
            rates = dict.fromkeys(equal.flows, equal.bandwidth // len(equal.flows))
        changed: list[Flow] = []
        for flow, rate in rates.items():
            if rate != flow.rate:
                flow.moved += flow.rate * (now - flow.at)
                flow.at = now
                if self._record:
                    self._add_rate(flow, rate - flow.rate)
                flow.rate = rate
                changed.append(flow)
            elif flow.upstream is not None:
                changed.append(flow)  # with the rate of what it follows
        for flow in changed:
            if flow.tied and flow.upstream is not None and flow.rate < flow.upstream.rate:
                flow.tied = False  # it falls behind, and may be faster for a while afterwards
            self._schedule(flow)
            for follower in flow.followers:
                if follower not in rates:
                    self._schedule(follower)

    def _add_rate(self, flow: Flow, rate: int) -> None:
        """For the record: the flow, settled, gets so much more from now on."""
        now = self._now
        flow.progress.append((now, flow.moved, flow.rate + rate))
        for link in flow.path:
            link.moved += link.rate * (now - link.at)
            link.at = now
            link.rate += rate
            if link.series and link.series[-1][0] == now:
                link.series.pop()
            link.series.append((now, link.rate, len(link.flows)))
