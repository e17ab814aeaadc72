"""One command on another machine, over ssh: its first line of input, its last words, its end. Knows no agent and no worker."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

from squall.errors import ConfigError

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")

LAST_WORDS_S = 0.5
"""How long the last words of a command that has ended may take to come: its end may be held by a process that ssh left behind."""


class SshCommand:
    """Runs until its standard input is closed, where it ends with that, or until it is killed.

    Args:
        hostname: as ssh knows it.
        command: its words there.
        line: the first line of its standard input, for what must not stand on a command line.
        say: is given every line of its standard error once `speaks` is set, from a thread; before, only the last is kept.

    Attributes:
        speaks: what it says is news.

    Raises ConfigError where there is no ssh.
    """

    def __init__(self, hostname: str, command: Sequence[str], line: str, say: Callable[[str], None]) -> None:
        self.speaks = False
        self._say = say
        self._latest = ""
        try:
            self._process = subprocess.Popen(
                [*SSH, hostname, shlex.join(command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f'launcher.launch = "ssh": {SSH[0]} cannot be run ({error.strerror}); use "print"') from None
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def last_words(self) -> str:
        """Of one that has ended: what it said last, or how it ended."""
        self._listening.join(LAST_WORDS_S)
        return self._latest or f"ssh ended with code {self._process.returncode}"

    def end(self, patience_s: float) -> None:
        """See that it is gone. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as said:
            for raw in said:
                line = raw.decode(errors="replace").strip()
                self._latest = line or self._latest
                if line and self.speaks:
                    self._say(line)
