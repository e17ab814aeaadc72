"""What would stop every worker is said before the first is started, in one line."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from squall import config as configuration
from squall.errors import ConfigError
from squall.live.fitness import crowded, has_driver, refuse_simulated, refuse_unfit, refuse_untraceable
from squall.live.serve import serve
from squall.live.served import ServedModel, served_model
from tests.live.test_serve import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(TINY))
    return made


def asked(folder: Path, *overrides: str) -> tuple[configuration.Config, ServedModel]:
    config = configuration.load(None, [f"model.name={folder}", *overrides])
    return config, served_model(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("replica.pp=2", "replica.pp is 2; pipeline stages are simulated, not served: use 1, and replica.tp"),
        ("replica.kv_dtype=fp8", "replica.kv_dtype is 'fp8'; the built-in engine keeps KV in the type that it computes in"),
        ("batching.prefix_cache_outputs=true", "batching.prefix_cache_outputs is for simulations"),
        ("batching={preemption='swap', swap_blocks=9}", 'batching.preemption = "swap" is for simulations'),
    ],
)
def test_what_only_simulations_do_is_refused(override: str, message: str) -> None:
    refuse_simulated(configuration.load(None, []))
    with pytest.raises(ConfigError, match=message):
        refuse_simulated(configuration.load(None, [override]))


def test_what_this_machine_has_is_not_refused(folder: Path) -> None:
    refuse_unfit(*asked(folder, "replica.num_blocks=1000"))


def test_a_device_of_no_kind_is_refused(folder: Path) -> None:
    for device in ("tpu", "cpu:3", "cuda:", "cuda:x"):
        with pytest.raises(ConfigError, match=f"serve.device is '{device}'; use 'cpu' or 'cuda'"):
            refuse_unfit(*asked(folder, f"serve.device={device}"))


@pytest.mark.skipif(torch.cuda.is_available() or has_driver(), reason="there is a GPU, or its driver")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"serve.device is 'cuda:1', but .*; use 'cpu', or"):
        refuse_unfit(*asked(folder, "serve.device=cuda:1"))


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="NIXL is installed")
def test_a_transport_that_is_not_installed_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"serve.transport is 'nixl', which is not installed here: pip install 'squall\[nixl\]'"
    ):
        refuse_unfit(*asked(folder, "serve.transport=nixl"))


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://[::1", "http://here:port"])
def test_spans_go_to_a_url(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match=r"serve\.otlp_endpoint is '.*'; expected a collector's URL, such as 'http://localhost:4318'"
    ):
        refuse_untraceable(configuration.load(None, [f'serve.otlp_endpoint="{endpoint}"']))


@pytest.mark.parametrize("lacking", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_without_its_extra_nothing_is_started_that_wants_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{lacking}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lacking, None)
    config = configuration.load(None, ["serve.engine=emulated", "serve.otlp_endpoint=http://localhost:4318"])
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry, which is not installed: pip install 'squall\[otel\]'"):
        serve(config, tmp_path / "run", print)
    assert not (tmp_path / "run").exists()


def test_more_kv_than_the_machine_has_memory_is_refused_with_what_would_fit(folder: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    block = 16 * 2 * 2 * 32 * 4  # tokens, keys and values, heads, their size, bytes
    fits = memory // block // 3
    refuse_unfit(*asked(folder, "fleet.replicas=3", f"replica.num_blocks={fits}"))
    with pytest.raises(
        ConfigError, match=rf"of KV cache for 3 replicas, and this machine has .*; use at most {fits}, or leave it"
    ):
        refuse_unfit(*asked(folder, "fleet.replicas=3", f"replica.num_blocks={fits + 1}"))


def test_nothing_is_started_and_nothing_left(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config, _ = asked(folder, "serve.device=tpu", "serve.port=0")
    with pytest.raises(ConfigError, match=r"serve.device is 'tpu'"):
        serve(config, tmp_path / "run", said.append)
    assert said == []
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_cores_are_warned_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert crowded(asked(folder, "fleet.replicas=4")[0]) is None
    assert crowded(asked(folder, "fleet.replicas=64", "serve.engine=emulated", "cluster.gpu=l4", "cluster.nodes=8")[0]) is None
    said = crowded(asked(folder, "fleet.replicas={min=1, max=3}", "replica.tp=2")[0])
    assert said == "the fleet may have 6 ranks, and 4 cores are here: each will be slower than it is alone"
