"""Live scaling on paper: a target that still loads and a source that is whole share a queue of equal batches, layer by layer.

The unit of time is one layer of one batch, on either of the two. A target runs layer k of a batch from the instant at which
that layer's weights have arrived; the source has them all, and runs what is left of a batch in one go. These are yardsticks
for the machine that does it (DESIGN section 4), and know nothing of it: no KV, no activations, no chance, no hardware.
"""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from squall.errors import ConfigError


class Case(Struct, frozen=True):
    """The batches that wait when a target begins to load.

    Attributes:
        num_batches: all there at 0; at least 1.
        arrivals: when each layer's weights have arrived at the target, in order; at least one, never decreasing.
    """

    num_batches: int
    arrivals: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_batches < 1:
            raise ConfigError(f"num_batches must be at least 1, not {self.num_batches}")
        if not self.arrivals or self.arrivals[0] < 0 or list(self.arrivals) != sorted(self.arrivals):
            raise ConfigError(f"arrivals must be instants from 0 that never decrease, one a layer, not {self.arrivals}")

    @property
    def num_layers(self) -> int:
        return len(self.arrivals)


def evenly(num_batches: int, num_layers: int, every: int) -> Case:
    """Layers that arrive one each `every` units, the first of them at 0."""
    return Case(num_batches, tuple(every * layer for layer in range(num_layers)))


class Schedule(Struct, frozen=True):
    """How it went, a batch each.

    Attributes:
        ends: when it was done.
        splits: layers that the target ran, and those that the source ran after them.
    """

    ends: tuple[int, ...]
    splits: tuple[tuple[int, int], ...]

    @property
    def average(self) -> float:
        return sum(self.ends) / len(self.ends)

    @property
    def makespan(self) -> int:
        return max(self.ends)


def stop_the_world(case: Case) -> Schedule:
    """The source works alone, as if the target could do nothing before its last layer, and had come too late then."""
    layers, batches = case.num_layers, case.num_batches
    return Schedule(tuple(layers * (batch + 1) for batch in range(batches)), ((0, layers),) * batches)


def best_effort(case: Case) -> Schedule:
    """A split fixed before: the target runs of each batch what has arrived, but at most half; then the source takes it."""
    half = max(1, case.num_layers // 2)
    return _play(case, lambda _, ready: min(ready, half))


def zigzag(case: Case) -> Schedule:
    """No split is ever computed (BlitzScale's schedule without a solver).

    The target runs one layer at a time, for the earliest batch whose next layer has arrived. The source, whenever it is idle,
    pulls the earliest batch that has had a layer there, and while the first layer has not arrived the earliest of all.
    """
    return _play(case, lambda _, ready: min(ready, 1), lambda _, ready: ready)


def follow(case: Case, splits: Sequence[tuple[int, int]]) -> Schedule:
    """Splits that were decided before, one a batch: the source takes a batch, the earliest first, that has had all its layers."""
    if [sum(split) for split in splits] != [case.num_layers] * case.num_batches or min(map(min, splits)) < 0:
        raise ConfigError(f"splits must be {case.num_batches} pairs that share {case.num_layers} layers, not {tuple(splits)}")
    return _play(case, lambda batch, _: splits[batch][0], lambda batch, ready: min(ready, splits[batch][0]))


_Rule = Callable[[int, int], int]


def _play(case: Case, pull_from: _Rule, run_to: _Rule | None = None) -> Schedule:
    """Tick by tick. Rules map a batch and the number of layers that are in to a number of layers.

    Args:
        pull_from: that the batch must have had before the source takes it.
        run_to: that the target gives it at most; as many when None.
    """
    limit = run_to or pull_from
    layers, done = case.num_layers, [0] * case.num_batches
    ends: dict[int, int] = {}
    now = ready = source_free_at = 0
    open_batches = list(range(case.num_batches))  # neither ended nor at the source, in order of arrival
    while open_batches:
        while ready < layers and case.arrivals[ready] <= now:
            ready += 1
        if source_free_at <= now:
            pulled = next((batch for batch in open_batches if done[batch] >= pull_from(batch, ready)), None)
            if pulled is not None:
                open_batches.remove(pulled)
                ends[pulled] = source_free_at = now + layers - done[pulled]
        now += 1
        runs = next((batch for batch in open_batches if done[batch] < limit(batch, ready)), None)
        if runs is not None:
            done[runs] += 1
            if done[runs] == layers:
                open_batches.remove(runs)
                ends[runs] = now
    return Schedule(tuple(ends[batch] for batch in range(case.num_batches)), tuple((number, layers - number) for number in done))


# -- the exact optimum

_State = tuple[tuple[int, ...], int]
"""Layers that each open batch has had (ascending: batches are equal), and the units for which the source is still busy."""

_Trace = tuple["_Trace", int, int] | None
"""What has ended: a linked list of (end, layers at the target)."""


def optimum(case: Case) -> Schedule:
    """A schedule with the least average end that there is, by exhaustive search with a bound; for small cases.

    Time grows with the number of multisets of progress, C(batches + layers, batches); ten batches of ten layers are no trouble.
    Batches come out in the order in which they end.

    Neither of the two is ever idle while there is something that it may do, which loses nothing. If the source waits w units
    to take a batch on which the target runs at most w layers meanwhile, taking it at once ends no later; and a layer more at
    the target never delays anybody, since all its layers end at whole units.
    """
    known = min((zigzag(case), best_effort(case), stop_the_world(case)), key=lambda schedule: schedule.average)
    best, best_trace = sum(known.ends), None
    level: dict[_State, tuple[int, _Trace]] = {((0,) * case.num_batches, 0): (0, None)}
    now = 0
    while level:
        after: dict[_State, tuple[int, _Trace]] = {}
        for state, (cost, trace) in level.items():
            for reached, price, story in _steps(case, state, now, trace):
                total = cost + price
                if total + _at_least(case, reached, now + 1) >= best:
                    continue
                if not reached[0]:
                    best, best_trace = total, story
                elif reached not in after or total < after[reached][0]:
                    after[reached] = total, story
        level, now = after, now + 1
    return _told(case, best_trace) if best_trace else known


def _steps(case: Case, state: _State, now: int, trace: _Trace) -> Iterator[tuple[_State, int, _Trace]]:
    """Every way through one unit: the state after it, the ends that were settled in it, and the story so far."""
    layers = case.num_layers
    batches, busy = state
    ready = sum(at <= now for at in case.arrivals)
    pulls = sorted(set(batches)) if not busy else [None]
    for pulled in pulls:
        rest, price, story, left = batches, 0, trace, busy
        if pulled is not None:
            rest, price, left = _without(batches, pulled), now + layers - pulled, layers - pulled
            story = (trace, price, pulled)
        runs = [had for had in sorted(set(rest)) if had < ready]
        if not runs:
            yield (rest, max(left - 1, 0)), price, story
        for had in runs:
            others = _without(rest, had)
            if had + 1 == layers:
                yield (others, max(left - 1, 0)), price + now + 1, (story, now + 1, layers)
            else:
                yield (tuple(sorted((*others, had + 1))), max(left - 1, 0)), price, story


def _at_least(case: Case, state: _State, now: int) -> int:
    """No schedule gives the open batches a smaller sum of ends.

    The two run at most two layers a unit, once the source is free, and a batch is on one of them at a time: the one with
    the i-th fewest layers left is the i-th to end at best.
    """
    batches, busy = state
    total = work = 0
    for had in reversed(batches):
        left = case.num_layers - had
        work += left
        total += now + max(left, work if work <= busy else -(-(work + busy) // 2))
    return total


def _without(batches: tuple[int, ...], had: int) -> tuple[int, ...]:
    at = batches.index(had)
    return batches[:at] + batches[at + 1 :]


def _told(case: Case, trace: _Trace) -> Schedule:
    ended = []
    while trace is not None:
        trace, end, had = trace
        ended.append((end, had))
    ended.sort()
    return Schedule(tuple(end for end, _ in ended), tuple((had, case.num_layers - had) for _, had in ended))
