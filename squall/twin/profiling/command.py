"""The words of `squall profile`. Knows what they are called; the modules beside it know what they mean."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from squall.errors import ConfigError
from squall.options import ConfigFile, finite, named_as_typed, option
from squall.saying import say_wrote

Settings = Annotated[list[str] | None, option("Override any key; may be repeated.", "--set", metavar="KEY=VALUE")]
ModelName = Annotated[str | None, option("model.name: a known model, a checkpoint, or a config.json")]
Device = Annotated[str | None, option("serve.device: cpu or cuda")]
OutFile = Annotated[Path | None, option("The profile to write.", "--out", "-o", metavar="FILE")]


def steps(
    config: ConfigFile = None,
    settings: Settings = None,
    model: ModelName = None,
    device: Device = None,
    engines: Annotated[int | None, option("Engines at work at once; when absent, as many as share this CPU.", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure; loading the model comes on top.", callback=finite)] = 45.0,
    out: OutFile = None,
) -> None:
    """Measure how long whole steps take on this machine. `squall profile operators`, `links` and `import` do other things."""
    from squall.perf.profile import save
    from squall.report.progress import progress
    from squall.twin.profile import busy, num_sharing, profile

    resolved = _load(config, settings, {"model.name": model, "serve.device": device})
    path = _writable(out or Path(f"{Path(resolved.model.name).name}-{resolved.serve.device}.profile.json"))
    count = engines or num_sharing(resolved)
    with progress(f"measuring {count} engine(s)", seconds) as show:
        measured = profile(resolved, count, seconds, show)
    save(measured, path)
    typer.echo(
        f"{len(measured.points)} shapes of steps on {measured.machine}; the fitted curve is off by "
        f"{100 * measured.median_error:.1f} % (median), {100 * measured.p95_error:.1f} % (95th percentile)"
    )
    if (note := busy(measured)) is not None:
        typer.echo(note)
    say_wrote(path, f"squall simulate {config or 'CONFIG'} --set latency.kind=profile --set latency.path={path}")


def operators(
    config: ConfigFile = None,
    settings: Settings = None,
    model: ModelName = None,
    device: Device = None,
    gpu: Annotated[str | None, option("cluster.gpu: which GPU this is; on a CPU it does not matter")] = None,
    tp: Annotated[list[int] | None, option("Degrees whose shares to measure; those of 1, 2, 4, 8 that work.", min=1)] = None,
    budget: Annotated[float, typer.Option(help="Seconds to measure for, about.", callback=finite)] = 120.0,
    whole_steps: Annotated[bool, typer.Option("--steps/--no-steps", help="Whole steps, for the overhead.")] = True,
    collectives: Annotated[bool, typer.Option(help="Collectives between processes of this machine, too.")] = True,
    graphs: Annotated[bool, typer.Option(help="On CUDA: a second profile, of captured decodes.")] = True,
    out: OutFile = None,
) -> None:
    """Measure the operators of a model's shares, for any TP degree, on one device."""
    from squall.twin.profiling.conduct import Wanted, conduct

    resolved = _load(config, settings, {"model.name": model, "serve.device": device, "cluster.gpu": gpu})
    path = _writable(out or Path(f"{Path(resolved.model.name).name}-{resolved.serve.device}.parquet"))
    wanted = Wanted(resolved, tuple(sorted(set(tp or ()))), budget, whole_steps, collectives, graphs, path)
    written = conduct(wanted, typer.echo)
    named = "cpu" if resolved.serve.device == "cpu" else resolved.cluster.gpu
    typer.echo(f"wrote {' and '.join(map(str, written))}")
    keys = f"--set latency.kind=profile --set latency.path={path} --set cluster.gpu={named}"
    typer.echo(f"next: squall simulate {config or 'CONFIG'} {keys}")


def links(
    device: Device = None,
    folder: Annotated[Path | None, option("Where to try the disk; the model store when absent.", metavar="DIR")] = None,
    megabytes: Annotated[int, typer.Option(help="How much to move each time.", min=1)] = 256,
    out: Annotated[Path | None, option("Also write the figures, as JSON.", "--out", "-o", metavar="FILE")] = None,
) -> None:
    """Measure how fast bytes move on this machine: shared memory, TCP, disk, host to device."""
    import msgspec

    from squall.twin.profiling.links import measure_links, settings_of

    path = None if out is None else _writable(out)
    found = measure_links(folder, megabytes << 20, device or "cpu")
    for link in found:
        typer.echo(f"{link.name:<24} {link.bytes_per_s / 1e9:8.2f} GB/s")
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        typer.echo(f"wrote {path}")
    typer.echo(f"next: squall simulate CONFIG {settings_of(found)}")


def bring_in(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of tables, or one of them.", show_default=False)],
    format: Annotated[str, option("vidur, llmservingsim or aiconfigurator")],
    out: Annotated[Path, option("The profile to write.", "--out", "-o", metavar="FILE")],
    gpu: Annotated[str | None, option("The GPU that was measured.")] = None,
    model: Annotated[str | None, option("The model that was measured, where the tables do not say.")] = None,
    engine: Annotated[str, typer.Option(help="Tables of this engine only.", show_default=False)] = "",
) -> None:
    """Read operator times that others measured, check them, and write them as a profile."""
    from squall.perf.catalogue import resolve_model
    from squall.perf.hardware import resolve_gpu
    from squall.perf.tables.choose import import_profile
    from squall.perf.tables.profile import save

    _writable(out)
    with named_as_typed({"cluster.gpu": "--gpu", "model.name": "--model"}):
        of_gpu, of_model = resolve_gpu(gpu) if gpu else None, resolve_model(model) if model else None
    read = import_profile(format, path, of_gpu, of_model, engine)
    save(read, out)
    for name, rows in read.rows.items():
        typer.echo(f"{name}: {len(rows):,} points")
    header = read.header
    typer.echo(f"{header.source}, {header.gpu}, {header.engine}")
    say_wrote(out, f"squall simulate CONFIG --set latency.kind=measured --set latency.path={out}")


def _load(path: Path | None, settings: list[str] | None, named: dict[str, str | None]) -> Any:
    """The configuration, with options for keys."""
    import json

    from squall.config import load

    given = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return load(path, [*(settings or ()), *given])


def _writable(path: Path) -> Path:
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another file (--out) or remove it")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: nothing can be written into {path.parent}; choose another file (--out)")
    return path


class Groups(typer.core.TyperGroup):
    """`squall profile` with a word of its own does what that says; whatever else follows is for measuring whole steps."""

    WORDS = ("import", "operators", "links")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args[:1] and args[0] in self.WORDS else ["measure", *args])


def profiles() -> typer.Typer:
    """The group."""
    group = typer.Typer(cls=Groups, help="Measure how long things take here, or import a profile.", rich_markup_mode=None)
    group.command("measure", hidden=True)(steps)
    group.command("operators")(operators)
    group.command("links")(links)
    group.command("import")(bring_in)
    return group
