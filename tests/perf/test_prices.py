from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from squall.core.actions import Chunk, RunSteps
from squall.perf.prices import CurvePrices, StepPrices


class Work:
    """Round prices in seconds; counts how often each is asked for."""

    def __init__(self, context: float = 1e-9, tokens: float = 1e-6) -> None:
        self.asked: list[tuple[str, int]] = []
        self._context = context
        self._tokens = tokens

    def step_s(self) -> float:
        return 0.0

    def tokens_s(self, tokens: int) -> float:
        self.asked.append(("tokens", tokens))
        return tokens * self._tokens

    def logits_s(self, rows: int) -> float:
        self.asked.append(("logits", rows))
        return rows * 1e-7

    def context_s(self) -> float:
        return self._context

    def chunk_s(self, tokens: int) -> tuple[float, float]:
        self.asked.append(("chunk", tokens))
        return tokens * 1e-8, tokens * 1e-9


def nanos(prices: StepPrices, decodes: int, context: int, *chunks: tuple[int, int, bool]) -> float:
    shape = RunSteps(0, 1, decodes, context, tuple(Chunk(0, offset, tokens, 0, last) for offset, tokens, last in chunks))
    (progression,) = prices.run(shape, 1)
    return progression.first / 16


def test_a_step_is_the_sum_of_its_kinds_of_work() -> None:
    prices = StepPrices("test", Work())
    assert nanos(prices, 2, 300) == 2 * 1000 + 2 * 100 + 300
    assert nanos(prices, 2, 300, (50, 10, False)) == 12 * 1000 + 2 * 100 + 300 + 10 * 10 + 50 * 10
    assert nanos(prices, 0, 0, (50, 10, True), (0, 4, False)) == 14 * 1000 + 1 * 100 + (10 * 10 + 50 * 10) + 4 * 10


def test_a_chunk_that_is_not_the_last_yields_no_logits() -> None:
    work = Work()
    nanos(StepPrices("test", work), 0, 0, (0, 10, False))
    assert [kind for kind, _ in work.asked] == ["chunk", "tokens"]


def test_each_price_is_worked_out_once() -> None:
    work = Work()
    prices = StepPrices("test", work)
    for context in range(100, 200):
        nanos(prices, 2, context, (context, 10, True))
    assert sorted(work.asked) == [("chunk", 10), ("logits", 3), ("tokens", 12)]


def test_over_a_run_context_and_offset_grow_and_nothing_else() -> None:
    shape = RunSteps(0, 7, 3, 500, (Chunk(0, 20, 10, 0, False),))
    (progression,) = StepPrices("test", Work()).run(shape, 7)
    assert progression.count == 7
    assert progression.increment == 16 * (3 * 1 + 10 * 10)


def test_a_step_lasts_at_least_a_nanosecond() -> None:
    assert nanos(StepPrices("test", Work(context=0.0, tokens=0.0)), 0, 0, (0, 1, False)) >= 1


def test_the_only_stage_lasts_as_long_as_the_step() -> None:
    prices = StepPrices("test", Work())
    assert prices.num_stages == 1
    shape = RunSteps(0, 1, 2, 301, (Chunk(0, 50, 10, 0, True),))
    (progression,) = prices.run(shape, 1)
    assert prices.stages(shape) == (progression.first // 16,)


# -- prices that bend


class Bent:
    """A microsecond a token, a tenth a row; a decode's context costs 1 ns a token up to 1000 each, 3 ns beyond; a chunk's offset
    2 ns a token up to 500 and 1 ns beyond; a chunk itself a nanosecond for the square of every token."""

    contexts = (0, 1000, 2000)
    offsets = (0, 500, 1000)

    def tokens_s(self, tokens: int) -> float:
        return tokens * 1e-6

    def logits_s(self, rows: int) -> float:
        return rows * 1e-7

    def decode_s(self, batch: int) -> Sequence[float]:
        return [batch * 1e-9 * value for value in (0, 1000, 4000)]

    def prefill_s(self, chunk: int) -> Sequence[float]:
        own = chunk * chunk
        return [1e-9 * (own + value) for value in (0, 1000, 1500)]

    def prompt_s(self, tokens: int) -> float:
        return self.prefill_s(tokens)[0]


def price(decodes: int, context: int, *chunks: tuple[int, int, bool]) -> float:
    """One step in nanoseconds."""
    shape = RunSteps(0, 1, decodes, context, tuple(Chunk(0, offset, tokens, 0, last) for offset, tokens, last in chunks))
    (progression,) = CurvePrices("test", Bent()).run(shape, 1)
    return progression.first / 16


def test_a_bent_price_is_read_off_its_straight_pieces() -> None:
    assert price(2, 300) == 2 * 1100 + 300
    assert price(2, 2 * 1500) == 2 * 1100 + 2 * (1000 + 3 * 500)
    assert price(2, 2 * 5000) == 2 * 1100 + 2 * (1000 + 3 * 4000)  # beyond the last knot as before it
    assert price(2, 301) == 2 * 1100 + 301  # contexts need not be equal
    assert price(0, 0, (100, 10, True)) == 10 * 1000 + 100 + 100 + 200
    assert price(2, 300, (700, 10, False)) == 12 * 1000 + 200 + 300 + 100 + 1000 + 200


def test_a_run_bends_where_its_context_does() -> None:
    run = CurvePrices("test", Bent()).run(RunSteps(0, 10, 2, 1992), 10)
    assert [(p.count, p.increment) for p in run] == [(4, 16 * 2), (6, 16 * 6)]
    assert run[1].first == 16 * (2 * 1100 + 2000)


def test_a_run_of_chunks_bends_with_offset_and_context() -> None:
    run = CurvePrices("test", Bent()).run(RunSteps(0, 9, 2, 1990, (Chunk(0, 470, 10, 0, False),)), 9)
    assert [(p.count, p.increment) for p in run] == [(3, 16 * (20 + 2)), (2, 16 * (10 + 2)), (4, 16 * (10 + 6))]


@given(
    decodes=st.integers(0, 9),
    each=st.integers(1, 2500),
    extra=st.integers(0, 8),
    chunk=st.integers(0, 70),
    offset=st.integers(0, 1500),
    steps=st.integers(1, 80),
)
def test_a_bent_run_costs_what_its_steps_cost(decodes: int, each: int, extra: int, chunk: int, offset: int, steps: int) -> None:
    if decodes + chunk == 0:
        decodes = 1
    prices = CurvePrices("test", Bent())
    context = decodes * each + min(extra, decodes)

    def shape(step: int) -> RunSteps:
        chunks = (Chunk(0, offset + step * chunk, chunk, 0, False),) if chunk else ()
        return RunSteps(0, 1, decodes, context + step * decodes, chunks)

    run = prices.run(shape(0), steps)
    assert sum(p.count for p in run) == steps
    assert [p.first + j * p.increment for p in run for j in range(p.count)] == [
        CurvePrices("test", Bent()).run(shape(step), 1)[0].first for step in range(steps)
    ]


def test_several_chunks_cost_what_one_of_equivalent_length_does() -> None:
    """30 and 40 tokens are one of 50; its offset keeps the pairs: (30 x 100 + 40 x 200) / 50 = 220."""
    alone = price(0, 0, (220, 50, False)) - 50 * 1000
    assert price(0, 0, (100, 30, False), (200, 40, False)) == 70 * 1000 + alone


def test_several_chunks_cost_no_less_than_the_most_expensive_alone() -> None:
    dear = price(0, 0, (1000, 1, False)) - 1000
    assert price(0, 0, (1000, 1, False), (0, 1, False)) == 2 * 1000 + dear


@given(st.lists(st.tuples(st.one_of(st.just(0), st.integers(1, 3000)), st.integers(1, 600)), min_size=1, max_size=6))
def test_any_chunks_cost_what_the_dearest_of_them_and_of_the_one_like_them_does(sizes: list[tuple[int, int]]) -> None:
    def alone(offset: int, tokens: int) -> float:
        return price(0, 0, (offset, tokens, False)) - 1000 * tokens

    length = round(sum(tokens * tokens for _, tokens in sizes) ** 0.5)
    one = sum(offset * tokens for offset, tokens in sizes) // length, length
    whole = price(0, 0, *((offset, tokens, False) for offset, tokens in sizes))
    assert whole - 1000 * sum(tokens for _, tokens in sizes) == max(alone(*size) for size in (*sizes, one))
