"""The words that events, actions and machines share. Knows no behaviour."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

Nanos = int
"""An instant or a duration, in integer nanoseconds. Seconds exist only in configuration, JSON and reports."""

RequestId = int
ReplicaId = int
RunId = int
BlockHash = int
"""Hash of a full KV block chained over all blocks before it; 63 bits, never 0."""

MachineId = int
"""Where a message goes: a replica (0, 1, ...) or one of the two below."""
ROUTER: Final = -1
CONTROLLER: Final = -2

MICROSECOND: Final = 1_000
MILLISECOND: Final = 1_000_000
SECOND: Final = 1_000_000_000
FOREVER: Final = 1 << 60
"""Longer than any run: a plan without an end of its own."""


class Role(StrEnum):
    """Which phase of a request a replica serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Request(Struct, frozen=True, gc=False):
    """All that a machine may know of a request. Its output length is not among it.

    Attributes:
        id: unique in a run; ids grow with arrival.
        arrived_at: when it reached the front door.
        num_prompt_tokens: tokens in the prompt, at least 1.
        max_output_tokens: the most it may generate, at least 1.
        num_output_tokens: tokens that it generated before it came here (a request continued after its replica died).
        block_hashes: one hash a full block of the prompt, chained; empty where nothing is known of its content. They go on into
            what it will generate where that is known and its blocks are to be found by later requests, too (simulations).
        session: requests of one session share a prefix; 0 means none.
    """

    id: RequestId
    arrived_at: Nanos
    num_prompt_tokens: int
    max_output_tokens: int
    num_output_tokens: int = 0
    block_hashes: tuple[BlockHash, ...] = ()
    session: int = 0
