"""What a search leaves behind says what it found: `best.toml`, simulated, gives the very numbers."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from squall.config import load
from squall.core.types import SECOND
from squall.search.command import Options, run
from squall.search.curves import curves
from squall.search.output import read
from squall.twin.rehearse import rehearse, usd_per_gpu_hour
from tests.search.conftest import tree

LONGER = {**tree()["workload"], "num_requests": 150}
ELASTIC = [{"replicas": {"min": 1, "max": 3}}]


@pytest.mark.parametrize(
    ("workload", "more"),
    [
        (tree()["workload"], {}),  # all of the workload, faster
        (LONGER, {}),  # sixty requests with lengths from all over it
        (tree()["workload"], {"objective": "usd", "space": {"replica.tp": [1, 2]}}),
        ({**LONGER, "arrivals": {"kind": "poisson", "rate_rps": 30.0}},
         {"objective": "usd", "space": {"fleet": ELASTIC, "scale": [{"kind": "concurrency", "target": 8.0}]}}),
    ],
    ids=["steady", "a part", "as it is", "elastic"],
)  # fmt: skip
def test_the_best_simulated_again_gives_the_very_numbers(workload: Any, more: dict[str, Any], tmp_path: Path) -> None:
    asked = {"num_requests": 60, "warm_up": 6, "span_s": 0, "seeds": 1, "top": 1, "space": {"replica.tp": [1, 2]}}
    asked |= {"prices": {"a100": {"on_demand": 1.25}}} | more
    slo = {"ttft_p90_s": 30.0, "tbt_p99_s": 1.0}
    (tmp_path / "search.toml").write_text(tomli_w.dumps(tree(workload=workload, slo=slo, cluster={}) | {"search": asked}))
    options = Options(
        place=tmp_path / "search.toml", gpus="a100", workers=1, store=tmp_path / "store.jsonl", out=tmp_path / "found",
    )  # fmt: skip
    place = run(options, lambda _: None)
    assert place is not None
    answers = read(place)
    found = answers.finalists[0].result
    config = load(place / "best.toml")
    record = rehearse(config)
    warm_up = answers.search.warm_up if answers.search.steady else 0
    num_gaps = sum(row.num_output_tokens - 1 for row in record.requests)
    assert curves(record, warm_up, num_gaps) == found.curves
    assert usd_per_gpu_hour(config) == found.usd_per_gpu_hour == 1.25
    if found.cost_usd is not None:
        assert record.gpu_nanos / SECOND / 3600 * 1.25 == pytest.approx(found.cost_usd, rel=1e-12)
    if found.choice.get("fleet"):
        assert record.scale_ups  # it did grow
