"""Weights into an engine's arena: from disk, from this machine's copy, or from the arenas of other workers, which read ours.

Knows which bytes of a transfer come from whom. Decides nothing: the controller's `Transfer` says it all.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

from squall.core.fleet_plan import Slots
from squall.core.fleet_view import Transfer
from squall.errors import PeerLost, TransferFailed
from squall.live.engine.loader import Reading, load_from_disk, load_from_host
from squall.live.engine.weights import Weights
from squall.live.loading import Arrived, Brought, Order
from squall.live.transfers import sources_of
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Fetch
from squall.live.transport.region import Region
from squall.live.transport.segment import HostCopies


class Filled(Protocol):
    """An engine, or a rank of one, whose arena is to be filled; see `TorchEngine`."""

    folder: Path

    @property
    def weights(self) -> Weights: ...

    @property
    def kv_region(self) -> Region | None: ...

    @property
    def tied(self) -> bool: ...

    @property
    def layers_ready(self) -> int: ...

    def build(self) -> None: ...


class ArenaWay:
    """See `Way`.

    Args:
        engine: whose arena is filled.
        endpoint: ours; closed with this.
        copies: of this machine; None: a disk is read without leaving one.
        slots: which replicas are joined so closely that they exchange the stripes of a striped transfer.
        reading, threads: of disks.
    """

    def __init__(
        self, engine: Filled, endpoint: Endpoint, copies: HostCopies, slots: Slots, *, keep_copy: bool = False,
        reading: Reading = "buffered", threads: int = 2,
    ) -> None:  # fmt: skip
        self.addresses = endpoint.addresses
        self._engine = engine
        self._endpoint = endpoint
        self._copies = copies
        self._slots = slots
        self._keep_copy = keep_copy
        self._reading: Reading = reading
        self._threads = threads
        self._built = False
        self._arrived: Arrived = lambda _: None
        self._num_layers = 0  # told
        self._telling = threading.Lock()
        self._fetch: Fetch | None = None
        self._missing = 0  # bytes, at the first order

    def prepare(self) -> None:
        if self._built:
            return
        self._engine.build()
        self._built = True
        region = self._engine.weights.arena.region
        region.on_verified = lambda _: self._tell()
        self._missing = sum(region.chunks[chunk].num_bytes for chunk in region.missing())
        self._endpoint.register(region)
        if self._engine.kv_region is not None:
            self._endpoint.register(self._engine.kv_region)

    def bring(self, order: Order, over: threading.Event, arrived: Arrived) -> Brought:
        region = self._engine.weights.arena.region
        region.fail(None)
        with self._telling:
            self._arrived = arrived
            self._num_layers = 0
        self._tell()
        if region.complete:
            return Brought()
        num_repaired = self._fill(order, over)
        return Brought(self._missing, region.began_at, num_repaired)

    def cancel(self) -> None:
        if (fetch := self._fetch) is not None:
            fetch.cancel("another order took its place")

    def forget(self) -> None:
        if self._built:
            arena = self._engine.weights.arena
            arena.forget()
            self._missing = sum(chunk.num_bytes for chunk in arena.region.chunks)
            self._copies.release()

    def close(self) -> None:
        self._endpoint.close()
        self._copies.close()

    def _tell(self) -> None:
        """In order, whoever brought the layer."""
        with self._telling:
            ready = self._engine.layers_ready
            if ready > self._num_layers:
                self._num_layers = ready
                self._arrived(ready)

    # -- kinds

    def _fill(self, order: Order, over: threading.Event) -> int:
        """Returns how many sections came wrong and had to come again."""
        began, transfer = time.monotonic(), order.transfer
        if transfer.source.kind == "gpu" or order.replica != transfer.path[0]:
            return self._from_peers(order, over)
        self._from_storage(keep=self._keep_copy or transfer.source.kind == "host")
        over.wait(max(0.0, began + (transfer.seconds or 0.0) - time.monotonic()))  # a mock says how long it takes
        return 0

    def _from_storage(self, *, keep: bool) -> None:
        engine = self._engine
        weights, folder, tied = engine.weights, engine.folder, engine.tied
        if keep:
            load_from_host(weights, self._copies, folder, tied=tied, reading=self._reading, threads=self._threads)
        else:
            load_from_disk(weights, folder, tied=tied, reading=self._reading, threads=self._threads)

    def _from_peers(self, order: Order, over: threading.Event) -> int:
        sources, stripes = sources_of(order, self._slots)
        if not sources:
            raise PeerLost(f"no replica of {_named(order.transfer)} can be reached")
        fetch = self._fetch = Fetch(self._endpoint, self._engine.weights.arena.region, sources, stripes=stripes)
        try:
            if over.is_set():
                raise TransferFailed("another order took its place")
            return fetch.run().num_repaired
        finally:
            self._fetch = None


def _named(transfer: Transfer) -> str:
    return ", ".join(str(place.id) for place in (transfer.source, *transfer.more_sources) if place.kind == "gpu")
