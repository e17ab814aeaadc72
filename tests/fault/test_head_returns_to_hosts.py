"""A head of agents on hosts (all here) that is killed, stopped or cut off: agents and workers run on, and are taken over.

What this ssh starts runs in a session of its own, as what sshd starts does.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from squall.live.roster import FILE
from tests.fault.conftest import HEAD, Hosts, free_port
from tests.fault.test_head_returns import CutOff, until
from tests.fault.test_serve_ends import Asking, complete, stand_still
from tests.processes import is_gone

Run = Callable[[str], None]


@pytest.fixture
def a_person(tmp_path: Path) -> Iterator[Run]:
    """Runs the commands that a head has printed; each stays in its terminal."""
    with contextlib.ExitStack() as held:

        def run(printed: str) -> None:
            for name, command in re.findall(r"on (\w+): (SQUALL_TOKEN=.*)", printed):
                terminal = held.enter_context((tmp_path / f"{name}.txt").open("ab"))
                process = held.enter_context(subprocess.Popen(["env", *shlex.split(command)], stderr=terminal))
                held.callback(process.kill)

        yield run


def phases(url: str) -> list[str]:
    fleet = httpx.get(f"{url}/fleet", verify=False)  # reading certificates takes 30 ms, many times a second
    return [each["phase"] for each in fleet.json()["replicas"]]


def kill(subject: Any) -> None:
    subject.process.kill()
    subject.process.wait()


def left_behind(subject: Any, hosts: Hosts) -> list[int]:
    """Agents and workers, once both of these run, of a head that is killed now."""
    until(lambda: sum(map(len, hosts.workers().values())) == 2)
    left = hosts.all()
    kill(subject)
    return left


def test_the_next_head_takes_agents_and_workers_over_and_ends_them_at_its_own_end(
    server: Any, spoken: Any, hosts: Hosts, tmp_path: Path
) -> None:
    with server(*hosts.settings) as subject:
        until(lambda: len(hosts.workers()) == 2 and all(hosts.workers().values()))
        asking = CutOff(subject.url, seed=3, max_tokens=1000)
        asking.began.wait(20)
        agents, workers = hosts.agents(), hosts.workers()
        assert (hosts.state / FILE).stat().st_mode & 0o777 == 0o600
        kill(subject)
        asking.join()
        assert asking.text == spoken(3, len(asking.text))
    with server(*hosts.settings, out=tmp_path / "next") as subject:
        for host in ("alpha", "beta"):
            subject.until_it_says(f"the agent of {host} has dialled again: taken over with 1 worker")
        assert complete(subject.url, 3, 40).json()["choices"][0]["text"] == spoken(3, 40)
        assert (hosts.agents(), hosts.workers()) == (agents, workers)
        assert sorted(hosts.dialled.read_text().split()) == ["alpha", "beta"]
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait() == 0
    assert all(map(is_gone, [*agents.values(), *(pid for pids in workers.values() for pid in pids)]))
    assert not (hosts.state / FILE).exists()


def test_agents_that_a_person_started_are_taken_over_too(
    server: Any, spoken: Any, hosts: Hosts, a_person: Run, tmp_path: Path
) -> None:
    settings = (*hosts.settings, "launcher.launch=print")
    with server(*settings, ready="on beta: ") as subject:
        a_person(subject.output)
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        subject.until_it_says("ready after")
        workers = hosts.workers()
        kill(subject)
    with server(*settings, out=tmp_path / "next") as subject:
        until(lambda: subject.output.count("has dialled again") == 2)
        assert "SQUALL_TOKEN" not in subject.output
        assert complete(subject.url, 3, 40).json()["choices"][0]["text"] == spoken(3, 40)
        assert hosts.workers() == workers
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait() == 0
    until(lambda: not hosts.agents())
    said = (tmp_path / "alpha.txt").read_text().splitlines()
    assert [re.sub(r".* (starts|gone|back)\b.*", r"\1", line) for line in said] == ["starts", "gone", "back"]
    assert f"the head at {HEAD}:{hosts.port} is gone: " in said[1]


def test_agents_to_whom_no_head_comes_back_end_with_their_workers(server: Any, hosts: Hosts) -> None:
    with server(*hosts.settings, "launcher.outlive_s=1") as subject:
        left = left_behind(subject, hosts)
    time.sleep(0.5)
    assert not any(map(is_gone, left))
    until(lambda: all(map(is_gone, left)))


def test_agents_of_another_configuration_end_with_their_workers_before_others_start(
    server: Any, hosts: Hosts, tmp_path: Path
) -> None:
    with server(*hosts.settings) as subject:
        left = left_behind(subject, hosts)
    with server(*hosts.settings, "batching.max_num_seqs=7", out=tmp_path / "next") as subject:
        for host in ("alpha", "beta"):
            subject.until_it_says(f"the agent of {host} served another configuration: it ends with its workers")
        assert all(map(is_gone, left))
        assert "taken over" not in subject.output
        assert complete(subject.url, 4, 3).status_code == 200


def test_agents_whose_head_comes_back_elsewhere_end_with_their_workers_and_others_start(
    server: Any, hosts: Hosts, tmp_path: Path
) -> None:
    """They dial where nobody listens any more."""
    with server(*hosts.settings) as subject:
        left = left_behind(subject, hosts)
    hosts.port = free_port()
    with server(*hosts.settings, f"launcher.listen={HEAD}:{hosts.port}", out=tmp_path / "next") as subject:
        assert complete(subject.url, 4, 3).status_code == 200
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        until(lambda: all(map(is_gone, left)))
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait() == 0


def test_a_head_may_come_back_on_another_port_for_its_clients(server: Any, hosts: Hosts, tmp_path: Path) -> None:
    with server(*hosts.settings) as subject:
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        workers = hosts.workers()
        kill(subject)
    with server(*hosts.settings, f"serve.port={free_port()}", out=tmp_path / "next") as subject:
        assert complete(subject.url, 4, 3).status_code == 200
        assert hosts.workers() == workers


def test_a_head_with_another_token_refuses_and_both_say_so(server: Any, hosts: Hosts, a_person: Run, tmp_path: Path) -> None:
    settings = (*hosts.settings, "launcher.launch=print")
    with server(*settings, ready="on beta: ") as subject:
        a_person(subject.output)
        left = left_behind(subject, hosts)
    (hosts.state / FILE).unlink()
    with server(*settings, out=tmp_path / "next", ready="on beta: ") as subject:
        subject.until_it_says("an agent was refused: 'alpha' does not know the token")
        until(lambda: all(map(is_gone, left)))
    refused = f"agent: the head at {HEAD}:{hosts.port} refuses: wrong token; use the command of this run"
    assert (tmp_path / "alpha.txt").read_text().splitlines()[-1] == refused


@pytest.mark.parametrize("stage", ["before agents dial", "workers start"])
def test_a_head_that_is_killed_while_workers_start(stage: str, server: Any, hosts: Hosts, tmp_path: Path) -> None:
    with server(*hosts.settings, ready="listening on") as subject:
        if stage == "workers start":
            until(lambda: sum(map(len, hosts.workers().values())) > 0)
        kill(subject)
    with server(*hosts.settings, out=tmp_path / "next") as subject:
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        assert complete(subject.url, 4, 3).status_code == 200
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait() == 0
    until(lambda: not hosts.agents())


def test_a_head_that_is_killed_while_weights_come(server: Any, spoken: Any, hosts: Hosts, tmp_path: Path) -> None:
    settings = (*hosts.settings, "fleet.replicas={min=1, max=2}", "fleet.down_window_s=600")
    with server(*settings) as subject:
        assert httpx.post(f"{subject.url}/fleet/scale", json={"replicas": 2}).status_code == 200
        until(lambda: "loading" in phases(subject.url))
        workers = hosts.workers()
        kill(subject)
    with server(*settings, out=tmp_path / "next") as subject:
        assert httpx.post(f"{subject.url}/fleet/scale", json={"replicas": 2}).status_code == 200
        until(lambda: phases(subject.url) == ["ready", "ready"])
        assert complete(subject.url, 3, 40).json()["choices"][0]["text"] == spoken(3, 40)
        assert hosts.workers() == workers


def test_a_worker_that_dies_while_there_is_no_head_is_started_again(server: Any, hosts: Hosts, tmp_path: Path) -> None:
    with server(*hosts.settings) as subject:
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        agents, workers = hosts.agents(), hosts.workers()
        kill(subject)
    os.kill(workers["beta"][0], signal.SIGKILL)
    with server(*hosts.settings, out=tmp_path / "next") as subject:
        subject.until_it_says("the agent of beta has dialled again: taken over with 0 workers")
        until(lambda: hosts.workers()["beta"] not in ([], workers["beta"]))
        assert (hosts.agents(), hosts.workers()["alpha"]) == (agents, workers["alpha"])


def test_an_agent_that_is_killed_takes_its_workers_along_and_another_one_is_started(
    server: Any, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with server(*hosts.settings) as subject:
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        agents, workers = hosts.agents(), hosts.workers()
        os.kill(agents["beta"], signal.SIGKILL)
        until(lambda: is_gone(workers["beta"][0]))
        until(lambda: hosts.agents().get("beta", agents["beta"]) != agents["beta"] and bool(hosts.workers()["beta"]))
        assert hosts.agents()["alpha"] == agents["alpha"]
        assert complete(subject.url, 4, 3).status_code == 200
        assert len(list(tmp_path.glob("squall-agent-*"))) == 2  # what the killed one had is gone


def test_an_agent_that_hangs_is_ended_by_the_next_one(server: Any, hosts: Hosts, tmp_path: Path) -> None:
    with server(*hosts.settings) as subject:
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        agents, workers = hosts.agents(), hosts.workers()
        os.kill(agents["beta"], signal.SIGSTOP)
        kill(subject)
    with server(*hosts.settings, out=tmp_path / "next") as subject:
        until(lambda: is_gone(agents["beta"]) and is_gone(workers["beta"][0]))
        until(lambda: bool(hosts.workers().get("beta")))
        assert hosts.agents()["alpha"] == agents["alpha"]


def test_two_heads_at_once(server: Any, hosts: Hosts, tmp_path: Path) -> None:
    with server(*hosts.settings):
        for state, said in (
            (hosts.state, f"launcher.state = {str(hosts.state)!r} is in use by another head"),
            (tmp_path / "other-state", f"launcher.listen = '{HEAD}:{hosts.port}' is in use"),
        ):
            settings = (
                "serve.engine=emulated",
                "serve.port=0",
                "fleet.replicas=2",
                *hosts.settings[:-1],
                f"launcher.state={state}",
            )
            words = [word for setting in settings for word in ("--set", setting)]
            command = [sys.executable, "-m", "squall", "serve", *words, "--out", str(tmp_path / "other")]
            other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert other.returncode == 2
            assert said in other.stderr
            assert not (tmp_path / "other").exists()


class Network(threading.Thread):
    """Between agents and their head: what is cut breaks, and nothing gets through until it is mended."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server((address, port))
        self._port = port
        self._is_cut = False
        self._open: list[socket.socket] = []
        self.num_refused = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._is_cut:
                    self.num_refused += 1
                    client.close()
                    continue
                head = socket.create_connection((HEAD, self._port))
                self._open += [client, head]
                for source, target in ((client, head), (head, client)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._is_cut = True
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            end.close()


def test_agents_that_are_cut_off_are_taken_back_and_requests_go_on(server: Any, spoken: Any, hosts: Hosts) -> None:
    network = Network("127.0.0.9", hosts.port)
    with contextlib.closing(network), server(*hosts.settings, "launcher.advertise=127.0.0.9") as subject:
        until(lambda: phases(subject.url) == ["ready", "ready"])
        agents, workers = hosts.agents(), hosts.workers()
        asking = Asking(subject.url, seed=3, max_tokens=500)
        asking.began.wait(20)
        network.cut()
        subject.until_it_says("the agent of beta is gone: ")
        until(lambda: network.num_refused >= 2)
        network.mend()
        until(lambda: subject.output.count("has dialled again") == 2)
        asking.join()
        assert asking.text == spoken(3, 500)
        assert (hosts.agents(), hosts.workers()) == (agents, workers)
        assert "is lost" not in subject.output
        subject.process.send_signal(signal.SIGTERM)
        assert subject.process.wait() == 0
    until(lambda: not hosts.agents())


def test_a_head_that_stands_still_for_a_while_finds_its_workers_again(server: Any, spoken: Any, hosts: Hosts) -> None:
    with server(*hosts.settings) as subject:
        until(lambda: sum(map(len, hosts.workers().values())) == 2)
        agents, workers = hosts.agents(), hosts.workers()
        stand_still(subject, spoken)
        until(lambda: subject.output.count("has dialled again") == 2)
        assert (hosts.agents(), hosts.workers()) == (agents, workers)
