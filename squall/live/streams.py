"""The requests whose clients still listen: from a prompt to a request, from a replica's tokens to its client.

Knows no router. What a request has so far stays here, so that it can go on elsewhere.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from squall.core.actions import Reply
from squall.core.types import ReplicaId, Request, RequestId
from squall.errors import Rejected, ReplicaFailed
from squall.live.engine.hashing import block_hashes
from squall.live.engine.interface import Sampling, TokenOut
from squall.live.stream import Stream


class Streams:
    """By request, until its last token, or until one side gives up.

    Args:
        max_model_len: of a prompt and its output together.
        block_size: tokens of a block by whose hash prompts are compared; None where they are not.
        cancelled: is told of every request that its client gives up before the end.
    """

    def __init__(self, max_model_len: int, block_size: int | None, cancelled: Callable[[RequestId], None]) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._cancelled = cancelled
        self._secret = secrets.token_bytes(32)
        self._hashed: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._ids = count(1)
        self._open: dict[RequestId, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, request: RequestId) -> Stream | None:
        return self._open.get(request)

    def open(self, prompt: Sequence[int], sampling: Sampling, session: int) -> Stream:
        """A new request. Its prompt leaves room for a token at least."""
        tokens = tuple(prompt)
        request = Request(
            id=next(self._ids),
            arrived_at=time.monotonic_ns(),
            num_prompt_tokens=len(tokens),
            max_output_tokens=max(1, min(sampling.max_tokens, self._max_model_len - len(tokens))),
            block_hashes=() if self._block_size is None else self._hashes_of(tokens, self._block_size),
            session=session,
        )
        stream = self._open[request.id] = Stream(request, tokens, sampling, self._give_up)
        return stream

    def _hashes_of(self, prompt: tuple[int, ...], block_size: int) -> tuple[int, ...]:
        """Those of the latest prompt are remembered: its choices come one after the other, up to 2,048 of them."""
        latest, hashes = self._hashed
        if prompt is not latest:
            hashes = block_hashes(prompt, block_size, self._secret)
            self._hashed = prompt, hashes
        return hashes

    def begun(self, requests: Iterable[RequestId]) -> None:
        """Their prompts are being computed; for the first time, if at all."""
        now = time.monotonic_ns()
        for request in requests:
            stream = self._open.get(request)
            if stream is not None and stream.begun_at is None:
                stream.begun_at = now

    def push(self, tokens: Iterable[TokenOut], replica: ReplicaId) -> None:
        for out in tokens:
            stream = self._open.get(out.request)
            if stream is not None:
                stream.push(out, replica)
                if out.finish is not None:
                    del self._open[out.request]

    def reject(self, reply: Reply) -> None:
        """The router takes it no further: a refusal, or a failure where its client has seen tokens."""
        stream = self._open.pop(reply.request, None)
        if stream is None:
            return
        if stream.output:
            stream.fail(ReplicaFailed(reply.message))
            return
        retry_after_s = reply.retry_after_s if reply.rejection.retryable else None
        stream.fail(Rejected(reply.message, reason=reply.rejection.value, retry_after_s=retry_after_s))

    def fail(self, requests: Iterable[RequestId], why: str) -> None:
        for request in requests:
            if stream := self._open.pop(request, None):
                stream.fail(ReplicaFailed(why))

    def fail_all(self, why: str) -> None:
        self.fail(tuple(self._open), why)

    def _give_up(self, request: RequestId) -> None:
        if self._open.pop(request, None) is not None:
            self._cancelled(request)
