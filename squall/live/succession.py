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


def fleet_of(*configs: Config) -> str:
    """The same for both: version and configurations, but for where a head writes its run and listens for clients."""
    told = [__version__]
    for config in configs:
        serve = replace(config.serve, host=Serve().host, port=Serve().port)
        told.append(configuration.dumps(replace(config, run=replace(config.run, out=None), serve=serve)))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def roster_of(config: Config, say: Callable[[str], None]) -> Roster | None:
    """What an earlier head has left on hosts, of all its models, and we may leave; to be held while we run.

    None without `launcher.state`. Raises ConfigError: the folder cannot be used, or another head holds it.
    """
    table = config.launcher
    return None if table.state is None else Roster(Path(table.state), table.outlive_s, say)


def estate_of(config: Config, say: Callable[[str], None], name: str = "") -> Estate | None:
    """As `roster_of`, of one model, on this machine; of several each has a folder of its `name` there."""
    table = config.launcher
    return None if table.state is None else Estate(Path(table.state) / name, fleet_of(config), table.outlive_s, say)
