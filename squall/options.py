"""How options of the command line are made, for all that have some, and named where they are wrong. Knows no command."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from squall.errors import ConfigError


def option(help: str, *names: str, **more: Any) -> Any:
    """An option without a default of its own: what its absence means, its help or the configuration says."""
    return typer.Option(*names, help=help, show_default=False, **more)


def finite(value: float) -> float:
    """For `callback`: a number of seconds above 0."""
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is not a number of seconds above 0.")
    return value


@contextlib.contextmanager
def named_as_typed(typed: Mapping[str, str]) -> Iterator[None]:
    """What is wrong with a key is said of the option that stands for it: `use --tp 2`, not `use replica.tp = 2`.

    Args:
        typed: the options, by their keys.
    """
    try:
        yield
    except ConfigError as error:
        keys = rf"\b({'|'.join(map(re.escape, typed))})\b( =)?"
        raise type(error)(re.sub(keys, lambda found: typed[found[1]], str(error))) from None


Settings = Annotated[
    list[str] | None, option("Override any key, such as fleet.replicas=4; may be repeated.", "--set", metavar="KEY=VALUE")
]

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="A TOML file; all defaults without one.", show_default=False)
]

ConfigFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="CONFIG",
        help="A TOML file; all defaults without one. Several, of one model each, share one [cluster].",
        show_default=False,
    ),
]
