from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.workload.parsing import clock, lengths, parse_calendar, parse_tokens

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "nanos"),
    [
        ("1970-01-02 00:00:01", 86_401 * SECOND),
        ("1970-01-01 00:00:00.1234567", 123_456_700),
        ("1970-01-01T00:00:00.5Z", SECOND // 2),
        ("1970-01-01 00:00:00.009930+00:00", 9_930_000),
        ("1970-01-01 00:00:01+00:00", SECOND),
        ("1970-01-01 02:00:00.25+01:30", 1800 * SECOND + SECOND // 4),
        ("1970-01-01 02:00:00.25+0130", 1800 * SECOND + SECOND // 4),
        ("1970-01-01 02:00:00.25+01", 3600 * SECOND + SECOND // 4),
        ("1970-01-01 00:00:00-05:30", 19_800 * SECOND),
        ("1970-01-01 00:00:00.1234567891", 123_456_789),
        ("2023-11-16 18:15:46.6805900", 1_700_158_546_680_590_000),
    ],
)
def test_both_years_time_formats_are_read_to_the_nanosecond(text: str, nanos: int) -> None:
    assert parse_calendar(text) == nanos


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2023-11-16",
        "2023-13-16 18:15:46",
        "2023-11-16 18:15:75.5",
        "2023-11-16 18:15:46.",
        "2023-11-16 18:15:46.5+2",
        "2023-11-16 18:15:46.5+24:00",
        "2023-11-16 18:15:46.5+02:60",
    ],
)
def test_what_is_no_date_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_calendar(text)


@pytest.mark.parametrize(
    ("value", "nanos"),
    [("1.5", 1_500_000_000), ("2", 2 * SECOND), (0.25, SECOND // 4), (1787267980, 1787267980 * SECOND), ("1e3", 1000 * SECOND)],
)
def test_numbers_and_text_are_times_in_the_unit(value: Any, nanos: int) -> None:
    assert clock(SECOND)([value]) == [nanos]


def test_large_whole_numbers_stay_exact() -> None:
    assert clock(1000)(["1760995776640783"]) == [1_760_995_776_640_783_000]
    assert clock(1_000_000)([1_760_995_776_640_783 // 1000]) == [1_760_995_776_640_000_000]


@pytest.mark.parametrize("value", ["", "-1", "nan", "inf", "-inf", "x", None, True, [], -1, float("nan"), float("inf"), "1e300"])
def test_what_is_no_time_is_refused_also_among_good_ones(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        clock(SECOND)(["1", value, "2"])


def test_whole_times_have_no_fraction() -> None:
    assert clock(1_000_000, whole=True)([3, 4.0, "5"]) == [3_000_000, 4_000_000, 5_000_000]
    with pytest.raises(ValueError):
        clock(1_000_000, whole=True)([0.2])


@given(
    st.lists(st.one_of(st.integers(0, 1 << 31), st.integers(0, 1 << 31).map(str), st.integers(0, 1 << 31).map(float)), min_size=1)
)
def test_a_column_of_lengths_is_read_like_each_of_its_values(values: list[Any]) -> None:
    assert lengths(0)(values) == [parse_tokens(value, 0) for value in values]


@pytest.mark.parametrize("value", ["", "-1", "0", 0, "1.5", 1.5, "nan", "inf", None, True, [1], 1 << 50, "1e300"])
def test_what_is_no_length_is_refused_also_among_good_ones(value: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        lengths(1)([5, value, 7])
