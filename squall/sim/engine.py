"""What stands in for the engine of a replica: it runs steps as long as their prices say, and knows whose sequence ends when.

Ends a run at its first finished sequence, as an engine does, and tells the world of every token. Knows no machine, no queue and
no event order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from squall.core.actions import Chunk, RunSteps
from squall.core.events import LayersDone, StepsDone
from squall.core.metrics import UNSET
from squall.core.types import Nanos, ReplicaId, RequestId, RunId
from squall.perf.latency import UNITS_PER_NANO, Progression
from squall.perf.progressions import steps_until, total
from squall.sim.world import World, entry

NO_RUN: Final = RunSteps(-1, 0, 0, 0)
"""What an engine has run before its first run."""


class DecodeClock:
    """What an engine knows of one group of decodes.

    Attributes:
        steps: that the group has done.
        last_step: of every member: the group's step after which it stops.
        ends: heap of the same; entries that `last_step` does not confirm are stale.
        told_at: when it did its last step, which gave every member a token.
        late: members who got their last token at another instant: while the group paused, or in another one.
    """

    __slots__ = ("ends", "last_step", "late", "steps", "told_at")

    def __init__(self) -> None:
        self.steps = 0
        self.last_step: dict[RequestId, int] = {}
        self.ends: list[tuple[int, RequestId]] = []
        self.told_at: Nanos = UNSET
        self.late: dict[RequestId, Nanos] = {}

    def join(self, request: RequestId, left: int, told_at: Nanos) -> None:
        """It has `left` tokens to generate, and got its last one at `told_at`."""
        last = self.last_step[request] = self.steps + left
        heappush(self.ends, (last, request))
        if told_at != self.told_at:
            self.late[request] = told_at

    def leave(self, request: RequestId) -> tuple[int, Nanos] | None:
        """How many tokens it has left and when it got its last one; None where it is not here."""
        last = self.last_step.pop(request, None)
        return None if last is None else (last - self.steps, self.late.pop(request, self.told_at))

    def first_gaps(self, weight: int, now: Nanos, gaps: array[int]) -> None:
        """The `weight` members get a token at `now`, after a pause or from another group."""
        late = self.late
        if weight > len(late):
            gaps.frombytes(entry(weight - len(late), 1, (now - self.told_at) * UNITS_PER_NANO, 0))
        for told_at in late.values():
            gaps.frombytes(entry(1, 1, (now - told_at) * UNITS_PER_NANO, 0))
        late.clear()


class Engine:
    """One replica's engine.

    Args:
        world: the truth and the record.
        replica: whose engine it is.

    Attributes:
        num_steps: done since the beginning.
    """

    __slots__ = (
        "_ends_at",
        "_group",
        "_groups",
        "_prices",
        "_replica",
        "_run",
        "_started_at",
        "_steps",
        "_world",
        "latency",
        "num_steps",
    )

    def __init__(self, world: World, replica: ReplicaId) -> None:
        self.num_steps = 0
        self.latency = world.latency_of(replica)  # its own: it may be slower than others
        self._world = world
        self._replica = replica
        self._run = NO_RUN  # the last one
        self._steps = 0
        self._prices: Sequence[Progression] = ()
        self._started_at: Nanos = UNSET
        self._ends_at: Nanos = UNSET  # while it runs
        self._group = DecodeClock()  # of the run
        self._groups = {0: self._group}

    def start(self, run: RunSteps, now: Nanos) -> Nanos:
        """Begin the run; returns when it will end."""
        if run.regrouped:
            self._regroup(run)
        if run.chunks:
            self._schedule(run.chunks, now)
        steps = run.steps
        self._group = group = self._groups[run.group]
        if steps > 1:
            ends = group.ends
            if ends and run.num_decodes:
                left = ends[0][0] - group.steps  # until a stale entry, it may be: then two runs take the place of one
                if left < steps:
                    steps = left if left > 0 else 1
            if steps > self._world.max_steps:
                steps = self._world.max_steps
        self._run = run
        self._steps = steps
        self._prices = prices = self.latency.run(run, steps)
        self._started_at = now
        for price in prices:
            count = price.count
            now += total(price, count) if count > 1 else price.first // UNITS_PER_NANO
        self._ends_at = now
        return now

    def _regroup(self, run: RunSteps) -> None:
        """Some decode with others from now on."""
        for moved in run.regrouped:
            new = self._groups.setdefault(moved.group, DecodeClock())
            if not new.last_step:
                new.told_at = UNSET
            for request in moved.requests:
                for group in self._groups.values():
                    if (found := group.leave(request)) is not None:
                        new.join(request, *found)
                        break

    def _schedule(self, chunks: Sequence[Chunk], now: Nanos) -> None:
        rows = self._world.rows
        for chunk in chunks:
            row = rows[chunk.request]
            if row.scheduled_at == UNSET:
                row.scheduled_at = now
                row.num_cached_tokens = chunk.num_cached
            row.replica = self._replica

    def cut(self, run: RunId, now: Nanos) -> Nanos | None:
        """End run `run` at the first boundary strictly after now. Returns when that is, or None where it changes nothing."""
        if self._run.run != run or self._ends_at <= now:
            return None
        kept: list[Progression] = []
        steps = 0
        at = self._started_at
        for price in self._prices:
            count, lasting = steps_until(price, now - at)
            kept.append(Progression(count, price.first, price.increment))
            steps += count
            at += lasting
            if at > now:
                break
        if steps == self._steps:
            return None
        self._prices = kept
        self._steps = steps
        self._ends_at = at
        return at

    def ends(self, at: Nanos) -> bool:
        """Whether something that it does will be done at that instant; nothing is, where it was cut or lost."""
        return self._ends_at == at

    def end(self, now: Nanos) -> StepsDone | LayersDone | None:
        """The run ends; None where it was cut, and does not end now."""
        if self._ends_at != now:
            return None
        run = self._run
        self._ends_at = UNSET
        world = self._world
        steps = self._steps
        self.num_steps += steps
        group = self._group
        stopped: list[RequestId] = []
        weight = run.num_decodes
        if weight:
            if group.told_at == self._started_at and not group.late:
                gaps = world.gaps
                for price in self._prices:
                    gaps.frombytes(entry(weight, price.count, price.first, price.increment))
            else:
                self._resume(group, weight, now)
            group.steps = step = group.steps + steps
            group.told_at = now
            ends = group.ends
            while ends and ends[0][0] <= step:
                last, request = heappop(ends)
                if group.last_step.get(request) == last:
                    del group.last_step[request]
                    stopped.append(request)
        elif not group.last_step:
            group.told_at = now
        for chunk in run.chunks:
            if chunk.last:
                left = world.first_token(chunk.request, now)
                if left:
                    group.join(chunk.request, left, now)
                else:
                    stopped.append(chunk.request)
        if not stopped:
            return StepsDone(run.run, steps)
        for request in stopped:
            world.finish(request, now)
        stopped.sort()
        return StepsDone(run.run, steps, tuple(stopped))

    def _resume(self, group: DecodeClock, weight: int, now: Nanos) -> None:  # noqa: ARG002 - a pipeline has no prices
        """The first step after a pause, and those after it; the last one ends now."""
        gaps = self._world.gaps
        step = self._prices[0]
        group.first_gaps(weight, self._started_at + step.first // UNITS_PER_NANO, gaps)
        if step.count > 1:
            gaps.frombytes(entry(weight, step.count - 1, step.first + step.increment, step.increment))
        for price in self._prices[1:]:
            gaps.frombytes(entry(weight, price.count, price.first, price.increment))

    def preempt(self, requests: Sequence[RequestId]) -> None:
        """They lose their KV at this step boundary."""
        world = self._world
        for request in requests:
            world.rows[request].preemptions += 1
            for group in self._groups.values():
                if (found := group.leave(request)) is not None:
                    world.left[request], world.last_token_at[request] = found
                    break

    def hold(self, requests: Sequence[RequestId]) -> None:
        """They do not decode here for now."""
        world = self._world
        for request in requests:
            for group in self._groups.values():
                if (found := group.leave(request)) is not None:
                    world.left[request], world.last_token_at[request] = found
                    break

    def join(self, requests: Sequence[RequestId], group: int) -> None:
        """They decode with `group` from now on; their KV was held here, or has come."""
        world = self._world
        joined = self._groups.setdefault(group, DecodeClock())
        for request in requests:
            joined.join(request, world.left.pop(request), world.last_token_at.pop(request))

    def forget(self, requests: Sequence[RequestId]) -> None:
        """They are cancelled; what they have generated so far is their output."""
        world = self._world
        for request in requests:
            left = world.left.pop(request, None)
            for group in self._groups.values():
                if (found := group.leave(request)) is not None:
                    left, _ = found
                    break
            world.last_token_at.pop(request, None)
            if left is not None:
                world.rows[request].num_output_tokens = world.outputs[request] - left

    def cut_now(self, now: Nanos) -> Nanos | None:
        """As `cut`, of whatever runs."""
        return self.cut(self._run.run, now)

    def lose(self, now: Nanos) -> tuple[RunId, int, Nanos] | None:
        """The replica dies. Steps done by now count, but for the last of a run, of whose end nobody will hear.

        Everybody who decoded keeps the tokens that they brought, and goes on elsewhere. Returns the run that was cut off, where
        steps of it count: how many, and when the last of them ended.
        """
        cut_off = None
        if self._ends_at != UNSET and self._steps > 1:
            kept: list[Progression] = []
            at, left = self._started_at, self._steps - 1
            for price in self._prices:
                count = min(steps_until(price, now - at)[0], left)
                if count and at + total(price, count) > now:
                    count -= 1
                if not count:
                    break
                kept.append(Progression(count, price.first, price.increment))
                at += total(price, count)
                left -= count
            if kept:
                self._prices, self._steps, self._ends_at = kept, sum(price.count for price in kept), at
                self.end(at)
                cut_off = self._run.run, self._steps, at
        world = self._world
        for group in self._groups.values():
            for request in list(group.last_step):
                if (found := group.leave(request)) is not None:
                    world.left[request], world.last_token_at[request] = found
        return cut_off
