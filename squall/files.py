"""Files and directories that come to be whole or not at all: written beside their place, then moved there.

Knows no content. Whatever goes wrong is an OSError, and nothing is left of it; callers say it in their own words.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

Content = bytes | Callable[[Path], None]
"""What a file holds, or how it is written to a path."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def write_and_sync(path: Path, content: bytes) -> None:
    """Returns when the bytes are on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def making(path: Path) -> Iterator[Path]:
    """A directory to fill, which is at `path` at the end. FileExistsError where there is one already, even an empty one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        yield beside
        if path.exists():  # a rename would silently replace an empty directory
            raise FileExistsError(0, "it exists already")
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_directory(path: Path, files: Mapping[str, Content]) -> None:
    """A new directory with these files; see `making`."""
    with making(path) as beside:
        for name, content in files.items():
            if callable(content):
                content(beside / name)
            else:
                write_and_sync(beside / name, content)
