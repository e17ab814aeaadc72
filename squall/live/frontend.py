"""What the API may ask of the head. Knows no HTTP, worker or machine: `live/head.py` implements it, tests use a small one."""

from collections.abc import Sequence
from typing import Protocol, Self

from msgspec import Struct

from squall.core.types import Nanos, ReplicaId, Role
from squall.live.engine.interface import Sampling, TokenOut
from squall.live.engine.tokenizer import Tokenizer


class Journey(Struct):
    """Where a request has been so far.

    Attributes:
        routed_after: how long it waited for the router to send it to a replica; None until then.
        num_sent: how often it did: more than once where a replica was lost with it.
        replicas: those it was sent to and those whose tokens came, in order.
    """

    routed_after: Nanos | None = None
    num_sent: int = 0
    replicas: tuple[ReplicaId, ...] = ()


class TokenStream(Protocol):
    """The tokens of one request as they come; ends after the one with `finish` set.

    `__anext__` raises `Rejected` (before the first token only) or `ReplicaFailed`.
    """

    @property
    def queued(self) -> Nanos | None:
        """How long it waited for the first step that worked on it; None until, or where, that is not known."""
        ...

    @property
    def journey(self) -> Journey: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> TokenOut: ...
    def cancel(self) -> None:
        """Nobody listens any more: free its KV. Idempotent; harmless after the end."""
        ...


class ReplicaStats(Struct, frozen=True):
    """One replica's state, for metrics. `phase` and `role` as in core; the rest is 0 until it is known.

    Attributes:
        num_layers: layers whose weights are there.
    """

    replica: int
    phase: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    role: str = "both"
    num_layers: int = 0


class LoadStats(Struct, frozen=True):
    """Loads of weights of one kind (`Transfer.kind`) that ended well, since the start."""

    kind: str
    count: int
    seconds: float
    num_bytes: int
    num_repaired: int


class ScaleStats(Struct, frozen=True):
    """How often a role's target went up or down since the start, and where it is."""

    role: str
    target: int
    num_up: int
    num_down: int


class GpuStats(Struct, frozen=True):
    """On a cluster that several models share: the GPUs that a fleet has, and how many more it wants, which others have."""

    held: int
    awaited: int


class FrontendStats(Struct, frozen=True):
    """A snapshot of the head. Counters count since the start."""

    replicas: tuple[ReplicaStats, ...]
    num_queued: int  # in the router, bound to no replica yet
    num_preemptions: int
    num_prefix_cache_queries: int  # prompt tokens looked up
    num_prefix_cache_hits: int  # of these, tokens found
    loads: tuple[LoadStats, ...] = ()
    scales: tuple[ScaleStats, ...] = ()
    num_failed_loads: int = 0
    gpus: GpuStats | None = None  # None where the fleet is alone on its cluster


class RoleStatus(Struct, frozen=True):
    """What is wanted of a role, and what there is. `manual`: somebody said so many, whatever the policy says."""

    role: str
    minimum: int
    maximum: int
    target: int
    manual: int | None
    ready: int
    coming: int
    draining: int
    idle: int


class ReplicaStatus(Struct, frozen=True):
    """One replica. `source`, `load`: where its weights come from and how, while it is there; `layers` of them have arrived."""

    replica: int
    role: str
    phase: str
    layers: int
    load: str | None
    source: str | None
    requests: int


class Decision(Struct, frozen=True):
    """A target that changed. `at` is Unix time, `why` the policy's line."""

    at: float
    role: str
    before: int
    after: int
    why: str


class FleetStatus(Struct, frozen=True, omit_defaults=True):
    """The fleet, for people and their tools. The latest decisions, oldest first. `gpus` as in `FrontendStats`."""

    roles: tuple[RoleStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    decisions: tuple[Decision, ...]
    gpus: GpuStats | None = None


class Frontend(Protocol):
    """Everything behind the HTTP layer.

    Attributes:
        model_names: the names that clients may use; the first is the canonical one.
        created: Unix time of the model, whole seconds.
        max_model_len: the longest prompt plus output, in tokens.
        draining: shutting down; new requests are rejected.
        ready: a replica takes requests, or none is there because nobody asks, and whoever does wakes one.
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

    def fleet(self) -> FleetStatus: ...

    def want(self, role: Role, count: int | None) -> None:
        """So many replicas of a role from now on, whatever the policy says, within the fleet's bounds; None: as the policy says.

        Raises ConfigError for a role that the fleet does not have.
        """
        ...
