"""What a head leaves on other hosts when it dies: agents, which dial again for a while, and what the next head must know of them.

Knows hosts by name, and no process: whether an agent is still there shows when it dials.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, field

from squall.core.types import ReplicaId
from squall.live.state import StateFolder

FILE = "agents.json"


class _Roster(Struct, frozen=True):
    token: str
    hosts: tuple[str, ...] = ()
    places: dict[str, tuple[ReplicaId, ...]] = field(default_factory=dict)


class Roster(StateFolder):
    """Holds the folder, and finds whose agents the last head had.

    The token is the folder's, whatever the configuration: agents of another one must be told from strangers, to be sent away.

    Args:
        folder: made where it is not there.
        outlive_s: how long agents and their workers wait for another head.
        say: tells a person what goes wrong later.

    Attributes:
        token: what all agents and workers know; the last head's, where it left one.
        hosts: whose agents may dial again.
        places: of the replicas of each model that ran there, by its name.

    Raises ConfigError: the folder cannot be used, or another head holds it.
    """

    def __init__(self, folder: Path, outlive_s: float, say: Callable[[str], None]) -> None:
        super().__init__(folder, FILE, say)
        self.outlive_s = outlive_s
        found = self.read(_Roster) or _Roster(secrets.token_hex(32))
        self.token = found.token
        self.hosts = frozenset(found.hosts)
        self.places: Mapping[str, tuple[ReplicaId, ...]] = found.places
        self._is_written = False

    def note(self, host: str | None = None) -> bool:
        """An agent of `host` is here, or (None) one may come. Returns whether another head will know it."""
        if host is not None and host not in self.hosts:
            self.hosts |= {host}
            self._is_written = False
        return self._write()

    def note_places(self, places: Mapping[str, tuple[ReplicaId, ...]]) -> None:
        """Replicas run there now."""
        if places != self.places:
            self.places = places
            self._is_written = False
            self._write()

    def _write(self) -> bool:
        found = _Roster(self.token, tuple(sorted(self.hosts)), dict(self.places))
        self._is_written = self._is_written or self.write(found)
        return self._is_written
