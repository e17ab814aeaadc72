from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from squall.perf.latency import Progression
from squall.perf.progressions import steps_until, total

progressions = st.builds(
    Progression,
    count=st.integers(1, 200),
    first=st.one_of(st.integers(16, 100), st.integers(16, 10**9)),
    increment=st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 10**6)),
)


def prices(progression: Progression) -> list[int]:
    return [(progression.first + j * progression.increment) // 16 for j in range(progression.count)]


@given(progressions)
def test_a_total_is_the_sum_of_its_rounded_steps(progression: Progression) -> None:
    sums = [0, *accumulate(prices(progression))]
    assert [total(progression, count) for count in range(progression.count + 1)] == sums


@given(progressions, st.data())
def test_a_cut_falls_on_the_first_boundary_strictly_after_now(progression: Progression, data: st.DataObject) -> None:
    ends = list(accumulate(prices(progression)))
    near = st.sampled_from(ends).flatmap(lambda end: st.integers(max(0, end - 1), end + 1))
    elapsed = data.draw(st.one_of(near, st.integers(0, ends[-1] + 5)))
    after = [step for step, end in enumerate(ends, start=1) if end > elapsed]
    step = after[0] if after else progression.count
    assert steps_until(progression, elapsed) == (step, ends[step - 1])


def test_rounding_is_lost_step_by_step() -> None:
    assert total(Progression(3, first=31, increment=0), 3) == 3
    assert total(Progression(3, first=31, increment=1), 3) == 1 + 2 + 2
