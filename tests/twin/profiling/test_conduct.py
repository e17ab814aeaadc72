"""A small model, from a config.json to a profile that prices steps; and what cannot be measured is said in one line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from squall.cli import app
from squall.config import Latency, ReplicaSpec, load
from squall.core.actions import RunSteps
from squall.errors import ConfigError, ProfileError
from squall.perf.build import latency_model
from squall.perf.hardware import GPUS, measure_cpu
from squall.perf.model import read_model
from squall.perf.tables.profile import load as load_profile
from squall.twin.profiling import collectives
from squall.twin.profiling.conduct import Wanted, conduct
from squall.twin.profiling.lines import Place
from squall.twin.profiling.links import Link, measure_links, settings_of

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
LIMITS = ["batching.max_num_batched_tokens=8", "batching.max_num_seqs=2", "replica.max_model_len=128"]
"""So few sizes that all are measured long before the time is over, on the slowest machine."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("squall.twin.profiling.timing.ENOUGH_S", 1e-4)
    monkeypatch.setattr("squall.twin.profiling.bench.COLD_BYTES", 1 << 20)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def wanted(folder: Path, budget_s: float, tps: tuple[int, ...] = (1, 2), **settings: str) -> Wanted:
    keys = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    config = load(None, [f"model.name={folder}", *LIMITS, *keys])
    return Wanted(config, tps, budget_s, steps=True, collectives=False, graphs=True, out=folder / "p.parquet")


def test_a_config_json_becomes_a_profile_for_two_degrees(folder: Path) -> None:
    said: list[str] = []
    (path,) = conduct(wanted(folder, 60.0), said.append)
    header = load_profile(path).header
    assert header.gpu == "cpu"
    assert header.tp == (1, 2)
    assert header.block_size == 16
    assert header.step_s is not None
    assert any("beside its operators" in line for line in said)
    assert not list(folder.glob("*.journal"))
    model = read_model(folder)
    for tp in (1, 2):
        priced = latency_model(Latency(kind="profile", path=str(path)), model, measure_cpu(), ReplicaSpec(tp=tp))
        assert "roofline" not in priced.source or tp == 2  # nobody measured collectives
        assert priced.run(RunSteps(0, 1, 2, 100), 1)[0].first > 16e9 * header.step_s
    with pytest.raises(ProfileError, match="was measured for a TP of 1, 2, not 4"):
        latency_model(Latency(kind="profile", path=str(path)), model, measure_cpu(), ReplicaSpec(tp=4))
    with pytest.raises(ProfileError, match="was measured on cpu, not on h100-sxm"):
        latency_model(Latency(kind="measured", path=str(path)), model, GPUS["h100-sxm"], ReplicaSpec())
    with pytest.raises(ConfigError, match="exists already"):
        conduct(wanted(folder, 1.0), said.append)


def test_a_run_that_was_too_short_leaves_its_journal_and_no_profile(folder: Path) -> None:
    with pytest.raises(ProfileError, match="were too few"):
        conduct(wanted(folder, 0.01), lambda line: None)
    assert (folder / "p.parquet.journal").is_file()
    assert not (folder / "p.parquet").exists()
    with pytest.raises(ProfileError, match="was begun with block_size 16, not 32"):
        conduct(wanted(folder, 0.01, replica__block_size="32"), lambda line: None)


@pytest.mark.parametrize(
    ("tps", "settings", "message"),
    [
        ((3,), {}, "replica.tp is 3"),
        ((1,), {"serve__device": "tpu"}, "serve.device is 'tpu'; use 'cpu' or 'cuda'"),
        ((1,), {"replica__kv_dtype": "fp8"}, "keeps KV as it computes: use fp32"),
    ],
)
def test_what_cannot_be_measured_is_said(folder: Path, tps: tuple[int, ...], settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conduct(wanted(folder, 1.0, tps, **settings), lambda line: None)


def test_the_command_writes_what_it_says(folder: Path) -> None:
    words = ["profile", "operators", "--model", str(folder), "--tp", "1", "--budget", "60", "--no-steps", "--no-collectives"]
    for setting in LIMITS:
        words += ["--set", setting]
    result = CliRunner().invoke(app, [*words, "-o", str(folder / "o.parquet")], catch_exceptions=False)
    assert f"wrote {folder / 'o.parquet'}" in result.output
    assert load_profile(folder / "o.parquet").header.step_s is None


@pytest.mark.slow
def test_collectives_between_processes_take_time() -> None:
    with collectives.joined(2, "cpu") as members:
        for line in collectives.lines(2):
            at: Place = {**line.fixed, "bytes": 4096}
            assert 0 < members.at(line.operator, at) < 10
        with pytest.raises(ProfileError, match="collectives cannot be measured: "):
            members.seconds("all_reduce", 1 << 60)


def test_every_link_of_a_machine_without_a_gpu_is_measured(tmp_path: Path) -> None:
    found = measure_links(tmp_path, 1 << 20)
    assert [link.name for link in found] == ["shared memory", "TCP (loopback)", "disk", "disk, cached"]
    assert all(link.bytes_per_s > 1e6 for link in found)
    assert not list(tmp_path.iterdir())


def test_links_become_settings() -> None:
    found = [Link("shared memory", 8e9), Link("disk", 1e9), Link("host to device", 2.5e10)]
    assert settings_of(found) == "--set cluster.ssd_gbps=8.0 --set cluster.host_gbps=200.0"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/disk: no file can be tried there .*; name another --folder"):
        measure_links(tmp_path / "file" / "disk", 1 << 20)
