"""Between a session's loop and its engine's thread: calls go one way, what comes of them the other. Knows no message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from squall.live.host import EngineThread

T = TypeVar("T")


class Errands:
    """For as long as the session that runs in this loop is open."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def close(self) -> None:
        """What has not begun is not made any more, and nobody hears how the rest ended."""
        self._closed = True

    def run(self, call: Callable[[], T], done: Callable[[T], None] | None, failed: Callable[[BaseException], None]) -> None:
        """Make `call` in the engine's thread, then `done` with what it returned (or `failed`) on the loop."""

        def work() -> None:
            if self._closed:
                return
            try:
                result = call()
            except Exception as error:
                self.on_loop(failed, error)
            else:
                if done is not None:
                    self.on_loop(done, result)

        self._thread.call(work)

    def on_loop(self, call: Callable[[T], None], argument: T) -> None:
        """From any thread, in order."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(lambda: None if self._closed else call(argument))
