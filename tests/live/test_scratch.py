"""Temporary folders: those that are used stay, and those of processes that were killed go with the next one that is made."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from squall.live.scratch import scratch

HOLDER = """
import time
from squall.live.scratch import scratch

with scratch("held") as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_there_for_the_block_alone(temporary: Path) -> None:
    def use() -> None:
        with scratch("mine") as folder:
            assert folder.parent == temporary
            (folder / "file").write_text("x")
            raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        use()
    assert not list(temporary.iterdir())


def test_what_others_use_stays_and_what_the_dead_have_left_goes(temporary: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        used = Path(holder.stdout.readline().strip())
        (used / "worker.log").write_text("x")
        (temporary / "held-by-nobody").write_text("no folder")
        (temporary / "helden").mkdir()
        with scratch("held"):
            assert used.is_dir()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with scratch("held") as folder:
            assert sorted(path.name for path in temporary.iterdir()) == sorted([folder.name, "held-by-nobody", "helden"])
