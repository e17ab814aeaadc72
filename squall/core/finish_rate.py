"""How fast requests finish, and so how long somebody who is sent away should wait. Knows no request."""

from squall.core.types import SECOND, Nanos

RATE_WINDOW: Nanos = 10 * SECOND
UNKNOWN_WAIT_S = 5.0
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0


class FinishRate:
    """How fast requests finish, over the last 10 to 20 seconds."""

    __slots__ = ("_before", "_began", "_current", "_until")

    def __init__(self) -> None:
        self._began: Nanos = 0
        self._until: Nanos = 0  # the end of the current window
        self._current = 0
        self._before = 0

    def add(self, num_finished: int, now: Nanos) -> None:
        if now >= self._until:
            self._roll(now)
        self._current += num_finished

    def _roll(self, now: Nanos) -> None:
        """A new window begins; the one before it counts where it has just ended."""
        begins = now - now % RATE_WINDOW
        if not self._until:
            self._began = now
        self._before = self._current if begins == self._until else 0
        self._current = 0
        self._until = begins + RATE_WINDOW

    def wait_s(self, num_requests: int, now: Nanos) -> float:
        """After how long so many more will have finished: whole seconds, from 1 to 60."""
        if now >= self._until:
            self._roll(now)
        num_finished = self._before + self._current
        if not num_finished:
            return UNKNOWN_WAIT_S
        elapsed = min(RATE_WINDOW + now % RATE_WINDOW, now - self._began)
        seconds = -(-num_requests * elapsed // (num_finished * SECOND))
        return min(max(float(seconds), MIN_WAIT_S), MAX_WAIT_S)
