"""One copy a machine: who makes it, who uses it, and when it goes."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from squall.errors import TransferFailed
from squall.live.transport.region import Region
from squall.live.transport.segment import HostCopies
from tests.live.disks import small_disk
from tests.live.transport.regions import fill, make_region, same

REVISION = "r1"


def unwanted() -> None:
    raise AssertionError("the copy was there")


def write(region: Region, fills: list[int] | None = None) -> None:
    fill(region)
    if fills is not None:
        fills.append(1)


def load(copies: HostCopies, revision: str = REVISION) -> tuple[Region, bool]:
    region = make_region()
    return region, copies.load(region, revision, partial(write, region))


def test_the_first_makes_it_and_the_others_load_it(tmp_path: Path) -> None:
    first, second = HostCopies(folder=tmp_path), HostCopies(folder=tmp_path)
    made, found = load(first)
    assert not found
    region = make_region()
    assert second.load(region, REVISION, unwanted)
    assert region.complete
    assert same(region, made)
    assert len(list(tmp_path.iterdir())) == 1
    assert not load(second, "r2")[1]
    assert len(list(tmp_path.iterdir())) == 2
    for copies in (first, second):
        copies.release()


def test_of_many_at_once_one_makes_it(tmp_path: Path) -> None:
    fills: list[int] = []
    everyone = [HostCopies(folder=tmp_path) for _ in range(6)]

    def run(index: int) -> None:
        region = make_region()
        everyone[index].load(region, REVISION, partial(write, region, fills))
        assert region.complete

    threads = [threading.Thread(target=run, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fills) == 1
    for copies in everyone:
        copies.release()


def test_it_goes_when_nobody_has_used_it_for_its_time(tmp_path: Path) -> None:
    copies = HostCopies(ttl_s=100, folder=tmp_path)
    load(copies)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, 0))
    assert copies.sweep() == []  # it is in use, and that is noted
    assert path.stat().st_mtime > 1e9
    copies.release()
    assert copies.sweep() == []  # its time has only begun
    os.utime(path, (0, 0))
    assert copies.sweep() == [path]
    assert list(tmp_path.iterdir()) == []
    assert not load(copies)[1]
    copies.release()


@pytest.mark.parametrize("moment", ["making", "using"])
def test_who_is_killed_leaves_nothing_for_ever(tmp_path: Path, moment: str) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r})
from pathlib import Path
from squall.live.transport.segment import HostCopies
from tests.live.transport.regions import fill, make_region
region = make_region()
def make():
    if {moment == "making"}:
        print("now", flush=True)
        time.sleep(60)
    fill(region)
HostCopies(ttl_s=0, folder=Path({str(tmp_path)!r})).load(region, {REVISION!r}, make)
print("now", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        copies = HostCopies(folder=tmp_path)
        assert copies.sweep() == []  # not under its hands
        process.send_signal(signal.SIGKILL)
    if moment == "making":
        region, found = load(HostCopies(folder=tmp_path))  # the next one makes it anew
        assert region.complete
        assert not found
    else:
        assert len(copies.sweep()) == 1
        assert list(tmp_path.iterdir()) == []


def test_a_damaged_copy_is_not_loaded_and_not_kept(tmp_path: Path) -> None:
    copies = HostCopies(folder=tmp_path)
    load(copies)
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.seek(64 * 1024 + 70_000)
        file.write(b"\xff\0\xff")
    region, found = load(HostCopies(folder=tmp_path))
    assert not found
    assert region.complete
    assert list(tmp_path.iterdir()) == []
    copies.release()


def test_a_full_memory_is_said_leaves_no_copy_and_is_tried_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", 256 * 1024) as folder:
        copies = HostCopies(folder=folder)
        for _ in range(2):
            with pytest.raises(TransferFailed, match=r"no host copy \(No space left on device\): .* GB are needed, .* GB free"):
                load(copies)
        assert [path.stat().st_size for path in folder.iterdir()] == [0]
        assert len(copies.sweep()) == 1
        copies.release()


def test_without_room_it_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransferFailed, match=r"no host copy \(No space left on device\): .* GB are needed, .* GB free"):
        load(HostCopies(folder=tmp_path))
    monkeypatch.undo()
    assert not load(HostCopies(folder=tmp_path))[1]  # an empty file is no copy


@pytest.mark.parametrize("stage", ["begins", "fills", "copies"])
def test_a_load_that_goes_on_while_its_process_ends_leaves_nothing(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sweeps then, sweeps once."""
    copies, region = HostCopies(folder=tmp_path), make_region()
    reached, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        reached.set()
        assert go_on.wait(10)

    def make() -> None:
        if stage == "fills":
            pause()
        fill(region)

    def accept(index: int) -> bool:
        pause()
        return Region.accept(region, index)

    if stage == "copies":
        made = HostCopies(folder=tmp_path)
        load(made)
        made.release()
        monkeypatch.setattr(region, "accept", accept)
    failed: list[TransferFailed] = []

    def run() -> None:
        try:
            copies.load(region, REVISION, make)
        except TransferFailed as error:
            failed.append(error)

    loading = threading.Thread(target=run)
    if stage == "begins":
        copies.close()
        go_on.set()
        loading.start()
        loading.join()
        assert len(failed) == 1
    else:
        loading.start()
        assert reached.wait(10)
        copies.close()
    HostCopies(folder=tmp_path).sweep(unused=True)
    assert list(tmp_path.iterdir()) == []
    go_on.set()
    loading.join()
    assert list(tmp_path.iterdir()) == []
    assert region.complete == (stage != "begins")
