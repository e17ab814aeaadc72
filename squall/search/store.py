"""Results that are never worked out twice: a file of JSON lines, each a key and what is known.

A key is a digest of all that a result depends on: the configuration, the content of the workload, what was asked, and the code.
Lines are only ever added, each at once, so an interrupted search leaves whole lines but for, at worst, the last, which is
ignored. Several searches may share a file: each adds whole lines at its end, and reads those of the others when it looks for
something that it does not know. Knows no strategy.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib import resources
from io import FileIO
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

import squall
from squall.config import POLICY_TABLES
from squall.errors import SquallError
from squall.search.result import Job, Result
from squall.search.setting import Setting
from squall.search.spec import Search

LARGE = 1 << 22

CODE = ("core", "policies", "perf", "workload", "sim", "search")
"""The packages that results depend on."""

_ASKED = ("objective", "criterion", "tolerance", "latency_of", "uncertainty")
"""What of the question changes a single result; the others only choose among results, or are part of the setting."""


class Line(Struct, frozen=True):
    """One line of the file. `need` as in `Job`: a result that was only to beat a score says little about a higher one."""

    key: str
    need: float | None
    result: Result


def code_version() -> str:
    """A digest of the code that makes results."""
    content = sha256(squall.__version__.encode())
    for package in CODE:
        folder = Path(str(resources.files("squall"))) / package
        for file in sorted(folder.rglob("*.py")):
            content.update(file.relative_to(folder).as_posix().encode())
            content.update(file.read_bytes())
    return content.hexdigest()[:16]


def key_of(search: Search, job: Job, setting: Setting, code: str) -> str:
    """The key of what there is to know about a setting."""
    config = setting.config
    meant = {
        name: msgspec.to_builtins(value)
        for name, value in asdict(config).items()
        if name not in ("run", "serve", "workload")
    }  # fmt: skip
    asked = [getattr(search, name) for name in _ASKED]
    limits = [(limit.metric, limit.quantile, limit.limit) for limit in setting.limits]
    beside = [_policy_source(getattr(config, name)) for name in POLICY_TABLES] + [_file_digest(config.latency.path)]
    run_with = (repr(setting.model), asdict(setting.gpu), setting.usd_per_gpu_hour, setting.sample.digest, beside)
    content = (code, meant, run_with, setting.warm_up, job.factor, job.thorough, asked, limits)
    return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:32]


def _policy_source(policy: object) -> str:
    """The code of a policy of the user's own."""
    module = sys.modules.get(type(policy).__module__)
    return "" if type(policy).__module__.startswith("squall.") else _file_digest(getattr(module, "__file__", None))


def _file_digest(path: str | None) -> str:
    """Of its content; of a large file, or a folder of tables, of names, sizes and times."""
    if path is None:
        return ""
    place = Path(path)
    with suppress(OSError):
        if place.is_file() and place.stat().st_size <= LARGE:
            return sha256(place.read_bytes()).hexdigest()
        files = [file for file in (place, *sorted(place.rglob("*"))) if file.is_file()]
        signs = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return sha256(repr(signs).encode()).hexdigest()
    return ""


class Store:
    """What is known so far.

    Args:
        path: the file; None keeps nothing.

    Attributes:
        num_known: results that the file had.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._known: dict[str, Line] = {}
        self._read = 0  # bytes of the file, up to the end of a line
        if path is not None and path.exists():
            if not path.is_file():
                raise SquallError(f"{path} is no file that results can be kept in; give another one with --store")
            self._catch_up()
        self.num_known = len(self._known)

    def find(self, key: str, job: Job) -> Result | None:
        """What answers the job, renamed to its number and choice; None where it must be worked out."""
        found = self._answer(key, job)
        if found is None and self._catch_up():
            found = self._answer(key, job)
        return found

    def _answer(self, key: str, job: Job) -> Result | None:
        line = self._known.get(key)
        if line is None:
            return None
        result = line.result
        if result.status == "outbid" and not _settles(result, job):
            return None
        return replace(result, number=job.number, choice=job.choice)

    def _catch_up(self) -> bool:
        """Take in what the file has got since it was read; whether that is anything."""
        if self._path is None:
            return False
        try:
            if not self._path.exists() or self._path.stat().st_size <= self._read:
                return False
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except OSError as error:
            raise SquallError(f"{self._path}: cannot be read: {error.strerror or error}") from None
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in _lines(whole):
            self._known[line.key] = line
        return bool(whole)

    def add(self, key: str, job: Job, result: Result) -> None:
        """Keep a result. Those that broke are tried again next time.

        Raises:
            SquallError: the disk is full or not writable; what was kept so far stays.
        """
        if result.status == "failed":
            return
        line = Line(key, job.need, result)
        self._known[key] = line
        if self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)  # what cannot be written is known at once
                if self._file.tell() and not _ends_whole(self._path):
                    self._file.write(b"\n")
            text = msgspec.json.encode(line) + b"\n"
            if self._file.write(text) < len(text):  # all at once, at the end: lines of two searches do not mix
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise SquallError(
                f"{self._path}: {error.strerror or error}; {len(self._known) - 1} results are kept, "
                "run the same command again to go on"
            ) from None

    def close(self) -> None:
        """Nothing is kept back until then: this only lets go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _settles(result: Result, job: Job) -> bool:
    """Whether it is known well enough that the job's need cannot be met."""
    return job.need is not None and result.score_at_most is not None and result.score_at_most <= job.need


def _lines(content: bytes) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    for text in content.split(b"\n"):
        try:
            yield decoder.decode(text)
        except msgspec.DecodeError:  # of a search that was cut off in the middle, or of another version: worked out again
            continue


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
