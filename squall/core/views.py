"""What a policy may read. The machines themselves satisfy these protocols: a view is a window, never a copy.

Knows no behaviour and no machine.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from msgspec import Struct

from squall.core.types import FOREVER, BlockHash, Request

# -- batching: which work goes into a replica's next steps


class WorkView(Protocol):
    """A request at a replica that does not decode yet."""

    @property
    def request(self) -> Request: ...
    @property
    def target(self) -> int:
        """Tokens whose KV must exist before it decodes: the prompt, and what it had generated when it came or was preempted."""
        ...

    @property
    def computed(self) -> int:
        """Of these, tokens whose KV exists."""
        ...

    @property
    def blocks(self) -> int:
        """KV blocks that it holds."""
        ...

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """Of its full prompt blocks; none where nothing is cached."""
        ...


class BatchingView(Protocol):
    """A replica between two steps.

    With pipeline stages there may be runs in progress: what they work on is not in `num_decodes` nor in `prefilling`, and the
    blocks that they take are not free.
    """

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_stages(self) -> int:
        """Pipeline stages: so many runs may be in progress at once, of one step each where there are several stages."""
        ...

    @property
    def free_blocks(self) -> int:
        """Blocks that chunks may take in the next step: free or idle in the prefix cache, without `decode_blocks`.

        Where it is negative the decodes do not have the blocks that they need, and only a plan without them will be followed:
        otherwise somebody is preempted and the policy asked again.
        """
        ...

    @property
    def decode_blocks(self) -> int:
        """Blocks that all decodes together take in the next step."""
        ...

    @property
    def num_decodes(self) -> int: ...
    @property
    def num_running(self) -> int:
        """Requests admitted and not finished, in whatever state."""
        ...

    @property
    def prefilling(self) -> Sequence[WorkView]:
        """Admitted and not yet decoding, in the order of admission."""
        ...

    @property
    def waiting(self) -> Sequence[WorkView]:
        """Not admitted; preempted ones come first."""
        ...

    @property
    def preempted(self) -> bool:
        """A request was preempted at this very boundary."""
        ...

    @property
    def steps_since_mark(self) -> int:
        """Steps in which decodes took part, since a plan last said `mark`."""
        ...

    def cached(self, work: WorkView) -> tuple[int, int]:
        """Blocks of a waiting request that are in the prefix cache, and how many of those others use (they cost no free one)."""
        ...

    def spans(self) -> Iterable[tuple[int, int]]:
        """Of each decode: the tokens of its context, the one to be computed next included, and how many more it may still add.

        Costs as much as there are decodes: not to be asked at every step.
        """
        ...

    def latest_grows(self) -> bool:
        """Whether the decode that arrived last takes a block in the next step. Costs as much as there are decodes."""
        ...


ALL: Final = FOREVER
"""More decodes than there are."""


class Plan(Struct, frozen=True, gc=False):
    """What the next steps work on.

    Attributes:
        steps: the policy would answer the same at each of so many boundaries, as long as nobody arrives, finishes or is
            preempted and free blocks only get fewer. 1 is always correct. More than 1 only without `admit`, and with at
            most one chunk, which then does not complete its prefill.
        chunks: tokens for each of `prefilling`, in order; missing ones get none.
        admit: tokens for the first requests of `waiting`, in order; at least 1 each, and their blocks must be free.
        open: an arrival could change the plan at the next boundary.
        decodes: the most decodes that take part, the earliest arrivals first. 0 pauses them all, which costs nothing; a part of
            them costs as much as the part is large, at each boundary.
        reserve: KV blocks that each request of `admit` holds from its first step on; missing ones, and numbers below what the
            step needs, take blocks as they need them. Either no more than its prompt fills, or all that it may come to need.
        keep: blocks that stay free throughout; the run ends before they are touched (but for its first step).
        preempt: do nothing yet: send the latest arrival back to the queue, and ask again.
        mark: `steps_since_mark` begins anew with this plan.
    """

    steps: int = 1
    chunks: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    open: bool = True
    decodes: int = ALL
    reserve: tuple[int, ...] = ()
    keep: int = 0
    preempt: bool = False
    mark: bool = False


ALL_DECODE: Final = Plan(FOREVER)
"""All decodes go on, and nothing else is to be done until something happens."""

ALL_DECODE_CLOSED: Final = Plan(FOREVER, open=False)
"""The same, whoever arrives."""


class BatchingPolicy(Protocol):
    """Plans a replica's next steps: a pure function of the view.

    A policy must admit somebody where nothing runs and somebody waits, or they wait for ever; the router has refused whoever
    does not fit into the KV pool alone.

    Attributes:
        prefix_cache: whether full prompt blocks are shared between requests.
    """

    @property
    def prefix_cache(self) -> bool: ...
    def __call__(self, view: BatchingView) -> Plan: ...
