"""Results that are never worked out twice: a file of JSON lines, each a key and what is known.

A key is a digest of all that a result depends on: the configuration, the content of the workload, what was asked, and the code.
Lines are only ever added, each at once, so an interrupted search leaves whole lines but for, at worst, the last, which is
ignored. Knows no strategy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from importlib import resources
from io import BufferedWriter
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

import squall
from squall.errors import SquallError
from squall.search.result import Job, Result
from squall.search.setting import Setting
from squall.search.spec import Search

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
    content = (
        meant, setting.sample.digest, job.warm_up, job.factor, asked, limits, setting.usd_per_gpu_hour, asdict(setting.gpu), code,
    )  # fmt: skip
    return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:32]


class Store:
    """What is known so far.

    Args:
        path: the file; None keeps nothing.

    Attributes:
        num_known: results that the file had.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BufferedWriter | None = None
        self._known: dict[str, Line] = {}
        if path is not None and path.exists():
            for line in _lines(path):
                self._known[line.key] = line
        self.num_known = len(self._known)

    def find(self, key: str, job: Job) -> Result | None:
        """What answers the job, renamed to its number and choice; None where it must be worked out."""
        line = self._known.get(key)
        if line is None:
            return None
        result = line.result
        if result.status == "outbid" and not _settles(result, job):
            return None
        return replace(result, number=job.number, choice=job.choice)

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
                self._file = self._path.open("ab")
                if self._file.tell() and not _ends_whole(self._path):
                    self._file.write(b"\n")
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
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


def _lines(path: Path) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SquallError(f"{path}: cannot be read: {error.strerror or error}") from None
    for text in content.split(b"\n"):
        try:
            yield decoder.decode(text)
        except msgspec.DecodeError:  # the end of a search that was cut off, or of another version: worked out again
            continue


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
