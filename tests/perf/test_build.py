from pathlib import Path

import pytest
from msgspec.structs import replace

from squall.config import Latency, ReplicaSpec, Speculation
from squall.core.actions import Chunk, RunSteps
from squall.errors import ConfigError, ProfileError
from squall.perf.build import latency_model, num_blocks
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import GPUS
from squall.perf.latency import LatencyModel
from squall.perf.profile import Point, fit, load, save
from squall.perf.quantization import Quantization

ROOFLINE = Latency(kind="roofline")
SMOLLM, L4 = resolve_model("smollm2"), GPUS["l4"]
POINTS = [Point(1, 100, 0, 0, False, 0.02), Point(2, 200, 0, 0, False, 0.03), Point(0, 0, 64, 0, True, 0.1)]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    save(fit(POINTS, model=SMOLLM.name, num_params=SMOLLM.num_params, machine="here", dtype="fp32"), path)
    return path


def test_auto_is_the_profile_where_a_path_is_given_and_the_roofline_otherwise(profile: Path) -> None:
    assert latency_model(Latency(), SMOLLM, L4, ReplicaSpec()).source.startswith("roofline")
    for latency in (Latency(path="p.json"), Latency(kind="profile", path="p.json")):
        model = latency_model(latency, SMOLLM, L4, ReplicaSpec(), base_dir=profile.parent)
        assert model.source == "profile (HuggingFaceTB/SmolLM2-135M-Instruct on here, fp32)"
        assert model.run(RunSteps(0, 1, 1, 100), 1)[0].first == pytest.approx(0.02 * 16e9, rel=0.01)


def test_a_profile_of_another_model_is_refused(profile: Path) -> None:
    with pytest.raises(ProfileError, match=r"was measured with .*SmolLM2.*, not Qwen/Qwen3-0.6B"):
        latency_model(Latency(path=str(profile)), resolve_model("qwen3-0.6b"), L4, ReplicaSpec())


@pytest.mark.parametrize(("key", "measured", "asked"), [("tp", 1, 3), ("block_size", 16, 32)])
def test_a_profile_of_another_share_or_block_size_is_refused(profile: Path, key: str, measured: int, asked: int) -> None:
    save(replace(load(profile), **{key: measured}), profile)
    with pytest.raises(ProfileError, match=f"measured with replica.{key} = {measured}, not {asked}; use {measured}"):
        latency_model(Latency(path=str(profile)), SMOLLM, L4, replace(ReplicaSpec(), **{key: asked}))


@pytest.mark.parametrize(
    ("latency", "replica", "message"),
    [
        (replace(Latency(), kind="guess"), ReplicaSpec(), "latency.kind is 'guess'; it must be \"auto\""),
        (Latency(kind="profile"), ReplicaSpec(), "latency.path is missing"),
        (Latency(), ReplicaSpec(pp=31), "replica.pp is 31, but .* has 30 layers; use 1 to 30"),
        (Latency(), ReplicaSpec(ep=2), "replica.ep is 2"),
        (Latency(), ReplicaSpec(kv_dtype="bf16", dtype="bf16", tp=9, ep=2), "replica.tp is 9"),
        (Latency(sequence_parallel=True), ReplicaSpec(), "latency.sequence_parallel needs GPUs to share norms"),
        (Latency(overlap_send=True), ReplicaSpec(), "latency.overlap_send needs pipeline stages"),
        (Latency(speculation=Speculation()), ReplicaSpec(pp=2), "do not go together yet; use replica.pp = 1"),
        (Latency(speculation=Speculation(model="no such model")), ReplicaSpec(), "model.name 'no such model'"),
        (Latency(), ReplicaSpec(tp=2), "replica.tp is 2"),
        (Latency(), replace(ReplicaSpec(), dtype="fp99"), "number type 'fp99' is unknown"),
    ],
)
def test_a_wrong_table_is_named(latency: Latency, replica: ReplicaSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        latency_model(latency, SMOLLM, L4, replica)


def test_a_cache_in_eight_bits_needs_a_gpu_that_computes_in_them() -> None:
    replica = ReplicaSpec(kv_dtype="fp8")
    with pytest.raises(ConfigError, match=r'kv_dtype is fp8, which a100-80g does not compute; use "auto", or one of h100'):
        latency_model(Latency(), SMOLLM, GPUS["a100-80g"], replica)
    assert latency_model(Latency(kind="roofline"), SMOLLM, GPUS["h100-sxm"], replica).num_stages == 1


def test_weights_of_fewer_bits_than_a_gpu_computes_in_are_read_faster_and_computed_no_faster() -> None:
    spec = replace(resolve_model("llama-3-8b"), quantization=Quantization("fp8"))
    plain, packed = (
        latency_model(ROOFLINE, model, GPUS["a100-80g"], ReplicaSpec()) for model in (resolve_model("llama-3-8b"), spec)
    )
    decode, prompt = RunSteps(0, 1, 1, 100), RunSteps(0, 1, 0, 0, (Chunk(0, 0, 8192, 0, True),))
    assert price(packed, decode) < 0.65 * price(plain, decode)
    assert price(packed, prompt) == pytest.approx(price(plain, prompt), rel=0.02)


def test_whole_steps_cannot_be_cut_or_changed(profile: Path) -> None:
    latency = Latency(path=str(profile))
    with pytest.raises(ConfigError, match=r"replica.pp is 2, but .* holds whole steps, not stages"):
        latency_model(latency, SMOLLM, L4, ReplicaSpec(pp=2))
    with pytest.raises(ConfigError, match=r"latency.launch_s changes operators, but .* holds whole steps"):
        latency_model(replace(latency, launch_s=1e-5), SMOLLM, L4, ReplicaSpec())


def test_stages_of_a_pipeline_have_blocks_of_their_own() -> None:
    one, two = (num_blocks(SMOLLM, L4, ReplicaSpec(pp=pp), max_num_batched_tokens=2048, max_num_seqs=256) for pp in (1, 2))
    assert 1.9 * one < two < 2.1 * one
    model = latency_model(ROOFLINE, SMOLLM, L4, ReplicaSpec(pp=2))
    assert model.num_stages == 2
    assert len(model.stages(RunSteps(0, 1, 1, 100))) == 2


def test_models_made_of_the_same_are_one_and_others_are_not() -> None:
    first, again, other = (
        latency_model(ROOFLINE, resolve_model("smollm2"), GPUS[name], ReplicaSpec()) for name in ("l4", "l4", "h100-sxm")
    )
    assert first is again
    assert price(first, RunSteps(0, 1, 1, 100)) > price(other, RunSteps(0, 1, 1, 100))
    faster = replace(L4, bandwidth=2 * L4.bandwidth)
    assert price(first, RunSteps(0, 1, 1, 100)) > price(
        latency_model(ROOFLINE, SMOLLM, faster, ReplicaSpec()), RunSteps(0, 1, 1, 100)
    )


def price(model: LatencyModel, shape: RunSteps) -> int:
    return model.run(shape, 1)[0].first


def test_blocks_come_from_the_account_unless_they_are_given() -> None:
    replica = ReplicaSpec()
    counted = num_blocks(SMOLLM, L4, replica, max_num_batched_tokens=2048, max_num_seqs=256)
    assert 50_000 < counted < 60_000
    assert num_blocks(SMOLLM, L4, replace(replica, num_blocks=77), max_num_batched_tokens=2048, max_num_seqs=256) == 77
    with pytest.raises(ConfigError, match=r"replica.num_blocks is 0"):
        num_blocks(SMOLLM, L4, replace(replica, num_blocks=0), max_num_batched_tokens=2048, max_num_seqs=256)
