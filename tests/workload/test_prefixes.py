import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.workload.prefixes import grown, hashes, named_block_hashes, segment_hashes

Prompt = list[int]


@given(st.lists(st.tuples(st.integers(0, (1 << 31) - 2), st.integers(1, (1 << 32) - 1)), unique=True, max_size=50))
def test_hashes_of_different_places_differ_and_are_63_bits_and_never_0(places: list[tuple[int, int]]) -> None:
    owners, ends = np.array([owner for owner, _ in places], dtype=np.int64), np.array([end for _, end in places], dtype=np.int64)
    drawn = hashes(owners, ends)
    assert len(set(drawn)) == len(places)
    assert all(0 < hash < 1 << 63 for hash in drawn)


def test_smaller_blocks_are_cut_from_a_trace_s_and_chained() -> None:
    one, other, third = named_block_hashes([[1, 2], [1, 3], [4, 2]], 512, [1024, 600, 1024], 16)
    assert (len(one), len(other), len(third)) == (64, 37, 64)
    assert len(set(one)) == 64
    assert one[:32] == other[:32]
    assert not set(one[32:]) & set(other[32:])
    assert not set(one) & set(third)  # its second block has the same name, after another first one


def test_larger_blocks_are_put_together_and_shared_only_whole() -> None:
    one, other = named_block_hashes([[1, 2, 3, 4], [1, 2, 3, 5]], 16, [64, 64], 32)
    assert (len(one), len(other)) == (2, 2)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_a_partial_block_counts_only_in_its_own_size() -> None:
    assert [len(h) for h in named_block_hashes([[1, 2]], 512, [600], 512)] == [1]
    assert named_block_hashes([[], [1]], 512, [600, 15], 16) == [(), ()]


@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=2, max_size=5),
    trace_block=st.integers(1, 8),
    block=st.integers(1, 8),
)
def test_no_block_size_claims_more_than_prompts_have_in_common(texts: list[Prompt], trace_block: int, block: int) -> None:
    ids: dict[tuple[int, ...], int] = {}
    names = [
        [ids.setdefault(tuple(text[: place + trace_block]), len(ids)) for place in range(0, len(text), trace_block)]
        for text in texts
    ]
    drawn = named_block_hashes(names, trace_block, [len(text) for text in texts], block)
    for text, of_text in zip(texts, drawn, strict=True):
        assert len(of_text) == len(text) // block
        for other, of_other in zip(texts, drawn, strict=True):
            for place, (one, two) in enumerate(zip(of_text, of_other, strict=False)):
                end = (place + 1) * block
                if one == two:
                    assert text[:end] == other[:end]
                last = (end - 1) // trace_block * trace_block + trace_block
                if text[:last] == other[:last]:
                    assert one == two


def test_content_grows_from_what_is_shared() -> None:
    first = grown([], 0, 40, owner=7)
    assert first == [(40, 7)]
    assert grown(first, 40, 100, owner=8) == [(40, 7), (100, 8)]
    assert grown(first, 25, 60, owner=8) == [(25, 7), (60, 8)]
    assert grown([(20, 1), (40, 7)], 30, 30, owner=8) == [(20, 1), (30, 7)]
    assert grown(first, 0, 10, owner=8) == [(10, 8)]


@pytest.mark.parametrize(("end", "count"), [(15, 0), (16, 1), (47, 2), (64, 4)])
def test_only_full_blocks_are_hashed(end: int, count: int) -> None:
    assert len(segment_hashes(grown([(20, 1)], 20, end, 2), 16)) == count


def test_segments_are_hashed_by_the_owner_of_each_block_s_last_token() -> None:
    owners, ends = np.array([1, 2, 3, 3]), np.array([16, 32, 48, 64])
    assert segment_hashes([(20, 1), (40, 2), (70, 3)], 16) == hashes(owners, ends)


def test_blocks_are_the_same_exactly_as_far_as_content_is() -> None:
    one, other = segment_hashes([(40, 1), (80, 2)], 16), segment_hashes([(40, 1), (80, 3)], 16)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
