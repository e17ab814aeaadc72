"""The commands. Each reads its configuration, calls the part that does the work, and says what it wrote and what to run next.

Knows no part's insides; parts are imported by the command that needs them, so that `squall simulate` pays for no web server.
For the same reason no module of commands postpones its annotations: typer would compile each of them, as text, at every start.
The one place that turns `SquallError` into a line on stderr and an exit code: 2 for what the user can put right, 130 for Ctrl-C.
"""

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import squall
from squall.errors import ConfigError, SquallError
from squall.extras import INSTALL, missing
from squall.live.command import doctor, models, scale
from squall.options import ConfigFiles, Settings, finite, option
from squall.report.command import compare, report
from squall.report.questions import latency, plan
from squall.saying import say, say_wrote
from squall.search.cli import search
from squall.twin.profiling.command import profiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from squall.config import Config
    from squall.perf.composed import Composed
    from squall.report.summary import Summary

WRONG_USAGE: Any = typer.BadParameter.__mro__[1]
"""What a command line raises that cannot be understood; typer shows this class under no name of its own."""

app = typer.Typer(
    help="Serve large language models through sudden load, and rehearse it first.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(models(), name="model")
app.add_typer(profiles(), name="profile")

NeededFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG",
        help="A TOML file with a [workload]; several, of one model each, share one [cluster].",
        show_default=False,
    ),
]
Out = Annotated[Path | None, option("The run directory to write; it must not exist yet.", metavar="DIR")]
ModelName = Annotated[str | None, option("model.name")]
Device = Annotated[str | None, option("serve.device: cpu or cuda")]


def main() -> None:
    """The `squall` command."""
    logging.basicConfig(format="squall: %(levelname)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and not at once: what is half done is removed
    if "" not in sys.path:
        sys.path.append("")  # a policy of one's own may lie in the current directory, where workers find it, too
    try:
        sys.exit(app(standalone_mode=False))
    except SquallError as error:
        _fail(str(error))
    except WRONG_USAGE as error:
        said = error.format_message()
        if "\n" in said:  # no mistake: the help of a command that needs another word
            typer.echo(said)
            sys.exit(2)
        _fail(f"{said} (`{' '.join(_command(error))} --help` says more)")
    except OSError as error:  # a full disk, a folder that may not be written, a name that is too long
        _fail(": ".join(str(part) for part in (error.filename, error.strerror or error) if part is not None))
    except ModuleNotFoundError as error:
        if missing(error) is None:
            raise
        _fail(f"this command needs {error.name}, which is not installed: {INSTALL}")
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback(invoke_without_command=True)
def squall_(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"squall {squall.__version__}")
        raise typer.Exit


@app.command()
def simulate(
    configs: NeededFiles,
    settings: Settings = None,
    events: Annotated[bool, typer.Option("--events", help="Also write the event log, which can be replayed.")] = False,
    detail: Annotated[bool, typer.Option("--detail", help="Batches, utilisation and energy, too (run.detail).")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Also write every step (run.steps).")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Also write a timeline for Perfetto (run.trace).")] = False,
    operators: Annotated[bool, typer.Option("--operators", help="Also write times of operators (run.operators).")] = False,
    series: Annotated[float | None, option("Also write a row every so many seconds (run.series_s).", metavar="SECONDS")] = None,
    out: Out = None,
) -> None:
    """Run a fleet on a virtual clock; or several, of one model each, on one cluster."""
    gc.disable()  # a process as short as this gives nothing up in circles, and most of it is imports
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads, for products of matrices that there are not
    asked = {"run.detail": detail, "run.steps": steps, "run.trace": trace, "run.operators": operators}
    given = {key: True for key, wanted in asked.items() if wanted} | ({} if series is None else {"run.series_s": series})
    if len(configs) > 1:
        _simulate_together(configs, settings, given, events=events, out=out)
        return
    from squall.report.progress import simulation_progress
    from squall.report.run import place_for, write_run
    from squall.twin.rehearse import rehearse, rehearse_with_events, usd_per_gpu_hour

    resolved = _load(configs[0], settings, out, given)
    place = place_for("simulate", resolved.run.out)
    told_apart: Sequence[Composed] = ()
    if resolved.run.operators:
        from squall.report.operators import explainers

        told_apart = explainers(resolved)
    with simulation_progress() as shown:
        record, log = rehearse_with_events(resolved, shown) if events else (rehearse(resolved, progress=shown), None)
        if shown is not None:
            shown.phase("writing")
        on = None
        if record.observed is not None:
            from squall.report.deployed import deployed

            on = deployed(resolved)
        summary = write_run(place, record, resolved, usd_per_gpu_hour(resolved), log, on, told_apart)
    _tell(summary)
    say_wrote(place, f"squall report {place}", f"squall compare {place} OTHER_RUN")


def _simulate_together(
    files: list[Path], settings: list[str] | None, given: dict[str, Any], *, events: bool, out: Path | None
) -> None:
    from squall.report.cluster import lines_of
    from squall.report.progress import simulation_progress
    from squall.report.run import place_for
    from squall.twin.together import simulate_together

    configs = _load_each(files, settings, out, given)
    place = place_for("simulate", configs[0].run.out)
    with simulation_progress() as shown:
        summary, each = simulate_together(configs, [str(file) for file in files], place, events=events, progress=shown)
    for fleet, one in zip(summary.fleets, each, strict=True):
        typer.echo(fleet.model)
        _tell(one)
    for line in lines_of(summary):
        typer.echo(line)
    say_wrote(place, f"squall report {place}", f"squall report {place / summary.fleets[0].model}")


@app.command()
def serve(
    configs: ConfigFiles = None,
    settings: Settings = None,
    model: ModelName = None,
    engine: Annotated[str | None, option("serve.engine: torch or emulated")] = None,
    gpu: Annotated[str | None, option("cluster.gpu, which an emulated engine pretends to be")] = None,
    device: Device = None,
    replicas: Annotated[int | None, option("fleet.replicas")] = None,
    host: Annotated[str | None, option("serve.host")] = None,
    port: Annotated[int | None, option("serve.port; 0 takes a free one")] = None,
    out: Out = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Serve a model: an OpenAI endpoint over a fleet; or several, each over its own, on one cluster."""
    from squall.live.serve import serve as run
    from squall.live.serve import serve_together
    from squall.report.run import place_for
    from squall.sharing import name_of

    given = {
        "model.name": model, "serve.engine": engine, "cluster.gpu": gpu, "serve.device": device,
        "serve.host": host, "serve.port": port, "fleet.replicas": replicas,
    }  # fmt: skip
    files: list[Path | None] = [*(configs or (None,))]
    several = len(files) > 1
    loaded = _load_each(configs or [], settings, out, given) if several else [_load(files[0], settings, out, given)]
    place = place_for("serve", loaded[0].run.out)
    if with_parent:
        threading.Thread(target=_watch_parent, daemon=True).start()
    if several:
        serve_together(loaded, [str(file) for file in files], place, say)
    else:
        run(loaded[0], place, say)
    served = [place / name_of(config) if several else place for config in loaded if config.workload is not None]
    simulated = [f"squall simulate {' '.join(str(folder / 'config.toml') for folder in served)}"] if served else []
    with contextlib.suppress(OSError):
        say_wrote(place, f"squall report {place}", *simulated)


app.command()(scale)


@app.command()
def replay(
    configs: NeededFiles,
    settings: Settings = None,
    url: Annotated[str | None, option("The endpoint; when absent, the one that CONFIG describes.")] = None,
    model: Annotated[str | None, option("The model to ask for; when absent, CONFIG's.")] = None,
    api_key: Annotated[str | None, option("The endpoint's key.", envvar="OPENAI_API_KEY")] = None,
    tokenizer: Annotated[Path | None, option("A tokenizer.json, for servers that take no token ids.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up.", callback=finite)] = 600.0,
    max_in_flight: Annotated[int | None, option("At most so many requests at once; what waits leaves late.", min=1)] = None,
    out: Out = None,
) -> None:
    """Drive any OpenAI endpoint with a workload, open loop; or with those of several models at once."""
    from squall.report.run import place_for, write_run
    from squall.twin.drive import drive
    from squall.twin.rehearse import usd_per_gpu_hour

    options = {"api_key": api_key, "tokenizer": tokenizer, "timeout_s": timeout, "max_in_flight": max_in_flight}
    if len(configs) > 1:
        if model is not None:
            raise ConfigError(f"--model {model} is one of {len(configs)} models; leave it out, or give one file")
        _replay_together(configs, settings, url, out, options)
        return
    resolved = _load(configs[0], settings, out)
    place = place_for("replay", resolved.run.out)
    record = drive(resolved, url, model, **options)
    _tell(write_run(place, record, resolved, None if url else usd_per_gpu_hour(resolved)))
    for line in record.warnings:
        typer.echo(f"note: {line}")
    say_wrote(
        place, f"squall report {place}", f"squall simulate {place / 'config.toml'}", f"squall compare {place} SIMULATED_RUN"
    )


def _replay_together(
    files: list[Path], settings: list[str] | None, url: str | None, out: Path | None, options: dict[str, Any]
) -> None:
    from squall.report.run import place_for
    from squall.twin.together import replay_together

    configs = _load_each(files, settings, out, {})
    place = place_for("replay", configs[0].run.out)
    done = replay_together(configs, [str(file) for file in files], place, url, **options)
    for folder, record, summary in done:
        typer.echo(folder.name)
        _tell(summary)
        for line in record.warnings:
            typer.echo(f"note: {line}")
    again = " ".join(str(folder / "config.toml") for folder, _, _ in done)
    say_wrote(place, f"squall report {done[0][0]}", f"squall simulate {again}", f"squall compare {place} SIMULATED_RUN")


app.command()(plan)
app.command()(search)
app.command()(latency)


@app.command()
def demo(out: Out = None, port: Annotated[int, typer.Option(help="Where to serve; 0 takes a free port.")] = 0) -> None:
    """Serve the embedded model, load it, simulate the same, compare."""
    from squall.twin.demo import demo as run

    run(out, port, typer.echo)


app.command()(compare)
app.command()(report)
app.command()(doctor)


def _load(config: Path | None, settings: list[str] | None, out: Path | None, *options: dict[str, Any]) -> "Config":
    """The configuration; options that were given override the keys that they stand for."""
    from squall.config import load

    given = {"run.out": None if out is None else str(out)}
    for keys in options:
        given |= keys
    return load(config, [*(settings or ()), *(f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None)])


def _load_each(files: list[Path], settings: list[str] | None, out: Path | None, given: dict[str, Any]) -> "list[Config]":
    """Of several models. What is wrong with one by an override, is said of its file."""
    from squall.sharing import said_of

    loaded = []
    for file in files:
        with said_of(str(file)):
            loaded.append(_load(file, settings, out, given))
    return loaded


def _command(error: Any) -> list[str]:
    """The words of the command that was not understood, however squall itself was called."""
    words: list[str] = []
    context = error.ctx
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return ["squall", *words]


def _watch_parent() -> None:
    """Whoever started us holds the other end of standard input; when that closes, they are gone, and nobody needs us."""
    while os.read(sys.stdin.fileno(), 1024):  # unbuffered: a buffer's lock, held here for ever, would abort our own exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(summary: "Summary") -> None:
    from squall.report.compare import headline

    for line in headline(summary):
        typer.echo(line)


def _fail(message: str) -> None:
    typer.echo("squall: error: " + " ".join(message.split("\n")), err=True)
    sys.exit(2)
