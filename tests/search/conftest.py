"""A small question that every part of a search can be tried with: Llama 3 8B, a dozen configurations, sixty requests."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from squall.search.conduct import Conductor
from squall.search.pool import Inline, Workers
from squall.search.result import Job
from squall.search.setting import Setting, Workshop
from squall.search.space import with_choice
from squall.search.spec import Search, read_search
from squall.search.store import Store

SPACE: dict[str, Any] = {
    "cluster.gpu": ["a100-80g", "h100-sxm"],
    "replica.tp": [1, 2],
    "batching.max_num_seqs": [16, 64],
    "batching.max_num_batched_tokens": [512, 2048],
}


def question(**more: Any) -> Search:
    """Small enough for a test; `more` replaces keys of `[search]`."""
    table: dict[str, Any] = {"num_requests": 60, "span_s": 0, "warm_up": 6, "seeds": 1, "top": 2, "space": SPACE}
    return read_search("test", table | more)


def tree(**more: Any) -> dict[str, Any]:
    """The configuration that is searched; `more` replaces tables."""
    tables: dict[str, Any] = {
        "model": {"name": "llama-3-8b"},
        "cluster": {"gpu": "a100-80g"},
        "batching": {"kind": "vllm"},
        "slo": {"ttft_p90_s": 1.0, "tbt_p99_s": 0.1},
        "workload": {
            "kind": "synthetic",
            "num_requests": 60,
            "arrivals": {"kind": "poisson", "rate_rps": 1.0},
            "prompt": {"kind": "lognormal", "median": 600, "sigma": 0.8, "low": 16, "high": 3000},
            "output": {"kind": "lognormal", "median": 60, "sigma": 0.7, "low": 2, "high": 300},
        },
    }
    return tables | more


def job(choice: Mapping[str, Any] | None = None, base: dict[str, Any] | None = None, **more: Any) -> Job:
    """One configuration, with the whole small sample."""
    chosen = dict(choice or {})
    return Job(0, chosen, with_choice(base or tree(), chosen), **({"num_requests": 60, "warm_up": 6} | more))


def setting(choice: Mapping[str, Any] | None = None, search: Search | None = None) -> Setting:
    return Workshop(search or question()).setting(job(choice))


def conductor(search: Search, base: dict[str, Any], workers: Workers | None = None, store: Store | None = None) -> Conductor:
    return Conductor(search, base, workers or Inline(Workshop(search)), store or Store(None), "code", lambda _: None)


@pytest.fixture
def told() -> Callable[[str], None]:
    lines: list[str] = []
    return lines.append
