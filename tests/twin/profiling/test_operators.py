"""A machine whose prices are known is measured: its profile gives them back, for every TP degree."""

import time
from pathlib import Path
from statistics import median

import pytest

from squall.core.actions import Chunk, RunSteps
from squall.errors import ProfileError
from squall.perf.catalogue import resolve_model
from squall.perf.composed import Composed
from squall.perf.decompose import Layout
from squall.perf.hardware import GPUS
from squall.perf.operators import AttentionShape, OperatorSource
from squall.perf.roofline import RooflineSource
from squall.perf.tables.profile import load, save
from squall.twin.profiling.journal import Journal, Row, Setup
from squall.twin.profiling.lines import Place
from squall.twin.profiling.operators import Spent, header, measure, profile_of, with_overhead
from squall.twin.profiling.questions import Limits, Questions, questions

LLAMA, H100 = resolve_model("llama-3.1-8b"), GPUS["h100-sxm"]
TRUTH = RooflineSource(H100)
LIMITS = Limits(tokens=2048, rows=128, context=8192, cache_bytes=1 << 30)
SETUP = Setup(LLAMA.name, LLAMA.num_params, "here", "bf16", "bf16", 16, "eager")
SHAPES = [
    RunSteps(0, 1, 1, 500),
    RunSteps(0, 1, 20, 20 * 900),
    RunSteps(0, 1, 100, 100 * 300),
    RunSteps(0, 1, 0, 0, (Chunk(0, 0, 700, 0, True),)),
    RunSteps(0, 1, 30, 30 * 500, (Chunk(0, 1000, 500, 0, False),)),
]


class Pretended:
    """A machine on which an operator takes what the datasheet says. Its clock moves only while something is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.asked: list[tuple[str, Place]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def seconds(self, operator: str, at: Place) -> float:
        self.now += 0.05
        self.asked.append((operator, at))
        n = {key: int(value) for key, value in at.items() if not isinstance(value, str)}
        match operator:
            case "gemm":
                return TRUTH.gemm(n["tokens"], n["rows"], n["columns"], str(at["dtype"])).seconds
            case "sampling":
                return TRUTH.sampling(n["rows"]).seconds
            case "decode_attention" | "prefill_attention":
                shape = AttentionShape(n["heads"], n["kv_heads"], n["head_dim"], str(at["kv_dtype"]))
                if operator == "decode_attention":
                    return TRUTH.decode_attention(n["batch"], n["context"], shape).seconds
                return TRUTH.prefill_attention(n["chunk"], n["before"], shape).seconds
        return TRUTH.elementwise(n["bytes"]).seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    return Pretended(monkeypatch)


def asked(*tps: int) -> Questions:
    return questions(LLAMA, [Layout(tp=tp) for tp in tps], LIMITS)


def run(machine: Pretended, what: Questions, path: Path, budget_s: float) -> tuple[Spent, list[Row]]:
    with Journal(path, SETUP) as journal:
        return measure(what.curves, machine.seconds, journal, budget_s, lambda done, note: None), journal.rows


def price(source: OperatorSource, tp: int, shape: RunSteps) -> float:
    model = Composed(LLAMA, "here", Layout(tp=tp), [source, TRUTH], TRUTH.efficiency, 0.0)
    return model.run(shape, 1)[0].first / 16e9


def test_one_machine_answers_for_every_degree(machine: Pretended, tmp_path: Path) -> None:
    _, rows = run(machine, asked(1, 4), tmp_path / "j", budget_s=15)
    path = tmp_path / "p.parquet"
    made = profile_of(rows, header("h100-sxm", "eager", (LLAMA.name,), (1, 4), 16), "j")
    save(with_overhead(made, 0.001), path)
    source = load(path).source()
    errors = [price(source, tp, shape) / price(TRUTH, tp, shape) - 1 for tp in (1, 4) for shape in SHAPES]
    assert median(map(abs, errors)) < 0.02
    assert max(map(abs, errors)) < 0.15
    assert source.step_s == 0.001


def test_more_time_makes_more_points_and_no_larger_errors(machine: Pretended, tmp_path: Path) -> None:
    def errors(budget_s: float) -> list[float]:
        _, rows = run(machine, asked(1), tmp_path / f"{budget_s}", budget_s)
        source = profile_of(rows, header("h100-sxm", "eager", (), (1,), 16), "j").source()
        return [abs(price(source, 1, shape) / price(TRUTH, 1, shape) - 1) for shape in SHAPES]

    short, long = errors(6), errors(20)
    assert sum(long) < sum(short)
    assert median(long) < 0.01


def test_too_little_time_is_said_and_the_next_run_goes_on(machine: Pretended, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"were too few: \d+ curves lack points; run the same again, which goes on from .*j"):
        run(machine, asked(1), tmp_path / "j", budget_s=0.5)
    before = len(machine.asked)
    spent, rows = run(machine, asked(1), tmp_path / "j", budget_s=30)
    assert spent.earlier == before
    assert spent.points == len(machine.asked) - before
    assert len(rows) == len(machine.asked)
    points = [(operator, tuple(at.items())) for operator, at in machine.asked]
    assert len(set(points)) == len(points)


def test_measuring_ends_where_nothing_is_left_to_learn(machine: Pretended, tmp_path: Path) -> None:
    spent, _ = run(machine, asked(1), tmp_path / "j", budget_s=1e6)
    assert spent.sure
    again, _ = run(machine, asked(1), tmp_path / "j", budget_s=1e6)
    assert again == Spent(0, spent.points, sure=True)


def test_whole_steps_get_their_share_of_the_time_between_operators(machine: Pretended, tmp_path: Path) -> None:
    took: list[float] = []

    def step() -> None:
        machine.now += 0.4
        took.append(0.4)

    with Journal(tmp_path / "j", SETUP) as journal:
        measure(asked(1).curves, machine.seconds, journal, 20.0, lambda done, note: None, between=step)
    assert 0.25 * 20 < sum(took) < 0.35 * 20


def test_a_measurement_that_noise_made_too_long_is_made_again(machine: Pretended, tmp_path: Path) -> None:
    noisy: set[str] = set()

    def seconds(operator: str, at: Place) -> float:
        true = machine.seconds(operator, at)
        if operator == "gemm" and operator not in noisy and at["tokens"] == 1:
            noisy.add(operator)
            return 50 * true
        return true

    with Journal(tmp_path / "j", SETUP) as journal:
        measure(asked(1).curves, seconds, journal, 20.0, lambda done, note: None)
    assert noisy
    table = profile_of(journal.rows, header("h100-sxm", "eager", (), (1,), 16), "j").source()
    for at in ({"rows": 4096, "columns": 6144}, {"rows": 14336, "columns": 4096}):
        found = table.gemm(1, at["rows"], at["columns"], "bf16")
        assert found is not None
        assert found.seconds == pytest.approx(TRUTH.gemm(1, at["rows"], at["columns"], "bf16").seconds)


def test_what_the_engine_does_not_run_is_named_and_left_out() -> None:
    deepseek = questions(resolve_model("deepseek-v3"), [Layout(tp=8, weight_dtype="fp8")], LIMITS)
    assert {"experts", "latent attention", "products of fp8 weights"} <= set(deepseek.left_out)
    assert not [curve for curve in deepseek.curves if "attention" in curve.operator]
    assert questions(LLAMA, [Layout()], LIMITS).left_out == []


def test_every_degree_has_its_own_products_and_heads_once() -> None:
    alone, shared = asked(1).curves, asked(1, 2).curves
    assert len([c for c in alone if c.operator == "gemm"]) == 5
    assert len([c for c in shared if c.operator == "gemm"]) == 10
    assert len([c for c in shared if c.operator == "decode_attention"]) == 2
    assert len([c for c in shared if c.operator == "norm"]) == 1
