"""Workers and ranks that are forked from a process which has imported torch, as each of hundreds would do for two seconds of CPU.

    python -m tests.live.forked LISTENER    the origin, which all are forked from; it ends with its standard input

Each is a process like any other, with pipes of its own, and runs what `python -m MODULE` would. That they can be started as they
are outside of tests is seen in tests/fault. Knows nothing of what they do.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn
from unittest.mock import patch

from squall.live import launch
from squall.live.engine import team

IMPORTED = ("squall.live.worker", "squall.live.engine.torch_engine", "squall.live.engine.parallel", "squall.live.engine.rank")
_ROOM = 1 << 20
_FREE = 512
"""No descriptor of ours has such a number, nor one above."""


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """What launchers and teams of this process start is forked from the origin."""
    with patch.object(launch, "subprocess", _instead(Forked)), patch.object(team, "subprocess", _instead(Forked)):
        yield


def _instead(popen: type) -> SimpleNamespace:
    """The module `subprocess`, with another way to start a process."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def _readable(fd: int, timeout: float | None) -> bool:
    """Whether there is something to read by then. `select.select` would refuse numbers from 1024 on."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else 1000 * timeout))


class Forked:
    """As much of `subprocess.Popen` as launchers and teams ask. Not our child: the origin waits for it, and tells us."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (), env: Mapping[str, str] = os.environ, start_new_session: bool = False,
    ) -> None:  # fmt: skip
        self.args = command
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        if stdin == subprocess.PIPE:
            its_input, ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb")
        else:
            its_input = os.open(os.devnull, os.O_RDONLY)
        if stdout == subprocess.PIPE:
            ours, its_output = os.pipe()
            self.stdout = os.fdopen(ours, "rb")
        else:
            its_output = os.dup(stdout)
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(_origin())
        asked = {"words": command[2:], "places": [0, 1, 2, *pass_fds], "env": dict(env), "session": start_new_session}
        its = [its_input, its_output, 2 if stderr is None else stderr.fileno(), *pass_fds]
        socket.send_fds(self._link, [json.dumps(asked).encode()], its)
        os.close(its_input)
        os.close(its_output)
        self.pid = int(self._link.recv(_ROOM))

    def wait(self, timeout: float | None = None) -> int:
        if not _readable(self._link.fileno(), timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self._link.recv(_ROOM, socket.MSG_PEEK))  # and leave it there for whoever asks next, in any thread

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    terminate = functools.partialmethod(send_signal, signal.SIGTERM)
    kill = functools.partialmethod(send_signal, signal.SIGKILL)

    def __del__(self) -> None:
        self._link.close()


@functools.cache
def _origin() -> bytes:
    """The address at which this process's own listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # a name that the system chooses
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.live.forked", str(listener.fileno())], cwd=Path(__file__).resolve().parents[2],
            pass_fds=[listener.fileno()], stdin=subprocess.PIPE, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        atexit.register(process.communicate)
        return bytes(listener.getsockname())


# -- the origin: it has one thread, so that it may fork


def main(listener: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in IMPORTED:
        importlib.import_module(module)
    patch.object(team, "subprocess", _instead(Child)).start()
    gc.freeze()  # a collection would copy the memory that all share
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    return
                if key.fileobj is listener:
                    link = listener.accept()[0]
                    asked, fds, _, _ = socket.recv_fds(link, _ROOM, 8)
                    if (pid := os.fork()) == 0:
                        _run(fds, link, **json.loads(asked))
                    for fd in fds:
                        os.close(fd)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, link))
                else:
                    pid, link = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with link, contextlib.suppress(OSError):  # nobody listens any more
                        link.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(
    fds: Sequence[int], link: socket.socket | None, *, words: Sequence[str], places: Sequence[int], env: Mapping[str, str],
    session: bool,
) -> NoReturn:  # fmt: skip
    """`python -m WORDS` with these descriptors in these places and no others. Says its number when it leads its session."""
    code: Any = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if session:
            os.setsid()
        if link is not None:
            link.send(b"%d" % os.getpid())
        aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE) for fd in fds]
        os.closerange(0, _FREE)
        for fd, place in zip(aside, places, strict=True):
            os.dup2(fd, place)
            os.close(fd)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)


class Child:
    """As much of `subprocess.Popen` as the team of a worker asks, which starts its first rank before it has other threads."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, stdout: int) -> None:
        self.args = command
        self._code: int | None = None
        self._lock = threading.Lock()
        if (pid := os.fork()) == 0:
            its = [os.open(os.devnull, os.O_RDONLY), stdout, 2, *pass_fds]
            _run(its, None, words=command[2:], places=[0, 1, 2, *pass_fds], env=dict(os.environ), session=False)
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if not _readable(self._fd, timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._code

    def kill(self) -> None:
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
