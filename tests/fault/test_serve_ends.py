"""The ends of a deployment: drained, stopped, killed, or never begun."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from squall.core.types import CONTROLLER, ROUTER
from squall.eventlog import read
from squall.twin.observe import observe
from tests.processes import children, is_gone


def complete(url: str, seed: int, max_tokens: int) -> httpx.Response:
    order = {"model": "llama-3.1-8b", "prompt": "hello", "max_tokens": max_tokens, "seed": seed}
    return httpx.post(f"{url}/v1/completions", json=order, timeout=60)


class Asking(threading.Thread):
    """A client in the middle of an answer."""

    def __init__(self, url: str, seed: int, max_tokens: int) -> None:
        super().__init__()
        self.text = ""
        self.began = threading.Event()
        self._url = url
        self._order = {"model": "llama-3.1-8b", "prompt": "hello", "max_tokens": max_tokens, "seed": seed, "stream": True}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._order, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk: Any = httpx.Response(200, content=line.removeprefix("data: ")).json()
                    self.text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    self.began.set()


def stand_still(server: Any, spoken: Any) -> None:
    """A head does, in the middle of an answer and for longer than anybody keeps silent; the answer goes on."""
    asking = Asking(server.url, seed=3, max_tokens=200)
    asking.began.wait(20)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(13)
    server.process.send_signal(signal.SIGCONT)
    asking.join()
    assert asking.text == spoken(3, 200)


def stopped(url: str, worker: int, seed: int, max_tokens: int) -> Asking:
    """A client in the middle of an answer, whose worker stands still; asked again where the answer was over before it did."""
    asking = Asking(url, seed, max_tokens)
    asking.began.wait()
    os.kill(worker, signal.SIGSTOP)
    if asking.is_alive():
        return asking
    os.kill(worker, signal.SIGCONT)
    return stopped(url, worker, seed, max_tokens)


def test_sigterm_finishes_streams_refuses_the_new_and_leaves_a_replayable_log(server: Any, spoken: Any) -> None:
    with server() as subject:
        (worker,) = children(subject.process.pid)
        asking = stopped(subject.url, worker, seed=3, max_tokens=150)
        subject.process.send_signal(signal.SIGTERM)
        subject.until_it_says("draining")
        refused = complete(subject.url, seed=1, max_tokens=3)
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)
        os.kill(worker, signal.SIGCONT)
        asking.join()
        assert asking.text == spoken(3, 150)
        assert subject.process.wait() == 0
        seen = observe(read(subject.directory / "events.jsonl.zst"))
        assert seen.mismatches == []
        assert set(seen.num_events) >= {ROUTER, CONTROLLER}
        assert set(seen.num_events) & {0, 1}
        assert not list((subject.directory / "logs").glob("events-*"))


def test_a_second_signal_stops_at_once(server: Any) -> None:
    with server("serve.time_dilation=20") as subject:
        asking = Asking(subject.url, seed=3, max_tokens=5000)
        asking.began.wait()
        subject.process.send_signal(signal.SIGINT)
        subject.until_it_says("draining")
        subject.process.send_signal(signal.SIGINT)
        assert subject.process.wait(20) == 0
        asking.join()


def test_all_workers_may_die_and_the_answer_still_comes(server: Any, spoken: Any) -> None:
    with server() as subject:
        asking = Asking(subject.url, seed=5, max_tokens=150)
        asking.began.wait()
        (worker,) = children(subject.process.pid)
        os.kill(worker, signal.SIGKILL)
        asking.join()
        assert asking.text == spoken(5, 150)
        subject.until_it_says("is lost")
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait() == 0
        assert observe(read(subject.directory / "events.jsonl.zst")).mismatches == []


def test_workers_end_when_the_head_is_killed(server: Any) -> None:
    with server() as subject:
        workers = children(subject.process.pid)
        assert workers
        subject.process.kill()
        subject.process.wait()
        deadline = time.monotonic() + 20
        while not all(map(is_gone, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def run_serve(directory: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    arguments = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "squall", "serve", *arguments, "--out", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_one_line_before_any_worker_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_serve(tmp_path / "run", "serve.engine=emulated", "model.name=llama-3.1-8b", f"serve.port={port}")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert f"serve.port = {port} on 127.0.0.1 cannot be used: Address already in use" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("cluster.gpu=h1000", "cluster.gpu 'h1000' is unknown"),
        ("replica.max_model_len=10000000", "replica.max_model_len is 10000000"),
        ("model.name=no-such-model", "no-such-model"),
        ("serve.host=no.such.host.invalid", "is no address of this machine"),
    ],
)
def test_what_is_wrong_with_the_configuration_is_one_line_and_exit_code_2(tmp_path: Path, setting: str, complaint: str) -> None:
    settings = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "serve.port=0")
    ended = run_serve(tmp_path / "run", *settings, setting)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert complaint in line
