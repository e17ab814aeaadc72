"""For how long a peer has been silent, as far as we could have heard it. Knows no connection."""

from __future__ import annotations

import asyncio
import math
from time import monotonic

TICK_S = 1.0

LATE_S = 2.0
"""Whoever wakes up so much too late has been stopped: a busy machine delays by less."""


class Vigil:
    """Begins when it is made. While this process stands still (SIGSTOP, a frozen container), nobody counts as silent.

    Args:
        silence_s: after how much silence it is over.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard_at = self._due_at = monotonic()
        self._stood_still_at = -math.inf

    def heard(self) -> None:
        self._heard_at = monotonic()

    @property
    def stood_still(self) -> bool:
        """We did a moment ago, so that peers may have given us up meanwhile. To be asked while `over` runs."""
        self._catch_up()
        return monotonic() - self._stood_still_at < self._silence_s

    async def over(self) -> None:
        """Returns when it is."""
        self._due_at = monotonic()
        while (left := self._heard_at + self._silence_s - monotonic()) > 0:
            self._due_at = monotonic() + min(left, TICK_S)
            await asyncio.sleep(self._due_at - monotonic())
            self._catch_up()

    def _catch_up(self) -> None:
        """What we have missed does not count."""
        now = monotonic()
        if now - self._due_at > LATE_S:
            self._heard_at += now - self._due_at
            self._due_at = self._stood_still_at = now
