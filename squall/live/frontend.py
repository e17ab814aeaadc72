"""What the API may ask of the head. Knows no HTTP, worker or machine: `live/head.py` implements it, tests use a small one."""

from collections.abc import Sequence
from typing import Protocol, Self

from msgspec import Struct

from squall.core.types import Nanos
from squall.live.engine.interface import Sampling, TokenOut
from squall.live.engine.tokenizer import Tokenizer


class TokenStream(Protocol):
    """The tokens of one request as they come; ends after the one with `finish` set.

    `__anext__` raises `Rejected` (before the first token only) or `ReplicaFailed`.
    """

    @property
    def queued(self) -> Nanos | None:
        """How long it waited for the first step that worked on it; None until, or where, that is not known."""
        ...

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> TokenOut: ...
    def cancel(self) -> None:
        """Nobody listens any more: free its KV. Idempotent; harmless after the end."""
        ...


class ReplicaStats(Struct, frozen=True):
    """One replica's state, for metrics. `phase` as in core/lifecycle.py; the rest is 0 until it is known."""

    replica: int
    phase: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int


class FrontendStats(Struct, frozen=True):
    """A snapshot of the head. Counters count since the start."""

    replicas: tuple[ReplicaStats, ...]
    num_queued: int  # in the router, bound to no replica yet
    num_preemptions: int
    num_prefix_cache_queries: int  # prompt tokens looked up
    num_prefix_cache_hits: int  # of these, tokens found


class Frontend(Protocol):
    """Everything behind the HTTP layer.

    Attributes:
        model_names: the names that clients may use; the first is the canonical one.
        created: Unix time of the model, whole seconds.
        max_model_len: the longest prompt plus output, in tokens.
        draining: shutting down; new requests are rejected.
        ready: at least one replica takes requests.
    """

    @property
    def model_names(self) -> Sequence[str]: ...
    @property
    def created(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def draining(self) -> bool: ...
    @property
    def ready(self) -> bool: ...

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, session: int = 0) -> TokenStream:
        """Start a request. Never blocks; a rejection shows at the stream's first `__anext__`."""
        ...

    def stats(self) -> FrontendStats: ...
