"""Several models on one cluster, on hosts or here, and heads that are killed: the workers of all are taken over."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fault.conftest import Hosts
from tests.fault.test_head_returns import until, workers
from tests.live.checkpoints import write_checkpoint
from tests.live.test_together import EMULATED, REAL, check_logs
from tests.processes import is_gone

NAMES = ("chat", "code")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of two emulated models, one replica each at first, on four GPUs."""
    return write(tmp_path, *(EMULATED.format(name=name) for name in NAMES))


def write(folder: Path, *texts: str) -> list[Path]:
    files = [folder / f"{name}.toml" for name in NAMES]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    return files


def fleets(url: str) -> dict[str, dict[str, Any]]:
    told = httpx.get(f"{url}/fleet", timeout=10, verify=False)  # reading certificates takes 30 ms, many times a second
    return {fleet["model"]: fleet for fleet in told.json()["models"]}


def places(url: str) -> dict[str, list[int]]:
    """Where the replicas are that are ready."""
    return {
        name: [each["replica"] for each in fleet["replicas"] if each["phase"] == "ready"] for name, fleet in fleets(url).items()
    }


def taken(url: str) -> list[int]:
    """Places, whoever has them."""
    return sorted(place for each in places(url).values() for place in each)


def scale(url: str, model: str, replicas: int | None) -> None:
    httpx.post(f"{url}/fleet/scale", json={"model": model, "replicas": replicas}, timeout=10).raise_for_status()


def say(url: str, model: str) -> str:
    body = {"model": model, "prompt": "w1 w2", "max_tokens": 9, "ignore_eos": True, "temperature": 0, "seed": 3}
    text: str = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]["text"]
    return text


def stop(subject: Any) -> None:
    subject.process.send_signal(signal.SIGTERM)
    assert subject.process.wait() == 0


def kill(subject: Any) -> None:
    subject.process.kill()
    subject.process.wait()


def test_models_share_hosts_and_their_agents(server: Any, hosts: Hosts, files: Sequence[Path], tmp_path: Path) -> None:
    """Two hosts of two devices: a place that one model leaves is the other's, wherever it is."""
    with server(*hosts.of_two_devices, files=files) as subject:
        until(lambda: places(subject.url) == {"chat": [0], "code": [1]})
        said = {name: say(subject.url, name) for name in NAMES}
        assert sorted(hosts.dialled.read_text().split()) == ["alpha", "beta"]
        scale(subject.url, "chat", 3)
        until(lambda: places(subject.url) == {"chat": [0, 2, 3], "code": [1]})
        assert {host: len(pids) for host, pids in hosts.workers().items()} == {"alpha": 2, "beta": 1}
        scale(subject.url, "code", 4)
        until(lambda: fleets(subject.url)["code"]["gpus"] == {"held": 1, "awaited": 3})
        scale(subject.url, "chat", 0)
        until(lambda: places(subject.url) == {"chat": [], "code": [0, 1, 2, 3]})
        assert say(subject.url, "code") == said["code"]
        scale(subject.url, "code", 1)
        scale(subject.url, "chat", None)
        assert say(subject.url, "chat") == said["chat"]  # who asks wakes it
        left = hosts.all()
        stop(subject)
        assert all(map(is_gone, left))
    check_logs(tmp_path / "run", NAMES)


def test_a_host_that_dies_takes_replicas_of_all_models_along(server: Any, hosts: Hosts, files: Sequence[Path]) -> None:
    with server(*hosts.of_two_devices, files=files) as subject:
        scale(subject.url, "chat", 2)
        scale(subject.url, "code", 2)
        until(lambda: taken(subject.url) == [0, 1, 2, 3])
        os.kill(hosts.agents()["beta"], signal.SIGKILL)
        subject.until_it_says(r"chat: replica \d is lost")
        subject.until_it_says(r"code: replica \d is lost")
        until(lambda: taken(subject.url) == [0, 1, 2, 3])
        assert sorted(hosts.dialled.read_text().split()) == ["alpha", "beta", "beta"]
        stop(subject)


def test_the_next_head_takes_the_workers_of_all_models_on_hosts_over(
    server: Any, hosts: Hosts, files: Sequence[Path], tmp_path: Path
) -> None:
    with server(*hosts.of_two_devices, files=files) as subject:
        said = {name: say(subject.url, name) for name in NAMES}
        agents, workers = hosts.agents(), hosts.workers()
        assert {host: len(pids) for host, pids in workers.items()} == {"alpha": 2, "beta": 0}
        kill(subject)
    with server(*hosts.of_two_devices, files=files, out=tmp_path / "next") as subject:
        subject.until_it_says("the agent of alpha has dialled again: taken over with 2 workers")
        assert {name: say(subject.url, name) for name in NAMES} == said
        assert (hosts.agents(), hosts.workers()) == (agents, workers)
        stop(subject)
    assert all(map(is_gone, (*agents.values(), *workers["alpha"])))


def test_fleets_begin_where_their_workers_are_and_what_they_do_not_begin_with_ends(
    server: Any, hosts: Hosts, files: Sequence[Path], tmp_path: Path
) -> None:
    """Each host has one process for all emulated replicas of a model."""
    with server(*hosts.of_two_devices, files=files) as subject:
        scale(subject.url, "chat", 0)
        until(lambda: fleets(subject.url)["chat"]["gpus"]["held"] == 0)
        scale(subject.url, "code", 2)
        until(lambda: places(subject.url) == {"chat": [], "code": [0, 1]})
        scale(subject.url, "chat", 1)
        until(lambda: places(subject.url) == {"chat": [2], "code": [0, 1]})
        first = hosts.workers()
        assert {host: len(pids) for host, pids in first.items()} == {"alpha": 1, "beta": 1}
        kill(subject)
    with server(*hosts.of_two_devices, files=files, out=tmp_path / "second") as subject:
        assert places(subject.url) == {"chat": [2], "code": [0]}
        assert hosts.workers() == first
        scale(subject.url, "chat", 3)
        until(lambda: places(subject.url) == {"chat": [1, 2, 3], "code": [0]})
        second = hosts.workers()
        assert {host: len(pids) for host, pids in second.items()} == {"alpha": 2, "beta": 1}
        kill(subject)
    with server(*hosts.of_two_devices, files=files, out=tmp_path / "third") as subject:
        assert places(subject.url) == {"chat": [1], "code": [0]}
        until(lambda: hosts.workers() == {"alpha": second["alpha"], "beta": []})
        stop(subject)


def test_agents_of_other_models_end_before_others_start(server: Any, hosts: Hosts, files: Sequence[Path], tmp_path: Path) -> None:
    with server(*hosts.of_two_devices, files=files) as subject:
        left = hosts.all()
        kill(subject)
    with server(*hosts.of_two_devices, "batching.max_num_seqs=7", files=files, out=tmp_path / "next") as subject:
        subject.until_it_says("the agent of alpha served another configuration")
        until(lambda: places(subject.url) == {"chat": [0], "code": [1]})
        assert all(map(is_gone, left))
        stop(subject)


def test_the_next_head_takes_the_workers_of_all_models_here_over(server: Any, files: Sequence[Path], tmp_path: Path) -> None:
    state = tmp_path / "state"
    with server(f"launcher.state={state}", files=files) as subject:
        said = {name: say(subject.url, name) for name in NAMES}
        left = {name: workers(state / name) for name in NAMES}
        kill(subject)
    with server(f"launcher.state={state}", files=files, out=tmp_path / "next") as subject:
        for name in NAMES:
            assert f"{name}: taken over from an earlier head: 1 worker" in subject.output
        assert {name: workers(state / name) for name in NAMES} == left
        assert {name: say(subject.url, name) for name in NAMES} == said
        stop(subject)
    assert all(map(is_gone, (*left["chat"], *left["code"])))


def test_a_worker_where_its_fleet_does_not_begin_leaves_its_place_to_the_other_model(server: Any, tmp_path: Path) -> None:
    """Two places, both of them code's when the head dies. The next one begins with chat in the first."""
    state = tmp_path / "state"
    files = write(tmp_path, *(REAL.format(folder=write_checkpoint(tmp_path / f"model-{name}"), name=name) for name in NAMES))
    with server(f"launcher.state={state}", files=files) as subject:
        scale(subject.url, "chat", 0)
        until(lambda: fleets(subject.url)["chat"]["gpus"]["held"] == 0)
        scale(subject.url, "code", 2)
        until(lambda: places(subject.url) == {"chat": [], "code": [0, 1]}, 60)
        until(lambda: len(workers(state / "code")) == 2)
        in_the_second, in_the_first = workers(state / "code")
        kill(subject)
    with server(f"launcher.state={state}", files=files, out=tmp_path / "next", ready="listening on") as subject:
        assert is_gone(in_the_first)
        until(lambda: places(subject.url) == {"chat": [0], "code": [1]}, 60)
        assert workers(state / "code") == [in_the_second]
        stop(subject)


def test_workers_here_are_taken_over_wherever_they_are(server: Any, tmp_path: Path) -> None:
    """Of three places chat has the last one, where it would not begin without it."""
    state = tmp_path / "state"
    texts = (REAL.format(folder=write_checkpoint(tmp_path / f"model-{name}"), name=name) for name in NAMES)
    files = write(tmp_path, *(text.replace("gpus_per_node = 2", "gpus_per_node = 3") for text in texts))
    with server(f"launcher.state={state}", files=files) as subject:
        scale(subject.url, "chat", 0)
        until(lambda: fleets(subject.url)["chat"]["gpus"]["held"] == 0)
        scale(subject.url, "code", 2)
        until(lambda: places(subject.url) == {"chat": [], "code": [0, 1]}, 60)
        scale(subject.url, "chat", 1)
        until(lambda: places(subject.url) == {"chat": [2], "code": [0, 1]}, 60)
        until(lambda: [len(workers(state / name)) for name in NAMES] == [1, 2])
        left = {name: workers(state / name) for name in NAMES}
        kill(subject)
    with server(f"launcher.state={state}", files=files, out=tmp_path / "next") as subject:
        until(lambda: places(subject.url) == {"chat": [2], "code": [0]}, 60)
        assert [workers(state / name)[0] in left[name] for name in NAMES] == [True, True]
        assert sum(map(is_gone, left["code"])) == 1
        stop(subject)
