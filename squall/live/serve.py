"""`squall serve`: puts launcher, workers, head and HTTP server together, and takes them down in order.

Starts the workers before it imports anything large, so that both do so at once; the head never imports torch. Knows the order of
things, not how any of them works.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from squall.config import Config
from squall.core.fleet_plan import FleetPlan, Share
from squall.core.types import ReplicaId
from squall.errors import ConfigError, ModelError
from squall.live.descriptors import allow_files
from squall.live.fitness import crowded, refuse_simulated, refuse_unfit, refuse_untraceable
from squall.live.folder import Say, fill_folder, logs_of, merge_logs, new_folder, open_head_log, write_changes
from squall.live.launch import FleetLauncher
from squall.live.launchers import Fleet, about, launchers_of
from squall.live.loop import run
from squall.live.plan import on_hosts, served_plan, shared_plan
from squall.live.served import ServedModel, served_model
from squall.live.transport.segment import HostCopies
from squall.mistakes import shown
from squall.pools import refuse_pools
from squall.sharing import first_places, name_of, said_of, shares

if TYPE_CHECKING:
    import uvicorn

    from squall.live.head import Head
    from squall.live.host_launch import FleetOnHosts

BACKLOG = 2048
SWEEP_EVERY_S = 10.0
LAST_BYTES_S = 5
"""How long connections may take to send what they have, once all requests are done."""


def serve(config: Config, directory: Path, say: Say) -> None:
    """Serve until SIGTERM or SIGINT, and drain then. A second signal stops at once.

    Args:
        config: the whole tree.
        directory: the run directory, which must not exist yet; it gets config.toml, logs/ and events.jsonl.zst.
        say: tells a person what happens, one line each.

    Raises:
        ConfigError: the port is in use, or a worker found the configuration wrong.
        ModelError: the model cannot be had or loaded.
    """
    began = monotonic()
    allow_files()
    _run([_fleet(config, directory)], directory, say, began)


def serve_together(configs: Sequence[Config], files: Sequence[str], directory: Path, say: Say) -> None:
    """As `serve`, of several models on one cluster, which `files` name: each has a folder of its own in the run directory.

    Raises also ConfigError where they cannot share a cluster, or a process.
    """
    began = monotonic()
    allow_files()
    for config, file in zip(configs, files, strict=True):
        _check_shareable(configs[0], config, files[0], file)
    configs = [on_hosts(config) for config in configs]
    found = shares(configs, files)
    begin = first_places(configs, found)
    fleets = []
    for config, file, share, at in zip(configs, files, found, begin, strict=True):
        with said_of(file):
            fleets.append(_fleet(config, directory / name_of(config), share, at))
    _check_served_names(fleets, files)
    _run(fleets, directory, say, began)


def _fleet(config: Config, directory: Path, share: Share | None = None, begin: Sequence[ReplicaId] | None = None) -> Fleet:
    refuse_pools(config, "squall serve")
    refuse_simulated(config)
    refuse_untraceable(config)
    model = served_model(config)
    return Fleet(config, model, _plan(config, model, share), directory, begin or range(config.fleet.num_initial))


def _run(fleets: Sequence[Fleet], directory: Path, say: Say, began: float) -> None:
    for fleet in fleets:
        if (warning := crowded(fleet.config)) is not None:
            about(fleet, fleets, say)(warning)
    with contextlib.ExitStack() as held:
        first = fleets[0].config.serve
        listener = held.enter_context(contextlib.closing(_listen(first.host, first.port)))
        launched = held.enter_context(_all_launched(fleets, directory, say))
        run(_serve(launched, listener, say, began))


Launched = tuple[Fleet, FleetLauncher]
"""A fleet, and who starts its workers."""


@contextlib.contextmanager
def _all_launched(fleets: Sequence[Fleet], directory: Path, say: Say) -> Iterator[list[Launched]]:
    """The run directory and the first processes of all. Where those of one cannot be had, nothing is left of the others'."""
    with new_folder(directory), contextlib.ExitStack() as beginning:
        launched = beginning.enter_context(launchers_of(fleets, say))
        for fleet, launcher in launched:
            beginning.enter_context(_begun(fleet, launcher, say))
        held = beginning.pop_all()
    with held:
        yield launched


@contextlib.contextmanager
def _begun(fleet: Fleet, launcher: FleetLauncher, say: Say) -> Iterator[None]:
    """What a fleet has in the run directory and its first processes, which end with the block."""
    fill_folder(fleet.directory, fleet.config)
    try:
        launcher.prepare(fleet.begin)
        yield
    finally:
        launcher.kill_all()
        HostCopies().sweep(unused=True)
        if fleet.config.serve.event_log:
            merge_logs(logs_of(fleet.directory), fleet.directory / "events.jsonl.zst", say)


def _check_shareable(first: Config, config: Config, file: str, other: str) -> None:
    """One process has one socket and one way to end, and one way to start workers."""
    table = config.launcher
    if table.kind == "ray":
        raise ConfigError(f"{other}: launcher.kind = 'ray' is for one model so far; several models want 'local' or 'hosts'")
    if table.warm and config.serve.engine == "torch" and config.serve.device != "cpu":
        raise ConfigError(
            f"{other}: launcher.warm = {table.warm} with several models on serve.device = {config.serve.device!r}: a process "
            "that waits would hold memory of GPUs that another model may get; leave it out"
        )
    launcher_keys = [key for key in table.__struct_fields__ if key != "warm"]
    serve_keys = ("host", "port", "api_keys", "cors_origins", "drain_timeout_s", "vllm_metrics", "otlp_endpoint")
    for name, keys in (("launcher", launcher_keys), ("serve", serve_keys)):
        for key in keys:
            here, there = getattr(getattr(first, name), key), getattr(getattr(config, name), key)
            if here != there:
                values = f"{shown(here)} in {file}, and {shown(there)} in {other}"
                raise ConfigError(f"models of one head need the same {name}.{key}: it is {values}")


def _check_served_names(fleets: Sequence[Fleet], files: Sequence[str]) -> None:
    """A request's `model` must say whose it is."""
    seen: dict[str, str] = {}
    for fleet, file in zip(fleets, files, strict=True):
        for name in fleet.model.names:
            if (other := seen.setdefault(name, file)) != file:
                raise ConfigError(f"{other} and {file} both serve {name!r}; give one of them another model.served_as")


def _listen(host: str, port: int) -> socket.socket:
    """Before any worker is started: a port in use is the most likely mistake."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no host can have this name"
        raise ConfigError(f"serve.host = {host!r} is no address of this machine: {why}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"serve.port = {port} on {host} cannot be used: {error.strerror}; choose another with --port") from None
    return listener


def _plan(config: Config, model: ServedModel, share: Share | None) -> FleetPlan:
    """What the fleet stands on."""
    if config.serve.engine == "torch":
        from squall.live.engine.build import refuse_uneven

        refuse_uneven(config, model)
        if config.launcher.kind == "local":
            refuse_unfit(config, model)
    return served_plan(config, model) if share is None else shared_plan(config, model, share)


async def _serve(launched: Sequence[Launched], listener: socket.socket, say: Say, began: float) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a connection that ends is no news to a person
    import uvicorn  # only now: the workers are starting meanwhile

    from squall.live.api.app import create_app
    from squall.live.api.connections import Connections, room_for_clients
    from squall.live.head import Head

    fleets = [fleet for fleet, _ in launched]
    config = fleets[0].config
    tracer = None
    if config.serve.otlp_endpoint is not None:
        from squall.live.tracing import open_tracer

        tracer = open_tracer(config.serve.otlp_endpoint, say)
    heads, logs = [], []
    for fleet, launcher in launched:
        model, tell = fleet.model, about(fleet, fleets, say)
        log = open_head_log(fleet.config, logs_of(fleet.directory), tell)
        logs.append(log)
        head = Head(fleet.config, model.names, model.tokenizer(), model.max_model_len, launcher, log, tell, plan=fleet.plan)
        if fleet.config.launcher.kind == "hosts":
            cast("FleetOnHosts", launcher).watch = head
        heads.append(head)
    for head in heads:
        head.neighbours = [other for other in heads if other is not head]
    others = [(head, fleet.config) for head, fleet in zip(heads[1:], fleets[1:], strict=True)]
    settings = uvicorn.Config(
        create_app(heads[0], config, tracer, others=others),
        http=cast(Any, Connections(room_for_clients(), say)),  # called as the class of a protocol would be
        log_level="warning",
        lifespan="off",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=LAST_BYTES_S,
    )
    server = _server(settings)
    for head, (_, launcher) in zip(heads, launched, strict=True):
        launcher.attend()
        head.start()
    sweeping = asyncio.create_task(_sweep())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with _signals() as (drain, stop):
            _stop_on_bugs(heads, drain, stop)
            await _until_stopped(fleets, heads, listener, say, began, drain, stop)
            if any(head.failed for head in heads):
                raise RuntimeError("a bug stopped the head; its traceback is above")
    finally:
        sweeping.cancel()
        server.should_exit = True
        server.force_exit = stop.is_set()
        await asyncio.gather(*(head.close() for head in heads))
        await serving
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        for log in logs:
            if log is not None:
                log.close()
        for fleet, head in zip(fleets, heads, strict=True):
            write_changes(fleet.directory, head.decisions, head.weights, about(fleet, fleets, say))


async def _sweep() -> None:
    """Copies of weights in this machine's memory whose time is over, whoever left them."""
    copies = HostCopies()
    while True:
        await asyncio.to_thread(copies.sweep)
        await asyncio.sleep(SWEEP_EVERY_S)


async def _until_stopped(
    fleets: Sequence[Fleet], heads: Sequence[Head], listener: socket.socket, say: Say, began: float, drain: asyncio.Event,
    stop: asyncio.Event,
) -> None:  # fmt: skip
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    coming = ", ".join(f"{fleet.config.fleet.num_initial} x {fleet.model.names[0]}" for fleet in fleets)
    say(f"listening on http://{address}; bringing up {coming}")
    failures = [head.load_failure for head in heads if head.load_failure is not None]
    ready, wanted = asyncio.ensure_future(_all(head.until_ready() for head in heads)), asyncio.ensure_future(drain.wait())
    futures: list[asyncio.Future[Any]] = [ready, wanted, *failures]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    if failed := [failure for failure in failures if failure.done()]:
        ready.cancel()
        wanted.cancel()
        raise ModelError(failed[0].result())
    if ready.done():
        say(f"ready after {monotonic() - began:.1f} s")
    await wanted
    ready.cancel()
    patience_s = fleets[0].config.serve.drain_timeout_s
    say(f"draining: running requests may take {patience_s:g} s more; again to stop at once")
    draining = asyncio.create_task(_all(head.drain(patience_s) for head in heads))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([draining, stopped], return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    stopped.cancel()


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works)


def _stop_on_bugs(heads: Sequence[Head], drain: asyncio.Event, stop: asyncio.Event) -> None:
    """A head that decides nothing would keep its clients waiting for ever."""

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if any(head.failed for head in heads):
            drain.set()
            stop.set()

    asyncio.get_running_loop().set_exception_handler(on_error)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """The first SIGTERM or SIGINT sets the first event, the next one the second."""
    loop = asyncio.get_running_loop()
    drain, stop = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop if drain.is_set() else drain).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield drain, stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _server(settings: uvicorn.Config) -> uvicorn.Server:
    """A server that leaves signals to us."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(settings)
