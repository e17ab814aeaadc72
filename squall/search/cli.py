"""The words of `squall search`. Knows what they are called; `command`, imported when it is run, knows what they mean."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from squall.errors import ConfigError
from squall.options import option


def search(
    place: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG|SEARCH", help="A TOML file, or the directory of an earlier search.", show_default=False),
    ] = None,
    settings: Annotated[list[str] | None, option("Override any key.", "--set", metavar="KEY=VALUE")] = None,
    model: Annotated[str | None, option("model.name")] = None,
    trace: Annotated[str | None, option("A trace file, or a well-known workload, such as chat-lmsys-1m.")] = None,
    gpus: Annotated[str | None, option("GPUs to choose from, with commas between.")] = None,
    max_gpus_per_replica: Annotated[int | None, option("search.max_gpus_per_replica", min=1)] = None,
    max_gpus: Annotated[int | None, option("search.max_gpus", min=1)] = None,
    ttft_p90: Annotated[float | None, option("Seconds until the first token, for 90 % of the requests.")] = None,
    tbt_p99: Annotated[float | None, option("Seconds between two tokens, for 99 % of all gaps.")] = None,
    limits: Annotated[list[str] | None, option("Any other, such as e2e_p95_s=30.", "--limit", metavar="NAME=SECONDS")] = None,
    objective: Annotated[str | None, option("qps_per_usd, usd, gpu_hours, energy_kwh or latency")] = None,
    criterion: Annotated[str | None, option("slo, or vidur: the time in the queue alone")] = None,
    strategy: Annotated[str | None, option("exhaustive, halving or sampler")] = None,
    prices: Annotated[list[str] | None, option("USD an hour of a GPU.", "--price", metavar="GPU=USD")] = None,
    rate: Annotated[float | None, option("Requests a second that copies of a deployment should bear.", min=1e-6)] = None,
    workers: Annotated[int | None, option("Processes; as many as there are CPUs when absent.", min=1)] = None,
    known: Annotated[
        bool, typer.Option("--known", help="Simulate nothing: the answers so far, of a search that was killed or still runs.")
    ] = False,
    cluster: Annotated[str | None, option("A Ray cluster to work on: its address, auto, or local.")] = None,
    store: Annotated[Path | None, option("Where results are kept; runs/search.jsonl when absent.", metavar="FILE")] = None,
    out: Annotated[Path | None, option("The directory to write; it must not exist yet.", metavar="DIR")] = None,
) -> None:
    """Find the cheapest deployment that keeps the objectives."""
    from squall.search.command import Options, run

    named = {"ttft_p90_s": ttft_p90, "tbt_p99_s": tbt_p99}
    given = {"max_gpus_per_replica": max_gpus_per_replica, "max_gpus": max_gpus, "objective": objective}
    given |= {"criterion": criterion, "strategy": strategy}
    if place is not None and not place.exists():
        raise ConfigError(f"{place}: no such configuration file, and no directory of an earlier search")
    options = Options(
        place=place,
        settings=tuple(settings or ()),
        model=model,
        trace=trace,
        gpus=gpus,
        limits=(*(f"{name}={value}" for name, value in named.items() if value is not None), *(limits or ())),
        prices=tuple(prices or ()),
        asked={key: value for key, value in given.items() if value is not None},
        rate=rate,
        workers=workers,
        known=known,
        cluster=cluster,
        store=store,
        out=out,
    )
    with _ended_in_order():
        wrote = run(options, typer.echo)
    if wrote is not None:
        best = f"squall simulate {wrote}/best.toml\n      " if (wrote / "best.toml").exists() else ""
        typer.echo(f"next: {best}squall search {wrote} --price GPU=USD --limit ttft_p90_s=1")


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends a search as Ctrl-C does, with the answers so far; only the exit code is its own."""
    terminated = False

    def on_signal(*_: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    except KeyboardInterrupt:
        if terminated:
            sys.exit(128 + signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
