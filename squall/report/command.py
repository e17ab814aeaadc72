"""The commands that look at runs: `squall compare`, several side by side, and `squall report`, one as a page.

Parts are imported by the command that needs them, as in `cli`. Knows no part's insides.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from squall.errors import ConfigError
from squall.saying import say_next, say_wrote


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories; the others are related to the first.")],
) -> None:
    """Two or more runs side by side; of several models, model by model."""
    from rich.console import Console

    from squall.report.compare import table, warnings
    from squall.report.run import read_run, side_by_side

    if len(runs) < 2:
        raise ConfigError(f"compare needs two run directories or more; only {runs[0]} was given")
    wide = None if sys.stdout.isatty() else 1000  # a file has no edge to fold at
    read = [(model, [read_run(path) for path in paths]) for model, paths in side_by_side(runs)]
    warned = [warnings(of_model) for _, of_model in read]  # all files are read before anything is said
    for (model, of_model), lines in zip(read, warned, strict=True):
        if model:
            typer.echo(model)
        Console(width=wide).print(table([path.name or str(path) for path in runs], [run.summary for run in of_model]))
        for line in lines:
            typer.echo(line)
    say_next(f"squall report {runs[0]}")


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]) -> None:
    """A run as one HTML page that needs no network; of a fleet that was served, out of its event log."""
    from squall.report.cluster import is_cluster, read_cluster, write_cluster_report

    if is_cluster(run):
        folders = [run / fleet.model for fleet in read_cluster(run).fleets]
        say_wrote(write_cluster_report(run), *(f"squall report {folder}" for folder in folders if folder.is_dir()))
        return
    from squall.report.served import served_in

    for each in served_in(run) or (run,):
        _report_one(each)


def _report_one(run: Path) -> None:
    from squall.report.changes import latest_decisions
    from squall.report.html import write_report
    from squall.report.run import read_run
    from squall.report.served import count_served, is_served

    found = count_served(run) if is_served(run) else read_run(run)
    page = write_report(found)
    for line in (*found.notes, *latest_decisions(found)):
        typer.echo(line)
    say_wrote(page, f"squall compare {run} OTHER_RUN")
