"""The weights of a tensor-parallel replica: a way for each rank's shard, all at once, as if they were one.

Rank i of one replica reads from rank i of another: its region has the rank in its name, its fingerprint the degree, so that a
peer of another degree is refused. Knows no bytes: the ways bring these.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from squall.errors import ConfigError
from squall.live.engine.torch_engine import TorchEngine
from squall.live.engine.weights import Weights
from squall.live.loading import Arrived, Brought, Order, Way
from squall.live.transport.interface import Transport
from squall.live.transport.region import Region


class Rank:
    """An engine as the way of another rank's weights sees it; rank 0's builds it, first of all. See `arena_way.Filled`."""

    def __init__(self, engine: TorchEngine, rank: int) -> None:
        self.folder = engine.folder
        self._engine = engine
        self._rank = rank

    @property
    def weights(self) -> Weights:
        return self._engine.shards[self._rank]

    @property
    def kv_region(self) -> Region | None:
        """All ranks' KV lies together, and is rank 0's to show."""
        return self._engine.kv_region if self._rank == 0 else None

    @property
    def tied(self) -> bool:
        return self._engine.tied

    @property
    def layers_ready(self) -> int:
        return self.weights.arena.layers_ready

    def build(self) -> None:
        if self._rank == 0:
            self._engine.build()


class ParallelWay:
    """See `Way`.

    Args:
        engine: of rank 0; its team ends with this.
        ways: of all ranks, rank 0's first.
        cards: an endpoint for each network card, rank 0's first: all ranks' weights may be read from each, and rank i's are
            asked of the i-th, so that they leave by different cards.
        moves_kv: all ranks' KV is to be had by peers, too.
    """

    def __init__(self, engine: TorchEngine, ways: Sequence[Way], cards: Sequence[Transport], *, moves_kv: bool = False) -> None:
        self.addresses = tuple(address for card in cards for address in card.addresses)
        self._engine = engine
        self._ways = tuple(ways)
        self._cards = tuple(cards)
        self._moves_kv = moves_kv
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._layers: list[int] = []

    def prepare(self) -> None:
        for way in self._ways:
            way.prepare()
        if self._moves_kv and self._engine.kv_region is None:
            raise ConfigError(
                "KV of several GPUs moves only where their processes can map each other's memory (CUDA IPC; see squall doctor): "
                'use replica.tp = 1, or a colocated fleet with fleet.drain = "wait" and load.live = false'
            )
        for card in self._cards:
            for weights in self._engine.shards:
                card.register(weights.arena.region)

    def bring(self, order: Order, over: threading.Event, arrived: Arrived) -> Brought:
        """What one rank cannot have ends the others', too; what has arrived stays."""
        ended = self._over = threading.Event()
        if over.is_set():  # before `cancel` could know of this call
            ended.set()
        brought: list[Brought | None] = [None] * len(self._ways)
        failures: list[Exception] = []
        self._layers = [0] * len(self._ways)

        def work(rank: int) -> None:
            try:
                brought[rank] = self._ways[rank].bring(_for_rank(order, rank), ended, partial(self._tell, arrived, rank))
            except Exception as error:
                failures.append(error)
                self.cancel()

        threads = [threading.Thread(target=work, args=(rank,), name=f"weights-{rank}") for rank in range(1, len(self._ways))]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return _together([each for each in brought if each is not None])

    def cancel(self) -> None:
        self._over.set()
        for way in self._ways:
            way.cancel()

    def forget(self) -> None:
        for way in self._ways:
            way.forget()

    def close(self) -> None:
        for way in self._ways:
            way.close()
        if self._engine.team is not None:
            self._engine.team.close()

    def _tell(self, arrived: Arrived, rank: int, num_layers: int) -> None:
        """A layer may be computed with once all ranks have theirs."""
        with self._lock:
            before = min(self._layers)
            self._layers[rank] = num_layers
            if min(self._layers) > before:
                arrived(min(self._layers))


def _for_rank(order: Order, rank: int) -> Order:
    """Peers' addresses, the rank's own card before the others; memory of the same machine stays the first."""
    peers = {}
    for replica, addresses in order.peers.items():
        far = [address for address in addresses if address.startswith("tcp:")]
        near = [address for address in addresses if not address.startswith("tcp:")]
        at = rank % len(far) if far else 0
        peers[replica] = (*near, *far[at:], *far[:at])
    return replace(order, peers=peers)


def _together(brought: Sequence[Brought]) -> Brought:
    began = [each.began_at for each in brought if each.began_at is not None]
    return Brought(sum(each.num_bytes for each in brought), min(began, default=None), sum(each.num_repaired for each in brought))
