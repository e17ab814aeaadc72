"""The same code in both bodies: what a real head and real workers did, fresh machines do again."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from squall.core.events import Cancelled, ReplicaDown
from squall.core.types import CONTROLLER, ROUTER
from squall.eventlog import read
from squall.twin.observe import observe

CONFIG = """
cluster.gpu = "h100-sxm"
fleet.replicas = 2
serve = { engine = "emulated", port = 0 }
run.out = "run"
"""


class Server:
    """`squall serve` with two emulated replicas in one worker process."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def complete(self, max_tokens: int, leave_after: int | None = None) -> int:
        """Chunks of one streamed answer; the client goes away after `leave_after` of them."""
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": "x" * 300,
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        seen = 0
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                seen += line.startswith("data: {")
                if seen == leave_after:
                    break
        return seen

    def kill_worker(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            if "squall.live.worker" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "config.toml").write_text(CONFIG)
    environment = os.environ | {"SQUALL_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "squall", "serve", "config.toml"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        listening = next(line for line in process.stdout if line.startswith("listening on "))
        next(line for line in process.stdout if line.startswith("ready "))
        yield Server(process, listening.split()[2].rstrip(";"))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the worker process in /proc")
def test_a_live_run_is_reproduced_through_a_killed_worker_and_a_client_that_left(server: Server, tmp_path: Path) -> None:
    chunks: list[int] = []
    clients = [threading.Thread(target=lambda: chunks.append(server.complete(200))) for _ in range(5)]
    for client in clients:
        client.start()
    assert server.complete(1500, leave_after=20) == 20
    server.kill_worker()
    for client in clients:
        client.join()
    assert min(chunks) >= 200  # all were continued
    assert server.complete(5) >= 5
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    records = list(read(tmp_path / "run" / "events.jsonl.zst"))
    observation = observe(records)
    assert observation.mismatches == []
    assert set(observation.num_events) - {0, 1} == {CONTROLLER, ROUTER}
    assert len(observation.num_events) >= 3  # what a killed worker had not flushed is gone
    router = [record.event for record in records if record.machine == ROUTER]
    assert ReplicaDown(0, lost=True) in router
    assert any(isinstance(event, Cancelled) for event in router)
