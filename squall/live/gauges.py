"""What replicas last said of their load, and what the counters of sessions that are over came to. Knows no client."""

from __future__ import annotations

from squall.core.controller import Controller
from squall.core.types import ReplicaId
from squall.live.fleet_book import FleetBook
from squall.live.frontend import FrontendStats, ReplicaStats
from squall.live.rpc.convert import ReplicaLoad

NO_LOAD = ReplicaLoad(0, 0, 0, 0, 0, 0)


class Gauges:
    """Of the replicas of `controller`; `book` knows their weights.

    Attributes:
        num_preemptions: of all replicas, ever.
    """

    def __init__(self, controller: Controller, book: FleetBook) -> None:
        self.num_preemptions = 0
        self._controller = controller
        self._book = book
        self._loads: dict[ReplicaId, ReplicaLoad] = {}
        self._past_queries = self._past_hits = 0

    def say(self, replica: ReplicaId, load: ReplicaLoad) -> None:
        self._loads[replica] = load

    def gone(self, replica: ReplicaId) -> None:
        """Its session is over; its counters begin anew with the next one."""
        if load := self._loads.pop(replica, None):
            self._past_queries += load.num_prefix_cache_queries
            self._past_hits += load.num_prefix_cache_hits

    def stats(self, num_queued: int) -> FrontendStats:
        """With so many requests that wait for a replica."""
        loads, book = self._loads, self._book
        return FrontendStats(
            replicas=tuple(
                ReplicaStats(
                    replica=replica,
                    phase=member.life.phase.value,
                    num_running=loads.get(replica, NO_LOAD).num_running,
                    num_waiting=loads.get(replica, NO_LOAD).num_waiting,
                    num_blocks=loads.get(replica, NO_LOAD).num_blocks,
                    num_used_blocks=loads.get(replica, NO_LOAD).num_used_blocks,
                    role=member.role.value,
                    num_layers=book.num_layers(member),
                )
                for replica, member in sorted(self._controller.fleet.items())
            ),
            num_queued=num_queued,
            num_preemptions=self.num_preemptions,
            num_prefix_cache_queries=self._past_queries + sum(load.num_prefix_cache_queries for load in loads.values()),
            num_prefix_cache_hits=self._past_hits + sum(load.num_prefix_cache_hits for load in loads.values()),
            loads=book.loads(),
            scales=book.scales(),
            num_failed_loads=book.num_failed_loads,
            gpus=book.gpus(),
        )
