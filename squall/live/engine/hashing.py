"""Names for KV blocks: equal prefixes get equal names, and nobody without the secret can make two prefixes collide.

Knows no pool and no request.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

from squall.core.types import BlockHash


def block_hashes(tokens: Sequence[int], block_size: int, secret: bytes) -> tuple[BlockHash, ...]:
    """One hash for every full block of `tokens`, each chained over all blocks before it; 63 bits, never 0.

    Args:
        tokens: token ids, below 2**32.
        block_size: tokens a block.
        secret: up to 64 bytes, the same in all processes of one fleet. It keeps a client from making up a prompt that
            shares a name with somebody else's.
    """
    num_blocks = len(tokens) // block_size
    packed = memoryview(struct.pack(f"<{num_blocks * block_size}I", *tokens[: num_blocks * block_size]))
    width = 4 * block_size
    chain = b""
    names = []
    for start in range(0, num_blocks * width, width):
        digest = blake2b(chain, key=secret, digest_size=16)
        digest.update(packed[start : start + width])
        chain = digest.digest()
        names.append((int.from_bytes(chain[:8], "little") >> 1) or 1)
    return tuple(names)
