from collections import Counter, OrderedDict
from itertools import takewhile
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from squall.core.blocks import BlockPool


def cached(pool: BlockPool, *hashes: int) -> BlockPool:
    """`pool` with these blocks cached and idle, the first to be evicted last."""
    pool.take(len(hashes))
    assert pool.share(hashes) == hashes
    pool.release(len(hashes), hashes)
    return pool


def test_blocks_are_taken_from_the_free_ones_and_come_back() -> None:
    pool = BlockPool(10)
    pool.take(7)
    assert (pool.num_available, pool.num_free) == (3, 3)
    pool.release(7, ())
    assert (pool.num_available, pool.num_free) == (10, 10)


def test_a_shared_block_stays_cached_after_its_last_user() -> None:
    pool = cached(BlockPool(10), 11, 12)
    assert (pool.num_available, pool.num_free) == (10, 8)
    assert pool.match((11, 12, 13), limit=3) == (2, 0)


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = cached(BlockPool(3), 11, 12, 13)
    assert pool.oldest(5) == (13, 12, 11)
    pool.take(1)
    assert pool.match((11, 12, 13), limit=3) == (2, 0)
    pool.take(2)
    assert pool.match((11, 12, 13), limit=3) == (0, 0)
    assert pool.num_available == 0


def test_a_block_whose_hash_is_0_is_one_like_any_other() -> None:
    pool = BlockPool(2)
    pool.take(2)
    pool.release(2, pool.share((0, 1)))
    assert pool.oldest(2) == (1, 0)
    pool.take(2)
    assert pool.match((0, 1), 2) == (0, 0)
    assert pool.num_free == pool.num_available == 0


def test_free_blocks_are_taken_before_anything_is_evicted() -> None:
    pool = cached(BlockPool(5), 11, 12)
    pool.take(3)
    assert pool.oldest(2) == (12, 11)
    pool.take(1)
    assert pool.oldest(2) == (11,)


def test_a_block_in_use_is_not_available_and_cannot_be_evicted() -> None:
    pool = cached(BlockPool(3), 11, 12, 13)
    pool.use((11, 12))
    assert pool.num_available == 1
    assert pool.oldest(3) == (13,)
    assert pool.match((11, 12, 13), limit=3) == (3, 2)
    pool.take(1)
    assert pool.match((11, 12, 13), limit=3) == (2, 2)


def test_a_block_with_two_users_becomes_idle_with_the_second_to_leave() -> None:
    pool = cached(BlockPool(3), 11)
    pool.use((11,))
    pool.use((11,))
    pool.release(1, (11,))
    assert pool.oldest(1) == ()
    pool.release(1, (11,))
    assert pool.oldest(1) == (11,)


def test_a_second_copy_of_a_cached_block_stays_private() -> None:
    pool = cached(BlockPool(3), 11)
    pool.take(1)
    assert pool.share((11,)) == ()
    pool.release(1, ())
    assert (pool.num_available, pool.num_free) == (3, 2)


def test_a_hit_ends_at_the_first_gap_and_at_the_limit() -> None:
    pool = cached(BlockPool(5), 11, 12, 14)
    assert pool.match((11, 12, 13, 14), limit=4) == (2, 0)
    assert pool.match((11, 12), limit=1) == (1, 0)
    assert pool.match((), limit=4) == (0, 0)


def test_using_a_block_again_makes_it_the_last_to_be_evicted() -> None:
    pool = cached(cached(BlockPool(4), 11), 12)
    pool.use((11,))
    pool.release(1, (11,))
    assert pool.oldest(2) == (12, 11)


def test_the_order_of_eviction_is_kept_however_long_it_goes_on() -> None:
    """Twelve conversations in a pool with room for eight: some go on while they are idle, and others are evicted."""
    dice, pool = Random(7), BlockPool(80)
    idle: OrderedDict[int, None] = OrderedDict()
    evicted = 0
    for _ in range(3_000):
        first = dice.randrange(12) * 100 + 1
        chain = tuple(range(first, first + dice.randint(1, 10)))
        held, in_use = pool.match(chain, len(chain))
        assert (held, in_use) == (len(list(takewhile(idle.__contains__, chain))), 0)
        pool.use(chain[:held])
        for block in chain[:held]:
            del idle[block]
        pool.take(len(chain) - held)
        while len(idle) > pool.num_available:
            idle.popitem(last=False)
            evicted += 1
        shared = chain[:held] + pool.share(chain[held:])
        pool.release(len(chain), shared)
        idle.update(dict.fromkeys(reversed(shared)))
        most = dice.choice((0, 0, 0, 3, 20, 80))  # as far as it has been looked, blocks lie apart from their chains
        assert pool.oldest(most) == tuple(idle)[:most]
    assert evicted > 1_000


class Book:
    """The same by bookkeeping: which block each request holds, and under which hash it is cached."""

    def __init__(self, num_blocks: int) -> None:
        self.free = num_blocks
        self.users: Counter[int] = Counter()
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.held: list[tuple[int, list[int]]] = []

    def check(self, pool: BlockPool) -> None:
        idle = [block for block in self.cached if not self.users[block]]
        private = sum(count - len(shared) for count, shared in self.held)
        assert pool.num_free == self.free
        assert pool.num_available == self.free + len(idle)
        assert pool.num_blocks == self.free + private + len(self.cached)
        assert sorted(pool.oldest(99)) == sorted(idle)


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 4)), max_size=60))
def test_no_block_is_ever_lost_or_made(num_blocks: int, story: list[tuple[int, int, int]]) -> None:
    """Requests of `length` blocks of family `family` come, use what is cached, share what they compute, and go."""
    pool, book = BlockPool(num_blocks), Book(num_blocks)
    for leaver, length, family in story:
        chain = [family * 10 + i for i in range(length)]
        held, in_use = pool.match(chain, length)
        if length - in_use <= pool.num_available:
            pool.use(chain[:held])
            book.users.update(chain[:held])
            evicted = pool.oldest(max(0, length - held - pool.num_free))
            pool.take(length - held)
            for block in evicted:
                del book.cached[block]
            book.free -= length - held - len(evicted)
            shared = chain[:held] + list(pool.share(chain[held:]))
            book.users.update(shared[held:])
            book.cached.update(dict.fromkeys(shared))
            book.held.append((length, shared))
        book.check(pool)
        if len(book.held) > leaver:
            count, shared = book.held.pop(leaver)
            pool.release(count, shared)
            book.users.subtract(shared)
            book.free += count - len(shared)
        book.check(pool)
