"""File systems that are soon full (for which one must be root), and bits that turn in other processes' memory."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """`folder` holds no more than so much."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a full disk needs root and mount")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a full disk needs mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def memories(pid: int) -> list[int]:
    """Sizes of the anonymous shared memories of another process."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [link.stat().st_size for link in links if "memfd:squall" in os.readlink(link)]


def spoil(pid: int, num_bytes: int, offset: int) -> None:
    """Turn a bit of the anonymous shared memory, of that size, of another process."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:squall" in os.readlink(link) and link.stat().st_size == num_bytes:
            with link.open("r+b", buffering=0) as memory:
                before = os.pread(memory.fileno(), 1, offset)
                os.pwrite(memory.fileno(), bytes([before[0] ^ 1]), offset)
            return
    raise AssertionError(f"process {pid} has no such memory")
