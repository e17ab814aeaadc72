"""The router's record of an unfinished request."""

from __future__ import annotations

from typing import Final

from squall.core.events import Held
from squall.core.lifecycle import RequestPhase
from squall.core.replica_index import Backend
from squall.core.types import Nanos, ReplicaId, Request

QUEUED: Final = RequestPhase.QUEUED  # a member looked up in its class takes as long as a call


class Entry:
    """An unfinished request.

    Attributes:
        num_tokens: the most KV that it may need.
        backend: the replica that has it; None while it is queued at the router.
        started: that replica has yielded a token of it.
        held: what that replica holds for another one that is to decode it; None before, and once that one has it.
        to: the replica that it is promised to meanwhile.
        taken_from: the live target whose first layers its replica goes on from; the KV of these may wait there.
        lost_by: replicas that died with it.
        num_failed: hand-offs that failed.
        queued_at: since when it waits for a replica, at the router or in the hand-off queue; 0 of one that never did.
    """

    __slots__ = ("backend", "held", "lost_by", "num_failed", "num_tokens", "phase", "queued_at", "request", "started",
                 "taken_from", "to")  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_tokens = request.num_prompt_tokens + request.max_output_tokens
        self.phase = QUEUED
        self.backend: Backend | None = None
        self.started = False
        self.held: Held | None = None
        self.to: Backend | None = None
        self.taken_from: ReplicaId | None = None
        self.lost_by: tuple[ReplicaId, ...] = ()
        self.num_failed = 0
        self.queued_at: Nanos = 0
