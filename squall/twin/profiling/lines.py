"""Where to measure next: curves of an operator along one or two sizes, and where what lies between their points is least sure.

Knows no operator, no clock and no tensors. Between two points time could run straight, or in proportion, or go on as it came
from either side; where these readings disagree, a point in the middle tells most. A disagreement is weighed by the share of a
step that the curve has.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, inf, log
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

Place = Mapping[str, int | str]
"""A row's columns, all but its time."""

SURE = 0.02
"""Readings that differ by less agree: measurements of one point differ as much."""

_AMISS = 1.2
"""More work should not take less than this part of the time: one of the two met noise."""


class Proposal(Struct, frozen=True):
    """A point worth measuring.

    Attributes:
        doubt: by how much readings of it differ, relatively; infinite for the first points of a line.
        needed: the curve is no curve without it.
    """

    operator: str
    at: Place
    doubt: float
    needed: bool = False


class Measurable(Protocol):
    """One or several curves of an operator.

    Attributes:
        operator: its name.
    """

    operator: str

    def proposals(self, most_s: float) -> Iterator[Proposal]:
        """Points worth measuring, none of which should take longer than `most_s` a time."""
        ...

    def learn(self, at: Place, seconds: float) -> "Line | None":
        """Remember a point. The line that it is on; None where it is not of this curve."""
        ...

    def ends(self) -> tuple[float, float]:
        """Seconds of all its layers together at the smallest and at the largest measured size; zeros before that."""
        ...


class Line:
    """An operator along one size.

    Args:
        fixed: the other columns.
        axis: the column of the size.
        sizes: that may be measured, ascending.
        count: how often a step runs it.
        power: with which its time grows at most.
    """

    def __init__(self, operator: str, fixed: Place, axis: str, sizes: Sequence[int], count: int = 1, power: float = 1.0) -> None:
        self.operator = operator
        self.fixed = dict(fixed)
        self.axis = axis
        self.sizes = list(sizes)
        self.count = count
        self.times: dict[int, float] = {}
        self._known: list[int] = []
        self._power = power

    def proposals(self, most_s: float) -> Iterator[Proposal]:
        """See `Measurable`: a missing first point, or the middle of the gap that is least sure."""
        self._leave_out(most_s)
        for size in self._firsts():
            if size not in self.times:
                yield self._propose(size, inf, needed=True)
                return
        best, where = 0.0, 0
        for low, high in zip(self._known, self._known[1:], strict=False):
            between = self.sizes[bisect_left(self.sizes, low + 1) : bisect_left(self.sizes, high)]
            if between:
                size = min(between, key=lambda size: abs(log(size + 1) - log((low + 1) * (high + 1)) / 2))
                doubt = self.doubt(size)
                if doubt > best:
                    best, where = doubt, size
        if best > SURE:
            yield self._propose(where, best)

    def learn(self, at: Place, seconds: float) -> "Line | None":
        """See `Measurable`."""
        if any(at.get(key) != value for key, value in self.fixed.items()) or self.axis not in at:
            return None
        size = int(at[self.axis])
        if size not in self.times:
            insort(self._known, size)
        self.times[size] = seconds
        if size not in self.sizes:
            insort(self.sizes, size)
        return self

    def ends(self) -> tuple[float, float]:
        """See `Measurable`."""
        if not self._known:
            return 0.0, 0.0
        return self.count * self.times[self._known[0]], self.count * self.times[self._known[-1]]

    def doubt(self, size: int) -> float:
        """By how much readings at a size between two points differ."""
        known, times = self._known, self.times
        after = bisect_left(known, size)
        low, high = known[after - 1], known[after]
        first, last = times[low], times[high]
        share = (size - low) / (high - low)
        in_proportion = (log(size + 1) - log(low + 1)) / (log(high + 1) - log(low + 1))
        readings = [first + share * (last - first), exp(log(first) + in_proportion * (log(last) - log(first)))]
        if after >= 2:
            readings.append(first + (first - times[known[after - 2]]) / (low - known[after - 2]) * (size - low))
        if after + 1 < len(known):
            readings.append(last - (times[known[after + 1]] - last) / (known[after + 1] - high) * (high - size))
        least, most = min(first, last), max(first, last)
        within = [min(most, max(least, reading)) for reading in readings]
        return max(within) / min(within) - 1

    def amiss(self, size: int) -> list[int]:
        """The sizes of which one must have met noise, were `size` one of them: itself and a neighbour that contradicts it."""
        place = self._known.index(size)
        for low, high in ((place - 1, place), (place, place + 1)):
            if low >= 0 and high < len(self._known):
                a, b = self._known[low], self._known[high]
                if self.times[a] > _AMISS * self.times[b]:
                    return [a, b]
        return []

    def place(self, size: int) -> Place:
        """All columns of a point."""
        return {**self.fixed, self.axis: size}

    def _firsts(self) -> list[int]:
        return sorted({self.sizes[0], self.sizes[len(self.sizes) // 2], self.sizes[-1]}) if self.sizes else []

    def _propose(self, size: int, doubt: float, *, needed: bool = False) -> Proposal:
        return Proposal(self.operator, self.place(size), doubt, needed)

    def _leave_out(self, most_s: float) -> None:
        """Sizes that would take too long, judged by the largest measured one, or by the smallest."""
        if self._known:
            largest = self._known[-1]
            while self.sizes[-1] > largest:
                growth = ((self.sizes[-1] + 1) / (largest + 1)) ** self._power
                if self.times[largest] * growth <= most_s:
                    break
                self.sizes.pop()


class Sheet:
    """An operator along two sizes: lines along the inner one, and where the outer one needs another line.

    Args:
        outer, outers: the column of the outer size, and the values that it may have, ascending.
        inner: the same of the inner size.
        inners: the values that it may have at an outer one, ascending.
        power: with which time grows along the outer size, at most.
    """

    def __init__(
        self,
        operator: str,
        fixed: Place,
        outer: str,
        outers: Sequence[int],
        inner: str,
        inners: Callable[[int], Sequence[int]],
        count: int = 1,
        power: float = 1.0,
    ) -> None:
        self.operator = operator
        self.fixed = dict(fixed)
        self.lines: dict[int, Line] = {}
        self._outer = outer
        self._outers = [size for size in outers if inners(size)]
        self._inner = inner
        self._inners = inners
        self._count = count
        self._power = power

    def proposals(self, most_s: float) -> Iterator[Proposal]:
        """See `Measurable`: first points of lines that were begun, then the least sure places along and between lines."""
        firsts = [self._outers[0], self._outers[len(self._outers) // 2], self._outers[-1]] if self._outers else []
        for outer in sorted(set(firsts)):
            if outer not in self.lines and self._affordable(outer, most_s):
                self._begin(outer)
        found = [proposal for line in list(self.lines.values()) for proposal in line.proposals(most_s)]
        missing = [proposal for proposal in found if proposal.doubt == inf]
        if missing:
            first = missing[0]
            yield first if first.at[self._outer] in firsts else replace(first, needed=False)
            return
        yield from found
        yield from self._across(most_s)

    def learn(self, at: Place, seconds: float) -> Line | None:
        """See `Measurable`."""
        if any(at.get(key) != value for key, value in self.fixed.items()) or self._outer not in at:
            return None
        return self._begin(int(at[self._outer])).learn(at, seconds)

    def ends(self) -> tuple[float, float]:
        """See `Measurable`."""
        ends = [line.ends() for _, line in sorted(self.lines.items()) if line.times]
        return (ends[0][0], ends[-1][1]) if ends else (0.0, 0.0)

    def _across(self, most_s: float) -> Iterator[Proposal]:
        """The first point of a new line where lines differ most from what lies between them."""
        common = set.intersection(*(set(line.times) for line in self.lines.values())) if self.lines else set()
        best: Proposal | None = None
        for inner in sorted(common):
            line = Line(self.operator, {**self.fixed, self._inner: inner}, self._outer, self._outers, power=self._power)
            for outer, along in self.lines.items():
                line.learn(line.place(outer), along.times[inner])
            for proposal in line.proposals(most_s):
                if proposal.doubt != inf and (best is None or proposal.doubt > best.doubt):
                    best = proposal
        if best is not None:
            outer = int(best.at[self._outer])
            first = self._inners(outer)[0]  # the line begins when this is measured
            yield Proposal(self.operator, {**self.fixed, self._outer: outer, self._inner: first}, best.doubt)

    def _affordable(self, outer: int, most_s: float) -> bool:
        """Whether the line's first point should take no longer than that, judged by the largest line that was begun."""
        begun = [size for size, line in self.lines.items() if line.times and size < outer]
        if not begun:
            return not self.lines
        largest = max(begun)
        return bool(min(self.lines[largest].times.values()) * (outer / largest) ** self._power <= most_s)

    def _begin(self, outer: int) -> Line:
        if outer not in self.lines:
            fixed = {**self.fixed, self._outer: outer}
            self.lines[outer] = Line(self.operator, fixed, self._inner, self._inners(outer), self._count)
        return self.lines[outer]
