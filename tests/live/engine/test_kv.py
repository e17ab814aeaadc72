"""Physical blocks under the rules that `RunSteps` states."""

from collections.abc import Iterator

import numpy as np
import pytest

from squall.live.engine.kv import BlockTables
from squall.live.engine.rows import DecodeRows

NONE: Iterator[int] = iter(())


def test_a_table_grows_by_whole_blocks_and_shrinks_to_nothing() -> None:
    blocks = BlockTables(4, 16)
    blocks.attach(1, ())
    assert [len(blocks.extend(1, tokens, NONE)) for tokens in (1, 16, 17, 48)] == [1, 1, 2, 3]
    assert blocks.num_free == 1
    blocks.release(1)
    blocks.release(1)
    assert blocks.num_free == 4


def test_full_prompt_blocks_are_kept_under_their_hash_and_taken_up_again() -> None:
    blocks = BlockTables(4, 16)
    blocks.attach(1, ())
    table = list(blocks.extend(1, 40, NONE))
    blocks.file(1, (11, 12), 20)
    assert blocks.num_held == 1
    blocks.file(1, (11, 12), 40)
    blocks.release(1)
    assert (blocks.num_held, blocks.num_free) == (2, 2)
    blocks.attach(2, (11, 12))
    assert blocks.tables[2] == table[:2]


def test_a_hash_that_is_held_already_is_not_filed_again_and_the_copy_is_freed() -> None:
    blocks = BlockTables(4, 16)
    for request in (1, 2):
        blocks.attach(request, ())
        blocks.extend(request, 16, NONE)
    for request in (1, 2):
        blocks.file(request, (11,), 16)
        blocks.release(request)
    assert (blocks.num_held, blocks.num_free) == (1, 3)


def test_cached_blocks_go_in_the_order_named_and_only_when_none_is_free() -> None:
    blocks = BlockTables(3, 16)
    blocks.attach(1, ())
    first, second = blocks.extend(1, 32, NONE)
    blocks.file(1, (11, 12), 32)
    blocks.release(1)
    blocks.attach(2, ())
    evictable = iter((12, 11))
    assert blocks.extend(2, 16, evictable)[0] not in (first, second)
    assert blocks.extend(2, 48, evictable)[1:] == [second, first]
    assert blocks.num_held == 0


def test_a_machine_that_disagrees_is_noticed() -> None:
    blocks = BlockTables(1, 16)
    blocks.attach(1, ())
    with pytest.raises(RuntimeError, match="request 1 starts its prefill again"):
        blocks.attach(1, ())
    with pytest.raises(RuntimeError, match="request 2 counts on cached block 7b, which is not held"):
        blocks.attach(2, (0x7B,))
    with pytest.raises(RuntimeError, match="no free KV block for request 1, and nothing may be evicted"):
        blocks.extend(1, 17, NONE)
    with pytest.raises(RuntimeError, match="block 7b, to be evicted, is not held"):
        blocks.extend(1, 17, iter((0x7B,)))


def test_rows_step_together_and_ask_for_a_block_only_at_its_edge() -> None:
    asked = []

    def extend(request: int, tokens: int) -> list[int]:
        asked.append((request, tokens))
        return [5, 6, 7]

    rows = DecodeRows(4, 3)
    rows.join(1, 100, 7, [5, 6])
    rows.join(2, 200, 2, [9])
    assert rows.step(extend).tolist() == [6 * 4 + 3, 9 * 4 + 2]
    assert asked == []
    assert rows.step(extend).tolist() == [7 * 4, 9 * 4 + 3]
    assert asked == [(1, 9)]
    assert rows.lengths.tolist() == [9, 4]


def test_rows_leave_in_any_order_and_more_can_join_than_there_was_room_for() -> None:
    rows = DecodeRows(4, 2)
    for request in range(40):
        rows.join(request, 1000 + request, 1, [request])
    for request in (0, 39, 7, 8, 7, 99):
        rows.leave(request)
    assert sorted(rows.requests) == [r for r in range(40) if r not in (0, 7, 8, 39)]
    assert rows.tokens.tolist() == [1000 + request for request in rows.requests]
    assert np.array_equal(rows.tables[:, 0], rows.requests)
    assert 7 not in rows
    assert 6 in rows
