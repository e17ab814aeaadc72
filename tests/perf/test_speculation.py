from collections.abc import Sequence

import pytest

from squall.core.actions import Chunk, RunSteps
from squall.errors import ConfigError
from squall.perf.prices import CurvePrices
from squall.perf.speculation import Speculation, speculative_prices


class Curves:
    """A microsecond a token, a tenth a row, a nanosecond a token of context: easy to add up by hand."""

    contexts = offsets = (0, 1000)

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def tokens_s(self, tokens: int) -> float:
        return self.scale * tokens * 1e-6

    def logits_s(self, rows: int) -> float:
        return self.scale * rows * 1e-7

    def decode_s(self, batch: int) -> Sequence[float]:
        return [0.0, self.scale * batch * 1e-6]

    def prefill_s(self, chunk: int) -> Sequence[float]:
        return [0.0, self.scale * 1e-6]

    def prompt_s(self, tokens: int) -> float:
        return self.prefill_s(tokens)[0]


def nanos(prices: CurvePrices, decodes: int, context: int, *chunks: tuple[int, int]) -> float:
    shape = RunSteps(0, 1, decodes, context, tuple(Chunk(0, offset, tokens, 0, False) for offset, tokens in chunks))
    (progression,) = prices.run(shape, 1)
    return progression.first / 16


def test_expected_tokens_of_a_step() -> None:
    assert Speculation(4, 0.0).tokens_per_step == 1
    assert Speculation(4, 1.0).tokens_per_step == 5
    assert Speculation(3, 0.5).tokens_per_step == 1 + 0.5 + 0.25 + 0.125


def test_a_token_bears_its_share_of_the_step_that_checks_four() -> None:
    prices = speculative_prices("test", Curves(), Speculation(3, 0.5), None)
    whole = 2 * 4 * (1000 + 100) + 400  # eight tokens and rows are checked; the cache is read once
    assert nanos(prices, 2, 400) == pytest.approx(whole / 1.875, rel=1e-3)


def test_a_draft_model_runs_once_for_each_token_it_drafts() -> None:
    prices = speculative_prices("test", Curves(), Speculation(3, 0.5), Curves(0.1))
    drafted = 3 * 0.1 * (2 * (1000 + 100) + 400)
    assert nanos(prices, 2, 400) == pytest.approx((2 * 4 * 1100 + 400 + drafted) / 1.875, rel=1e-3)


def test_a_chunk_is_computed_once_and_a_step_without_decodes_costs_what_it_did() -> None:
    plain, speculative = CurvePrices("test", Curves()), speculative_prices("test", Curves(), Speculation(3, 0.5), None)
    assert nanos(speculative, 0, 0, (0, 10)) == nanos(plain, 0, 0, (0, 10))
    assert nanos(speculative, 2, 400, (0, 10)) == pytest.approx(10 * 1000 + (8 * 1100 + 400) / 1.875, rel=1e-3)


def test_drafts_that_are_never_accepted_only_cost() -> None:
    plain, useless = CurvePrices("test", Curves()), speculative_prices("test", Curves(), Speculation(4, 0.0), None)
    assert nanos(useless, 8, 800) > 4 * nanos(plain, 8, 800)


def test_a_run_costs_what_its_steps_cost() -> None:
    prices = speculative_prices("test", Curves(), Speculation(3, 0.7), Curves(0.1))
    run = prices.run(RunSteps(0, 9, 3, 2995), 9)
    singles = [prices.run(RunSteps(0, 1, 3, 2995 + 3 * step), 1)[0].first for step in range(9)]
    assert [p.first + step * p.increment for p in run for step in range(p.count)] == singles


def test_impossible_speculation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_tokens is 0; it must be at least 1"):
        Speculation(0, 0.5)
    with pytest.raises(ConfigError, match=r"acceptance is 1.5; it must be between 0 and 1"):
        Speculation(2, 1.5)
