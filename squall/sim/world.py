"""What is true of the requests of a simulation: how long each one's output is, and what has become of it so far.

Engines (`sim.engine`) ask it and tell it. Knows no machine, no queue and no event order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Final

from msgspec.structs import replace

from squall.core.events import Arrived, Rejection
from squall.core.metrics import UNSET, Gaps, Outcome, RequestRow, RunRecord
from squall.core.types import FOREVER, Nanos, ReplicaId, Request, RequestId
from squall.perf.latency import UNITS_PER_NANO, LatencyModel
from squall.workload.spec import OfferedRequest

entry: Final = Struct("4q").pack
"""An entry of `Gaps`, as bytes: an array takes them three times as fast as four numbers."""

UNFINISHED, COMPLETED = Outcome.UNFINISHED, Outcome.COMPLETED  # a member looked up in its class takes as long as a call


class World:
    """The truth about the requests, and the record of what became of them.

    Args:
        requests: the workload.
        latency: prices steps.
        max_steps: the longest run that an engine makes of what it is asked for.
        latencies: of replicas whose steps `latency` does not price.
        files_outputs: later requests find the blocks of answers in a prefix cache.

    Attributes:
        rows: what became of each request so far. `num_output_tokens` is the truth, how many it will have if nothing ends it
            earlier, until `record` makes it what came of that.
    """

    def __init__(
        self,
        requests: Iterable[OfferedRequest],
        latency: LatencyModel,
        max_steps: int = FOREVER,
        latencies: Mapping[ReplicaId, LatencyModel] | None = None,
        files_outputs: bool = False,
    ) -> None:
        self.latency = latency
        self._latencies = latencies or {}
        self._files_outputs = files_outputs
        self.max_steps = max_steps
        self.gaps = array("q")  # weight, count, first and increment of each entry of `Gaps`, one after the other
        self.rows: dict[RequestId, RequestRow] = {}
        self.followers: dict[RequestId, list[OfferedRequest]] = {}  # who waits for the end of which request
        self.released: list[OfferedRequest] = []  # who waits no longer, for the driver to collect
        for request in requests:
            self.rows[request.id] = RequestRow(
                request.id, request.arrived_at, request.num_prompt_tokens, request.num_output_tokens
            )
            if request.after >= 0:
                self.followers.setdefault(request.after, []).append(request)
        self.num_absent = 0  # who had not arrived when the run was ended
        self.paused: dict[RequestId, tuple[int, Nanos]] = {}  # who decodes nowhere: tokens left, and when the last one came

    def latency_of(self, replica: ReplicaId) -> LatencyModel:
        """What prices the steps of a replica."""
        return self._latencies.get(replica, self.latency)

    def reject(self, request: RequestId, rejection: Rejection, now: Nanos) -> None:
        """It is refused, or given up: its client sees a failure where it had tokens."""
        row = self.rows[request]
        row.outcome = Outcome.REJECTED if row.first_token_at == UNSET else Outcome.FAILED
        row.error = rejection.value
        row.finished_at = now
        self._release(request)

    def cancel(self, request: RequestId, now: Nanos) -> None:
        """The client goes away. What the request still generates is counted as its output."""
        row = self.rows[request]
        if row.outcome is UNFINISHED:
            row.outcome = Outcome.CANCELLED
            row.finished_at = now
            self._release(request)

    def finish(self, request: RequestId, now: Nanos) -> None:
        """It has its last token."""
        row = self.rows[request]
        if row.outcome is UNFINISHED:
            row.outcome = COMPLETED
            row.finished_at = now
            if self.followers:
                self._release(request)

    def _release(self, request: RequestId) -> None:
        """Its client has seen its end, whatever that was."""
        self.released += self.followers.pop(request, ())

    def arrivals(self, requests: Iterable[OfferedRequest]) -> list[tuple[Nanos, Arrived]]:
        """When each of these arrives, and what the router hears of it.

        A trace does not know the client's limit; the output it recorded stands for it (the router refuses what never fits).
        """
        files_outputs = self._files_outputs
        return [
            (
                offered.arrived_at,
                Arrived(
                    Request(
                        offered.id,
                        offered.arrived_at,
                        offered.num_prompt_tokens,
                        offered.num_output_tokens,
                        0,
                        offered.block_hashes + offered.output_hashes if files_outputs else offered.block_hashes,
                        offered.session,
                    )
                ),
            )
            for offered in requests
        ]

    def arrival(self, offered: OfferedRequest, now: Nanos) -> Arrived:
        """What the router hears of one that waited for another's end and arrives now."""
        self.rows[offered.id].arrived_at = now
        ((_, arrived),) = self.arrivals((replace(offered, arrived_at=now),))
        return arrived

    def first_token(self, request: RequestId, now: Nanos) -> int:
        """A prefill ended and yielded a token. Returns how many tokens the request has left."""
        row = self.rows[request]
        if row.first_token_at == UNSET:
            row.first_token_at = now
            return row.num_output_tokens - 1
        left, told_at = self.paused.pop(request)
        self.gaps.frombytes(entry(1, 1, (now - told_at) * UNITS_PER_NANO, 0))
        return left - 1

    def generated(self, request: RequestId) -> int | None:
        """How many tokens a request that decodes nowhere has; None where it has none, or decodes."""
        paused = self.paused.get(request)
        return None if paused is None else self.rows[request].num_output_tokens - paused[0]

    def stop(self, now: Nanos) -> None:
        """The run ends before all is done: what everybody has generated is their output; who has not arrived stays out of it."""
        absent = [offered.id for waiting in self.followers.values() for offered in waiting]
        absent += [row.id for row in self.rows.values() if row.arrived_at >= now]
        for request in dict.fromkeys(absent):
            del self.rows[request]
            self.num_absent += 1

    def record(self, now: Nanos) -> RunRecord:
        """What became of everybody; tokens of those who ended, or are, without a replica count, too."""
        for request, (left, _) in self.paused.items():
            if request in self.rows:
                self.rows[request].num_output_tokens -= left
        rows = list(self.rows.values())
        for row in rows:
            if row.first_token_at == UNSET:
                row.num_output_tokens = 0
        gaps = Gaps(*(self.gaps[i::4] for i in range(4)))
        sources = dict.fromkeys(latency.source for latency in self._latencies.values()) or (self.latency.source,)
        return RunRecord("simulated", rows, gaps, ended_at=now, latency_source="; ".join(sources))
