"""What a fleet's controller remembers of the past: how fast a counter grew, the highest answer of the latest window, and which
size was too small for which load.

Keyed by instants, fed from outside: knows no clock, no policy and no replica.
"""

from bisect import bisect_right
from collections import deque
from math import sqrt

from squall.core.types import FOREVER, SECOND, Nanos

LESS = 0.1
"""Less load is a tenth less at least: it is never the same to a percent."""


class Growth:
    """A counter that only grows, and how fast it grew over a window, now or some time ago.

    Between two samples it is taken to have grown evenly.

    Args:
        memory: how far back one may ask.
        spacing: samples are at least so far apart.
    """

    __slots__ = ("_instants", "_latest", "_memory", "_spacing", "_totals")

    def __init__(self, memory: Nanos, spacing: Nanos) -> None:
        self._memory = memory
        self._spacing = spacing
        self._instants: list[Nanos] = []
        self._totals: list[int] = []
        self._latest: tuple[Nanos, int] = (0, 0)

    def observe(self, now: Nanos, total: int) -> None:
        """The counter stands at `total`; instants never decrease."""
        self._latest = now, total
        if self._instants and now < self._instants[-1] + self._spacing:
            return
        self._instants.append(now)
        self._totals.append(total)
        oldest = now - self._memory - self._spacing
        if self._instants[len(self._instants) // 2] < oldest:  # half of it is of no use: so each sample is moved twice at most
            kept = bisect_right(self._instants, oldest) - 1
            del self._instants[:kept]
            del self._totals[:kept]

    def per_s(self, window: Nanos, ago: Nanos = 0) -> float | None:
        """Growth a second over a window (of at least 1) that ended so long before the latest observation.

        None where that window was not seen as a whole, or is forgotten: nothing is known then, which is not the same as none.
        """
        until = self._latest[0] - ago
        since = until - window
        if not self._instants or since < self._instants[0] or window + ago > self._memory:
            return None
        return (self._total_at(until) - self._total_at(since)) * SECOND / window

    def _total_at(self, at: Nanos) -> float:
        i = bisect_right(self._instants, at) - 1
        begin, total = self._instants[i], self._totals[i]
        end, next_total = self._latest if i + 1 == len(self._instants) else (self._instants[i + 1], self._totals[i + 1])
        if end <= begin:
            return total
        return total + (next_total - total) * (at - begin) / (end - begin)


class Mean:
    """The mean of a number over time, which holds from one observation to the next."""

    __slots__ = ("_growth", "_latest", "_number", "_sum")

    def __init__(self, memory: Nanos, spacing: Nanos) -> None:
        self._growth = Growth(memory, spacing)
        self._sum = 0  # the number times the nanoseconds for which it held
        self._number = 0
        self._latest: Nanos = 0

    def observe(self, now: Nanos, number: int) -> None:
        self._sum += self._number * (now - self._latest)
        self._number = number
        self._latest = now
        self._growth.observe(now, self._sum)

    def over(self, window: Nanos) -> float | None:
        """None where the window was not seen as a whole."""
        per_s = self._growth.per_s(window)
        return None if per_s is None else per_s / SECOND


class Highest:
    """The highest number said within the latest window: what it takes to go down is that all of them were low."""

    __slots__ = ("_said", "_since", "_window")

    def __init__(self, window: Nanos) -> None:
        self._window = window
        self._since: Nanos | None = None
        self._said: deque[tuple[Nanos, int]] = deque()  # descending; each held until the next one begins

    def add(self, now: Nanos, number: int) -> None:
        """Somebody says `number` now; it holds until something else is said."""
        if self._since is None:
            self._since = now
        said = self._said
        since = now
        while said and said[-1][1] <= number:
            since, _ = said.pop()
        said.append((since, number))
        while len(said) > 1 and said[1][0] <= now - self._window:
            said.popleft()

    def over_window(self, now: Nanos) -> int | None:
        """None until a whole window has passed since the first number."""
        if self._since is None or now - self._since < self._window:
            return None
        return self._said[0][1]


class TooFew:
    """How many replicas were given a trial and were too few, and for how much.

    A policy that looks at queues or at concurrency sees the fleet that there is: with one replica more it finds that one fewer
    would do, and once that one is gone that it does not. What it says of a smaller fleet is a guess, and a trial is better: at a
    load that so many were too few for, nobody tries again.

    Less arrives where it is a tenth less, and by two standard deviations of as many independent requests (but half is less, of
    however few). A trial's load is that of the window after it, since what ended it may have been the first second of a burst.

    Args:
        window: that load is measured over.
        requests, tokens: what has arrived, kept for so long at least.
    """

    __slots__ = ("_bound", "_count", "_failed", "_known_at", "_on_trial", "_requests", "_tokens", "_window")

    def __init__(self, window: Nanos, requests: Growth, tokens: Growth) -> None:
        self._window = max(1, window)
        self._requests = requests
        self._tokens = tokens
        self._on_trial = False
        self._failed = 0  # so many, at a load that is known at `_known_at`
        self._known_at: Nanos = FOREVER
        self._count = 0
        self._bound = 0.0  # tokens a second; what is below it is less

    def lowered(self) -> None:
        """The policy is content with fewer from now on."""
        self._on_trial = True

    def raised(self, count: int, now: Nanos) -> None:
        """`count` are not enough."""
        if self._on_trial:
            self._on_trial = False
            self._failed = max(self._failed, count)
            self._known_at = min(self._known_at, now + self._window)

    def observe(self, now: Nanos) -> None:
        """After what has arrived was."""
        if now < self._known_at:
            return
        load, requests = self._tokens.per_s(self._window), self._requests.per_s(self._window)
        if load and requests:
            number = requests * self._window / SECOND
            self._count, self._bound = self._failed, load * (1 - min(max(LESS, 2 / sqrt(number)), 0.5))
        self._failed, self._known_at = 0, FOREVER

    @property
    def fewest(self) -> int:
        """That may be tried."""
        if self._count:
            load = self._tokens.per_s(self._window)
            if load is not None and load < self._bound:
                self._count = 0
        return self._count + 1 if self._count else 0
