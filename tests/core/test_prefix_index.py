"""What the router remembers of prompts that it sent: found again, bounded, and the same whichever way it is kept."""

from hypothesis import given, settings
from hypothesis import strategies as st

from squall.core.prefix_index import MAX_HOLDERS, PrefixIndex
from squall.core.types import BlockHash, ReplicaId


def index(replicas: int = 2, apart: int = 16, num_blocks: int = 100) -> PrefixIndex:
    """Of so many replicas with blocks of 16 tokens."""
    made = PrefixIndex(apart)
    for replica in range(replicas):
        made.add(replica, num_blocks, 16)
    return made


def test_the_longest_beginning_wins_over_a_shorter_one() -> None:
    i = index()
    i.record(0, (1, 2, 3))
    i.record(1, (1, 2, 4, 5))
    assert i.longest((1, 2, 4, 5, 6)) == (4, [1])
    assert i.longest((1, 2, 3, 9)) == (3, [0])
    assert i.longest((1, 2, 9)) == (2, [0, 1])
    assert i.longest((7, 8)) == (0, ())
    assert i.longest(()) == (0, ())


def test_only_one_hash_in_every_stride_is_remembered() -> None:
    i = index(apart=64)
    i.record(0, tuple(range(1, 12)))
    assert len(i) == 2  # blocks 4 and 8
    assert i.longest(tuple(range(1, 12))) == (8, [0])
    assert i.longest((1, 2, 3, 4, 99, 99, 99, 99)) == (4, [0])
    assert i.longest((1, 2, 3)) == (0, ())


def test_blocks_larger_than_the_distance_are_all_remembered() -> None:
    i = PrefixIndex(256)
    i.add(0, num_blocks=10, block_size=512)
    i.record(0, (1, 2))
    assert i.longest((1, 2, 3)) == (2, [0])


def test_the_longest_unused_is_forgotten_and_the_end_of_a_prompt_before_its_beginning() -> None:
    i = index(num_blocks=4)
    i.record(0, (1, 2))
    i.record(0, (3, 4))
    i.record(0, (1, 5))
    assert i.longest((1, 2)) == (1, [0])
    i.record(0, (6,))
    assert i.longest((3, 4)) == (1, [0])
    assert i.longest((1, 5)) == (2, [0])


def test_a_prompt_larger_than_the_pool_leaves_its_beginning() -> None:
    i = index(num_blocks=3)
    i.record(0, (1, 2, 3, 4, 5))
    assert i.longest((1, 2, 3, 4, 5)) == (3, [0])


def test_what_everybody_has_is_known_of_those_who_got_it_last() -> None:
    i = index(replicas=MAX_HOLDERS + 2)
    for replica in range(MAX_HOLDERS + 2):
        i.record(replica, (1,))
    assert i.longest((1,)) == (1, list(range(2, MAX_HOLDERS + 2)))
    assert len(i) == MAX_HOLDERS


def test_a_replica_that_is_gone_is_forgotten_and_comes_back_with_nothing() -> None:
    i = index()
    i.record(0, (1, 2))
    i.record(1, (1,))
    i.forget(0)
    assert i.longest((1, 2)) == (1, [1])
    i.add(0, 100, 16)
    assert i.longest((1, 2)) == (1, [1])
    i.forget(0)
    i.forget(1)
    assert len(i) == 0
    assert i.longest((1, 2)) == (0, ())


PROMPTS = st.integers(0, 10).flatmap(lambda n: st.tuples(*[st.integers(1, 3)] * n))


def chained(prompt: tuple[int, ...]) -> tuple[BlockHash, ...]:
    """Hashes that are equal where everything up to there is."""
    return tuple(hash(prompt[: n + 1]) for n in range(len(prompt)))


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, 11), PROMPTS, st.booleans()), max_size=80),
    room=st.integers(1, 12),
    stride=st.integers(1, 3),
)
def test_it_remembers_no_more_than_it_may_and_only_what_was_sent(
    moves: list[tuple[ReplicaId, tuple[int, ...], bool]], room: int, stride: int
) -> None:
    i = index(replicas=12, apart=16 * stride, num_blocks=room * stride)
    sent: dict[ReplicaId, set[BlockHash]] = {replica: set() for replica in range(12)}
    for replica, prompt, lost in moves:
        hashes = chained(prompt)
        num_blocks, holders = i.longest(hashes)
        assert len(holders) <= MAX_HOLDERS
        assert num_blocks % stride == 0
        assert all(hashes[num_blocks - 1] in sent[holder] for holder in holders)
        if lost:
            i.forget(replica)
            i.add(replica, room * stride, 16)
            sent[replica].clear()
        else:
            i.record(replica, hashes)
            sent[replica].update(hashes)
            assert replica in i.longest(hashes[:stride])[1] or len(hashes) < stride
        assert {block for kept in i._sent.values() for block in kept} == set(i._holders)
        assert len(i) == sum(map(len, i._holders.values()))
        assert all(len(kept) <= room for kept in i._sent.values())
    for replica in range(12):
        i.forget(replica)
    assert not i._holders
