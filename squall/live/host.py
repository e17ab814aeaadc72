"""A replica's place in a worker: its engine, in a thread of its own, its weights, and how what it has moves. Outlives sessions.

Knows no machine and no message; what happens while a head wants the replica is in `session.py`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from squall.core.types import ReplicaId
from squall.core.views import BatchingPolicy
from squall.eventlog import EventLog
from squall.live.activations import ActivationsWay
from squall.live.engine.interface import Engine
from squall.live.kv_way import KvWay
from squall.live.loading import Loads, Way, Whole

if TYPE_CHECKING:
    from squall.live.session import Session

Call = Callable[[], None]


class EngineThread:
    """Makes an engine's calls one after the other, in a thread of its own.

    Args:
        name: of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, call: Call) -> None:
        """Make `call` after all earlier ones. It must not raise."""
        self._calls.put(call)

    def stop(self) -> None:
        """End the thread after the calls made so far."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class Host:
    """A replica's place in this worker.

    Args:
        replica: its id.
        engine: loaded when a head asks for it, once.
        policy: plans its steps.
        log: of events and actions; None writes none.
        way: how its weights come; as the engine brings them itself when None.
        kv: how its KV moves; None where it does not.
        activations: how batches change hands (live scaling); None where they do not.

    Attributes:
        session: the one that is open; None while no head wants it.
        failed: what the engine raised, after which it cannot be trusted any more.
    """

    def __init__(
        self, replica: ReplicaId, engine: Engine, policy: BatchingPolicy, log: EventLog | None, way: Way | None = None,
        kv: KvWay | None = None, activations: ActivationsWay | None = None,
    ) -> None:  # fmt: skip
        self.replica = replica
        self.engine = engine
        self.policy = policy
        self.log = log
        self.thread = EngineThread(f"engine-{replica}")
        self.session: Session | None = None
        self.failed: BaseException | None = None
        self.way: Way = Whole(lambda: self.engine.load()) if way is None else way
        self.kv = kv
        self.activations = activations
        self.loads = Loads(self.way)

    def lose(self, error: BaseException) -> None:
        """A part of the engine is gone, though it may not have been called. From any thread."""
        self.failed = error
        if (session := self.session) is not None:
            session.on_loop(session._fail, error)

    def come_up(self) -> None:
        """What can be done before a head asks for it, in the engine's thread. What fails now will fail then, and be said."""
        with contextlib.suppress(Exception):
            self.way.prepare()

    def forget(self) -> None:
        """The replica is off, and its process may stand ready for it to be wanted again: without its weights.

        In the engine's thread, where whoever wants them again prepares first.
        """
        if self.session is None and self.loads.idle:
            self.way.forget()

    def close(self) -> None:
        """Its weights are not wanted any more, here or elsewhere."""
        self.loads.stop()
        if self.kv is not None:
            self.kv.close()
        if self.activations is not None:
            self.activations.close()
        self.way.close()
