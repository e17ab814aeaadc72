"""Speculative decoding as prices: a draft of some tokens, one step of the model that checks them all, and how many come out.

Knows no sequences: the account is deterministic, in expectation. A replica still decodes one token a step; such a step costs the
share of a checking step that one of the tokens coming out of it has to bear. Throughput and time per token are right on average,
while real gaps come in bursts, and memory for a draft model's weights and cache is not counted.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

from msgspec import Struct

from squall.errors import ConfigError
from squall.perf.latency import UNITS_PER_NANO
from squall.perf.prices import Beside, CurvePrices, Curves, units


class Speculation(Struct, frozen=True):
    """`draft_tokens` tokens are drafted a step, each of which is accepted with probability `acceptance` if all before it were."""

    draft_tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ConfigError(f"latency.speculation.draft_tokens is {self.draft_tokens}; it must be at least 1")
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"latency.speculation.acceptance is {self.acceptance}; it must be between 0 and 1")

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of one checking step, the model's own included: (1 - a^(k+1)) / (1 - a) (Leviathan et al., Fast
        Inference from Transformers via Speculative Decoding, 2023, equation 1)."""
        a, k = self.acceptance, self.draft_tokens
        return k + 1.0 if a == 1 else float((1 - a ** (k + 1)) / (1 - a))


def speculative_prices(source: str, curves: Curves, speculation: Speculation, draft: Curves | None) -> CurvePrices:
    """Prices of steps that decode one token a request on average.

    Args:
        curves: of the model.
        draft: of the draft model, which drafts one token after the other; None where drafting is free (look-ups in the prompt).
    """
    amortised = _Amortised(curves, speculation, draft)
    return CurvePrices(source, amortised, _beside(curves, speculation, draft))


def _beside(curves: Curves, speculation: Speculation, draft: Curves | None) -> Beside:
    """Chunks are computed once; the decodes pay their part of what they add to the step."""
    drafts, share = speculation.draft_tokens, speculation.tokens_per_step

    @cache
    def passing(tokens: int) -> float:
        return curves.tokens_s(tokens) if tokens else 0.0

    @cache
    def logits(rows: int) -> float:
        return curves.logits_s(rows) if rows else 0.0

    @cache
    def drafting(decodes: int) -> float:
        return drafts * (draft.tokens_s(decodes) + draft.logits_s(decodes)) if draft is not None else 0.0

    def price(decodes: int, tokens: int, last: int) -> int:
        plain = passing(tokens) + logits(last)
        if decodes:
            checked = decodes * (drafts + 1)
            added = passing(tokens + checked) + logits(last + checked) - plain
            plain += (added + drafting(decodes)) / share
        return max(UNITS_PER_NANO, units(plain))

    return price


class _Amortised:
    """The model's curves, with the attention of decodes shared by the tokens that come out; a check reads the cache once."""

    def __init__(self, curves: Curves, speculation: Speculation, draft: Curves | None) -> None:
        self.tokens_s = curves.tokens_s
        self.logits_s = curves.logits_s
        self.prefill_s = curves.prefill_s
        self.prompt_s = curves.prompt_s
        self.contexts = curves.contexts if draft is None else sorted({*curves.contexts, *draft.contexts})
        self.offsets = curves.offsets
        self._curves = curves
        self._speculation = speculation
        self._draft = draft

    def decode_s(self, batch: int) -> Sequence[float]:
        seconds = self._curves.decode_s(batch)
        drafts, share = self._speculation.draft_tokens, self._speculation.tokens_per_step
        if self._draft is None:
            return [value / share for value in seconds]
        drafting = self._draft.decode_s(batch)
        return [(_at(self._curves.contexts, seconds, knot) + drafts * _at(self._draft.contexts, drafting, knot)) / share
                for knot in self.contexts]  # fmt: skip


def _at(knots: Sequence[int], seconds: Sequence[float], amount: int) -> float:
    """On the straight lines between knots, and beyond the last."""
    low = min(bisect_right(knots, amount), len(knots) - 1) - 1
    rise = (seconds[low + 1] - seconds[low]) / (knots[low + 1] - knots[low])
    return seconds[low] + rise * (amount - knots[low])
