"""A worker process: one or more replicas behind the gRPC service of `rpc/squall.proto`.

    python -m squall.live.worker --config CONFIG --replicas 0 [--listen 127.0.0.1:0] [--device cuda]

Prints one line of JSON (its address) when it listens, and then nothing on standard output. Knows how sessions come and go and
when the process ends; what happens inside a session is in `session.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec

from squall import config as configuration
from squall.config import Config
from squall.core.types import ReplicaId
from squall.errors import ConfigError, SquallError
from squall.eventlog import open_log
from squall.live.host import Host
from squall.live.hosts import host_maker
from squall.live.loop import run
from squall.live.rpc.generated import squall_pb2 as pb
from squall.live.rpc.health import Health
from squall.live.rpc.service import OPTIONS, Door, handler
from squall.live.served import served_model
from squall.live.session import Session
from squall.live.transport.segment import HostCopies

GRACE_S = 60.0
"""How long a worker waits for a head that went away, or never came."""

FLUSH_S = 2.0
EXIT_S = 20.0
"""After so long it has hung: the end of a worker whose head is gone takes two flushes, and a while on a busy machine."""

OPEN_S = 10.0
"""How long whoever calls may take to say who they are."""

_log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext of our two messages; the stubs make it generic, the library does not


class Worker:
    """Serves the sessions of `hosts` until it is asked to end.

    Args:
        hosts: the replicas that live here.
        token: what all workers of the fleet know; only a head that does gets a session.
        drain_timeout_s: how long running requests may take to finish once the end is wanted.
        grace_s: how long to wait without any session.

    Attributes:
        orphaned: the process that started us is gone.
        grace_s: as given; may change at any time.
    """

    def __init__(self, hosts: Sequence[Host], token: str, drain_timeout_s: float, grace_s: float) -> None:
        self.orphaned = False
        self._door = Door(token)
        self._hosts = {host.replica: host for host in hosts}
        self._drain_timeout_s = drain_timeout_s
        self.grace_s = grace_s
        self._health = Health()
        self._end = asyncio.Event()
        self._at_once = False

    async def serve(self, listen: str, listening: Callable[[str], None]) -> None:
        """Serve on `listen` ("host:port", port 0 for any) and call `listening` with the address. Returns when it is over.

        Raises ConfigError when it cannot listen there.
        """
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((handler(self._session), self._health.handler))
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError:
            raise ConfigError(f"a worker cannot listen on {listen}: is the port in use?") from None
        for host in self._hosts.values():
            host.thread.start()
        await server.start()
        self._health.set(serves=True)
        listening(f"{listen.rpartition(':')[0]}:{port}")
        watch = asyncio.create_task(self._watch())
        await self._end.wait()
        watch.cancel()
        self._health.set(serves=False)
        await self._finish_requests()
        for host in self._hosts.values():
            if host.session is not None:
                host.session.over.set()
        await server.stop(grace=FLUSH_S)
        await self._stop_engines()

    def end(self, *, at_once: bool = False) -> None:
        """Finish the running requests, then end; or end at once. Idempotent."""
        self._at_once = self._at_once or at_once
        self._end.set()

    @property
    def failed(self) -> bool:
        """An engine cannot be trusted any more."""
        return any(host.failed for host in self._hosts.values())

    async def _session(self, requests: AsyncIterator[pb.ToReplica], context: Context) -> None:
        if not await self._door.admits(context):
            return
        host, settled = await self._host_of(requests, context)
        outbox: asyncio.Queue[pb.FromReplica | None] = asyncio.Queue()
        session = Session(host, outbox.put_nowait, settled=settled)
        session.open()
        parts = [asyncio.create_task(part) for part in (_read(requests, session), session.over.wait())]
        writer = asyncio.create_task(_write(outbox, context))
        try:
            done, _ = await asyncio.wait([*parts, writer], return_when=asyncio.FIRST_COMPLETED)
            outbox.put_nowait(None)
            await asyncio.wait([writer], timeout=FLUSH_S)  # first: a call has one write or one end at a time
            if wrong := next((error for task in done if (error := task.exception()) is not None), None):
                await _refuse(context, host.replica, wrong)
        finally:
            session.close()
            for task in (*parts, writer):
                task.cancel()
            if host.failed is not None:
                self.end(at_once=True)

    async def _host_of(self, requests: AsyncIterator[pb.ToReplica], context: Context) -> tuple[Host, bool]:
        """The replica that the first message opens, and whether it counts as settled; otherwise the call is aborted."""
        first = await self._first(requests)
        if first is None or not first.HasField("open"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be open")
        assert first is not None
        host = self._hosts.get(first.open.replica)
        if host is None:
            known = ", ".join(map(str, self._hosts))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"replica {first.open.replica} is not here; here are {known}")
        assert host is not None
        if host.session is not None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"replica {host.replica} has a head already")
        return host, first.open.settled

    async def _first(self, requests: AsyncIterator[pb.ToReplica]) -> pb.ToReplica | None:
        """None where none comes in time: a head that says nothing must not stay, nor hold up our end."""
        first, end = asyncio.ensure_future(anext(aiter(requests), None)), asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait({first, end}, timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED)
            return first.result() if first.done() else None
        finally:
            first.cancel()
            end.cancel()

    async def _watch(self) -> None:
        """End when no head has wanted us for too long."""
        alone_since = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.grace_s / 4))
            if any(host.session for host in self._hosts.values()):
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self.grace_s:
                _log.warning("no head for %g s", self.grace_s)
                self.end()

    async def _finish_requests(self) -> None:
        """Until nobody has any; the heads are told, so that what can be moved is."""
        deadline = time.monotonic() + self._drain_timeout_s
        for host in self._hosts.values():
            if host.session is not None and not host.session.idle and not self._at_once:
                host.session.give_notice(self._drain_timeout_s)
        while not self._at_once and time.monotonic() < deadline:
            if all(host.session is None or host.session.idle for host in self._hosts.values()):
                return
            await asyncio.sleep(0.02)

    async def _stop_engines(self) -> None:
        for host in self._hosts.values():
            if host.session is not None:
                host.session.close()
            host.thread.stop()
        deadline = time.monotonic() + FLUSH_S  # a step may be long, and its thread is a daemon
        for host in self._hosts.values():
            await asyncio.to_thread(host.thread.join, max(0.0, deadline - time.monotonic()))
            await asyncio.to_thread(host.close)


async def _refuse(context: Context, replica: ReplicaId, wrong: BaseException) -> None:
    """What a head must not say is its mistake, and anything else ours: that is to be found in the log of whoever made it."""
    if isinstance(wrong, ValueError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
    _log.error("the session of replica %d ends", replica, exc_info=wrong)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(wrong).__name__}: {wrong}")


async def _read(requests: AsyncIterator[pb.ToReplica], session: Session) -> None:
    async for message in requests:
        session.receive(message)


async def _write(outbox: asyncio.Queue[pb.FromReplica | None], context: Context) -> None:
    while (message := await outbox.get()) is not None:
        await context.write(message)


# -- the process


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    try:
        config = configuration.load(given.config)
        if given.device is not None:
            config = msgspec.structs.replace(config, serve=msgspec.structs.replace(config.serve, device=given.device))
        token = _token(given)
        make = host_maker(config, served_model(config), token, given.listen, given.nics)
        name = f"events-{given.replicas[0]}-{os.getpid()}.jsonl.zst"
        log = open_log(given.logs / name, given_up=_log_given_up) if config.serve.event_log else None
        hosts = [make(replica, log) for replica in given.replicas]
        for host in hosts:
            host.thread.call(host.come_up)
        with log or contextlib.nullcontext():
            return run(_main(given, hosts, config, token))
    except SquallError as error:
        print(f"worker: error: {error}", file=sys.stderr)  # noqa: T201
        return 2


async def _main(given: argparse.Namespace, hosts: Sequence[Host], config: Config, token: str) -> int:
    worker = Worker(hosts, token, config.serve.drain_timeout_s, given.grace_s)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.end)
    loop.set_exception_handler(lambda loop, context: _bug(loop, context, worker))
    if given.with_parent:
        threading.Thread(target=_watch_parent, args=(loop, worker, given.outlive_s), daemon=True).start()

    def greet(address: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # whoever started us has gone: see `_watch_parent`
            os.write(sys.stdout.fileno(), json.dumps({"address": address, "replicas": given.replicas}).encode() + b"\n")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads on: what a library prints must not fill the pipe

    await worker.serve(given.listen, greet)
    if worker.orphaned:
        HostCopies().sweep(unused=True)  # the head would have done it
    return int(worker.failed)


def _token(given: argparse.Namespace) -> str:
    """What all workers of the fleet know: the first line of standard input, where nobody else can read it, or SQUALL_TOKEN.

    A worker that was told nothing is reached by nobody.
    """
    if given.with_parent:
        return sys.stdin.readline().strip() or secrets.token_hex()
    return os.environ.get("SQUALL_TOKEN") or secrets.token_hex()


def _log_given_up(error: OSError) -> None:
    _log.warning("the event log ends here: %s", error.strerror)


def _bug(loop: asyncio.AbstractEventLoop, context: dict[str, Any], worker: Worker) -> None:
    """An exception that nobody caught: no state here can be trusted, and the head will start another worker."""
    loop.default_exception_handler(context)
    worker.end(at_once=True)


def _watch_parent(loop: asyncio.AbstractEventLoop, worker: Worker, outlive_s: float) -> None:
    """Standard input ends when the head does, however it does. Another one may come within `outlive_s`, once ours has said that
    it would find us."""
    noted = False
    while os.read(sys.stdin.fileno(), 4096):
        noted = True
    worker.orphaned = True
    if noted:
        worker.grace_s = outlive_s
        return
    loop.call_soon_threadsafe(lambda: worker.end(at_once=True))
    time.sleep(EXIT_S)
    os._exit(1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m squall.live.worker", description="One squall worker; `squall serve` starts them."
    )
    parser.add_argument("--config", type=Path, required=True, help="the resolved configuration")
    parser.add_argument("--replicas", type=_replicas, required=True, help="ids, such as 0 or 0-3 or 0,2")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 for any")
    parser.add_argument("--nics", type=_words, default=(), help="addresses that the weights of each rank leave by, such as a,b")
    parser.add_argument("--device", help="overrides serve.device")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="seconds to wait without a head")
    parser.add_argument("--logs", type=Path, default=Path(), help="directory for the event log")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    parser.add_argument("--outlive-s", type=float, default=0.0, help="with --with-parent: seconds to wait for another head then")
    return parser.parse_args(arguments)


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _replicas(text: str) -> list[ReplicaId]:
    """ "0-2,5" is [0, 1, 2, 5]."""
    ids: list[ReplicaId] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return ids


if __name__ == "__main__":
    sys.exit(main())
