"""What stands in for the engine of a replica: it runs steps as long as their prices say, and knows whose sequence ends when.

Ends a run at its first finished sequence, as an engine does, and tells the world of every token. Knows no machine, no queue and
no event order.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from squall.core.actions import Chunk, RunSteps
from squall.core.events import LayersDone, StepsDone
from squall.core.metrics import UNSET
from squall.core.types import FOREVER, Nanos, ReplicaId, RequestId, RunId
from squall.perf.latency import UNITS_PER_NANO, Progression
from squall.perf.progressions import steps_until, total
from squall.perf.worked_out import WorkedOut
from squall.sim.world import World, entry

NO_RUN: Final = RunSteps(-1, 0, 0, 0)
"""What an engine has run before its first run."""

NEVER: Final = (2 * FOREVER, -1)
"""The last of every heap of ends, so that it always has a first."""


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
        self.ends: list[tuple[int, RequestId]] = [NEVER]
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


class Engine:
    """One replica's engine.

    Args:
        world: the truth and the record.
        replica: whose engine it is.

    Attributes:
        latency: prices its steps.
    """

    __slots__ = ("_ends_at", "_gaps", "_groups", "_pauses", "_replica", "_running", "_world", "latency")

    def __init__(self, world: World, replica: ReplicaId) -> None:
        self.latency = world.latency_of(replica)  # its own: it may be slower than others
        self._world = world
        self._gaps = world.gaps
        self._replica = replica
        self._ends_at: Nanos = UNSET  # while it runs
        self._running: tuple[RunSteps, int, Sequence[Progression], Nanos] = (NO_RUN, 0, (), UNSET)
        """The last run, how many steps it has and what these cost, and when it began."""
        self._groups: dict[int, DecodeClock] = WorkedOut(lambda _: DecodeClock())
        self._pauses = 0  # steps in which nobody decoded

    @property
    def num_steps(self) -> int:
        """Steps done since the beginning."""
        return self._pauses + sum(group.steps for group in self._groups.values())

    def start(self, run: RunSteps, now: Nanos) -> Nanos:
        """Begin the run; returns when it will end."""
        if run.regrouped:
            self._regroup(run)
        for chunk in run.chunks:
            if chunk.offset == chunk.num_cached:  # the first one
                self._schedule(chunk, now)
        steps = run.steps
        if steps == 1:
            prices = self.latency.run(run, 1)
            ends_at = now + prices[0].first // UNITS_PER_NANO
        else:
            if run.num_decodes:
                group = self._groups[run.group]
                left = group.ends[0][0] - group.steps  # until a stale entry, it may be: then two runs take the place of one
                if left < steps:
                    steps = left if left > 0 else 1
            if steps > self._world.max_steps:
                steps = self._world.max_steps
            prices = self.latency.run(run, steps)
            ends_at = now
            for price in prices:
                ends_at += total(price, price.count)
        self._running = run, steps, prices, now
        self._ends_at = ends_at
        return ends_at

    def _regroup(self, run: RunSteps) -> None:
        """Some decode with others from now on."""
        for moved in run.regrouped:
            new = self._groups[moved.group]
            if not new.last_step:
                new.told_at = UNSET
            for request in moved.requests:
                for group in self._groups.values():
                    if (found := group.leave(request)) is not None:
                        new.join(request, *found)
                        break

    def _schedule(self, chunk: Chunk, now: Nanos) -> None:
        """The first piece of a prompt since it came here, or came back."""
        row = self._world.rows[chunk.request]
        if row.scheduled_at == UNSET:
            row.scheduled_at = now
            row.num_cached_tokens = chunk.num_cached
        row.replica = self._replica

    def cut(self, run: RunId, now: Nanos) -> Nanos | None:
        """End run `run` at the first boundary strictly after now. Returns when that is, or None where it changes nothing."""
        running, steps, prices, at = self._running
        if running.run != run or self._ends_at <= now:
            return None
        began, left = at, steps
        kept: list[Progression] = []
        for price in prices:
            count, lasting = steps_until(price, now - at)
            kept.append(Progression(count, price.first, price.increment))
            left -= count
            at += lasting
            if at > now:
                break
        if not left:
            return None
        self._running = running, steps - left, kept, began
        self._ends_at = at
        return at

    def ends(self, at: Nanos) -> bool:
        """Whether something that it does will be done at that instant; nothing is, where it was cut or lost."""
        return self._ends_at == at

    def end(self, now: Nanos) -> StepsDone | LayersDone | None:
        """The run ends; None where it was cut, and does not end now."""
        if self._ends_at != now:
            return None
        self._ends_at = UNSET
        run, steps, prices, began = self._running
        group = self._groups[run.group]
        stopped: tuple[RequestId, ...] = ()
        weight = run.num_decodes
        if weight:
            if group.told_at == began and not group.late:
                for price in prices:
                    self._gaps.frombytes(entry(weight, price.count, price.first, price.increment))
            elif prices or group.late:
                self._resume(group, weight, prices, began, now)
            else:  # one step of a pipeline costs its decodes the time since their last tokens
                self._gaps.frombytes(entry(weight, 1, (now - group.told_at) * UNITS_PER_NANO, 0))
            group.steps = step = group.steps + steps
            group.told_at = now
            ends = group.ends
            while ends[0][0] <= step:  # no run goes beyond the first end, so all of them are at this step, and ids ascend
                last, request = heappop(ends)
                if group.last_step.get(request) == last:
                    del group.last_step[request]
                    self._world.finish(request, now)
                    stopped += (request,)
        else:
            self._pauses += steps
            if not group.last_step:
                group.told_at = now
        for chunk in run.chunks:
            if chunk.last:
                left = self._world.first_token(chunk.request, now)
                if left:
                    group.join(chunk.request, left, now)
                else:
                    self._world.finish(chunk.request, now)
                    stopped = tuple(sorted((*stopped, chunk.request)))
        return StepsDone(run.run, steps, stopped)

    def _resume(self, group: DecodeClock, weight: int, prices: Sequence[Progression], began: Nanos, now: Nanos) -> None:
        """The `weight` members get a token after a pause, or their first one in this group, and where they are priced more."""
        gaps, late = self._gaps, group.late
        at = began + prices[0].first // UNITS_PER_NANO if prices else now
        if weight > len(late):
            gaps.frombytes(entry(weight - len(late), 1, (at - group.told_at) * UNITS_PER_NANO, 0))
        for told_at in late.values():
            gaps.frombytes(entry(1, 1, (at - told_at) * UNITS_PER_NANO, 0))
        late.clear()
        if prices:
            step = prices[0]
            if step.count > 1:
                gaps.frombytes(entry(weight, step.count - 1, step.first + step.increment, step.increment))
            for price in prices[1:]:
                gaps.frombytes(entry(weight, price.count, price.first, price.increment))

    def preempt(self, requests: Sequence[RequestId]) -> None:
        """They lose their KV at this step boundary."""
        world = self._world
        for request in requests:
            world.rows[request].preemptions += 1
            for group in self._groups.values():
                if (found := group.leave(request)) is not None:
                    world.paused[request] = found
                    break

    def hold(self, requests: Sequence[RequestId]) -> None:
        """They do not decode here for now."""
        world = self._world
        for request in requests:
            for group in self._groups.values():
                if (found := group.leave(request)) is not None:
                    world.paused[request] = found
                    break

    def join(self, requests: Sequence[RequestId], group: int) -> None:
        """They decode with `group` from now on; their KV was held here, or has come."""
        world = self._world
        joined = self._groups[group]
        for request in requests:
            joined.join(request, *world.paused.pop(request))

    def forget(self, requests: Sequence[RequestId]) -> None:
        """They are cancelled; what they have generated so far is their output."""
        world = self._world
        for request in requests:
            left = world.paused.pop(request, None)
            for group in self._groups.values():
                if (found := group.leave(request)) is not None:
                    left = found
                    break
            if left is not None:
                world.rows[request].num_output_tokens -= left[0]

    def cut_now(self, now: Nanos) -> Nanos | None:
        """As `cut`, of whatever runs."""
        return self.cut(self._running[0].run, now)

    def lose(self, now: Nanos) -> tuple[RunId, int, Nanos] | None:
        """The replica dies. Steps done by now count, but for the last of a run, of whose end nobody will hear.

        Everybody who decoded keeps the tokens that they brought, and goes on elsewhere. Returns the run that was cut off, where
        steps of it count: how many, and when the last of them ended.
        """
        cut_off = None
        run, steps, prices, began = self._running
        if self._ends_at != UNSET and steps > 1:
            kept: list[Progression] = []
            at, left = began, steps - 1
            for price in prices:
                count = min(steps_until(price, now - at)[0], left)
                if count and at + total(price, count) > now:
                    count -= 1
                if not count:
                    break
                kept.append(Progression(count, price.first, price.increment))
                at += total(price, count)
                left -= count
            if kept:
                steps = sum(price.count for price in kept)
                self._running, self._ends_at = (run, steps, kept, began), at
                self.end(at)
                cut_off = run.run, steps, at
        world = self._world
        for group in self._groups.values():
            for request in list(group.last_step):
                if (found := group.leave(request)) is not None:
                    world.paused[request] = found
        return cut_off
