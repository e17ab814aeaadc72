"""A sender's account: its blocks are its own again when all that was offered of a request has been taken, and not before."""

import msgspec

from squall.live.transport.kv import KvTaken, Ledger


def say(ledger: Ledger, *taken: KvTaken) -> None:
    for each in taken:
        ledger.on_notify("somebody", msgspec.msgpack.encode(each))


def test_blocks_are_free_with_the_last_offer_that_is_taken() -> None:
    freed: list[KvTaken] = []
    ledger = Ledger(freed.append)
    ledger.offered(7, 0, 4)
    ledger.offered(7, 4, 8)
    ledger.offered(9, 0, 8)
    say(ledger, KvTaken(7, 4, 8), KvTaken(7, 4, 8))  # whoever was cut off says it again
    assert freed == []
    say(ledger, KvTaken(7, 0, 4))
    assert [taken.request for taken in freed] == [7]
    say(ledger, KvTaken(7, 0, 4))
    assert len(freed) == 1


def test_what_was_not_offered_frees_nothing() -> None:
    freed: list[KvTaken] = []
    ledger = Ledger(freed.append)
    ledger.offered(7, 0, 4, number=2)
    say(ledger, KvTaken(7, 0, 4, number=1), KvTaken(7, 0, 3, number=2), KvTaken(8, 0, 4, number=2))
    ledger.on_notify("somebody", b"no message")
    assert freed == []
    say(ledger, KvTaken(7, 0, 4, number=2))
    assert [taken.number for taken in freed] == [2]


def test_an_offer_that_is_withdrawn_is_taken_by_nobody_any_more() -> None:
    freed: list[KvTaken] = []
    ledger = Ledger(freed.append)
    ledger.offered(7, 0, 4, number=1)
    assert not ledger.withdraw(7, number=2)
    assert ledger.withdraw(7, number=1)
    assert not ledger.withdraw(7)
    say(ledger, KvTaken(7, 0, 4, number=1))
    assert freed == []
