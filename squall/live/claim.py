"""One agent of a fleet and a host on this machine at a time. Knows processes by names that the system keeps while they live.

A head starts another agent only where it has heard nothing of the first for a while: that one hangs, and would keep its devices.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import socket
import struct
import sys
import time

END_S = 5.0
POLL_S = 0.02
_PEER = struct.Struct("3i")  # struct ucred: process, user, group


def claim(token: str, host: str) -> socket.socket | None:
    """Hold the name that agents of this token and host want, whatever head they dial, for as long as what is returned is open.

    Whoever held it is killed, and its workers end with it.
    None where there are no such names (on Linux there are), or somebody else's process holds it: nobody is hindered then.
    """
    if sys.platform != "linux":
        return None
    name = f"\0squall-agent-{os.getuid()}-{hashlib.sha256(f'{token} {host}'.encode()).hexdigest()[:32]}"
    holding = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        try:
            holding.bind(name)
            holding.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _holder_killed(name):
                break
            time.sleep(POLL_S)
        else:
            return holding
    holding.close()
    return None


def _holder_killed(name: str) -> bool:
    """False where it is not ours to kill."""
    with contextlib.suppress(ConnectionRefusedError, ProcessLookupError), socket.socket(socket.AF_UNIX) as asking:  # just gone
        asking.connect(name)
        pid, user, _ = _PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if user != os.getuid() or pid in (0, os.getpid()):
            return False
        os.kill(pid, signal.SIGKILL)
    return True
