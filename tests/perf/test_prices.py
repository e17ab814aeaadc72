from squall.core.actions import Chunk, RunSteps
from squall.perf.prices import StepPrices


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
