"""A limit on how fast bytes leave: what a slower network would do, on a machine that has none. Knows no sockets."""

import math
import threading
import time
from collections.abc import Callable

PIECE = 256 * 1024
"""Bytes between two looks at the clock, at most: 2 ms at 1 Gbit/s."""

_SMALLEST_PIECE = 4096
_PIECE_NS = 10_000_000
"""How long a piece may keep others waiting on a slow link."""

_CREDIT_NS = 2_000_000
"""How much of an idle moment may be made up for: a sleep that was too long."""


class Throttle:
    """A link of `gbps` gigabits (10^9 bits) a second, shared by all who take from it. From any thread.

    Args:
        gbps: above 0.

    Attributes:
        piece: how many bytes to take at a time.
    """

    def __init__(self, gbps: float) -> None:
        self._ns_per_byte = 8 / gbps
        self.piece = min(PIECE, max(_SMALLEST_PIECE, int(_PIECE_NS / self._ns_per_byte)))
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int, meanwhile: Callable[[], None] = lambda: None, every_s: float = math.inf) -> None:
        """Return when `num_bytes` more have had their time on the link; before, `meanwhile` is called every so many seconds."""
        with self._lock:
            begin = max(self._free_at, time.monotonic_ns() - _CREDIT_NS)
            self._free_at = until = begin + num_bytes * self._ns_per_byte
        while (left_s := (until - time.monotonic_ns()) / 1e9) > 0:
            time.sleep(min(left_s, every_s))
            if left_s > every_s:
                meanwhile()
