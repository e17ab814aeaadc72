"""Prompts of exact length, as token ids, for replaying a workload against a real engine. Knows no tokenizer and no text.

Ids are drawn evenly from the vocabulary without its special ids, so the text behind them means nothing; the work is the same.
What requests are said to share, they share token by token: blocks of the same hash, or the session's beginning.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from squall.errors import ConfigError

_REQUEST, _SESSION, _BLOCK = 1, 2, 3


def prompt_tokens(
    seed: int,
    request: int,
    length: int,
    vocab_size: int,
    special_ids: Collection[int] = (),
    *,
    session: int = 0,
    block_hashes: Sequence[int] = (),
    block_size: int = 16,
) -> list[int]:
    """`length` token ids that depend on nothing but the arguments.

    Args:
        special_ids: never drawn (begin, end, padding, ...).
        session: not 0: the prompt is the beginning of the session's one long text, so a later, longer prompt of the same
            session begins with the earlier one.
        block_hashes, block_size: the first blocks, each drawn from its hash alone; they go before the session.

    Raises ConfigError where no ordinary id is left.
    """
    special = np.array(sorted({id for id in special_ids if 0 <= id < vocab_size}), dtype=np.int64)
    ordinary = vocab_size - len(special)
    if ordinary < 1:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens has no ordinary one: all are special")
    pieces = [_draw((seed, _BLOCK, hash), block_size, ordinary) for hash in block_hashes]
    rest = length - block_size * len(pieces)
    if rest > 0:
        key = (seed, _SESSION, session) if session else (seed, _REQUEST, request)
        pieces.append(_draw(key, rest, ordinary))
    ranks = np.concatenate(pieces)[:length] if pieces else np.empty(0, dtype=np.int64)
    # The r-th ordinary id is r plus the number of special ids at or below it: those whose own rank among the others is at most r.
    before = np.searchsorted(special - np.arange(len(special)), ranks, side="right")
    tokens: list[int] = (ranks + before).tolist()
    return tokens


def _draw(key: tuple[int, ...], count: int, below: int) -> NDArray[np.int64]:
    return np.random.default_rng(np.random.SeedSequence(key)).integers(0, below, count)
