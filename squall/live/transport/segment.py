"""One copy of a model in a machine's memory, which all its processes can load from. Knows files and locks, no peers.

A copy is a POSIX shared-memory file. Whoever uses it holds a shared lock on it, which the system takes back however a process
ends; whoever makes it, an exclusive one. So a copy that nobody holds is known, also after kill -9, and `sweep` removes it
once it has gone unused for its time to live, or was never finished.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

from squall.errors import TransferFailed
from squall.live.transport.memory import read_into, write_from
from squall.live.transport.region import Region

FOLDER = Path("/dev/shm")
"""Where Linux keeps POSIX shared memory."""

_HEADER = 64 * 1024
_POLL_S = 0.02


class _Header(Struct, frozen=True):
    """At the beginning of a finished copy; before that there are zeros."""

    fingerprint: str
    num_bytes: int
    sums: dict[str, int]
    ttl_s: float


class HostCopies:
    """The copies of one user on this machine.

    Args:
        ttl_s: how long a copy is kept that nobody uses.
        patience_s: how long to wait for somebody who is making the copy that we want.
        folder: where they are.
    """

    def __init__(self, ttl_s: float = 600.0, patience_s: float = 600.0, folder: Path = FOLDER) -> None:
        self._ttl_s = ttl_s
        self._patience_s = patience_s
        self._folder = folder
        self._held: dict[Path, int] = {}
        self._loading: dict[int, Path] = {}  # by descriptor
        self._closed = False
        self._lock = threading.Lock()

    def load(self, region: Region, revision: str, fill: Callable[[], None], threads: int = 2) -> bool:
        """Fill `region` from its copy; where there is none, call `fill` and make it. The copy is held until `release`.

        Args:
            revision: of the weights; with the region's fingerprint it names the copy.
            fill: fills and publishes all sections of the region.
            threads: how many copy.

        Returns:
            Whether the copy was there.

        Raises:
            TransferFailed: no room for it, nobody finished it in time, or it is not wanted any more. What `fill` raises.
        """
        path = self._path(region, revision)
        fd, header = self._open(path, region)
        try:
            self._begin(path, fd)
            if header is not None:
                region.expect(header.sums)
                if _copy_out(fd, region, threads):
                    self._hold(path, fd)
                    return True
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()  # it has been damaged: nobody may load from it again
            fill()
            if header is None:
                self._write(fd, region)
                self._hold(path, fd)
                return False
        except BaseException:
            self._drop(fd)
            raise
        self._drop(fd)
        return False

    def close(self) -> None:
        """As `release`, and for good: a load that goes on holds nothing either, and what it has not finished is removed."""
        with self._lock:
            self._closed = True
            for fd, path in self._loading.items():
                _let_go(path, fd)
        self.release()

    def release(self) -> None:
        """Use none of them any more; their time to live begins."""
        for fd in self._held.values():
            os.utime(fd)
            os.close(fd)
        self._held.clear()

    def sweep(self, *, unused: bool = False) -> list[Path]:
        """Remove what has gone unused for too long or was never finished. Returns what it removed.

        Call it now and then: it also notes which copies are in use, from when on their time to live will count. With `unused`
        nobody is expected to come back: whatever is not in use goes.
        """
        removed = []
        for path in sorted(self._folder.glob(f"{_prefix()}*")):
            with contextlib.suppress(OSError), _opened(path) as fd:
                if not _lock(fd, fcntl.LOCK_EX):
                    os.utime(fd)
                    continue
                header = _read_header(fd)
                if unused or header is None or time.time() - os.fstat(fd).st_mtime > header.ttl_s:
                    path.unlink()
                    removed.append(path)
        return removed

    # -- one copy

    def _path(self, region: Region, revision: str) -> Path:
        name = xxhash.xxh3_128_hexdigest(f"{region.fingerprint}\0{revision}\0{region.sections}".encode())
        return self._folder / f"{_prefix()}{name}"

    def _open(self, path: Path, region: Region) -> tuple[int, _Header | None]:
        """The finished copy under a shared lock, or an empty file under an exclusive one."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
                    if not _lock(fd, kind) or not _same(path, fd):
                        break
                    header = _read_header(fd)
                    if header is not None or kind == fcntl.LOCK_EX:
                        kept, fd = fd, -1
                        if header is not None:
                            fcntl.flock(kept, fcntl.LOCK_SH)
                        return kept, header
            finally:
                if fd >= 0:
                    os.close(fd)
            time.sleep(_POLL_S)
        raise TransferFailed(
            f"{path}: another process has been making this copy of {region.fingerprint} for {self._patience_s:g} s"
        )

    def _write(self, fd: int, region: Region) -> None:
        header = _Header(region.fingerprint, len(region.memory), region.sums, self._ttl_s)
        body = msgspec.msgpack.encode(header)
        try:
            os.posix_fallocate(fd, 0, _HEADER + len(region.memory))  # a full memory is an error here, not a signal later
            region.show([(0, len(region.memory))])
            write_from(fd, [(_HEADER, len(region.memory))], [region.memory])
        except OSError as error:
            os.ftruncate(fd, 0)
            free = os.statvfs(self._folder)
            room = f"{len(region.memory) / 1e9:.2f} GB are needed, {free.f_bavail * free.f_frsize / 1e9:.2f} GB free"
            raise TransferFailed(
                f"{self._folder}: no host copy ({error.strerror}): {room}; enlarge it, or load from disk"
            ) from None
        os.pwrite(fd, len(body).to_bytes(8, "little") + body, 0)  # last: before it, there is no copy
        fcntl.flock(fd, fcntl.LOCK_SH)

    def _begin(self, path: Path, fd: int) -> None:
        with self._lock:
            if not self._closed:
                self._loading[fd] = path
                return
        _let_go(path, fd)
        raise TransferFailed(f"{path} is not wanted any more")

    def _drop(self, fd: int) -> None:
        with self._lock:
            self._loading.pop(fd, None)
            os.close(fd)

    def _hold(self, path: Path, fd: int) -> None:
        with self._lock:
            os.utime(fd)
            del self._loading[fd]
            for old in (self._held.pop(path, None), fd if self._closed else None):
                if old is not None:
                    os.close(old)
            if not self._closed:
                self._held[path] = fd


def _prefix() -> str:
    return f"squall-{os.getuid()}-"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _let_go(path: Path, fd: int) -> None:
    """Its lock; and an unfinished copy, which only we can have, before anybody else gets it."""
    if _read_header(fd) is None and _same(path, fd):
        path.unlink()
    fcntl.flock(fd, fcntl.LOCK_UN)


def _same(path: Path, fd: int) -> bool:
    """It was not removed while we waited for its lock."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _read_header(fd: int) -> _Header | None:
    raw = os.pread(fd, _HEADER, 0)
    length = int.from_bytes(raw[:8], "little")
    if not 0 < length <= len(raw) - 8:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        header = msgspec.msgpack.decode(raw[8 : 8 + length], type=_Header)
        if os.fstat(fd).st_size == _HEADER + header.num_bytes:
            return header
    return None


def _copy_out(fd: int, region: Region, threads: int) -> bool:
    """Whether every section matched its checksum."""

    def copy(index: int) -> bool:
        section = region.sections[index]
        if region.verified(index):
            return True
        segment = (section.offset, section.num_bytes)
        read_into(fd, [(_HEADER + section.offset, section.num_bytes)], [region.view(segment)])
        region.settle([segment])
        return region.accept(index)

    with ThreadPoolExecutor(threads) as pool:
        return all(list(pool.map(copy, range(len(region.sections)))))
