"""The commands beside `squall serve`: `squall scale` asks a running fleet, `squall doctor` this machine; `squall model` fetches.

Parts are imported by the command that needs them, as in `cli`. Knows no part's insides.
"""

from typing import Annotated, Any

import typer

from squall.errors import ConfigError, ModelError
from squall.options import option
from squall.saying import say, say_next


def scale(
    replicas: Annotated[int | None, typer.Argument(help="How many; when absent, only the status is shown.", min=0)] = None,
    role: Annotated[str | None, option("prefill, decode or both; a fleet of one role needs none")] = None,
    model: Annotated[str | None, option("Whose fleet, where several models are served.")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Let the policy decide again.")] = False,
    url: Annotated[str, typer.Option(help="The service.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, option("Its key.", envvar="OPENAI_API_KEY")] = None,
) -> None:
    """Show a running fleet, or say how many replicas it should have."""
    from squall.live.admin import fleet_of, lines_of

    if replicas is not None and auto:
        raise ConfigError("a number of replicas and --auto contradict each other; give one of them")
    for name, given in (("--role", role), ("--model", model)):
        if given is not None and replicas is None and not auto:
            raise ConfigError(f"{name} alone changes nothing; give a number of replicas, or --auto")
    change: dict[str, Any] | None = None
    if replicas is not None or auto:
        change = {"replicas": replicas, "role": role} | ({} if model is None else {"model": model})
    for line in lines_of(fleet_of(url, api_key, change)):
        say(line)


def doctor() -> None:
    """Is this machine fit to serve? Exit code 1 where something fails."""
    from squall.live.doctor import examine

    failed = False
    for finding in examine():
        typer.echo(finding.line())
        failed = failed or finding.verdict == "fail"
    if failed:
        raise typer.Exit(1)


def pull(name: Annotated[str, typer.Argument(help="Its name.")] = "smollm2") -> None:
    """Fetch a model, once."""
    from squall.live.models import pull as fetch

    fetch(name, typer.echo)
    say_next(f"squall serve --model {name}")


def list_models() -> None:
    """What can be fetched, and what is here."""
    from squall.live.models import SOURCES, find

    for name in SOURCES:
        try:
            typer.echo(f"{name}: {find(name)}")
        except ModelError as error:
            typer.echo(str(error))


def models() -> typer.Typer:
    """The group of `squall model`."""
    group = typer.Typer(help="Models that squall can fetch by itself.", no_args_is_help=True, rich_markup_mode=None)
    group.command("pull")(pull)
    group.command("list")(list_models)
    return group
