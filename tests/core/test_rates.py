"""What a controller remembers of sizes that were too small, and of how much arrived."""

import pytest

from squall.core.rates import Growth, TooFew
from squall.core.types import SECOND

WINDOW = 30 * SECOND


class Past:
    """Requests of 100 tokens that arrive evenly, looked at once a second."""

    def __init__(self) -> None:
        self.requests, self.tokens = Growth(WINDOW, SECOND), Growth(WINDOW, SECOND)
        self.too_few = TooFew(WINDOW, self.requests, self.tokens)
        self.now = self.arrived = 0

    def goes_on(self, seconds: int, rate: int) -> None:
        for _ in range(seconds):
            self.now += SECOND
            self.arrived += rate
            self.requests.observe(self.now, self.arrived)
            self.tokens.observe(self.now, self.arrived * 100)
            self.too_few.observe(self.now)

    def fails(self, count: int) -> None:
        self.too_few.lowered()
        self.too_few.raised(count, self.now)


@pytest.mark.parametrize(
    ("rate", "same", "less"),
    [
        (100, 90, 89),  # of 3,000 in a window two standard deviations are 110: a tenth counts
        (12, 11, 10),  # of 360 they are 38, more than a tenth: below 10.74 a second
        (1, 1, 0),  # of 30 they are 11: below 0.63 a second
    ],
)
def test_a_size_that_was_too_small_is_tried_again_when_significantly_less_arrives(rate: int, same: int, less: int) -> None:
    past = Past()
    past.goes_on(60, rate)
    past.fails(2)
    assert past.too_few.fewest == 0  # until the load is known
    past.goes_on(600, rate)
    assert past.too_few.fewest == 3
    past.goes_on(60, same)
    assert past.too_few.fewest == 3
    past.goes_on(60, less)
    assert past.too_few.fewest == 0
    past.goes_on(60, rate)
    assert past.too_few.fewest == 0  # forgotten


def test_what_the_first_second_of_a_burst_ends_was_not_too_few_for_what_came_before_it() -> None:
    past = Past()
    past.goes_on(60, 10)
    past.fails(2)
    past.goes_on(10, 50)
    past.goes_on(50, 10)
    assert past.too_few.fewest == 0


def test_whoever_grows_without_a_trial_has_proved_nothing() -> None:
    past = Past()
    past.goes_on(60, 10)
    past.too_few.raised(2, past.now)
    past.goes_on(60, 10)
    assert past.too_few.fewest == 0


def test_of_several_trials_in_a_window_the_largest_size_counts() -> None:
    past = Past()
    past.goes_on(60, 10)
    past.fails(4)
    past.goes_on(10, 10)
    past.fails(3)
    past.goes_on(20, 10)
    assert past.too_few.fewest == 5
