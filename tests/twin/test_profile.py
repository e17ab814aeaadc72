"""A profile of an engine whose prices are known tells these prices; what cannot be measured is said so."""

import time
from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace

from squall.config import load
from squall.core.actions import Chunk, RunSteps
from squall.errors import ModelError
from squall.live.engine.emulated import EmulatedEngine
from squall.live.engine.tokenizer import ByteTokenizer
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import resolve_gpu
from squall.perf.latency import BatchShape, LatencyModel, Progression, only_stage
from squall.perf.profile import Point, ProfileModel, fit
from squall.perf.roofline import Roofline
from squall.twin.profile import busy, medians, num_sharing, profile, stretched
from squall.twin.sweep import SWEEP, Stage, sweep

LLAMA = resolve_model("llama-3-8b")
PRICES = Roofline(LLAMA, resolve_gpu("a100-80g"))


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping takes exactly as long as it should, and no time at all."""
    now = [0]

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9)

    monkeypatch.setattr(time, "sleep", sleep)
    for clock in ("monotonic_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, clock, lambda: now[0])


class OtherKernels:
    """Another kernel computes the products of nine rows and more, at twice the price. Satisfies `LatencyModel`."""

    source = "test"
    num_stages = 1

    def run(self, shape: BatchShape, steps: int) -> list[Progression]:
        factor = 2 if shape.num_decodes + sum(chunk.num_tokens for chunk in shape.chunks) > 8 else 1
        return [Progression(p.count, factor * p.first, factor * p.increment) for p in PRICES.run(shape, steps)]

    def stages(self, shape: BatchShape) -> tuple[int, ...]:
        return only_stage(self.run(shape, 1))


def engine(num_blocks: int = 20_000, max_model_len: int = 8192, prices: LatencyModel = PRICES) -> EmulatedEngine:
    return EmulatedEngine(prices, num_blocks, 16, max_model_len, ByteTokenizer())


def seconds(model: LatencyModel, shape: RunSteps) -> float:
    (price,) = model.run(shape, 1)
    return price.first / 16e9


@pytest.mark.usefixtures("virtual_time")
def test_every_measured_step_has_the_shape_that_it_claims() -> None:
    for point in sweep(engine()):
        chunks = (Chunk(0, point.chunk_offset, point.chunk_tokens, 0, point.last),) if point.chunk_tokens else ()
        claimed = RunSteps(1, 1, point.num_decodes, point.decode_context, chunks)
        assert point.seconds == pytest.approx(seconds(PRICES, claimed), rel=1e-6)


@pytest.mark.usefixtures("virtual_time")
def test_a_profile_prices_steps_as_the_engine_that_was_measured() -> None:
    measured = fit(list(sweep(engine())), model=LLAMA.name, num_params=LLAMA.num_params, machine="emulated", dtype="bf16")
    fitted = ProfileModel(measured)
    for shape in (
        RunSteps(1, 1, 1, 100),
        RunSteps(1, 1, 12, 3000),
        RunSteps(1, 1, 100, 30_000),
        RunSteps(1, 1, 0, 0, (Chunk(0, 0, 300, 0, True),)),
        RunSteps(1, 1, 10, 2000, (Chunk(0, 512, 512, 0, False),)),
    ):
        assert seconds(fitted, shape) == pytest.approx(seconds(PRICES, shape), rel=0.1)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("decodes", [7, 8, 12, 13, 15])
def test_a_profile_knows_what_lies_between_powers_of_two_before_the_sweep_is_over(decodes: int) -> None:
    prices = OtherKernels()
    points = list(islice(sweep(engine(prices=prices)), 40))
    fitted = ProfileModel(fit(points, model=LLAMA.name, num_params=LLAMA.num_params, machine="emulated", dtype="bf16"))
    shape = RunSteps(1, 1, decodes, 100 * decodes)
    assert seconds(fitted, shape) == pytest.approx(seconds(prices, shape), rel=0.2)


@pytest.mark.usefixtures("virtual_time")
def test_a_sweep_leaves_nothing_in_the_engine_even_when_it_is_cut_short() -> None:
    measured = engine()
    points = sweep(measured)
    for _ in range(10):
        next(points)
    assert measured.ledger.num_held > 0
    points.close()  # type: ignore[attr-defined]
    assert measured.ledger.num_held == 0
    assert len(list(sweep(measured))) == sum(stage.num_points() for stage in SWEEP)
    assert measured.ledger.num_held == 0


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(60, 8192), (20_000, 300), (60, 90)])
def test_shapes_that_do_not_fit_are_left_out(num_blocks: int, max_model_len: int) -> None:
    small = engine(num_blocks, max_model_len)
    points = list(sweep(small))
    assert points
    assert len(points) == sum(stage.num_points() for stage in SWEEP if stage.fits(small))
    assert max(point.chunk_offset + point.chunk_tokens for point in points) < max_model_len


def test_a_stage_measures_each_piece_of_each_prompt_and_each_batch() -> None:
    assert Stage(prompt=100, chunk=32, batches=(1, 4)).num_points() == 4 * 4 + 2
    assert Stage(prompt=64, chunk=64).num_points() == 1


def test_measurements_of_one_shape_become_their_median() -> None:
    points = [Point(1, 70, 0, 0, False, second) for second in (0.3, 0.1, 9.0)] + [Point(2, 70, 0, 0, False, 0.5)]
    assert medians(points) == [Point(1, 70, 0, 0, False, 0.3), Point(2, 70, 0, 0, False, 0.5)]


def test_who_had_half_a_core_takes_twice_as_long() -> None:
    assert stretched([Point(1, 70, 0, 0, False, 0.3)], 0.5) == [Point(1, 70, 0, 0, False, 0.6)]


def test_other_work_beside_a_measurement_is_told_of() -> None:
    points = [Point(1, 70, 0, 0, False, 0.1), Point(0, 0, 64, 0, True, 0.2)]
    measured = fit(points, model="m", num_params=1, machine="here", dtype="fp32")
    assert busy(measured) is busy(replace(measured, share=0.97)) is None
    said = "this machine had other work: engines had a core for 22 % of the time, and steps took longer"
    assert busy(replace(measured, share=0.22)) == said


def test_as_many_engines_share_a_cpu_as_there_are_replicas_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert [num_sharing(load(None, [f"fleet.replicas={n}"])) for n in (1, 3, 9)] == [1, 3, 4]
    assert num_sharing(load(None, ["fleet.replicas=3", "serve.device=cuda"])) == 1


def test_engines_in_processes_of_their_own_are_measured_at_once() -> None:
    config = load(None, ["model.name=llama-3-8b", "cluster.gpu=h100-sxm", "serve.engine=emulated"])
    told: list[str] = []
    measured = profile(config, 2, 0.3, lambda done, note: told.append(note))
    assert measured.machine.endswith("2 engines at once")
    assert measured.num_params == LLAMA.num_params
    assert measured.share == pytest.approx(1.0, abs=1e-3)  # they sleep, and are timed by the wall
    assert int(told[-1].split()[0]) >= len(measured.points)


def test_an_error_in_an_engine_is_the_commands_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        profile(load(None, [f"model.name={tmp_path}"]), 1, 0.3, lambda done, note: None)
