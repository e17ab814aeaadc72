"""Random numbers by purpose. Knows no distribution.

Every purpose ("arrivals", "prompt", ...) draws from a stream of its own, so that no draw depends on how many another one took.
"""

from zlib import crc32

import numpy as np

from squall.errors import ConfigError


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random numbers of one purpose. Raises ConfigError for a negative seed."""
    if seed < 0:
        raise ConfigError(f"run.seed is {seed}; it must be 0 or more")
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(purpose.encode())]))
