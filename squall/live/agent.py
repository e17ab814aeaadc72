"""An agent of a head on one of its hosts: starts and ends workers there, and ends with them when the head has ended.

    SQUALL_TOKEN=... python -m squall.live.agent --head HOST:PORT --host NAME      (`squall serve` says or runs it)

A head that is lost without a word may be back, or another in its place: where its welcome says for how long workers outlive it,
they run on, and it is dialled until then. Knows processes, as `LocalLauncher` starts them; not what they compute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from squall.errors import ConfigError, PeerLost, PeerRefused, SquallError
from squall.live.agents import MAX_LINE, Answer, Deployed, Goodbye, Welcome, Wire, Wish, meet_head
from squall.live.claim import claim
from squall.live.launch import LocalLauncher
from squall.live.loop import run
from squall.live.scratch import scratch
from squall.live.transport.segment import HostCopies
from squall.quantities import counted

DIAL_S = 10.0
END_S = 15.0

FIRST_REDIAL_S = 0.1
LAST_REDIAL_S = 2.0
"""A head that is lost is dialled after the first, then after twice as long, and so on up to the last."""


class Agent:
    """Does what the head wishes, one task a wish.

    Args:
        wire: to the head.
        launchers: of this host, one a model.
    """

    def __init__(self, wire: Wire, launchers: Sequence[LocalLauncher]) -> None:
        self._wire = wire
        self._launchers = launchers
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the head says that it ends; raises PeerLost where it is lost. Workers run on."""
        beating = asyncio.create_task(self._wire.beat())
        for launcher in self._launchers:
            launcher.attend()
        try:
            while not isinstance(wish := await self._wire.hear(), Goodbye):
                if isinstance(wish, Wish):
                    task = asyncio.create_task(self._do(wish))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            beating.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _do(self, wish: Wish) -> None:
        address, launcher = "", self._launchers[wish.model]
        try:
            match wish.verb:
                case "prepare":
                    launcher.prepare([wish.replica])
                case "start":
                    address = await launcher.start(wish.replica)
                case "stop":
                    await launcher.stop(wish.replica)
                case "kill":
                    await launcher.kill(wish.address)
        except SquallError as error:
            self._wire.say(Answer.failed(wish.number, error))
        else:
            self._wire.say(Answer(wish.number, address))


class Dialler:
    """Finds the head, and finds it again.

    Args:
        head: "host:port" where it waits for agents.
        host: our name in its configuration.
        token: what all workers of the fleet know.

    Attributes:
        wire: the latest that led to it.

    Raises ConfigError where `head` is no address.
    """

    def __init__(self, head: str, host: str, token: str) -> None:
        address, _, port = head.rpartition(":")
        if not (address and port.isdecimal() and int(port) < 1 << 16):
            raise ConfigError(f"--head {head}: expected host:port")
        self.head = head
        self._address, self._port = address.strip("[]"), int(port)
        self._host = host
        self._token = token
        self._name = secrets.token_hex(8)

    async def meet(self, fleet: str = "", num_workers: int = 0) -> Welcome:
        """Raises PeerLost where nobody is there, PeerRefused where we are not wanted."""
        dialling = asyncio.open_connection(self._address, self._port, limit=MAX_LINE)
        try:
            reader, writer = await asyncio.wait_for(dialling, DIAL_S)
        except (OSError, TimeoutError, UnicodeError) as error:
            why = error or f"no answer within {DIAL_S:g} s"
            raise PeerLost(f"the head at {self.head} cannot be reached: {why}") from None
        self.wire = Wire(reader, writer)
        try:
            return await meet_head(self.wire, self._host, self._token, self._name, fleet, num_workers)
        except PeerRefused as error:  # and it may wait for our end
            raise PeerRefused(f"the head at {self.head} refuses: {error}") from None
        except BaseException:
            self.wire.close()
            raise

    async def meet_again(self, welcome: Welcome, num_workers: Callable[[], int]) -> Welcome:
        """Whoever is our head now. Raises PeerLost where there is none in time, PeerRefused where it has no use for us."""
        self.wire.close()  # so that the head, if it lives, knows
        wait_s, patience_s = FIRST_REDIAL_S, welcome.outlive_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while True:
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, LAST_REDIAL_S)
                    with contextlib.suppress(PeerLost):
                        return await self.meet(welcome.fleet, num_workers())
        raise PeerLost(f"the head at {self.head} did not come back within {patience_s:g} s: its workers end")


class SshSession:
    """That we were started in. It ends with the head, and takes us with it unless we are to outlive it.

    Args:
        log: takes what we say once nobody listens any more.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stays = False

    def watch(self) -> None:
        """ssh closes our standard input when the head's end is gone; workers see the end of theirs."""
        threading.Thread(target=self._watch, daemon=True).start()

    def outlive(self) -> None:
        self._stays = True
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with contextlib.suppress(PermissionError):  # it is ours already
            os.setsid()

    def _watch(self) -> None:
        while os.read(0, 4096):
            pass
        if not self._stays:
            time.sleep(END_S)  # the connection to the head ends, too, and we with it
        if not self._stays:
            os._exit(1)
        with contextlib.suppress(OSError):
            os.dup2(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)


async def _main(dialler: Dialler, host: str, token: str, folder: Path, ssh: SshSession | None) -> None:
    welcome = await dialler.meet()
    with contextlib.ExitStack() as held:
        if welcome.outlive_s:
            if ssh is not None:
                ssh.outlive()
            if (claimed := await asyncio.to_thread(claim, token, host)) is not None:
                held.enter_context(contextlib.closing(claimed))
        launchers = [_launcher(deployed, folder / deployed.name, token, welcome) for deployed in welcome.deployed]
        if ssh is None:  # else the head's user knows
            _say(f"the head at {dialler.head} starts workers of {host} here; Ctrl-C ends them")
        try:
            await _serve(dialler, welcome, launchers)
        finally:
            await asyncio.gather(*(launcher.close() for launcher in launchers))
            HostCopies().sweep(unused=True)


async def _serve(dialler: Dialler, welcome: Welcome, launchers: Sequence[LocalLauncher]) -> None:
    """One head after the other, until one ends, or none comes."""

    def num_running() -> int:
        return sum(launcher.num_running for launcher in launchers)

    while True:
        try:
            await Agent(dialler.wire, launchers).serve()
            return
        except PeerLost as error:
            lost, patience_s = f"the head at {dialler.head} is gone", welcome.outlive_s
            if not patience_s:
                raise PeerLost(f"{lost}, and its workers with it: {error}") from None
            left = counted(num_running(), "worker")
            _say(f"{lost}: {error}; it is dialled for {patience_s:g} s, with {left} left running")
        welcome = await dialler.meet_again(welcome, num_running)
        for launcher, deployed in zip(launchers, welcome.deployed, strict=True):
            launcher.keep(deployed.wanted, welcome.outlive_s)
            if len(launchers) > 1:  # another model may be about to get what it has on its GPUs
                await launcher.trim()
        _say(f"the head at {dialler.head} is back, and has taken over {counted(num_running(), 'worker')}")


def _launcher(deployed: Deployed, folder: Path, token: str, welcome: Welcome) -> LocalLauncher:
    folder.mkdir(exist_ok=True)
    config = folder / "config.toml"
    config.write_text(deployed.config, encoding="utf-8")
    extra = ("--grace-s", "inf") if welcome.outlive_s else ()  # it is we who know how long they may be without a head
    return LocalLauncher(config, folder, deployed.groups, extra, token=token, places=deployed.places, warm=deployed.warm)


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
    with scratch("squall-agent") as folder:
        folder = given.logs or folder
        ssh = SshSession(folder / "agent.log") if given.stdin else None
        if ssh is not None:
            ssh.watch()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run(_main(Dialler(given.head, given.host, token), given.host, token, folder, ssh))
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
    with contextlib.suppress(OSError):  # nobody listens
        os.write(2, f"agent: {line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
