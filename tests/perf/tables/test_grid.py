"""Reading between measured points: bounded by them, growing beyond them, exact on them."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.perf.tables.grid import Grid


def affine(at: Sequence[float]) -> float:
    """Three microseconds and one for each unit of the product of the sizes."""
    product = 1.0
    for size in at:
        product *= size
    return 3.0 + product


def test_a_measured_point_is_read_as_it_is() -> None:
    grid = Grid([((1,), 4.2), ((8,), 10.0)], affine)
    reading = grid.read((8,))
    assert (reading.seconds, reading.between, reading.beyond) == (10.0, (), 0.0)


def test_between_two_points_time_follows_the_trend_scaled_to_both() -> None:
    grid = Grid([((0,), 10.0), ((4,), 20.0)], lambda at: 1.0 + at[0] ** 2)
    # the trend is 1 at 0, 5 at 2 and 17 at 4: a quarter of the way
    assert grid.read((2,)).seconds == pytest.approx(12.5)
    assert grid.read((2,)).between == (0,)


def test_beyond_the_points_time_grows_with_the_trend() -> None:
    grid = Grid([((2,), 10.0), ((4,), 14.0)], affine)
    assert grid.read((11,)).seconds == pytest.approx(14.0 * 14 / 7)  # the trend doubles from 4 to 11
    assert grid.read((11,)).beyond == pytest.approx(1.0)
    assert grid.read((1,)).seconds == pytest.approx(10.0 * 4 / 5)


def test_two_sizes_are_read_one_after_the_other() -> None:
    grid = Grid([((x, y), 5.0 + 2 * x * y) for x in (1, 3) for y in (2, 6)], affine)
    assert grid.read((2, 4)).seconds == pytest.approx(5.0 + 2 * 8)
    assert grid.read((2, 4)).between == (0, 1)


def test_a_grid_with_holes_is_read_all_the_same() -> None:
    grid = Grid([((1, 2), 5.0), ((1, 8), 11.0), ((3, 2), 9.0)], affine)
    assert grid.read((3, 8)).seconds == pytest.approx(9.0 * (3 + 24) / (3 + 6))
    assert grid.read((3, 8)).beyond > 0


def test_with_a_tile_time_rises_where_a_new_tile_begins() -> None:
    grid = Grid([((64,), 10.0), ((96,), 10.0), ((160,), 20.0)], affine, tile=128)
    assert grid.read((128,)).seconds == 10.0
    assert grid.read((129,)).seconds == 20.0


def test_a_point_can_be_read_as_if_it_had_not_been_measured() -> None:
    grid = Grid([((1,), 4.0), ((2,), 99.0), ((3,), 6.0)], affine)
    assert grid.read((2,), without=(2,)).seconds == pytest.approx(5.0)


@given(
    steps=st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 5.0)), min_size=2, max_size=12),
    asked=st.lists(st.integers(1, 900), min_size=2, max_size=20),
    tile=st.sampled_from([0, 16, 64]),
)
def test_where_points_rise_readings_rise_are_positive_and_never_flat_beyond(
    steps: list[tuple[int, float]], asked: list[int], tile: int
) -> None:
    size, seconds, points = 0, 1.0, []
    for width, rise in steps:
        size, seconds = size + width, seconds + rise
        points.append(((size,), seconds))
    grid = Grid(points, affine, tile)
    read = [grid.read((at,)).seconds for at in sorted(asked)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(read))
    assert all(value > 0 for value in read)
    assert grid.read((2 * size,)).seconds > points[-1][1]
