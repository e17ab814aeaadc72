"""The demo leaves two runs of the same work, and no process, however it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from squall import config as configuration
from squall.config import Slo
from squall.core.metrics import Gaps, RunRecord
from squall.core.types import SECOND
from squall.errors import ModelError, SquallError
from squall.live.models import find
from squall.report.compare import warnings
from squall.report.run import read_run
from squall.report.summary import Summary, summarise
from squall.twin.demo import demo, kept_unless_empty, other_work, serving


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    """A fleet that is up within a second and needs no model on disk."""
    path = tmp_path / "emulated.toml"
    config = configuration.load(None, ["model.name=llama-3-8b", "cluster.gpu=h100-sxm", "serve.engine=emulated", "serve.port=0"])
    path.write_text(configuration.dumps(config))
    return path


def listens(address: tuple[str, int]) -> bool:
    with socket.socket() as client:
        return client.connect_ex(address) == 0


def eventually(happens: Callable[[], bool]) -> bool:
    for _ in range(300):
        if happens():
            return True
        time.sleep(0.1)
    return False


def of_tbt(seconds: float) -> Summary:
    gaps = Gaps()
    gaps.add(round(seconds * SECOND), 10)
    return summarise(RunRecord("real", [], gaps, SECOND), Slo(), None)


def test_whoever_breaks_off_leaves_no_empty_directory_and_loses_no_full_one(tmp_path: Path) -> None:
    for name, files in (("empty", []), ("full", ["profile.json"])):
        place = tmp_path / name
        place.mkdir()
        for file in files:
            (place / file).touch()
        with pytest.raises(KeyboardInterrupt), kept_unless_empty(place):
            raise KeyboardInterrupt
        assert place.exists() == bool(files)


def test_a_machine_that_had_other_work_is_told_of() -> None:
    assert other_work(of_tbt(0.02), of_tbt(0.024)) is None
    slow = "this machine was 12.0 times as slow while it was {}: it has other work to do; try again when it has none"
    assert other_work(of_tbt(0.02), of_tbt(0.24)) == slow.format("profiled")
    assert other_work(of_tbt(0.24), of_tbt(0.02)) == slow.format("served")


def test_what_is_served_ends_with_the_block(emulated: Path, tmp_path: Path) -> None:
    with serving(emulated, tmp_path / "serve") as address:
        assert listens(address)
    assert not listens(address)
    assert (tmp_path / "serve" / "events.jsonl.zst").is_file()


def test_what_is_served_ends_when_the_block_fails(emulated: Path, tmp_path: Path) -> None:
    addresses: list[tuple[str, int]] = []

    def fail() -> None:
        with serving(emulated, tmp_path / "serve") as address:
            addresses.append(address)
            assert listens(address)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert eventually(lambda: not listens(addresses[0]))


def test_what_is_served_ends_when_its_parent_is_killed(emulated: Path, tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from squall.twin.demo import serving
with serving(Path({str(emulated)!r}), Path({str(tmp_path / "serve")!r})) as address:
    print(*address, flush=True)
    time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        host, port = parent.stdout.readline().split()
        assert listens((host, int(port)))
        os.kill(parent.pid, signal.SIGKILL)
    assert eventually(lambda: not listens((host, int(port))))


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('[model]\nname = "no-such-model"\n')
    with (
        pytest.raises(SquallError, match=r"the server did not come up; it last said \"squall: error: .*no-such-model"),
        serving(path, tmp_path / "serve"),
    ):
        pytest.fail("it came up")


@pytest.mark.model
def test_the_demo_measures_serves_and_simulates_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find("smollm2")
    except ModelError:
        pytest.skip("the embedded model is not on disk: squall model pull smollm2")
    lines: list[str] = []
    demo(tmp_path / "demo", 0, lines.append, profile_s=2.0, load_s=8.0)  # somebody comes, however slow we are
    live, simulated = read_run(tmp_path / "demo" / "live"), read_run(tmp_path / "demo" / "simulated")
    assert (live.summary.world, simulated.summary.world) == ("real", "simulated")
    assert live.summary.completed == live.summary.requests == simulated.summary.completed > 0
    assert live.summary.num_output_tokens == simulated.summary.num_output_tokens
    assert warnings([live, simulated]) == []
    assert simulated.summary.latency_source.startswith("profile (")
    table = capsys.readouterr().out
    assert "measured" in table
    assert "TBT p50 (s)" in table
    assert any(line.startswith("wrote ") for line in lines)
    assert (tmp_path / "demo" / "profile.json").is_file()
