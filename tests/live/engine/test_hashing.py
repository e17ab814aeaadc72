from squall.live.engine.hashing import block_hashes

SECRET = b"only the fleet knows"


def test_there_is_one_hash_for_every_full_block() -> None:
    assert [len(block_hashes(range(n), 4, SECRET)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(0 < name < 1 << 63 for name in block_hashes(range(4000), 4, SECRET))


def test_a_hash_names_its_block_and_all_before_it() -> None:
    tokens = list(range(100))
    names = block_hashes(tokens, 10, SECRET)
    assert len(set(names)) == 10
    tokens[35] += 1
    changed = block_hashes(tokens, 10, SECRET)
    assert [a == b for a, b in zip(names, changed, strict=True)] == [True] * 3 + [False] * 7
    assert block_hashes([1, 1, 1, 1], 2, SECRET)[0] != block_hashes([1, 1, 1, 1], 2, SECRET)[1]


def test_another_secret_gives_other_names_and_the_same_one_the_same() -> None:
    assert block_hashes(range(40), 4, SECRET) == block_hashes(list(range(40)), 4, SECRET)
    assert not set(block_hashes(range(40), 4, SECRET)) & set(block_hashes(range(40), 4, b"another"))
