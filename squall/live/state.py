"""The folder of `launcher.state`: one head holds it at a time, and keeps one file there that only its user can read.

Knows not what is in the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
from msgspec import Struct

from squall.errors import ConfigError
from squall.files import replacing

T = TypeVar("T", bound=Struct)


class StateFolder:
    """Holds the folder until it is left.

    Args:
        folder: made where it is not there.
        file: the name of ours in it.
        say: tells a person what goes wrong later.

    Raises ConfigError: the folder cannot be used, or another head holds it.
    """

    def __init__(self, folder: Path, file: str, say: Callable[[str], None]) -> None:
        self._path = folder / file
        self._say = say
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"launcher.state = {str(folder)!r} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"launcher.state = {str(folder)!r} is in use by another head; end that one, or give this one a folder of its own"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Another head may hold the folder."""
        os.close(self._lock)

    def read(self, kind: type[T]) -> T | None:
        """None where there is nothing, or nothing that can be read, of which a person is told."""
        try:
            if not self._path.exists():
                return None
            if self._path.is_file():  # a pipe would be waited for
                return msgspec.json.decode(self._path.read_bytes(), type=kind)
            why = "it is no file"
        except OSError as error:
            why = error.strerror or str(error)
        except msgspec.DecodeError as error:
            why = str(error)
        self._say(f"{self._path} cannot be read ({why}): what an earlier head has left is not taken over, and ends by itself")
        return None

    def write(self, content: Struct) -> bool:
        """The whole file anew. Whether that was possible; where not, a person is told."""
        try:
            with replacing(self._path) as fresh, open(fresh, "wb", opener=_private) as file:
                file.write(msgspec.json.encode(content))
        except OSError as error:
            self._say(f"no other head will find all workers: cannot write {self._path}: {error.strerror}")
            return False
        return True

    def clear(self) -> None:
        """There is nothing to be found any more."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
