"""Host memory that bytes pass through, for as long as somebody moves some: its pages go back when nobody does. Knows no bytes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from squall.live.transport.memory import SharedMemory


class Window:
    """From any thread.

    Args:
        memory: its pages are taken as they are written to.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._users = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Something is on its way, until `end`."""
        with self._lock:
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._memory.give_back()

    @contextmanager
    def used(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()
