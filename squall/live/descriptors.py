"""How many files this process may have open, connections among them. Knows not what for."""

from __future__ import annotations

import contextlib
import resource

from squall.errors import ConfigError

MOST = 1 << 20

FEWEST = 64
"""Below some forty, libraries cannot be loaded, or sessions with workers not be opened, without a word that says why."""


def allow_files() -> int:
    """As many as the system lets us: the limit is raised to that, for what we start, too.

    Raises ConfigError where that is too few to serve with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    with contextlib.suppress(ValueError, OSError):
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY:
        return MOST
    if soft < FEWEST:
        raise ConfigError(
            f"no more than {soft} files may be open here, and serving takes {FEWEST} at least: "
            "raise the limit (ulimit -n 1024, or LimitNOFILE= of a service)"
        )
    return soft
