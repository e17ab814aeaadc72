"""Whole deployments in processes of their own, to be killed: emulated, and twice as fast as what they pretend to be."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from squall import config as configuration
from squall.config import Config
from squall.live.engine.emulated import pseudo_token
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.head import Head
from squall.live.launch import LocalLauncher
from squall.live.served import served_model
from tests.processes import agents, children

SETTINGS = (
    "serve.engine=emulated",
    "model.name=llama-3.1-8b",
    "cluster.gpu=h100-sxm",
    "fleet.replicas=2",
    "serve.time_dilation=0.5",
    "serve.port=0",
)


@pytest.fixture
def config() -> Config:
    return configuration.load(None, SETTINGS)


@pytest.fixture
def spoken() -> Callable[[int, int], str]:
    """What a request with this seed says, in so many tokens."""
    tokenizer = ByteTokenizer()
    return lambda seed, count: tokenizer.decode([pseudo_token(tokenizer, seed, position) for position in range(count)])


@pytest.fixture
def fleet(config: Config, tmp_path: Path) -> Callable[..., Any]:
    """`async with fleet() as (head, launcher)`: two replicas in a process each, both ready."""

    @asynccontextmanager
    async def bring_up(silence_s: float = 10.0) -> AsyncIterator[tuple[Head, LocalLauncher]]:
        path = tmp_path / "config.toml"
        path.write_text(configuration.dumps(config), encoding="utf-8")
        launcher = LocalLauncher(path, tmp_path, [(0,), (1,)])
        model = served_model(config)
        head = Head(config, model.names, model.tokenizer(), model.max_model_len, launcher, silence_s=silence_s)
        head.start()
        try:
            while not head.stats().replicas or any(replica.phase != "ready" for replica in head.stats().replicas):
                await asyncio.sleep(0.01)
            yield head, launcher
        finally:
            await head.close()
            launcher.kill_all()

    return bring_up


SSH = """#!/bin/sh
while [ "$1" = "-o" ]; do shift 2; done
echo "$1" >> "{log}"
shift
exec setsid --wait /bin/sh -c "$*"
"""

HEAD = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class Hosts:
    """alpha and beta, and what dials a head from there."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.state = folder / "state"
        self.dialled = folder / "dialled"
        self.settings = [
            "launcher.kind=hosts",
            f"launcher.python={sys.executable}",
            'launcher.hosts=[{hostname="alpha", address="127.0.0.1"}, {hostname="beta", address="127.0.0.2"}]',
            f"launcher.listen={HEAD}:{port}",
            f"launcher.state={self.state}",
        ]

    @property
    def of_two_devices(self) -> list[str]:
        return [setting.replace('"}', '", devices=[0, 1]}') for setting in self.settings]

    def agents(self) -> dict[str, int]:
        """Those that run, by their hosts."""
        return agents(f":{self.port}")

    def workers(self) -> dict[str, list[int]]:
        return {host: sorted(children(pid)) for host, pid in self.agents().items()}

    def all(self) -> list[int]:
        return [*self.agents().values(), *(pid for pids in self.workers().values() for pid in pids)]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    subject = Hosts(tmp_path, free_port())
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(log=subject.dialled))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    yield subject
    for pid in subject.agents().values():
        os.kill(pid, signal.SIGKILL)


class Server:
    """A `squall serve`."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, output: Path) -> None:
        self.process = process
        self.directory = directory
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until_it_says(self, pattern: str) -> str:
        """Waits for a line; what its first group matched."""
        while (match := re.search(pattern, self.output)) is None:
            assert self.process.poll() is None, self.output
            time.sleep(0.02)
        return match[1] if match.re.groups else match[0]

    @property
    def url(self) -> str:
        return self.until_it_says(r"listening on (http://\S+);")


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., Any]:
    """`with server("key=value") as server`: a whole deployment, once it has said what `ready` matches; or that of `files`."""

    @contextmanager
    def bring_up(
        *settings: str, files: Sequence[Path] = (), out: Path = tmp_path / "run", ready: str = "ready after"
    ) -> Iterator[Server]:
        given = settings if files else (*SETTINGS, *settings)
        arguments = [*map(str, files), *(part for setting in given for part in ("--set", setting))]
        command = [sys.executable, "-m", "squall", "serve", *arguments, "--out", str(out)]
        output = tmp_path / "output.txt"
        with output.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
            subject = Server(process, out, output)
            try:
                subject.until_it_says(ready)
                yield subject
            finally:
                process.kill()

    return bring_up
