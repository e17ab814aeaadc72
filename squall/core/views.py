"""What a policy may read. The machines themselves satisfy these protocols: a view is a window, never a copy.

Knows no behaviour and no machine.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from squall.core.types import BlockHash, Request

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
    """A replica between two steps, when the decodes already have the blocks that they need for the next step."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int:
        """Blocks that chunks may take in the next step: free or idle in the prefix cache, without what the decodes take."""
        ...

    @property
    def num_decodes(self) -> int: ...
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

    def cached(self, work: WorkView) -> tuple[int, int]:
        """Blocks of a waiting request that are in the prefix cache, and how many of those others use (they cost no free one)."""
        ...


class Plan(Struct, frozen=True, gc=False):
    """What the next steps work on, besides all decodes.

    Attributes:
        steps: the policy would answer the same at each of so many boundaries, as long as nobody arrives, finishes or is
            preempted and free blocks only get fewer. 1 is always correct. More than 1 only without `admit`, and with at
            most one chunk, which then does not complete its prefill.
        chunks: tokens for each of `prefilling`, in order; missing ones get none.
        admit: tokens for the first requests of `waiting`, in order; at least 1 each, and their blocks must be free.
        open: an arrival could change the plan at the next boundary.
    """

    steps: int = 1
    chunks: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    open: bool = True


class BatchingPolicy(Protocol):
    """Plans a replica's next steps: a pure function of the view.

    Attributes:
        prefix_cache: whether full prompt blocks are shared between requests.
    """

    @property
    def prefix_cache(self) -> bool: ...
    def __call__(self, view: BatchingView) -> Plan: ...
