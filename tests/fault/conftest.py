"""Whole deployments in processes of their own, to be killed: emulated, and twice as fast as what they pretend to be."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
    """`with server("key=value") as server`: a whole deployment, once it has said what `ready` matches."""

    @contextmanager
    def bring_up(*settings: str, out: Path = tmp_path / "run", ready: str = "ready after") -> Iterator[Server]:
        arguments = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
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
