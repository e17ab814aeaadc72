"""One request between the workers and its client: its tokens as they come, and all that is needed to go on with it elsewhere.

Of replicas it knows which it has been at: the head says so and pushes, the client reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from squall.core.types import Nanos, ReplicaId, Request, RequestId
from squall.errors import SquallError
from squall.live.engine.interface import Job, Sampling, TokenOut
from squall.live.frontend import Journey


class Stream:
    """One request's tokens, from the workers to one client. Satisfies `TokenStream`.

    Args:
        request: as the router knows it.
        prompt, sampling: what machines never see.
        cancelled: called once, when the client gives up before the end.
    """

    def __init__(
        self, request: Request, prompt: tuple[int, ...], sampling: Sampling, cancelled: Callable[[RequestId], None]
    ) -> None:
        self.request = request
        self.output: list[int] = []
        self.begun_at: Nanos | None = None
        self.journey = Journey()
        self._prompt = prompt
        self._sampling = sampling
        self._cancelled = cancelled
        self._ready: deque[TokenOut] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: SquallError | None = None
        self._over = False
        self._at: ReplicaId | None = None

    @property
    def queued(self) -> Nanos | None:
        return None if self.begun_at is None else self.begun_at - self.request.arrived_at

    @property
    def job(self) -> Job:
        """All that an engine needs to begin the request, or to go on with it."""
        return Job(self.request.id, self._prompt, self._sampling, tuple(self.output), self.request.block_hashes)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOut:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._ready.popleft()

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            self._cancelled(self.request.id)

    def sent(self, replica: ReplicaId, now: Nanos) -> None:
        """The router sent it there."""
        self.journey.num_sent += 1
        if self.journey.routed_after is None:
            self.journey.routed_after = now - self.request.arrived_at
        self._is_at(replica)

    def _is_at(self, replica: ReplicaId) -> None:
        if replica != self._at:
            self._at = replica
            self.journey.replicas += (replica,)

    def push(self, out: TokenOut, replica: ReplicaId) -> None:
        """A token that the replica said; the request may have come to it from another one, in a hand-off."""
        self._is_at(replica)
        self.output.append(out.token)
        self._ready.append(out)
        self._over = out.finish is not None
        self._wake()

    def fail(self, error: SquallError) -> None:
        """No more tokens come."""
        self._over = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
