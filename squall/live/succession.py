"""What two heads must have in common for one to take the other's workers over, and what the last one has left. Starts nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from squall import __version__
from squall import config as configuration
from squall.config import Config, Serve
from squall.live.estate import Estate
from squall.live.roster import Roster


def fleet_of(config: Config) -> str:
    """The same for both: version and configuration, but for where a head writes its run and listens for clients."""
    serve = replace(config.serve, host=Serve().host, port=Serve().port)
    same = replace(config, run=replace(config.run, out=None), serve=serve)
    return hashlib.sha256(f"{__version__}\n{configuration.dumps(same)}".encode()).hexdigest()


def left_to(config: Config, say: Callable[[str], None]) -> Estate | Roster | None:
    """What an earlier head has left, and we may leave; to be held while we run. None without `launcher.state`.

    Raises ConfigError: the folder cannot be used, or another head holds it.
    """
    table = config.launcher
    if table.state is None:
        return None
    if table.kind == "hosts":
        return Roster(Path(table.state), table.outlive_s, say)
    estate = Estate(Path(table.state), fleet_of(config), table.outlive_s, say)
    if estate.survivors:
        say(f"{len(estate.survivors)} workers of an earlier head run on: they are taken over")
    return estate
