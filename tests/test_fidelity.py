"""The scoreboard of benchmarks/fidelity.py: what it calls worse, and that predictions have not become so."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from squall.perf.tables.profile import OperatorProfile
from squall.perf.tables.table import Curve

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def fidelity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fidelity", ROOT / "benchmarks" / "fidelity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = sys.path.copy()
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


def test_a_figure_is_worse_beyond_a_tenth_and_half_a_point(fidelity: ModuleType) -> None:
    row, worse = fidelity.Row, fidelity.worse
    kept = {"error": 10.0, "coverage": 90.0, "seconds": 1.0}
    error, coverage, seconds = (("error", "", "", 1), ("coverage", "", "", 1), ("seconds", "", "", 1))
    assert worse([row(*error, 11.4), row(*coverage, 88.5, 88.0, "% inside"), row(*seconds, 9.0, None, "CPU s")], kept) == []
    assert worse([row(*error, 11.6), row(*coverage, 87.0, 88.0, "% inside"), row("new", "", "", 1, 99.0)], kept) == [
        "error was 10.00 and is 11.60",
        "coverage was 90.00 and is 87.00",
    ]


def test_the_summary_holds_errors_of_ours_only() -> None:
    summary = json.loads((ROOT / "benchmarks" / "fidelity_summary.json").read_text())
    assert set(summary) == {"full", "smoke"}
    for part in summary.values():
        assert all(isinstance(value, float | int) for value in part.values())
        assert not any(key.startswith("theirs.") for key in part)


@pytest.mark.shared
def test_a_real_run_is_told_as_well_as_before(fidelity: ModuleType, shared: Path) -> None:
    kept = json.loads((ROOT / "benchmarks" / "fidelity_summary.json").read_text())["full"]
    rows = fidelity.rtx4090.compare(shared)
    assert [row.verdict for row in rows] == ["met"] * 12
    assert fidelity.worse(rows, kept) == []


@pytest.mark.shared
def test_prompts_of_the_run_share_the_blocks_that_they_had_in_common(fidelity: ModuleType, shared: Path) -> None:
    run = fidelity.rtx4090
    lines = (shared / "data" / "traces" / "llmservingsim_measured" / "RTX4090_Llama-3.1-8B_requests.jsonl").read_text()
    offered = run.offered([json.loads(line) for line in lines.splitlines()])
    seen: set[int] = set()
    again = 0
    for request in offered:
        again += len(seen.intersection(request.block_hashes))
        seen.update(request.block_hashes)
    assert 16 * again == 4_848  # what LLMServingSim's cache found of these prompts
    assert all(request.num_prompt_tokens > run.COMMON[request.id][1] for request in offered if request.id in run.COMMON)


@pytest.mark.shared
def test_held_out_points_are_told_as_well_as_promised(fidelity: ModuleType, shared: Path) -> None:
    read = fidelity.operators.read_vidur(shared / "data" / "vidur_profiles" / "h100")
    learned = fidelity.operators.Learned()
    learned.add(OperatorProfile(read.header, {"gemm": read.rows["gemm"]}), Curve, 10)
    learned.off.sort()
    assert learned.off[len(learned.off) // 2] < 2.0
    assert sum(learned.inside) / len(learned.inside) > 0.85
