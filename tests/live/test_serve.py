"""What serving promises beside serving: a light head, an honest end, a socket of its own."""

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from squall import config as configuration
from squall.core.fleet_plan import Share, Slots
from squall.core.router import Router
from squall.errors import ConfigError, ModelError
from squall.live.launchers import own_gpus
from squall.live.serve import _listen, serve
from squall.live.served import served_model

EMULATED = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "serve.port=0", "serve.host=127.0.0.1")

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


def test_the_head_never_imports_torch() -> None:
    code = (
        "import squall.live.serve, squall.live.head, squall.live.api.app, sys;"
        "from squall.live.served import served_model; from squall import config;"
        "served_model(config.load(None, ['serve.engine=emulated', 'model.name=llama-3.1-8b'])).tokenizer();"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_nothing_of_opentelemetry_is_imported_where_no_spans_are_wanted() -> None:
    code = (
        "import squall.live.serve, squall.live.head, squall.live.api.app, sys;"
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_bug_in_a_machine_ends_the_service_instead_of_hanging_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(self: Router, event: object, now: int) -> list[object]:
        raise ZeroDivisionError

    monkeypatch.setattr(Router, "handle", explode)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="a bug stopped the head"):
        serve(configuration.load(None, EMULATED), tmp_path / "run", lambda line: None)
    assert "ZeroDivisionError" in caplog.text


def test_a_checkpoint_that_cannot_be_loaded_ends_the_service_with_its_reason(tmp_path: Path) -> None:
    said: list[str] = []
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps(TINY))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(broken / "tokenizer.json"))
    settings = configuration.load(None, [f"model.name={broken}", "serve.port=0"])
    with pytest.raises(ModelError, match=r"safetensors"):
        serve(settings, tmp_path / "run", said.append)
    assert any("cannot load the model" in line for line in said)


def test_an_address_is_taken_before_anything_else() -> None:
    with _listen("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="in use; choose another with --port"):
        _listen("127.0.0.1", first.getsockname()[1])
    if socket.has_ipv6:
        with _listen("::1", 0) as second:
            assert second.family is socket.AF_INET6


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:", "no such host:1"])
def test_what_cannot_be_listened_on_for_agents_leaves_no_run_directory(tmp_path: Path, listen: str) -> None:
    hosts = ('launcher.kind="hosts"', 'launcher.hosts=[{hostname="node-a"}]', f'launcher.listen="{listen}"')
    with pytest.raises(ConfigError, match=r"launcher\.listen = .* expected host:port of this machine"):
        serve(configuration.load(None, [*EMULATED, *hosts]), tmp_path / "run", lambda line: None)
    assert not list(tmp_path.iterdir())


def test_an_emulated_model_needs_sizes_alone_and_a_real_one_a_checkpoint() -> None:
    emulated = served_model(configuration.load(None, [*EMULATED, "replica.max_model_len=4096", 'model.served_as=["a", "b"]']))
    assert (emulated.folder, emulated.max_model_len, emulated.names) == (None, 4096, ("a", "b"))
    with pytest.raises(ModelError, match=r"llama-3\.1-8b"):
        served_model(configuration.load(None, ["model.name=llama-3.1-8b"]))
    with pytest.raises(ConfigError, match=r"replica\.max_model_len is 200000"):
        served_model(configuration.load(None, [*EMULATED, "replica.max_model_len=200000"]))


def test_each_replica_of_this_machine_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place.environment for place in own_gpus(Slots(2, 2), 2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}
    ]  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-0a1b, 6")  # which somebody has left to us
    assert [place.devices for place in own_gpus(Slots(2, 2), 2)] == [("4", "GPU-0a1b"), ("6", -1)]


def test_on_a_shared_cluster_a_gpu_has_the_same_number_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of 8: three GPUs a replica leave two of each node to others."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    threes = Slots(4, 2, shared=Share(0, (0, 0), 16, 8, 3))
    assert [place.devices for place in own_gpus(threes, 3)] == [(0, 1, 2), (3, 4, 5), (8, 9, 10), (11, 12, 13)]
