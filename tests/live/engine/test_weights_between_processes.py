"""A model goes from one process through another into an engine here, and some are killed: its logits are those of the files."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from squall.core.actions import Chunk
from squall.errors import TransferFailed
from squall.live.engine import devices
from squall.live.engine.interface import Job, Sampling
from squall.live.engine.loader import load_from_peers
from squall.live.engine.tokenizer import ByteTokenizer
from squall.live.engine.torch_engine import TorchEngine
from squall.live.transport.endpoint import Endpoint
from squall.live.transport.fetch import Source
from tests.live.as_devices import HOMES
from tests.live.forked import Forked

PROMPT = tuple(range(40, 60))


@contextmanager
def process(name: str, folder: Path, gbps: float, kind: str, home: str) -> Iterator[Forked]:
    command = [sys.executable, "-m", "tests.live.engine.weights_peer", name, str(folder), str(gbps), kind, home]
    peer = Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert peer.stdin is not None
    assert peer.stdout is not None
    with peer.stdin, peer.stdout:
        try:
            yield peer
        finally:
            peer.kill()


def addresses(peer: Forked) -> list[str]:
    assert peer.stdout is not None
    return json.loads(peer.stdout.readline())  # type: ignore[no-any-return]


def scores(engine: TorchEngine) -> list[list[float]]:
    engine.add(Job(1, PROMPT, Sampling(max_tokens=1)))
    step = engine.prepare([Chunk(1, 0, len(PROMPT), 0, True)])
    return engine.scores(step, engine.run_layers(step, 0, engine.num_layers))


def pass_through(
    folder: Path, backend: int, gbps: float, kill: tuple[str, ...], after_s: float, home: str = "memory"
) -> TorchEngine:
    here = TorchEngine(folder, ByteTokenizer(), num_blocks=16, device="cuda" if home == "cuda" else "cpu", dtype="fp32")
    here.build()
    target = Endpoint("target", "t", patience_s=5)
    with process("source", folder, gbps, "disk", home) as source, process("middle", folder, gbps, "peer", home) as middle:
        first, second = addresses(source), addresses(middle)
        assert middle.stdin is not None
        middle.stdin.write(json.dumps([first[backend]]).encode() + b"\n")
        middle.stdin.flush()

        def die() -> None:
            time.sleep(after_s)
            for victim in (each for each, name in ((source, "source"), (middle, "middle")) if name in kill):
                victim.kill()

        killer = threading.Thread(target=die)
        killer.start()
        try:
            load_from_peers(here.weights, target, [Source((second[backend],)), Source((first[backend],), standby=True)])
        finally:
            killer.join()
            target.close()
    return here


@pytest.mark.parametrize("backend", [0, -1], ids=["shm", "tcp"])
def test_the_middle_one_is_killed_and_the_logits_are_those_of_the_files(tiny: Path, backend: int) -> None:
    ordinary = TorchEngine(tiny, ByteTokenizer(), num_blocks=16)
    ordinary.load()
    num_bytes = len(ordinary.weights.arena.region.memory)
    gbps = num_bytes * 8 / 1e9 / 0.3  # 0.3 s for all of it
    there = pass_through(tiny, backend, gbps, ("middle",), random.Random(backend).uniform(0.05, 0.25))
    assert bytes(there.weights.arena.region.memory) == bytes(ordinary.weights.arena.region.memory)
    assert scores(there) == scores(ordinary)


@pytest.mark.parametrize("home", ["lent", "unlent", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_middle_one_is_killed_and_what_came_from_device_to_device_is_right(
    tiny: Path, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    else:
        monkeypatch.setattr(devices, "device_of", HOMES[home])
    ordinary = TorchEngine(tiny, ByteTokenizer(), num_blocks=16, device="cuda" if home == "cuda" else "cpu", dtype="fp32")
    ordinary.load()
    num_bytes = len(ordinary.weights.arena.tensor)
    there = pass_through(tiny, 0, num_bytes * 8 / 1e9 / 0.3, ("middle",), 0.15, home)
    assert torch.equal(there.weights.arena.tensor, ordinary.weights.arena.tensor)
    assert any(there.weights.arena.region.memory) == (home == "unlent")  # by the host it went only where it had to
    assert scores(there) == scores(ordinary)


def test_with_everybody_killed_it_fails_and_says_so(tiny: Path) -> None:
    with pytest.raises(TransferFailed, match="of weights is held by no source that is left"):
        pass_through(tiny, -1, 0.001, ("source", "middle"), 0.1)


@pytest.mark.model
def test_smollm2_through_a_chain(smollm2: Path) -> None:
    ordinary = TorchEngine(smollm2, ByteTokenizer(), num_blocks=16)
    ordinary.load()
    there = pass_through(smollm2, 0, 100.0, (), 0)
    assert scores(there) == scores(ordinary)
