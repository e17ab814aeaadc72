"""Other processes, as /proc tells of them."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def is_gone(pid: int) -> bool:
    """It does nothing any more, though its parent may not have waited for it, or cannot while other threads of it still end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(pid: int) -> list[int]:
    """Processes that its main thread has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def commands() -> Iterator[tuple[int, list[str]]]:
    """All processes there are, and the words that each was started with."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            yield int(path.parent.name), path.read_bytes().decode(errors="replace").split("\0")


def agents(head: str) -> dict[str, int]:
    """Agents that dial a head whose address ends like this, by their hosts.

    A child that is about to become a worker still has its parent's words: the parent counts.
    """
    found: dict[str, int] = {}
    for pid, words in sorted(commands()):
        if words[0] == sys.executable and "squall.live.agent" in words and words[words.index("--head") + 1].endswith(head):
            found.setdefault(words[words.index("--host") + 1], pid)
    return found


def host_copies(pids: Iterable[int]) -> set[Path]:
    """The copies of weights in this machine's memory that these processes use."""
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has just been closed
                if (target := os.readlink(link)).startswith(f"/dev/shm/squall-{os.getuid()}-"):
                    found.add(Path(target))
    return found
