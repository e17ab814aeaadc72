"""A limit on how fast bytes leave: what a slower network would do, on a machine that has none. Knows no sockets."""

import threading
import time

PIECE = 256 * 1024
"""Bytes between two looks at the clock: 2 ms at 1 Gbit/s."""

_CREDIT_NS = 2_000_000
"""How much of an idle moment may be made up for: a sleep that was too long."""


class Throttle:
    """A link of `gbps` gigabits (10^9 bits) a second, shared by all who take from it. From any thread.

    Args:
        gbps: above 0.
    """

    def __init__(self, gbps: float) -> None:
        self._ns_per_byte = 8 / gbps
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Return when `num_bytes` more have had their time on the link."""
        with self._lock:
            begin = max(self._free_at, time.monotonic_ns() - _CREDIT_NS)
            self._free_at = until = begin + num_bytes * self._ns_per_byte
        while (left := until - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
