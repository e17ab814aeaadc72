"""Two models behind one endpoint and on one cluster: a GPU that one gives back is the other's, and both logs can be replayed."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from squall import config as configuration
from squall.core.events import GpusHeld
from squall.errors import ConfigError
from squall.eventlog import read
from squall.live.serve import serve_together
from squall.twin.observe import observe
from tests.live.checkpoints import write_checkpoint
from tests.live.disks import small_disk

EMULATED = """
model = {{ name = "llama-3.1-8b", served_as = ["{name}"] }}
cluster = {{ gpu = "h100-sxm", gpus_per_node = 4 }}
fleet = {{ replicas = {{ min = 0, max = 4, initial = 1 }}, down_window_s = 0.2, idle_ttl_s = 0.1 }}
scale = {{ kind = "concurrency", stable_s = 60.0 }}
load = {{ kind = "mock", load_s = 0.2 }}
serve = {{ engine = "emulated", port = 0 }}
"""

REAL = """
model = {{ name = "{folder}", served_as = ["{name}"] }}
cluster.gpus_per_node = 2
fleet = {{ replicas = {{ min = 0, max = 2, initial = 1 }}, down_window_s = 0.2, idle_ttl_s = 0.1 }}
scale = {{ kind = "concurrency", stable_s = 60.0 }}
replica.num_blocks = 64
serve.port = 0
"""


class Service:
    """`squall serve chat.toml code.toml`, as another process."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def complete(self, model: str, max_tokens: int = 5) -> list[str]:
        body = {"model": model, "prompt": "w1 w2", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "seed": 7}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["model"] == model
        assert answer["usage"]["completion_tokens"] == max_tokens
        return [choice["text"] for choice in answer["choices"]]

    def scale(self, model: str, replicas: int | None) -> None:
        httpx.post(f"{self.url}/fleet/scale", json={"model": model, "replicas": replicas}, timeout=10).raise_for_status()

    def fleets(self) -> dict[str, Any]:
        told = httpx.get(f"{self.url}/fleet", timeout=10, verify=False)  # reading certificates takes 30 ms, many times a second
        return {fleet["model"]: fleet for fleet in told.json()["models"]}

    def until(self, **ready: int) -> dict[str, Any]:
        """Until so many replicas of each model are ready."""
        deadline = time.monotonic() + 60
        while True:
            fleets = self.fleets()
            if {name: fleets[name]["roles"][0]["ready"] for name in ready} == ready:
                return fleets
            assert time.monotonic() < deadline, fleets
            time.sleep(0.05)


@contextmanager
def serving(folder: Path, chat: str, code: str) -> Iterator[Service]:
    (folder / "chat.toml").write_text(chat)
    (folder / "code.toml").write_text(code)
    environment = os.environ | {"SQUALL_HOME": str(folder / "home"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "squall", "serve", "chat.toml", "code.toml", "--out", "run"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        listening = next(line for line in process.stdout if line.startswith("listening on "))
        next(line for line in process.stdout if line.startswith("ready "))
        yield Service(process, listening.split()[2].rstrip(";"))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def check_logs(run: Path, models: Sequence[str]) -> None:
    """Each is whole by itself."""
    for model in models:
        records = list(read(run / model / "events.jsonl.zst"))
        assert any(isinstance(record.event, GpusHeld) for record in records)
        seen = observe(records)
        assert seen.exact, str(seen.mismatches[0])


def test_emulated_models_share_gpus_and_one_endpoint(tmp_path: Path) -> None:
    with serving(tmp_path, EMULATED.format(name="chat"), EMULATED.format(name="code")) as service:
        service.until(chat=1, code=1)
        listed = httpx.get(f"{service.url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["chat", "code"]
        assert service.complete("chat") == service.complete("chat")
        service.complete("code")
        service.scale("chat", 3)
        service.until(chat=3, code=1)
        service.scale("code", 4)  # for which there is no place
        fleets = service.until(chat=3, code=1)
        assert fleets["code"]["gpus"] == {"held": 1, "awaited": 3}
        assert fleets["chat"]["gpus"] == {"held": 3, "awaited": 0}
        service.scale("chat", 1)
        service.until(chat=1, code=3)  # woken by the other one's going
        service.scale("chat", 0)
        fleets = service.until(chat=0, code=4)
        assert fleets["code"]["gpus"] == {"held": 4, "awaited": 0}
        scraped = httpx.get(f"{service.url}/metrics").text
        assert scraped.count("# HELP squall_requests_total ") == 1
        assert 'squall_gpus_held{model="code"} 4.0' in scraped
        assert 'squall_gpus_held{model="chat"} 0.0' in scraped
        assert 'squall_requests_total{code="200",model="chat",outcome="completed"} 2.0' in scraped
        answer = httpx.post(f"{service.url}/v1/completions", json={"model": "x", "prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            404,
            "model: 'x' is not served here; 'chat', 'code' is",
        )
        assert httpx.post(f"{service.url}/v1/completions", json={"prompt": "a"}).status_code == 400
        assert httpx.post(f"{service.url}/fleet/scale", json={"replicas": 1}).status_code == 400
        assert httpx.post(f"{service.url}/v1/completions", content=b"no json").status_code == 400
        assert httpx.get(f"{service.url}/readyz").status_code == 200
    check_logs(tmp_path / "run", ["chat", "code"])


def test_a_real_model_at_rest_leaves_its_place_to_the_other_and_gets_it_back(tmp_path: Path) -> None:
    """Two places: one each, then both for one, then one each again, as requests come."""
    one, other = write_checkpoint(tmp_path / "one"), write_checkpoint(tmp_path / "other")
    chat, code = REAL.format(folder=one, name="chat"), REAL.format(folder=other, name="code")
    with serving(tmp_path, chat, code) as service:
        service.until(chat=1, code=1)
        said = service.complete("chat", 20)
        assert service.complete("code", 20) == said  # the same weights
        service.scale("chat", 0)
        service.scale("code", 2)
        service.until(chat=0, code=2)
        assert service.complete("code", 20) == said
        service.scale("code", 1)
        service.scale("chat", None)
        assert service.complete("chat", 20) == said  # who asks wakes it
        service.until(code=1)
    check_logs(tmp_path / "run", ["chat", "code"])


def test_where_one_cannot_begin_nothing_is_left_of_the_others(tmp_path: Path) -> None:
    """The disk has room for one file of one page: the configuration of the first."""
    base = ("serve.engine=emulated", "serve.port=0", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm")
    configs = [configuration.load(None, [*base, f"model.served_as=['{name}']"]) for name in ("chat", "code")]
    assert len(configuration.dumps(configs[0])) <= mmap.PAGESIZE
    with small_disk(tmp_path / "disk", mmap.PAGESIZE) as disk:
        with pytest.raises(ConfigError, match=r"cannot write into the run directory .*run/code: No space left"):
            serve_together(configs, ["a.toml", "b.toml"], disk / "run", lambda _: None)
        assert not list(disk.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["serve.port=1"], r"models of one head need the same serve.port: it is 0 in a.toml, and 1 in b.toml"),
        (["launcher.kind=ray"], r"b.toml: launcher.kind = 'ray' is for one model so far; several models want 'local'"),
        (["cluster.nodes=2"], r"models on one cluster need the same cluster.nodes: it is 1 in a.toml, and 2 in b.toml"),
        (["model.name=nobodys"], r"b.toml: model.name 'nobodys' is neither a known model"),
        (["serve.engine=torch"], r"b.toml: model 'llama-3.1-8b' is neither a checkpoint directory nor known"),
        (["model.served_as=['x', 'chat']"], r"a.toml and b.toml both serve 'chat'; give one of them another model.served_as"),
    ],
)
def test_what_one_head_cannot_serve_is_said_before_anything_starts(tmp_path: Path, settings: list[str], message: str) -> None:
    base = ("serve.engine=emulated", "serve.port=0", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm")
    configs = [
        configuration.load(None, [*base, "model.served_as=['chat']"]),
        configuration.load(None, [*base, "model.served_as=['code']", *settings]),
    ]
    with pytest.raises(ConfigError, match=message):
        serve_together(configs, ["a.toml", "b.toml"], tmp_path / "run", lambda _: None)
    assert not list(tmp_path.iterdir())
