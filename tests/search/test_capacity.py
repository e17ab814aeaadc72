"""The highest place on a grid that passes, wherever the search begins."""

from hypothesis import given
from hypothesis import strategies as st

from squall.search.capacity import FIRST_STEP, SLOWEST_RPS, between, highest, place_below, rate_at


@given(st.integers(-1, 500), st.integers(-50, 600), st.integers(0, 100), st.integers(100, 500))
def test_it_is_found_wherever_the_search_begins(edge: int, start: int, low: int, high: int) -> None:
    asked: list[int] = []

    def passes(place: int) -> bool:
        assert low <= place <= high
        asked.append(place)
        return place <= edge

    assert highest(passes, start, low, high) == (None if edge < low else min(edge, high))
    assert len(asked) == len(set(asked)) <= 20


@given(st.integers(0, 5000), st.integers(2, 600))
def test_the_roundest_place_is_looked_at_first(low: int, apart: int) -> None:
    def twos(place: int) -> int:
        return place & -place if place else 1 << 20

    assert twos(between(low, low + apart)) == max(twos(place) for place in range(low + 1, low + apart))


@given(st.integers(0, 30), st.sets(st.integers(1, FIRST_STEP - 1)), st.integers(0, 300))
def test_chance_at_the_edge_gives_one_answer_wherever_the_search_begins(edge: int, lucky: set[int], start: int) -> None:
    """Between two multiples of the step anything may pass or fail."""
    first = edge * FIRST_STEP

    def passes(place: int) -> bool:
        return place <= first or place - first in lucky

    assert highest(passes, start, 0, 300) == highest(passes, first, 0, 300)


def test_an_empty_range_holds_nothing() -> None:
    assert highest(lambda _: True, 0, 3, 2) is None


@given(st.floats(2e-4, 1e4), st.floats(0.001, 0.5))
def test_the_grid_is_so_fine(rate: float, tolerance: float) -> None:
    place = place_below(rate, tolerance)
    assert rate_at(place, tolerance) <= rate * (1 + 1e-6)
    assert rate_at(place + 1, tolerance) > rate * (1 - 1e-6)


def test_below_the_grid_is_nothing() -> None:
    assert place_below(SLOWEST_RPS / 2, 0.01) == -1
