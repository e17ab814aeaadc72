"""Points are chosen where readings differ: bends and jumps get many, straight stretches few."""

from collections.abc import Callable
from math import hypot, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.twin.profiling.lines import Line, Measurable, Sheet
from squall.twin.profiling.questions import sizes

SIZES = sizes(1, 2048, also=(9,))


def measure_all(curve: Measurable, seconds: Callable[..., float], axes: tuple[str, ...], most_s: float = 1e9) -> int:
    """Measures whatever is proposed, the worst doubt first, until nothing is. How many points that took."""
    count = 0
    while proposals := list(curve.proposals(most_s)):
        best = max(proposals, key=lambda proposal: proposal.doubt)
        assert curve.learn(best.at, seconds(*(best.at[axis] for axis in axes))) is not None
        count += 1
    return count


def line(known: tuple[int, ...] = tuple(SIZES)) -> Line:
    return Line("gemm", {"rows": 8, "columns": 8}, "tokens", known)


@pytest.mark.parametrize(("each", "fixed"), [(0.0, 5.0), (1.0, 0.0)])
def test_what_never_changes_or_is_in_proportion_takes_three_points(each: float, fixed: float) -> None:
    assert measure_all(line(), lambda tokens: fixed + each * (tokens + 1), ("tokens",)) == 3


def test_what_bends_takes_some_points_and_is_then_known_everywhere() -> None:
    curve = line()

    def seconds(tokens: int) -> float:
        return 1e-5 + hypot(1e-4, 1e-6 * tokens)

    assert measure_all(curve, seconds, ("tokens",)) < 0.7 * len(SIZES)
    known = sorted(curve.times)
    for size in SIZES:
        low, high = max(k for k in known if k <= size), min(k for k in known if k >= size)
        share = (size - low) / (high - low) if high > low else 0.0
        reading = curve.times[low] + share * (curve.times[high] - curve.times[low])
        assert reading == pytest.approx(seconds(size), rel=0.04)


@given(st.sampled_from(SIZES[2:-2]), st.floats(1.5, 20))
def test_a_jump_is_found_wherever_it_is(at: int, factor: float) -> None:
    curve = line()
    measure_all(curve, lambda tokens: factor if tokens >= at else 1.0, ("tokens",))
    before = max(size for size in SIZES if size < at)
    assert {before, at} <= set(curve.times)


def test_sizes_that_would_take_too_long_are_left_out() -> None:
    curve = line()
    measure_all(curve, lambda tokens: 0.01 * tokens, ("tokens",), most_s=2.0)
    assert max(curve.times) <= 200
    assert len(curve.times) >= 3


def test_neighbours_that_contradict_each_other_are_named() -> None:
    curve = line()
    for size, seconds in ((1, 1.0), (64, 3.0), (2048, 2.0)):
        curve.learn({"rows": 8, "columns": 8, "tokens": size}, seconds)
    assert curve.amiss(1) == []
    assert curve.amiss(64) == curve.amiss(2048) == [64, 2048]
    assert curve.learn({"rows": 9, "columns": 8, "tokens": 1}, 1.0) is None


def test_a_sheet_begins_further_lines_where_they_differ_and_needs_only_the_first() -> None:
    outers = sizes(1, 64)
    sheet = Sheet("decode_attention", {"heads": 4}, "batch", outers, "context", lambda batch: sizes(16, 4096 // batch))
    first = next(sheet.proposals(1e9))
    assert first.needed
    assert first.doubt == inf
    assert first.at == {"heads": 4, "batch": 1, "context": 16}
    measure_all(sheet, lambda batch, context: 1e-5 + 1e-8 * batch * context + (1e-3 if batch > 12 else 0), ("batch", "context"))
    assert {12, 16} <= set(sheet.lines)
    assert len(sheet.lines) < len(outers)
    later = [outer for outer in sheet.lines if outer not in (1, outers[len(outers) // 2], 64)]
    assert later
    again = Sheet("decode_attention", {"heads": 4}, "batch", outers, "context", lambda batch: sizes(16, 4096 // batch))
    for outer, along in sheet.lines.items():
        for size, seconds in along.times.items():
            if outer not in later:
                again.learn({"heads": 4, "batch": outer, "context": size}, seconds)
    again.learn({"heads": 4, "batch": later[0], "context": 16}, 1e-3)
    (begun,) = again.proposals(1e9)
    assert begun.at["batch"] == later[0]
    assert not begun.needed


def test_sizes_step_by_a_half_and_a_third() -> None:
    assert sizes(1, 20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert sizes(16, 10) == []
    assert sizes(1, 10, also=(9, 99)) == [1, 2, 3, 4, 6, 8, 9, 10]
