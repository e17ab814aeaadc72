"""The decoding sequences as rows of arrays, so that a step costs a few array operations and not a loop over sequences.

Knows token counts and block numbers; not what tokens mean, and not which blocks are free.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from squall.core.types import RequestId


class DecodeRows:
    """One row a sequence; the order changes as rows leave.

    Args:
        block_size: tokens a block.
        max_blocks: the most blocks of one sequence.

    Attributes:
        requests: whose each row is.
        tokens: int64; the token that the next step takes in.
        lengths: int32; tokens whose KV is in the cache.
        tables: int32 [rows, max_blocks].
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self.requests: list[RequestId] = []
        self._block_size = block_size
        self._rows: dict[RequestId, int] = {}
        self._tokens = np.zeros(16, dtype=np.int64)
        self._lengths = np.zeros(16, dtype=np.int32)
        self._tables = np.zeros((16, max_blocks), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._rows

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: len(self.requests)]

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self._lengths[: len(self.requests)]

    @property
    def tables(self) -> NDArray[np.int32]:
        return self._tables[: len(self.requests)]

    def join(self, request: RequestId, token: int, length: int, table: list[int]) -> None:
        """A sequence with `length` tokens in the cache goes on with `token`."""
        row = len(self.requests)
        if row == len(self._tokens):
            self._grow()
        self.requests.append(request)
        self._rows[request] = row
        self._tokens[row] = token
        self._lengths[row] = length
        table = table[: self._tables.shape[1]]  # more may be reserved than it can ever use
        self._tables[row, : len(table)] = table

    def give(self, request: RequestId, to: DecodeRows, table: list[int]) -> None:
        """It goes on with other rows; `table` is its block table. Harmless if it is not here."""
        row = self._rows.get(request)
        if row is not None and to is not self:
            to.join(request, int(self._tokens[row]), int(self._lengths[row]), table)
            self.leave(request)

    def leave(self, request: RequestId) -> None:
        """Harmless if it is not here."""
        row = self._rows.pop(request, None)
        if row is None:
            return
        last = self.requests.pop()
        if last != request:
            end = len(self.requests)
            self.requests[row] = last
            self._rows[last] = row
            for array in (self._tokens, self._lengths, self._tables):
                array[row] = array[end]

    def step(self, extend: Callable[[RequestId, int], list[int]]) -> NDArray[np.int64]:
        """Make room for one more token a row, which counts from now on. Returns the slots that they go to.

        Args:
            extend: gives the block table of a request once it holds so many tokens.
        """
        before = self.lengths.copy()
        for row in np.flatnonzero(before % self._block_size == 0).tolist():
            index = int(before[row]) // self._block_size
            self._tables[row, index] = extend(self.requests[row], int(before[row]) + 1)[index]
        self.lengths[:] += 1
        blocks = self.tables[np.arange(len(before)), before // self._block_size].astype(np.int64)
        return blocks * self._block_size + before % self._block_size

    def _grow(self) -> None:
        self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
        self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        self._tables = np.concatenate((self._tables, np.zeros_like(self._tables)))
