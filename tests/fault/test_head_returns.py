"""A head that is killed, and the next one: its workers run on and are taken over, or end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from squall.live.estate import FILE
from tests.fault.conftest import free_port
from tests.fault.test_serve_ends import Asking, complete, stand_still
from tests.processes import children, is_gone


class CutOff(Asking):
    """A client whose head dies in the middle of the answer."""

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            super().run()


def workers(state: Path) -> list[int]:
    """Process numbers of those that listen."""
    return [worker["pid"] for worker in json.loads((state / FILE).read_text())["workers"]]


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_the_next_head_takes_the_workers_over_and_ends_them_at_its_own_end(
    server: Any, spoken: Any, state: Path, tmp_path: Path
) -> None:
    with server(f"launcher.state={state}") as subject:
        asking = CutOff(subject.url, seed=3, max_tokens=1000)
        asking.began.wait()
        left = workers(state)
        subject.process.kill()
        subject.process.wait()
        asking.join()
        assert asking.text == spoken(3, len(asking.text))
    with server(f"launcher.state={state}", out=tmp_path / "next") as subject:
        assert "taken over from an earlier head: 1 worker" in subject.output
        assert workers(state) == left
        assert complete(subject.url, 4, 12).json()["choices"][0]["text"] == spoken(4, 12)
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait() == 0
    assert all(map(is_gone, left))
    assert not (state / FILE).exists()


def test_workers_that_nobody_takes_over_end(server: Any, state: Path) -> None:
    with server(f"launcher.state={state}", "launcher.outlive_s=0.5") as subject:
        left = workers(state)
        subject.process.kill()
        until(lambda: all(map(is_gone, left)))


def test_workers_of_another_configuration_are_ended_and_not_taken_over(server: Any, state: Path, tmp_path: Path) -> None:
    with server(f"launcher.state={state}") as subject:
        left = workers(state)
        subject.process.kill()
    with server(f"launcher.state={state}", "batching.max_num_seqs=7", out=tmp_path / "next") as subject:
        until(lambda: all(map(is_gone, left)))
        assert "taken over" not in subject.output
        assert complete(subject.url, 4, 3).status_code == 200


def test_a_head_may_come_back_on_another_port(server: Any, state: Path, tmp_path: Path) -> None:
    with server(f"launcher.state={state}") as subject:
        left = workers(state)
        subject.process.kill()
    with server(f"launcher.state={state}", f"serve.port={free_port()}", out=tmp_path / "next") as subject:
        assert "taken over" in subject.output
        assert workers(state) == left


def test_a_head_that_stands_still_for_a_while_finds_its_workers_again(server: Any, spoken: Any) -> None:
    """They have given it up meanwhile; killed, they would have lost their weights."""
    with server() as subject:
        left = children(subject.process.pid)
        stand_still(subject, spoken)
        assert children(subject.process.pid) == left


def test_a_worker_that_died_with_the_head_is_started_again(server: Any, state: Path, tmp_path: Path) -> None:
    with server(f"launcher.state={state}") as subject:
        left = workers(state)
        subject.process.kill()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, left)))
    with server(f"launcher.state={state}", out=tmp_path / "next") as subject:
        assert "taken over" not in subject.output
        assert complete(subject.url, 4, 3).status_code == 200


def test_a_folder_is_held_by_one_head_at_a_time(server: Any, state: Path, tmp_path: Path) -> None:
    with server(f"launcher.state={state}"):
        settings = ["--set", "serve.engine=emulated", "--set", f"launcher.state={state}", "--set", "serve.port=0"]
        command = [sys.executable, "-m", "squall", "serve", *settings, "--out", str(tmp_path / "other")]
        other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert other.returncode == 2
        assert f"launcher.state = {str(state)!r} is in use by another head" in other.stderr
        assert not (tmp_path / "other").exists()
