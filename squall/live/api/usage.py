"""How many tokens a request has cost so far. Knows no stream and no answer."""

from __future__ import annotations

from typing import Any

from squall.live.api.order import Order
from squall.live.engine.interface import TokenOut


class Usage:
    """Counts tokens as clients pay for them: each prompt once, each generated token."""

    def __init__(self, order: Order) -> None:
        self.num_prompt_tokens = sum(len(prompt) for prompt in order.prompts)
        self.num_output_tokens = 0
        self._best_of = order.best_of
        self._cached: dict[int, int] = {}

    def count(self, index: int, out: TokenOut) -> None:
        self.num_output_tokens += 1
        if index % self._best_of == 0:
            prompt = index // self._best_of
            self._cached[prompt] = max(out.num_cached_tokens, self._cached.get(prompt, 0))

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._cached.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
