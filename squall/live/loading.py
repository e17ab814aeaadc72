"""One replica's weights, from the order to the last checksum: who fetches them is told apart from who asks.

A new order while weights are on their way takes the place of the old one; what has arrived stays. Knows no engine, no head and
no bytes: a `Way` brings these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from squall.core.fleet_view import Transfer
from squall.core.types import ReplicaId
from squall.errors import PeerRefused, TransferFailed
from squall.live.rpc.convert import WeightsMoved

REDIRECT_S = 15.0
"""How long a load that has lost its sources waits for an order that names others: a head notices a silent replica within ten."""


class Order(Struct, frozen=True):
    """One `LoadWeights`, with what machines never see.

    Attributes:
        replica: who is to get them.
        peers: where the replicas that the transfer names can be reached.
        settled: they count as having been there for long (see `Open` in squall.proto).
    """

    replica: ReplicaId
    transfer: Transfer
    peers: Mapping[ReplicaId, tuple[str, ...]]
    settled: bool = False


class Brought(Struct, frozen=True):
    """What a way has brought: bytes, when the first came (monotonic clock; None: none had to), sections that came again."""

    num_bytes: int = 0
    began_at: float | None = None
    num_repaired: int = 0


Arrived = Callable[[int], None]
"""Told how many leading layers may be computed with, whenever these are more than before. From any thread."""


class Way(Protocol):
    """How weights come to one replica.

    Attributes:
        addresses: where peers can read them; empty where they cannot.
    """

    addresses: tuple[str, ...]

    def prepare(self) -> None:
        """Make room for them. In the engine's thread; harmless when it was done before. Raises SquallError."""
        ...

    def bring(self, order: Order, over: threading.Event, arrived: Arrived, /) -> Brought:
        """Returns when every checksum has matched, at once where they are here. In a thread of its own.

        Raises:
            PeerRefused, ModelError, ConfigError: it will not work.
            TransferFailed: the sources are lost, or `over` was set; what has arrived stays for the next call.
        """
        ...

    def cancel(self) -> None:
        """End the call of `bring` that is under way, whose `over` is set. From any thread."""
        ...

    def forget(self) -> None:
        """Nobody wants them now, but somebody may again: their memory is free. In the engine's thread, when none is brought."""
        ...

    def close(self) -> None:
        """No peer reads from here any more."""
        ...


class Told(Protocol):
    """Who asked for weights; called in a thread of the load, and once at the end: `loaded` or `load_failed`."""

    def arrived(self, num_layers: int) -> None: ...
    def loaded(self, moved: WeightsMoved) -> None: ...
    def load_failed(self, error: Exception) -> None: ...


class _Wanted:
    """An order that stands, and who gave it."""

    def __init__(self, order: Order, told: Told) -> None:
        self.order = order
        self.told = told
        self.at = time.monotonic()
        self.over = threading.Event()


class Loads:
    """Carries out orders, of which the latest counts.

    Args:
        way: how weights come.
        redirect_s: see REDIRECT_S.
    """

    def __init__(self, way: Way, redirect_s: float = REDIRECT_S) -> None:
        self._way = way
        self._redirect_s = redirect_s
        self._changed = threading.Condition()
        self._wanted: _Wanted | None = None
        self._working = False
        self._then: Callable[[], None] | None = None

    def order(self, order: Order, told: Told) -> None:
        """Bring the weights. From any thread."""
        self._replace(_Wanted(order, told))

    @property
    def idle(self) -> bool:
        """Nothing is on its way, nor will be before the next order."""
        with self._changed:
            return not self._working

    def stop(self, then: Callable[[], None] | None = None) -> None:
        """Nobody waits for them any more. What has arrived stays. `then` is called once nothing is on its way, in any thread; it
        is not where another order comes before."""
        self._replace(None, then)

    def _replace(self, wanted: _Wanted | None, then: Callable[[], None] | None = None) -> None:
        with self._changed:
            before, self._wanted = self._wanted, wanted
            self._then = then if self._working else None
            idle = not self._working
            start = wanted is not None and not self._working
            self._working = self._working or start
            self._changed.notify_all()
        if before is not None:
            before.over.set()
            self._way.cancel()
        if start:
            threading.Thread(target=self._work, name="weights", daemon=True).start()
        if idle and then is not None:
            then()

    def _work(self) -> None:
        """Until nothing is wanted."""
        began: float | None = None
        while (wanted := self._next()) is not None:
            began = wanted.at if began is None else began
            try:
                brought = self._way.bring(wanted.order, wanted.over, wanted.told.arrived)
            except PeerRefused as error:
                self._fail(wanted, error)
            except TransferFailed as error:
                if not self._superseded(wanted):
                    self._fail(wanted, error)
            except Exception as error:
                self._fail(wanted, error)
            else:
                self._succeed(began, brought)

    def _next(self) -> _Wanted | None:
        with self._changed:
            wanted, then = self._wanted, self._then
            self._working = wanted is not None
            self._then = None
        if wanted is None and then is not None:
            then()
        return wanted

    def _superseded(self, wanted: _Wanted) -> bool:
        """Its sources are lost: whether an order came that names others, or nobody wants it any more."""
        with self._changed:
            return self._changed.wait_for(lambda: self._wanted is not wanted, self._redirect_s)

    def _fail(self, wanted: _Wanted, error: Exception) -> None:
        with self._changed:
            if self._wanted is not wanted:
                return
            self._wanted = None
        wanted.told.load_failed(error)

    def _succeed(self, began: float, brought: Brought) -> None:
        """All is here, whichever order brought it."""
        with self._changed:
            latest, self._wanted = self._wanted, None
        if latest is None:
            return
        now = time.monotonic()
        first = now if brought.began_at is None else max(began, brought.began_at)
        latest.told.loaded(
            WeightsMoved(latest.order.transfer.kind, brought.num_bytes, first - began, now - began, brought.num_repaired)
        )


class Whole:
    """An engine that brings its weights itself, all at once, and has none to give. See `Way`.

    Args:
        load: reads them.
    """

    addresses: tuple[str, ...] = ()

    def __init__(self, load: Callable[[], None]) -> None:
        self._load = load
        self._loaded = False

    def prepare(self) -> None:
        if not self._loaded:
            self._load()
            self._loaded = True

    def bring(self, _order: Order, _over: threading.Event, _arrived: Arrived, /) -> Brought:
        return Brought()

    def cancel(self) -> None:
        """Nothing is under way."""

    def forget(self) -> None:
        """The engine keeps them."""

    def close(self) -> None:
        """Nobody reads."""
