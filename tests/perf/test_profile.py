from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from squall.core.actions import Chunk, RunSteps
from squall.errors import ProfileError
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import GPUS
from squall.perf.latency import LatencyModel
from squall.perf.profile import Point, Profile, ProfileModel, fit, load, save
from squall.perf.roofline import Roofline

DECODES = [(n, context) for n in (1, 2, 4, 8, 16, 32) for context in (64, 512, 2048)]
CHUNKS = [(tokens, offset, last) for tokens in (16, 64, 256, 512) for offset in (0, 1024) for last in (False, True)]


def priced(model: LatencyModel, point: Point) -> float:
    chunks = (Chunk(0, point.chunk_offset, point.chunk_tokens, 0, point.last),) if point.chunk_tokens else ()
    (progression,) = model.run(RunSteps(0, 1, point.num_decodes, point.decode_context, chunks), 1)
    return progression.first / 16e9


def points(model: LatencyModel, noise: float = 0.0) -> list[Point]:
    """What somebody would measure of a machine that behaves like `model`."""
    shapes = [Point(n, n * each, 0, 0, False, 1.0) for n, each in DECODES]
    shapes += [Point(0, 0, tokens, offset, last, 1.0) for tokens, offset, last in CHUNKS]
    shapes += [Point(n, n * 300, 256, 512, last, 1.0) for n in (4, 16) for last in (False, True)]
    factors = np.random.default_rng(3).normal(1.0, noise, len(shapes))
    return [replace(shape, seconds=priced(model, shape) * float(factor)) for shape, factor in zip(shapes, factors, strict=True)]


def fitted(measured: list[Point]) -> Profile:
    return fit(measured, model="smollm2", num_params=134_515_008, machine="a test", dtype="fp32")


MACHINE = Roofline(resolve_model("smollm2"), GPUS["l4"])


def test_a_curve_fitted_to_a_machine_prices_its_steps_within_three_per_cent() -> None:
    profile = fitted(points(MACHINE))
    assert profile.p95_error < 0.03
    between = [Point(12, 12 * 900, 0, 0, False, 1.0), Point(0, 0, 384, 512, True, 1.0), Point(8, 8 * 700, 128, 256, False, 1.0)]
    for point in between:
        assert priced(ProfileModel(profile), point) == pytest.approx(priced(MACHINE, point), rel=0.05)


def test_a_machine_that_batches_well_up_to_a_point_is_followed_round_the_bend() -> None:
    """SmolLM2 on one CPU thread: sixteen decodes cost three times one, but a prompt costs the same for every token."""
    decodes = {1: 0.045, 2: 0.062, 4: 0.087, 8: 0.119, 16: 0.128, 32: 0.16}
    prompts = {64: 0.20, 128: 0.31, 256: 0.56, 512: 1.05, 1024: 2.1}
    context_s = 1e-6
    measured = [
        Point(n, each * n, 0, 0, False, seconds + context_s * each * n) for n, seconds in decodes.items() for each in (50, 500)
    ]
    measured += [Point(0, 0, tokens, 0, True, seconds) for tokens, seconds in prompts.items()]
    profile = fitted(measured)
    assert profile.p95_error < 0.03
    assert priced(ProfileModel(profile), Point(12, 1200, 0, 0, False, 1.0)) == pytest.approx(0.1247, rel=0.03)
    assert priced(ProfileModel(profile), Point(0, 0, 2048, 0, True, 1.0)) == pytest.approx(5.0, rel=0.1)


def test_noise_of_five_per_cent_is_averaged_out() -> None:
    profile = fitted(points(MACHINE, noise=0.05))
    for point in points(MACHINE):
        assert priced(ProfileModel(profile), point) == pytest.approx(point.seconds, rel=0.12)


@given(
    seconds=st.lists(st.floats(1e-4, 1.0), min_size=len(DECODES) + len(CHUNKS) + 4, max_size=len(DECODES) + len(CHUNKS) + 4),
    decodes=st.integers(1, 100),
    context=st.integers(100, 1_000_000),
    offset=st.integers(0, 50_000),
    chunk=st.integers(1, 4096),
    more=st.integers(1, 50),
)
def test_whatever_was_measured_more_work_never_costs_less(
    seconds: list[float], decodes: int, context: int, offset: int, chunk: int, more: int
) -> None:
    measured = [replace(point, seconds=value) for point, value in zip(points(MACHINE), seconds, strict=True)]
    model = ProfileModel(fitted(measured))
    point = Point(decodes, context, chunk, offset, False, 1.0)
    price = priced(model, point)
    assert price > 0
    for larger in (
        replace(point, num_decodes=decodes + more),
        replace(point, decode_context=context + more),
        replace(point, chunk_tokens=chunk + more),
        replace(point, chunk_offset=offset + more),
        replace(point, last=True),
    ):
        assert priced(model, larger) >= price


@given(
    decodes=st.integers(0, 64),
    each=st.integers(1, 4096),
    offset=st.integers(0, 8192),
    chunk=st.integers(0, 2048),
    steps=st.integers(1, 30),
)
def test_a_run_of_k_steps_costs_what_k_single_steps_cost_to_the_unit(
    decodes: int, each: int, offset: int, chunk: int, steps: int
) -> None:
    model = ProfileModel(PROFILE)
    decodes = decodes or (0 if chunk else 1)

    def shape(j: int) -> RunSteps:
        chunks = (Chunk(0, offset + j * chunk, chunk, 0, False),) if chunk else ()
        return RunSteps(0, 1, decodes, decodes * each + j * decodes, chunks)

    (run,) = model.run(shape(0), steps)
    assert run.count == steps
    assert [run.first + j * run.increment for j in range(steps)] == [model.run(shape(j), 1)[0].first for j in range(steps)]


PROFILE = fitted(points(MACHINE, noise=0.02))


def test_a_profile_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == PROFILE
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_a_profile_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ProfileError, match="taken: cannot be written"):
        save(PROFILE, tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 7', "is of version 7, this squall reads version 1; measure again"),
        ('"machine"', '"machina"', "is not a profile"),
        ('"context": ', '"context": -', "has a negative price"),
        ('"knots": [', '"knots": [5, ', "knots must ascend from 1"),
    ],
)
def test_a_profile_that_is_none_is_refused_with_the_reason(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError, match=rf"profile.json: .*{message}"):
        load(path)


def test_a_truncated_and_a_missing_profile_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    path.write_text(path.read_text()[:300])
    with pytest.raises(ProfileError, match="is not a profile"):
        load(path)
    with pytest.raises(ProfileError, match=r"none.json: cannot be read .* `squall profile` makes one"):
        load(tmp_path / "none.json")


def test_points_that_cannot_tell_a_price_are_refused() -> None:
    measured = points(MACHINE)
    with pytest.raises(ProfileError, match="no step of decodes alone"):
        fitted([point for point in measured if point.chunk_tokens])
    with pytest.raises(ProfileError, match="no prefill chunk"):
        fitted([point for point in measured if not point.chunk_tokens])
    with pytest.raises(ProfileError, match=r"point 0 took nan seconds"):
        fitted([replace(measured[0], seconds=float("nan")), *measured])
    with pytest.raises(ProfileError, match=r"point 0 is no step"):
        fitted([replace(measured[0], num_decodes=0), *measured])


def test_extra_overhead_is_added_to_every_step() -> None:
    plain, slower = ProfileModel(PROFILE), ProfileModel(PROFILE, overhead_s=0.002)
    for point in points(MACHINE):
        assert priced(slower, point) - priced(plain, point) == pytest.approx(0.002)
