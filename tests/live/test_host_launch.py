"""Workers on a list of hosts: agents over an ssh that stays here, or by a command that a person runs; addresses of their own."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from squall import config as configuration
from squall.core.types import Role
from squall.errors import ConfigError, HostLost
from squall.live import agent, host_launch
from squall.live.engine.interface import Sampling
from squall.live.head import Head
from squall.live.host_launch import HostsLauncher
from squall.live.plan import served_plan
from squall.live.remote import Model
from squall.live.served import served_model
from squall.live.transport.segment import HostCopies
from tests.live.checkpoints import write_checkpoint
from tests.processes import agents

SSH = """#!/bin/sh
while [ "$1" = "-o" ]; do shift 2; done
echo "$1" >> "{log}"
shift
exec /bin/sh -c "$*"
"""

EMULATED = ("serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.gpu=h100-sxm", "cluster.gpus_per_node=8")
HOSTS = (
    'launcher.kind="hosts"',
    f'launcher.python="{sys.executable}"',
    'launcher.hosts=[{hostname="alpha", address="127.0.0.1"}, {hostname="beta", address="127.0.0.2"}]',
)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hosts that were dialled, one a line."""
    log, program = tmp_path / "dialled", tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return log


class Fleet:
    """A head here, and its hosts."""

    def __init__(self, head: Head, launcher: HostsLauncher, said: list[str]) -> None:
        self.head = head
        self.launcher = launcher
        self.said = said

    async def answer(self) -> list[int]:
        sampling = Sampling(max_tokens=5, ignore_eos=True, temperature=0.0)
        return [out.token async for out in self.head.submit(tuple(range(20)), sampling)]

    def phases(self) -> dict[int, str]:
        return {replica.replica: replica.phase for replica in self.head.stats().replicas}

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.02)

    async def ready(self, count: int) -> None:
        await self.until(lambda: list(self.phases().values()).count("ready") == count)


@asynccontextmanager
async def serving(*settings: str, ready: bool = True) -> AsyncIterator[Fleet]:
    config = configuration.load(None, (*HOSTS, *settings))
    said: list[str] = []
    served = served_model(config)
    shared = config.serve.engine == "emulated"
    model = Model(configuration.dumps(config), config.replica.tp, shared)
    launcher = HostsLauncher(config.launcher, [model], say=said.append)
    (fleet,) = launcher.fleets
    async with AsyncExitStack() as stack:
        stack.callback(launcher.kill_all)
        head = Head(config, served.names, served.tokenizer(), 512, fleet, say=said.append, plan=served_plan(config, served))
        fleet.watch = head
        stack.push_async_callback(head.close)
        fleet.prepare(range(config.fleet.num_initial))
        launcher.attend()
        head.start()
        if ready:
            await head.until_ready()
        yield Fleet(head, launcher, said)
    HostCopies().sweep(unused=True)


def agents_of(launcher: HostsLauncher) -> dict[str, int]:
    """The agents of this head that run here, by their hosts."""
    return agents(launcher.address)


async def test_over_ssh_workers_come_up_where_they_belong_and_end_with_the_head(ssh: Path) -> None:
    async with serving(*EMULATED, "fleet.replicas=2") as fleet:
        await fleet.ready(2)
        assert sorted(ssh.read_text().split()) == ["alpha", "beta"]
        where = {name: list(host.started.values()) for name, host in fleet.launcher._hosts.items()}
        assert [address.rpartition(":")[0] for name in ("alpha", "beta") for address in where[name]] == ["127.0.0.1", "127.0.0.2"]
        assert len(await fleet.answer()) == 5
        os.kill(agents_of(fleet.launcher)["beta"], signal.SIGKILL)
        await fleet.until(lambda: fleet.phases()[1] != "ready")
        assert len(await fleet.answer()) == 5
        assert any(line.startswith("replica 1 is lost") for line in fleet.said)
        assert agents_of(fleet.launcher).keys() >= {"alpha"}
    assert not agents_of(fleet.launcher)


@pytest.mark.parametrize(
    ("listen", "address", "said"),
    [
        (
            "127.0.0.1:0",
            "10.0.0.9",
            r"alpha cannot dial 127.0.0.1:\d+: set launcher.listen or launcher.advertise to what it calls",
        ),
        ("[::1]:0", "10.0.0.9", r"alpha cannot dial \[::1\]:\d+: set launcher.listen"),
        ("127.0.0.1:0", "127.0.0.2", None),
    ],
)
def test_an_address_that_only_we_can_dial_is_told_of(listen: str, address: str, said: str | None) -> None:
    hosts = (
        f'launcher.hosts=[{{hostname="alpha", address="{address}"}}]',
        f'launcher.listen="{listen}"',
        "launcher.launch=print",
    )
    config = configuration.load(None, ("launcher.kind=hosts", *hosts))
    heard: list[str] = []
    launcher = HostsLauncher(config.launcher, [Model("", 1)], say=heard.append)
    launcher.fleets[0].prepare([0])
    launcher.kill_all()
    assert heard[-1].startswith("on alpha: SQUALL_TOKEN=")
    assert len(heard) == (1 if said is None else 2)
    assert said is None or re.match(said, heard[0])


async def test_who_has_to_start_an_agent_is_reminded_once_and_again_when_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squall.live.host_launch.REMIND_S", 0.02)
    reminder = "alpha has no agent yet; run the command above there"
    both = "launcher.hosts=[{hostname='alpha', address='127.0.0.1', devices=[0, 1]}]"
    async with serving(*EMULATED, both, 'launcher.launch="print"', "fleet.replicas=2", ready=False) as fleet:  # both wait for it
        await fleet.until(lambda: reminder in fleet.said)
        await asyncio.sleep(0.2)
        assert fleet.said.count(reminder) == 1
        (line,) = [line for line in fleet.said if line.startswith("on alpha: ")]
        with subprocess.Popen(["/bin/sh", "-c", f"exec env {line.removeprefix('on alpha: ')}"]) as started:
            await fleet.ready(2)
            assert fleet.said.count(reminder) == 1
            started.kill()
        await fleet.until(lambda: fleet.said.count(reminder) == 2)
        await asyncio.sleep(0.2)
        assert fleet.said.count(reminder) == 2


async def test_the_command_that_is_printed_is_enough_and_no_other_token_is(ssh: Path) -> None:
    async with serving(*EMULATED, 'launcher.launch="print"', "fleet.replicas=1", ready=False) as fleet:
        (line,) = [line for line in fleet.said if line.startswith("on alpha: ")]
        command = line.removeprefix("on alpha: ")
        token, words = command.split(" ", 1)
        stranger = await asyncio.to_thread(
            subprocess.run, ["/bin/sh", "-c", f"SQUALL_TOKEN=other {words}"], capture_output=True, text=True
        )
        said = f"agent: the head at {fleet.launcher.address} refuses: wrong token; use the command of this run\n"
        assert (stranger.returncode, stranger.stderr) == (1, said)
        assert token.startswith("SQUALL_TOKEN=")
        agent = subprocess.Popen(["/bin/sh", "-c", f"exec env {command}"])
        await fleet.head.until_ready()
        assert len(await fleet.answer()) == 5
    assert await asyncio.to_thread(agent.wait, 20) == 0
    assert not ssh.exists()


@pytest.mark.timeout(240)
async def test_ranks_on_two_hosts_pass_each_other_their_shards_by_their_own_cards(ssh: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    hosts = ", ".join(
        f'{{hostname="{name}", address="{at}", devices=[0, 1], nics=["{at}", "{nic}"]}}'
        for name, at, nic in (("alpha", "127.0.0.1", "127.0.1.1"), ("beta", "127.0.0.2", "127.0.1.2"))
    )
    more = ("replica.tp=2", "replica.num_blocks=64", "load.kind=p2p", "fleet.replicas={min=1, max=2}", "fleet.down_window_s=600")
    async with serving(f"model.name={model}", f"launcher.hosts=[{hosts}]", *more) as fleet:
        alone = await fleet.answer()
        cards = [address.rpartition(":")[0] for address in fleet.head._book._addresses[0] if address.startswith("tcp")]
        assert cards == ["tcp://127.0.0.1", "tcp://127.0.1.1"]
        fleet.head.want(Role.BOTH, 2)
        await fleet.ready(2)
        fleet.head.want(Role.BOTH, 1)
        await fleet.until(lambda: "ready" in fleet.phases().values() and list(fleet.phases().values()).count("ready") == 1)
        assert await fleet.answer() == alone


async def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with serving(*EMULATED, "fleet.replicas=1", ready=False) as fleet:
        await fleet.until(lambda: any("alpha has no agent: ssh ended with code 255" in line for line in fleet.said))


async def test_what_is_wrong_on_a_host_is_said_of_it(ssh: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    more = ("serve.device=cuda:7", "replica.num_blocks=64")  # a worker sees the one GPU of its slot at most
    async with serving(f"model.name={model}", *more, ready=False) as fleet:
        assert fleet.head.load_failure is not None
        assert re.match(r"alpha: .*cuda:7", await fleet.head.load_failure)


DOWN = """#!/bin/sh
while [ "$1" = "-o" ]; do shift 2; done
echo "$1" >> "{log}"
if [ -e "{folder}/$1.out" ]; then echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; fi
shift
exec /bin/sh -c "$*"
"""


@pytest.fixture
def unsure(ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`ssh`, for hosts that are away as long as a file of their name is here; and no patience."""
    (tmp_path / "bin" / "ssh").write_text(DOWN.format(log=ssh, folder=tmp_path))
    monkeypatch.setattr(host_launch, "FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(host_launch, "LAST_RETRY_S", 0.4)
    return ssh


def dialled(log: Path, name: str) -> int:
    return log.read_text().split().count(name)


async def test_a_host_that_is_out_is_named_once_and_used_again_when_it_is_back(unsure: Path, tmp_path: Path) -> None:
    (tmp_path / "alpha.out").touch()
    async with serving(*EMULATED, "fleet.replicas=2") as fleet:  # two places, of which one is out
        await fleet.until(lambda: dialled(unsure, "alpha") >= 6)
        assert fleet.phases()[1] == "ready"
        assert len(await fleet.answer()) == 5
        named = [line for line in fleet.said if "alpha" in line]
        assert len(named) == 1
        assert named[0].startswith(
            "alpha has no agent: ssh: connect to host alpha port 22: No route to host; see that `ssh alpha` works"
        )
        assert not any("is lost" in line for line in fleet.said)
        (tmp_path / "alpha.out").unlink()
        await fleet.ready(2)
        assert fleet.said.count("alpha is back") == 1


class Told:
    """Remembers which hosts went and came."""

    def __init__(self) -> None:
        self.news: list[tuple[str, int]] = []

    def host_out(self, host: int) -> None:
        self.news.append(("out", host))

    def host_back(self, host: int) -> None:
        self.news.append(("back", host))

    def no_host(self, why: str) -> None:
        raise AssertionError(why)


async def test_of_a_host_that_goes_and_comes_all_models_hear(unsure: Path, tmp_path: Path) -> None:
    (tmp_path / "beta.out").touch()
    config = configuration.load(None, (*HOSTS, *EMULATED))
    model = Model(configuration.dumps(config), 1, shared=True)
    launcher = HostsLauncher(config.launcher, [replace(model, name="chat"), replace(model, name="code")], say=lambda _: None)
    told = [Told(), Told()]
    try:
        for fleet, watch in zip(launcher.fleets, told, strict=True):
            fleet.watch = watch
        for fleet in launcher.fleets:
            with pytest.raises(HostLost, match="beta"):
                await fleet.start(1)
        assert [watch.news for watch in told] == [[("out", 1)], [("out", 1)]]
        (tmp_path / "beta.out").unlink()
        while not all(("back", 1) in watch.news for watch in told):
            await asyncio.sleep(0.02)
        first, second = [await fleet.start(1) for fleet in launcher.fleets]
        assert first != second  # a process for each model
        await launcher.fleets[0].close()
        assert not agents_of(launcher)
    finally:
        launcher.kill_all()


async def test_a_replica_goes_to_another_host_at_once(unsure: Path, tmp_path: Path) -> None:
    (tmp_path / "alpha.out").touch()
    async with serving(*EMULATED, "fleet.replicas=1") as fleet:
        assert fleet.phases()[1] == "ready"
        assert len([line for line in fleet.said if "alpha" in line]) == 1


async def test_a_head_that_reaches_no_host_gives_up(unsure: Path, tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / f"{name}.out").touch()
    async with serving(*EMULATED, "fleet.replicas=1", ready=False) as fleet:
        assert fleet.head.load_failure is not None
        why = await fleet.head.load_failure
        assert "has no agent: ssh: connect to host" in why
        assert min(dialled(unsure, "alpha"), dialled(unsure, "beta")) >= host_launch.TRIES


async def test_an_agent_that_hangs_is_replaced_like_one_that_has_ended(ssh: Path) -> None:
    async with serving(*EMULATED, "fleet.replicas=2") as fleet:
        await fleet.ready(2)
        hanging = agents_of(fleet.launcher)["beta"]
        os.kill(hanging, signal.SIGSTOP)
        await fleet.until(lambda: any("the agent of beta is gone: no sign of life" in line for line in fleet.said))
        fleet.launcher._call(fleet.launcher._hosts["beta"])
        await fleet.until(lambda: agents_of(fleet.launcher).get("beta", hanging) != hanging)
        await fleet.until(lambda: fleet.launcher._hosts["beta"].present is not None)
        assert not Path(f"/proc/{hanging}/exe").exists()
        await fleet.ready(2)
        assert len(await fleet.answer()) == 5
    assert not agents_of(fleet.launcher)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [*HOSTS, "launcher.state=x"],
            r"launcher.listen = '127.0.0.1:0' gives every head another port, .*; give it a port, such as",
        ),
        (["launcher.kind=ray", "launcher.state=x"], r'launcher.state means nothing where launcher.kind = "ray": Ray ends'),
        (['launcher.kind="hosts"'], r'launcher.kind = "hosts" needs \[\[launcher.hosts\]\]'),
        (['launcher.hosts=[{hostname="a"}]'], r"launcher.hosts means nothing where launcher.kind = 'local'"),
        ([*HOSTS, 'launcher.listen="0.0.0.0:7000"'], r"listen = '0.0.0.0:7000' is no address to dial; set launcher.advertise to"),
        ([*HOSTS, 'launcher.listen="[::]:7000"'], r"listen = '\[::\]:7000' is no address to dial; set launcher.advertise to"),
        ([*HOSTS, "fleet.replicas=3"], r"may grow to 3 replicas of 1, and there is place for 2 on 2 hosts of 1 device;"),
        ([*HOSTS, "replica.tp=2"], r"alpha has 1 device, and a replica takes 2, all of one host"),
        (['launcher.kind="hosts"', 'launcher.hosts=[{hostname="a"}, {hostname="a"}]'], r"launcher.hosts has 'a' twice"),
        (
            ['launcher.kind="hosts"', 'launcher.hosts=[{hostname=""}]'],
            r"hostname = '' is no name of a host; give one that ssh knows",
        ),
        (['launcher.kind="hosts"', 'launcher.hosts=[{hostname="-oX=y"}]'], r"hostname = '-oX=y' is no name of a host"),
        (['launcher.kind="hosts"', 'launcher.hosts=[{hostname="a", devices=[0, 0]}]'], r"a has a device twice in \[0, 0\]"),
        (
            ['launcher.kind="hosts"', 'launcher.hosts=[{hostname="a", nics=["x", "y"]}]'],
            r"a has 2 nics for 1 device; give one each, or none",
        ),
        (
            ['launcher.kind="hosts"', 'launcher.hosts=[{hostname="a"}, {hostname="b", devices=[0, 1]}]'],
            r"b has 2 devices, a 1; use as many",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_line(settings: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configuration.load(None, settings)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--head", "nonsense"], "agent: --head nonsense: expected host:port"),
        (["--head", "127.0.0.1:99999"], "agent: --head 127.0.0.1:99999: expected host:port"),
        (["--head", "a..b:5"], "agent: the head at a..b:5 cannot be reached: "),
        (["--head", "127.0.0.1:1", "--logs", "/proc/none"], "agent: /proc/none: "),
    ],
)
def test_an_agent_that_cannot_begin_says_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SQUALL_TOKEN", "any")
    assert agent.main([*words, "--host", "node-a"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(said)
