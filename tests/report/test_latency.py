from squall.perf.composed import Line
from squall.perf.operators import Provenance
from squall.report.latency import latency_lines

LINES = [
    Line(0, "norm", "token", 4, 1e-6, Provenance.ROOFLINE, 0.5, "roofline"),
    Line(0, "head", "token", 1, 3e-3, Provenance.MEASURED, 0.0, "tables of vllm"),
]


def test_operators_are_listed_by_cost_with_their_origin_and_summed_with_their_interval() -> None:
    heading, _, titles, first, second, _, together = latency_lines("measured (a model)", LINES)
    assert heading == "measured (a model)"
    assert titles.split() == ["operator", "class", "times", "together", "share", "+-", "from"]
    assert first.split() == ["head", "token", "1", "3.000", "ms", "100.0%", "0%", "measured", "(tables", "of", "vllm)"]
    assert second.split() == ["norm", "token", "4", "1.0", "us", "0.0%", "50%", "roofline"]
    # a step made of measured kernels is told ten per cent wider than they are (perf.composed.IN_A_STEP)
    assert together.startswith("one step: 3.001 ms, nine times in ten between 2.728 ms and 3.302 ms; operators: 100% measured")


def test_stages_are_listed_one_after_the_other() -> None:
    lines = [*LINES, Line(1, "head", "token", 1, 2e-3, Provenance.ROOFLINE, 1.0, "roofline")]
    assert [line for line in latency_lines("x", lines) if line.startswith("stage")] == ["stage 0: 3.001 ms", "stage 1: 2.000 ms"]
