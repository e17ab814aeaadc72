"""An agent of a head on one of its hosts: starts and ends workers there, and ends with them when the head is gone.

    SQUALL_TOKEN=... python -m squall.live.agent --head HOST:PORT --host NAME      (`squall serve` says or runs it)

Knows processes, as `LocalLauncher` starts them; not what they compute.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from squall.errors import ConfigError, PeerLost, SquallError
from squall.live.agents import MAX_LINE, Answer, Welcome, Wire, Wish, meet_head
from squall.live.launch import LocalLauncher
from squall.live.loop import run
from squall.live.transport.segment import HostCopies

DIAL_S = 10.0
END_S = 15.0


class Agent:
    """Does what the head wishes, one task a wish.

    Args:
        wire: to the head.
        launcher: of this host.
    """

    def __init__(self, wire: Wire, launcher: LocalLauncher) -> None:
        self._wire = wire
        self._launcher = launcher
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the head is gone; raises PeerLost then. All workers have ended."""
        beating = asyncio.create_task(self._wire.beat())
        self._launcher.attend()
        try:
            while True:
                wish = await self._wire.hear()
                if isinstance(wish, Wish):
                    task = asyncio.create_task(self._do(wish))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            beating.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._launcher.close()
            HostCopies().sweep(unused=True)

    async def _do(self, wish: Wish) -> None:
        address = ""
        try:
            match wish.verb:
                case "prepare":
                    self._launcher.prepare([wish.replica])
                case "start":
                    address = await self._launcher.start(wish.replica)
                case "stop":
                    await self._launcher.stop(wish.replica)
                case "kill":
                    await self._launcher.kill(wish.address)
        except SquallError as error:
            self._wire.say(Answer.failed(wish.number, error))
        else:
            self._wire.say(Answer(wish.number, address))


async def _main(head: str, host: str, token: str, folder: Path, say: Callable[[str], None]) -> None:
    address, _, port = head.rpartition(":")
    if not (address and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"--head {head}: expected host:port")
    dialling = asyncio.open_connection(address.strip("[]"), int(port), limit=MAX_LINE)
    try:
        reader, writer = await asyncio.wait_for(dialling, DIAL_S)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise PeerLost(f"the head at {head} cannot be reached: {error or f'no answer within {DIAL_S:g} s'}") from None
    wire = Wire(reader, writer)
    try:
        welcome = await meet_head(wire, host, token)
        say(f"the head at {head} starts workers of {host} here; Ctrl-C ends them")
        try:
            await Agent(wire, _launcher(welcome, folder, token)).serve()
        except PeerLost as error:
            raise PeerLost(f"the head at {head} is gone, and its workers with it: {error}") from None
    finally:
        wire.close()


def _launcher(welcome: Welcome, folder: Path, token: str) -> LocalLauncher:
    config = folder / "config.toml"
    config.write_text(welcome.config, encoding="utf-8")
    return LocalLauncher(config, folder, welcome.groups, token=token, places=welcome.places, warm=welcome.warm)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m squall.live.agent", description="Workers on this machine for a head elsewhere."
    )
    parser.add_argument("--head", required=True, help="host:port of the head")
    parser.add_argument("--host", required=True, help="our hostname in its configuration")
    parser.add_argument("--logs", type=Path, help="folder for what workers print; a temporary one by default")
    parser.add_argument("--stdin", action="store_true", help="the token is the first line of standard input; end when that does")
    given = parser.parse_args(arguments)
    token = sys.stdin.readline().strip() if given.stdin else os.environ.get("SQUALL_TOKEN", "")
    if given.stdin:
        threading.Thread(target=_watch_stdin, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="squall-agent-", ignore_cleanup_errors=True) as scratch:
        folder = given.logs or Path(scratch)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run(_main(given.head, given.host, token, folder, _no_news if given.stdin else _say))
        except SquallError as error:
            _say(str(error))
            return 1
        except OSError as error:  # the folder of the logs cannot be made, or the disk is full
            _say(f"{folder}: {error.strerror}")
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def _say(line: str) -> None:
    print(f"agent: {line}", file=sys.stderr, flush=True)  # noqa: T201


def _no_news(line: str) -> None:
    """Over ssh the head's user reads along, and knows."""


def _watch_stdin() -> None:
    """ssh closes it when the head's end is gone; workers see the end of theirs."""
    while os.read(0, 4096):
        pass
    time.sleep(END_S)  # the connection to the head ends, too, and we with it
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
