"""A service whose fleet grows in a burst and shrinks after it, with workers of its own."""

import asyncio
import contextlib
import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from msgspec.structs import replace

from squall import config as configuration
from squall.core.types import Role
from squall.deployment import plain_plan
from squall.live.admin import fleet_of
from squall.live.engine.interface import Sampling
from squall.live.head import Head
from squall.live.launch import LocalLauncher
from squall.live.served import served_model
from tests.live.checkpoints import write_checkpoint
from tests.live.disks import small_disk
from tests.processes import commands, host_copies

SETTINGS = (
    "serve.engine=emulated",
    "model.name=llama-3.1-8b",
    "cluster.gpu=h100-sxm",
    "serve.time_dilation=0.5",
    "fleet.replicas={min=1, max=2}",
    "fleet.down_window_s=0.5",
    "fleet.idle_ttl_s=0.1",
    "load={kind='mock', load_s=0.2}",
    "scale={kind='concurrency', target=4, utilisation=1, stable_s=0.4}",
)


def numbers(head: Head) -> dict[int, str]:
    return {replica.replica: replica.phase for replica in head.stats().replicas}


async def until(head: Head, phases: dict[int, str]) -> None:
    while numbers(head) != phases:
        await asyncio.sleep(0.01)


async def text_of(head: Head, spoken: Any, seed: int, tokens: int) -> None:
    stream = head.submit(tuple(b"hello"), Sampling(max_tokens=tokens, seed=seed))
    assert "".join([out.text async for out in stream]) == spoken(seed, tokens)


async def test_a_second_worker_comes_with_a_burst_and_goes_after_it_and_no_client_notices(tmp_path: Path, spoken: Any) -> None:
    """field issues 12, 48 and 49: the fleet shrinks again, and a replica that goes finishes what it has."""
    config = configuration.load(None, SETTINGS)
    path = tmp_path / "config.toml"
    path.write_text(configuration.dumps(config), encoding="utf-8")
    launcher = LocalLauncher(path, tmp_path, [(0,), (1,)])
    model = served_model(config)
    said: list[str] = []
    plan = plain_plan(config)
    plan = replace(plan, slots=replace(plan.slots, num=2))
    head = Head(config, model.names, model.tokenizer(), model.max_model_len, launcher, say=said.append, plan=plan)
    head.start()
    try:
        await until(head, {0: "ready"})

        async def ask_and_ask_again(seed: int) -> None:
            while numbers(head) != {0: "ready", 1: "ready"}:
                await text_of(head, spoken, seed, 300)

        burst = [asyncio.create_task(ask_and_ask_again(seed)) for seed in range(12)]
        await until(head, {0: "ready", 1: "ready"})
        assert launcher.pid(1) is not None
        late = [asyncio.create_task(text_of(head, spoken, seed, 20)) for seed in range(100, 108)]
        await asyncio.gather(*burst, *late)
        while launcher.pid(0) is not None and launcher.pid(1) is not None:
            await asyncio.sleep(0.02)
        await text_of(head, spoken, 7, 20)  # whoever is left still serves
        head.want(Role.BOTH, 2)
        await until(head, {0: "ready", 1: "ready"})
        assert any("1 -> 2 replicas" in line for line in said)
        assert "both: 1 -> 2 replicas: asked for" in said
        assert any("2 -> 1 replicas" in line for line in said)
        await asyncio.gather(*(text_of(head, spoken, seed, 30) for seed in range(8)))
    finally:
        await head.close()
        launcher.kill_all()


def running(directory: Path) -> list[int]:
    """Worker processes of this deployment."""
    config = str(directory / "config.toml")
    return [pid for pid, words in commands() if "squall.live.worker" in words and config in words]


def test_a_fleet_that_was_served_leaves_why_it_changed_and_what_it_loaded(server: Any) -> None:
    with server(*SETTINGS, "scale={kind='fixed'}") as subject:
        fleet_of(subject.url, None, {"replicas": 2, "role": None})
        while [replica["phase"] for replica in fleet_of(subject.url, None)["replicas"]] != ["ready", "ready"]:
            time.sleep(0.05)
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait(20) == 0
        (decided,) = pl.read_parquet(subject.directory / "decisions.parquet").iter_rows(named=True)
        assert {key: decided[key] for key in ("role", "before", "after", "why")} == {
            "role": "both", "before": 1, "after": 2, "why": "asked for",
        }  # fmt: skip
        (loaded,) = pl.read_parquet(subject.directory / "transfers.parquet").iter_rows(named=True)
        assert (loaded["what"], loaded["kind"], loaded["replica"], loaded["route"]) == ("weights", "mock", 1, [1])
        assert loaded["started_at"] > decided["at"] > 0
        assert loaded["duration"] >= 0.5 * 0.2e9  # 0.2 s, at half of them
        assert loaded["bytes_per_s"] == pytest.approx(loaded["num_bytes"] / loaded["duration"] * 1e9)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_a_head_that_goes_leaves_no_process_and_no_copy_of_weights(server: Any, tmp_path: Path, blow: signal.Signals) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    settings = ("serve.engine=torch", f"model.name={model}", "cluster.gpu=cpu", "replica.num_blocks=64", "load.kind=host")
    with server(*settings) as subject:
        assert len(running(subject.directory)) == 2
        with urllib.request.urlopen(f"{subject.url}/fleet") as answer:
            assert {replica["load"] for replica in json.load(answer)["replicas"]} <= {"disk", "host"}
        copies = host_copies(running(subject.directory))
        assert len(copies) == 1
        command = Path(f"/proc/{running(subject.directory)[0]}/cmdline").read_bytes().split(b"\0")
        assert not any(len(word) == 64 for word in command)  # the fleet's token is no argument
        subject.process.send_signal(blow)
        subject.process.wait(30)
        deadline = time.monotonic() + 30
        while (running(subject.directory) or any(copy.exists() for copy in copies)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(subject.directory) == []
        assert not any(copy.exists() for copy in copies)


def test_a_head_that_is_killed_while_weights_move_leaves_no_process(server: Any, tmp_path: Path) -> None:
    """Eight megabytes over a link that would take minutes."""
    model = write_checkpoint(tmp_path / "tiny")
    settings = (
        "serve.engine=torch", f"model.name={model}", "cluster.gpu=cpu", "replica.num_blocks=64", "load.kind=p2p",
        "fleet.replicas={min=1, max=2}", "cluster.gpus_per_node=2", "serve.link_gbps=0.0005",
    )  # fmt: skip
    with server(*settings) as subject:
        fleet_of(subject.url, None, {"replicas": 2})
        while "loading" not in [replica["phase"] for replica in fleet_of(subject.url, None)["replicas"]]:
            time.sleep(0.05)
        assert len(running(subject.directory)) == 2
        subject.process.kill()
        subject.process.wait(30)
        deadline = time.monotonic() + 60
        while running(subject.directory) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(subject.directory) == []


def test_a_full_disk_ends_the_logs_and_nothing_else(server: Any, tmp_path: Path, spoken: Any) -> None:
    with small_disk(tmp_path / "disk", 256 * 1024) as disk, server(out=disk / "run") as subject:
        with contextlib.suppress(OSError):
            (disk / "ballast").write_bytes(bytes(256 * 1024))
        for number in range(3000):
            body = {"model": "llama-3.1-8b", "prompt": "hello", "max_tokens": 3, "seed": number}
            order = urllib.request.Request(
                f"{subject.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(order, timeout=60) as answer:
                assert json.load(answer)["choices"][0]["text"] == spoken(number, 3)
            if "the event log ends here: No space left on device" in subject.output:
                break
        else:
            raise AssertionError("the disk was not full")
        with urllib.request.urlopen(f"{subject.url}/health", timeout=60) as answer:
            assert answer.status == 200
