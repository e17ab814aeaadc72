"""What a head leaves behind: written, found again, and never mistaken for somebody else's."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from squall.errors import ConfigError
from squall.live.estate import FILE, Estate


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def estate(folder: Path, fleet: str = "a", said: list[str] | None = None) -> Estate:
    return Estate(folder, fleet, 5.0, (said if said is not None else []).append)


def died(folder: Path, process: subprocess.Popen[bytes]) -> Estate:
    """A head that noted the process and died: it holds the folder no more, and has cleared nothing up."""
    held = estate(folder)
    held.note({process.pid: ("127.0.0.1:1", (0, 1))})
    os.close(held._lock)
    return held


def test_the_next_head_finds_token_and_workers(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    first = died(tmp_path / "state", sleeper)
    with estate(tmp_path / "state") as second:
        assert second.token == first.token
        assert [(one.pid, one.left.address, one.left.replicas) for one in second.survivors] == [
            (sleeper.pid, "127.0.0.1:1", (0, 1))
        ]
        assert second.survivors[0].poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            second.survivors[0].wait(0.01)
        second.survivors[0].terminate()
        assert second.survivors[0].wait(10) == 0
        assert second.survivors[0].poll() == 0


def test_nobody_else_can_read_the_token(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    died(tmp_path / "state", sleeper)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600


def test_another_process_with_the_same_number_is_nobody(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    died(tmp_path, sleeper)
    tree = msgspec.json.decode((tmp_path / FILE).read_bytes())
    tree["workers"][0]["started"] += 1
    (tmp_path / FILE).write_bytes(msgspec.json.encode(tree))
    with estate(tmp_path) as second:
        assert second.survivors == []
    assert sleeper.poll() is None


def test_what_is_from_before_the_machine_was_started_anew_is_as_nothing(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    died(tmp_path, sleeper)
    tree = msgspec.json.decode((tmp_path / FILE).read_bytes())
    (tmp_path / FILE).write_bytes(msgspec.json.encode(tree | {"boot": "another"}))
    with estate(tmp_path, "b") as second:
        assert second.survivors == []
    assert sleeper.poll() is None


def test_workers_of_another_fleet_are_asked_to_end_and_their_token_is_not_used(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    first = died(tmp_path, sleeper)
    with estate(tmp_path, "b") as second:
        assert second.survivors == []
        assert second.token != first.token
    assert sleeper.wait(10) != 0


@pytest.mark.parametrize("content", [b"", b"{", b'{"fleet": 3}', b"\xff"])
def test_a_file_that_cannot_be_read_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with estate(tmp_path) as held:
        assert held.survivors == []


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**70])
def test_numbers_that_no_process_has_are_nobody(tmp_path: Path, sleeper: subprocess.Popen[bytes], pid: int) -> None:
    died(tmp_path, sleeper)
    tree = msgspec.json.decode((tmp_path / FILE).read_bytes())
    text = msgspec.json.encode(tree).replace(f'"pid":{sleeper.pid}'.encode(), f'"pid":{pid}'.encode())
    (tmp_path / FILE).write_bytes(text)
    with estate(tmp_path) as held:
        assert held.survivors == []


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with estate(tmp_path) as held:
        assert held.survivors == []


def test_a_head_that_took_nobody_over_leaves_the_file_to_the_next(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    died(tmp_path, sleeper)
    with estate(tmp_path):
        pass
    with estate(tmp_path) as third:
        assert len(third.survivors) == 1


def test_one_head_at_a_time(tmp_path: Path) -> None:
    with estate(tmp_path), pytest.raises(ConfigError, match=r"launcher\.state = .* is in use by another head"):
        estate(tmp_path)
    with estate(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"launcher\.state = .* cannot be used: Not a directory"):
        estate(tmp_path / "file" / "state")


def test_what_cannot_be_written_is_said_and_stops_nobody(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    with estate(tmp_path, said=said) as held:
        (tmp_path / FILE).mkdir()
        assert not held.note({sleeper.pid: ("127.0.0.1:1", (0,))})
        assert len(said) == 1
        assert said[0].startswith(f"no other head will find all workers: cannot write {tmp_path / FILE}")
        (tmp_path / FILE).rmdir()


async def test_whoever_was_taken_over_is_heard_when_it_ends(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    died(tmp_path, sleeper)
    with estate(tmp_path) as second:
        over = asyncio.Event()
        second.survivors[0].when_over(over.set)
        await asyncio.sleep(0.05)
        assert not over.is_set()
        second.survivors[0].terminate()
        await asyncio.wait_for(over.wait(), 10)
