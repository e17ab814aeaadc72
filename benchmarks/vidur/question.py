"""What is searched: a model under one of the Vidur paper's workloads, on A100 and H100, with every batching policy."""

import os
import sys
from pathlib import Path
from typing import Any

from squall.search.space import usual_space
from squall.search.spec import Search, read_search

SHARED = Path(os.environ.get("SQUALL_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"
SLO = {"ttft_p90_s": 2.0, "tbt_p99_s": 0.2}
FEW = {"num_requests": 60, "warm_up": 6, "span_s": 2}
"""Of a smoke: enough to see all of the machinery work, and too few to believe a figure."""

MODELS = ("llama-2-7b", "internlm-20b", "llama-2-70b", "qwen-72b")
WORKLOADS = ("chat-lmsys-1m", "arxiv-4k", "bwb-4k")


def tree(search: Search, named: str = WORKLOADS[0], **more: Any) -> dict[str, Any]:
    """The configuration that is searched."""
    table: dict[str, Any] = {"kind": "named", "name": named, "num_requests": search.num_requests}
    table["arrivals"] = {"kind": "poisson", "rate_rps": 1.0}
    tables = {"model": {"name": "llama-2-70b"}, "cluster": {"gpu": "h100", "nodes": 64}, "slo": SLO, "workload": table}
    return tables | more


def paper_space() -> dict[str, Any]:
    """GPU, shares, stages, every batching policy with its bounds."""
    space = usual_space(Search(max_gpus_per_replica=16), ["a100", "h100"], {})
    return space | {"replica.tp": [1, 2, 4, 8], "replica.pp": [1, 2, 4]}


def asked(**more: Any) -> Search:
    return read_search("benchmark", {"max_gpus_per_replica": 16, "space": paper_space()} | more)


def word(name: str) -> str:
    """What follows an option on the command line; empty where it is not there."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv[:-1] else ""
