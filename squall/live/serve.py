"""`squall serve`: puts launcher, workers, head and HTTP server together, and takes them down in order.

Starts the workers before it imports anything large, so that both do so at once; the head never imports torch. Knows the order of
things, not how any of them works.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from squall import config as configuration
from squall.config import Config
from squall.core.fleet_plan import FleetPlan
from squall.errors import ConfigError, ModelError, SquallError
from squall.eventlog import open_log, write_merged
from squall.live.descriptors import allow_files
from squall.live.estate import Estate
from squall.live.fitness import crowded, refuse_simulated, refuse_unfit, refuse_untraceable
from squall.live.launch import FleetLauncher, LocalLauncher
from squall.live.loop import run
from squall.live.plan import served_plan
from squall.live.roster import Roster
from squall.live.served import ServedModel, served_model
from squall.live.succession import fleet_of, left_to
from squall.live.transport.segment import HostCopies
from squall.pools import refuse_pools

if TYPE_CHECKING:
    import uvicorn

    from squall.live.head import Head
    from squall.live.host_launch import HostsLauncher

Say = Callable[[str], None]

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
    refuse_pools(config, "squall serve")
    refuse_simulated(config)
    refuse_untraceable(config)
    allow_files()
    began = monotonic()
    model = served_model(config)
    plan = _plan(config, model)
    if (warning := crowded(config)) is not None:
        say(warning)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(contextlib.closing(_listen(config.serve.host, config.serve.port)))
        left = left_to(config, say)
        if left is not None:
            held.enter_context(left)
        logs = _make(directory, config)
        try:
            launcher = _launcher(config, directory, logs, plan, say, left)
        except SquallError:
            shutil.rmtree(directory, ignore_errors=True)  # nothing has run yet
            raise
        try:
            launcher.prepare(range(config.fleet.num_initial))
            run(_serve(config, model, plan, launcher, listener, logs, say, began))
        finally:
            launcher.kill_all()
            HostCopies().sweep(unused=True)
            if config.serve.event_log:
                _merge_logs(logs, directory / "events.jsonl.zst", say)


def _make(directory: Path, config: Config) -> Path:
    """The run directory, with what workers need to start. Returns the folder of their logs; leaves nothing where it cannot."""
    logs = directory / "logs"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {directory}: {error.strerror}") from None
    try:
        logs.mkdir()
        (directory / "config.toml").write_text(configuration.dumps(config), encoding="utf-8")
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise ConfigError(f"cannot write into the run directory {directory}: {error.strerror}") from None
    return logs


def _merge_logs(logs: Path, target: Path, say: Say) -> None:
    """The logs of head and workers become one; their parts are not needed any more then."""
    parts = sorted(logs.glob("events-*.jsonl.zst"))
    try:
        write_merged(parts, target)
    except (OSError, SquallError) as error:
        say(f"the event logs stay in {logs}, as they cannot be merged: {error}")
        return
    for part in parts:
        part.unlink()


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


def _launcher(
    config: Config, directory: Path, logs: Path, plan: FleetPlan, say: Say, left: Estate | Roster | None = None
) -> FleetLauncher:
    """A process for each replica that there may be. Emulated ones share one: they sleep nearly all the time."""
    table, gpus, shared = config.launcher, config.replica.tp * config.replica.pp, config.serve.engine == "emulated"
    if table.kind == "hosts":
        from squall.live.host_launch import HostsLauncher

        assert not isinstance(left, Estate)
        text, fleet = configuration.dumps(config), fleet_of(config)
        return HostsLauncher(table, text, gpus, shared=shared, say=say, fleet=fleet, roster=left)
    if table.kind == "ray":
        from squall.live.ray_launch import RayLauncher

        on_gpu = not shared and config.serve.device != "cpu"
        return RayLauncher(table, configuration.dumps(config), gpus, on_gpu=on_gpu)
    assert not isinstance(left, Roster)
    replicas = range(plan.slots.num)
    groups = [tuple(replicas)] if shared else [(replica,) for replica in replicas]
    return LocalLauncher(directory / "config.toml", logs, groups, warm=table.warm, estate=left)


def _plan(config: Config, model: ServedModel) -> FleetPlan:
    """What the fleet stands on."""
    if config.fleet.moves_kv and config.serve.engine == "torch" and config.serve.device != "cpu":
        given, instead = 'fleet.drain = "move"', '"wait"'
        if config.fleet.mode == "disaggregated":
            given, instead = 'fleet.mode = "disaggregated"', '"colocated" with fleet.replicas'
        raise ConfigError(
            f"{given} with serve.device = {config.serve.device!r}: KV leaves only a CPU's pool so far; "
            f'use serve.device = "cpu", or {instead}'
        )
    if config.serve.engine == "torch":
        from squall.live.engine.build import refuse_uneven

        refuse_uneven(config, model)
        if config.launcher.kind == "local":
            refuse_unfit(config, model)
    return served_plan(config, model)


async def _serve(
    config: Config,
    model: ServedModel,
    plan: FleetPlan,
    launcher: FleetLauncher,
    listener: socket.socket,
    logs: Path,
    say: Say,
    began: float,
) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a connection that ends is no news to a person
    import uvicorn  # only now: the workers are starting meanwhile

    from squall.live.api.app import create_app
    from squall.live.api.connections import Connections, room_for_clients
    from squall.live.head import Head

    log = None
    if config.serve.event_log:
        log = open_log(logs / "events-head.jsonl.zst", given_up=lambda error: say(f"the event log ends here: {error.strerror}"))
    tracer = None
    if config.serve.otlp_endpoint is not None:
        from squall.live.tracing import open_tracer

        tracer = open_tracer(config.serve.otlp_endpoint, say)
    head = Head(config, model.names, model.tokenizer(), model.max_model_len, launcher, log, say, plan=plan)
    if config.launcher.kind == "hosts":
        cast("HostsLauncher", launcher).watch = head
    settings = uvicorn.Config(
        create_app(head, config, tracer),
        http=cast(Any, Connections(room_for_clients(), say)),  # called as the class of a protocol would be
        log_level="warning",
        lifespan="off",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=LAST_BYTES_S,
    )
    server = _server(settings)
    launcher.attend()
    head.start()
    sweeping = asyncio.create_task(_sweep())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with _signals() as (drain, stop):
            _stop_on_bugs(head, drain, stop)
            await _until_stopped(config, head, listener, say, began, drain, stop)
            if head.failed:
                raise RuntimeError("a bug stopped the head; its traceback is above")
    finally:
        sweeping.cancel()
        server.should_exit = True
        server.force_exit = stop.is_set()
        await head.close()
        await serving
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if log is not None:
            log.close()


async def _sweep() -> None:
    """Copies of weights in this machine's memory whose time is over, whoever left them."""
    copies = HostCopies()
    while True:
        await asyncio.to_thread(copies.sweep)
        await asyncio.sleep(SWEEP_EVERY_S)


async def _until_stopped(
    config: Config, head: Head, listener: socket.socket, say: Say, began: float, drain: asyncio.Event, stop: asyncio.Event
) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    say(f"listening on http://{address}; bringing up {config.fleet.num_initial} x {head.model_names[0]}")
    assert head.load_failure is not None
    ready, wanted = asyncio.ensure_future(head.until_ready()), asyncio.ensure_future(drain.wait())
    futures: list[asyncio.Future[Any]] = [ready, wanted, head.load_failure]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    if head.load_failure.done():
        ready.cancel()
        wanted.cancel()
        raise ModelError(head.load_failure.result())
    if ready.done():
        say(f"ready after {monotonic() - began:.1f} s")
    await wanted
    ready.cancel()
    say(f"draining: running requests may take {config.serve.drain_timeout_s:g} s more; again to stop at once")
    draining, stopped = asyncio.create_task(head.drain(config.serve.drain_timeout_s)), asyncio.create_task(stop.wait())
    await asyncio.wait([draining, stopped], return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    stopped.cancel()


def _stop_on_bugs(head: Head, drain: asyncio.Event, stop: asyncio.Event) -> None:
    """A head that decides nothing would keep its clients waiting for ever."""

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if head.failed:
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
