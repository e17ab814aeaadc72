"""Temporary folders of processes that may be killed: whoever makes the next one removes those of the dead. Knows no contents.

Whoever uses a folder holds a lock on it, which the system lets go of however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder whose name begins so, for as long as the block lasts; those that nobody uses any more are removed first."""
    for old in Path(tempfile.gettempdir()).glob(f"{name}-*"):
        if (held := _lock(old)) is not None:
            _remove(old, held)
    while (held := _lock(folder := Path(tempfile.mkdtemp(prefix=f"{name}-")))) is None:
        pass  # somebody took it for an old one
    try:
        yield folder
    finally:
        _remove(folder, held)


def _lock(folder: Path) -> int | None:
    """To be closed; None where the folder is somebody else's, in use or gone."""
    with contextlib.suppress(OSError):
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(held).st_uid == os.getuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.is_dir():
                    kept, held = held, -1
                    return kept
        finally:
            if held >= 0:
                os.close(held)
    return None


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
