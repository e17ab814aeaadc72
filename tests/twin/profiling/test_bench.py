"""Each operator runs on this machine as the engine runs it; how long it takes is nobody's business here."""

import time

import pytest
import torch

from squall.errors import ProfileError
from squall.live.engine.kernels import Kernels, load_kernels
from squall.perf.catalogue import resolve_model
from squall.perf.decompose import Layout
from squall.twin.profiling.bench import Cold, OperatorBench, widths
from squall.twin.profiling.lines import Place
from squall.twin.profiling.questions import Limits, questions
from squall.twin.profiling.timing import Call, CpuTimer, CudaTimer, GraphTimer, Timer, cpu_clock

SMOLLM = resolve_model("smollm2")
LIMITS = Limits(tokens=64, rows=16, context=128, cache_bytes=8 << 20)
LAYOUTS = [Layout(tp=tp, dtype="fp32", weight_dtype="fp32", kv_dtype="fp32") for tp in (1, 3)]


class Counting:
    """A timer that runs a call twice and says how many calls there were."""

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, call: Call) -> float:
        call()
        call()
        self.calls += 1
        return float(self.calls)


def bench(timer: Timer, kernels: Kernels | None, captured: Timer | None = None) -> OperatorBench:
    asked = questions(SMOLLM, LAYOUTS, LIMITS)
    return OperatorBench(widths(SMOLLM, asked.kernels), 16, torch.float32, torch.device("cpu"), kernels, timer, captured)


@pytest.mark.parametrize("native", [True, False])
def test_every_first_point_of_every_curve_can_be_run(native: bool) -> None:
    kernels = load_kernels() if native else None
    if native and kernels is None:
        pytest.skip("no C++ compiler here")
    timer = Counting()
    made = bench(timer, kernels)
    seen: set[str] = set()
    for curve in questions(SMOLLM, LAYOUTS, LIMITS).curves:
        for proposal in curve.proposals(1e9):
            assert made.seconds(curve.operator, proposal.at) == timer.calls
            curve.learn(proposal.at, 1.0)
            seen.add(curve.operator)
    assert seen == {
        "gemm", "decode_attention", "prefill_attention", "norm", "rotary", "activation", "embedding", "sampling",
    }  # fmt: skip


def test_a_chunk_in_the_middle_and_a_window_can_be_run() -> None:
    at: Place = {"head_dim": 64, "window": 40, "kv_dtype": "fp32", "dtype": "fp32", "kv_heads": 1, "heads": 3}
    made = bench(Counting(), None)
    assert made.seconds("prefill_attention", {**at, "chunk": 16, "before": 50})
    assert made.seconds("decode_attention", {**at, "batch": 3, "context": 77})


def test_what_is_captured_has_a_timer_of_its_own() -> None:
    plain, captured = Counting(), Counting()
    made = bench(plain, None, captured)
    made.seconds("sampling", {"rows": 1})
    made.seconds("norm", {"bytes": 9216})
    assert (plain.calls, captured.calls) == (1, 1)


def test_what_the_engine_does_not_have_is_refused() -> None:
    with pytest.raises(ProfileError, match="moe is not run by the built-in engine"):
        bench(Counting(), None).seconds("moe", {})


def test_pieces_are_taken_in_turn_and_lie_apart() -> None:
    pieces = Cold(torch.float32, torch.device("cpu")).pieces(20 << 20)
    places = [pieces().data_ptr() for _ in range(6)]
    assert places[:3] == places[3:]
    assert len(set(places)) == 3
    assert min(b - a for a, b in zip(sorted(set(places)), sorted(set(places))[1:], strict=False)) >= 4 * (20 << 20)


def test_one_thread_has_a_clock_that_does_not_count_waiting_and_a_time_is_the_median() -> None:
    assert cpu_clock(1) is time.thread_time_ns
    assert cpu_clock(2) is time.perf_counter_ns
    ticks = iter([0, 10_000_000, 0, 900_000_000, 0, 20_000_000, 0, 30_000_000, 0, 11_000_000])
    assert CpuTimer(lambda: next(ticks)).seconds(lambda: None) == 0.02


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events_with_and_without_graphs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    asked = questions(SMOLLM, [Layout(dtype="bf16")], LIMITS)
    device = torch.device("cuda")
    made = OperatorBench(widths(SMOLLM, asked.kernels), 16, torch.bfloat16, device, None, CudaTimer(), GraphTimer())
    for curve in asked.curves:
        (proposal,) = curve.proposals(1e9)
        assert 0 < made.seconds(curve.operator, proposal.at) < 1
