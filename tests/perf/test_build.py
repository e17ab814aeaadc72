from pathlib import Path

import pytest
from msgspec.structs import replace

from squall.config import Latency, ReplicaSpec
from squall.core.actions import RunSteps
from squall.errors import ConfigError, ProfileError
from squall.perf.build import latency_model, num_blocks
from squall.perf.catalogue import resolve_model
from squall.perf.hardware import GPUS
from squall.perf.profile import Point, fit, save

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


@pytest.mark.parametrize(
    ("latency", "replica", "message"),
    [
        (replace(Latency(), kind="guess"), ReplicaSpec(), "latency.kind is 'guess'; it must be \"auto\""),
        (Latency(kind="profile"), ReplicaSpec(), "latency.path is missing"),
        (Latency(), ReplicaSpec(pp=2), "replica.pp is 2"),
        (Latency(), ReplicaSpec(tp=2), "replica.tp is 2"),
        (Latency(), replace(ReplicaSpec(), dtype="fp99"), "number type 'fp99' is unknown"),
    ],
)
def test_a_wrong_table_is_named(latency: Latency, replica: ReplicaSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        latency_model(latency, SMOLLM, L4, replica)


def test_blocks_come_from_the_account_unless_they_are_given() -> None:
    replica = ReplicaSpec()
    counted = num_blocks(SMOLLM, L4, replica, max_num_batched_tokens=2048, max_num_seqs=256)
    assert 50_000 < counted < 60_000
    assert num_blocks(SMOLLM, L4, replace(replica, num_blocks=77), max_num_batched_tokens=2048, max_num_seqs=256) == 77
    with pytest.raises(ConfigError, match=r"replica.num_blocks is 0"):
        num_blocks(SMOLLM, L4, replace(replica, num_blocks=0), max_num_batched_tokens=2048, max_num_seqs=256)
