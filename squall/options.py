"""How options of the command line are made, for all that have some. Knows no command."""

from pathlib import Path
from typing import Annotated, Any

import typer


def option(help: str, *names: str, **more: Any) -> Any:
    """An option without a default of its own: what its absence means, its help or the configuration says."""
    return typer.Option(*names, help=help, show_default=False, **more)


def finite(value: float) -> float:
    """For `callback`: a number of seconds above 0."""
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is not a number of seconds above 0.")
    return value


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
