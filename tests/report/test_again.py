"""A run is repeated exactly from the configuration that it left in its directory, whatever was drawn, and from anywhere."""

from pathlib import Path

import polars as pl
import pytest

from squall.config import load
from squall.report.run import CONFIG, REQUESTS, STEPS, write_run
from squall.twin.rehearse import rehearse

SETTINGS = (
    "model.name=llama-3-8b",
    "cluster.gpu=a100-80g",
    "fleet.replicas=2",
    "workload.kind=synthetic",
    "workload.num_requests=60",
    "workload.arrivals={kind='poisson', rate_rps=20}",
    "workload.prompt={kind='lognormal', median=300, sigma=1.0, low=1, high=4000}",
    "workload.output={kind='lognormal', median=40, sigma=1.0, low=1, high=400}",
    "run.steps=true",
    "slo.ttft_p90_s=0.5",
)


@pytest.mark.parametrize("more", [(), ("route.kind=random", "run.seed=7"), ("route.kind=power_of_two", "replica.num_blocks=260")])
def test_the_written_configuration_repeats_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    config = load(None, [*SETTINGS, *more])
    write_run(tmp_path / "first", rehearse(config), config, None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = load(tmp_path / "first" / CONFIG)
    write_run(tmp_path / "second", rehearse(again), again, None)
    for name in (CONFIG, REQUESTS, STEPS):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        config = load(None, [*SETTINGS, f"run.seed={seed}"])
        write_run(tmp_path / str(seed), rehearse(config), config, None)
    one, other = (pl.read_parquet(tmp_path / str(seed) / REQUESTS) for seed in (1, 2))
    assert not one.equals(other)


def test_a_trace_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "data" / "trace.csv"
    trace.parent.mkdir()
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,300,20\n2023-11-16 18:15:47.1,50,9\n")
    settings = (*SETTINGS[:3], "workload.kind=trace", "workload.path=data/trace.csv")
    monkeypatch.chdir(tmp_path)
    config = load(None, settings)
    write_run(tmp_path / "first", rehearse(config), config, None)
    monkeypatch.chdir("/")
    again = load(tmp_path / "first" / CONFIG)
    write_run(tmp_path / "second", rehearse(again), again, None)
    assert (tmp_path / "first" / REQUESTS).read_bytes() == (tmp_path / "second" / REQUESTS).read_bytes()
