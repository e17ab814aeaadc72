"""What prompts share, as hashes of KV blocks. Knows blocks and tokens, no file and no time.

Content is told by where it was first said: an owner, and how far into it. Two prompts whose n-th block has the same hash are the
same up to the end of that block. A hash therefore needs only the owner of the block's last token, and the token's place: from the
same facts blocks of any size can be hashed, and what the facts do not say is never taken for shared.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from squall.core.types import BlockHash

Segments = list[tuple[int, int]]
"""Content from its beginning on: (end in tokens, owner), ends ascending. Owners are numbered from 0."""

_SPREAD = 0x9E3779B97F4A7C15  # odd, so that no two numbers are spread to the same; the golden ratio, so that they look random
_BITS_63 = (1 << 63) - 1


def hashes(owners: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[BlockHash, ...]:
    """One hash a block: who owns its last token, and where in the prompt it ends. All different where these are."""
    facts = ((owners + 1).astype(np.uint64) << np.uint64(32)) | ends.astype(np.uint64)
    return tuple(((facts * np.uint64(_SPREAD)) & np.uint64(_BITS_63)).tolist())


def segment_hashes(segments: Segments, block_size: int) -> tuple[BlockHash, ...]:
    """Of all full blocks; the same hashes as those of `hashes`."""
    found: list[BlockHash] = []
    end = block_size
    for bound, owner in segments:
        place = (owner + 1) << 32
        found += [(place | end) * _SPREAD & _BITS_63 for end in range(end, bound + 1, block_size)]
        end = (bound // block_size + 1) * block_size
    return tuple(found)


def grown(history: Segments, shared: int, end: int, owner: int) -> Segments:
    """The first `shared` tokens of `history`, and then until `end` what `owner` says."""
    segments: Segments = []
    for bound, former in history:
        kept = min(bound, shared, end)
        if kept > (segments[-1][0] if segments else 0):
            segments.append((kept, former))
    if not segments or segments[-1][0] < end:
        segments.append((end, owner))
    return segments


def named_block_hashes(
    blocks: Sequence[Sequence[int]], trace_block_size: int, num_prompt_tokens: Sequence[int], block_size: int
) -> list[tuple[BlockHash, ...]]:
    """Hashes of a trace's prompts in blocks of `block_size`, from the names of their blocks of `trace_block_size`.

    A trace's block is taken for the same where its name and all names before it are. Smaller blocks are cut from it, larger ones
    put together; a larger one, and one across a border, is shared only if the last trace's block in it is.
    """
    owners: dict[tuple[int, int], int] = {}
    result = []
    for names, tokens in zip(blocks, num_prompt_tokens, strict=True):
        owner = -1
        path = []
        for name in names:
            owner = owners.setdefault((owner, name), len(owners))
            path.append(owner)
        ends = np.arange(block_size, tokens + 1, block_size, dtype=np.int64)
        known = path and len(ends)
        result.append(hashes(np.array(path, dtype=np.int64)[(ends - 1) // trace_block_size], ends) if known else ())
    return result
