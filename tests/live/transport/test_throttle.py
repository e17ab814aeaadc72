"""A slow link by hand: on a clock that only sleeping moves, what is taken takes its bytes over the rate, whoever takes it."""

import time

import pytest

from squall.live.transport.throttle import PIECE, Throttle

MS = 1_000_000


class Clock:
    """Nanoseconds, which pass while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1_000 * MS

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_bytes_take_their_time_and_no_more(clock: Clock) -> None:
    """At 1 Gbit/s 125,000 bytes take a millisecond. The first may leave as if they had been waited for 2 ms before."""
    link = Throttle(1.0)
    took = []
    for _ in range(4):
        began = clock.now
        link.take(500_000)
        took.append((clock.now - began) / MS)
    assert took == pytest.approx([2, 4, 4, 4], abs=1e-3)


def test_an_idle_link_saves_nothing_up_but_two_milliseconds(clock: Clock) -> None:
    link = Throttle(8.0)  # a byte a nanosecond
    link.take(10 * MS)
    clock.now += 5_000 * MS
    began = clock.now
    link.take(10 * MS)
    assert clock.now - began == pytest.approx(8 * MS, abs=10)


def test_whoever_waits_is_asked_whether_to_go_on(clock: Clock) -> None:
    class Given(Exception):
        """Up."""

    def give_up() -> None:
        raise Given

    link = Throttle(8.0)
    began = clock.now
    with pytest.raises(Given):
        link.take(1_000 * MS, give_up, every_s=0.1)
    assert clock.now - began == pytest.approx(100 * MS, abs=10)


@pytest.mark.parametrize(("gbps", "piece"), [(100.0, PIECE), (0.01, 12_500), (0.0001, 4096)])
def test_a_piece_keeps_others_waiting_ten_milliseconds_at_most(gbps: float, piece: int) -> None:
    assert Throttle(gbps).piece == piece
