import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ConfigError
from squall.workload.prompts import prompt_tokens


@given(
    seed=st.integers(0, 1 << 40),
    request_id=st.integers(0, 1 << 40),
    length=st.integers(0, 300),
    vocab=st.integers(5, 200),
    special=st.sets(st.integers(-5, 250), max_size=4),
)
def test_a_prompt_has_its_exact_length_of_ordinary_tokens_and_is_always_the_same(
    seed: int, request_id: int, length: int, vocab: int, special: set[int]
) -> None:
    tokens = prompt_tokens(seed, request_id, length, vocab, special)
    assert len(tokens) == length
    assert all(0 <= token < vocab for token in tokens)
    assert not special & set(tokens)
    assert tokens == prompt_tokens(seed, request_id, length, vocab, special)


def test_every_ordinary_token_is_drawn_about_equally_often() -> None:
    tokens = prompt_tokens(0, 0, 40_000, 8, {0, 3, 4})
    assert {token: tokens.count(token) for token in range(8)} == pytest.approx(
        {0: 0, 1: 8000, 2: 8000, 3: 0, 4: 0, 5: 8000, 6: 8000, 7: 8000}, rel=0.05
    )


def test_requests_differ_but_a_session_continues_its_own_text() -> None:
    assert prompt_tokens(0, 1, 50, 1000) != prompt_tokens(0, 2, 50, 1000)
    first, second = prompt_tokens(0, 1, 50, 1000, session=7), prompt_tokens(0, 2, 90, 1000, session=7)
    assert second[:50] == first
    assert prompt_tokens(0, 1, 50, 1000, session=8) != first


def test_blocks_of_the_same_hash_hold_the_same_tokens() -> None:
    one = prompt_tokens(0, 1, 45, 1000, block_hashes=(11, 12), block_size=16)
    other = prompt_tokens(0, 2, 60, 1000, block_hashes=(11, 13), block_size=16)
    assert one[:16] == other[:16]
    assert one[16:32] != other[16:32]
    assert one[32:] != other[32:45]
    assert (len(one), len(other)) == (45, 60)


def test_a_vocabulary_without_ordinary_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="all are special"):
        prompt_tokens(0, 0, 5, 2, {0, 1})
