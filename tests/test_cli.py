"""The commands as a user types them: what they print, what they leave behind, and how they fail."""

import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest

from squall import __version__
from squall.cli import main
from squall.config import dumps, load
from squall.errors import ModelError
from squall.live.models import find
from squall.report.compare import written
from squall.report.run import read_run
from squall.twin.demo import serving
from tests.live.test_together import serving as together

EXAMPLES = Path(__file__).parents[1] / "examples"


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def squall(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """Runs `squall ARGUMENTS` in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["squall", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return run


Squall = Callable[..., Said]


def test_the_version_is_printed(squall: Squall) -> None:
    assert squall("--version") == (0, f"squall {__version__}\n", "")


def test_help_names_every_command(squall: Squall) -> None:
    said = squall("--help")
    assert said.code == 0
    for command in ("simulate", "serve", "replay", "profile", "compare", "report", "model", "demo"):
        assert f"\n  {command} " in said.out


def test_a_wrong_key_is_one_line_and_exit_code_2(squall: Squall, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("[fleet]\nreplica = 3\n")
    assert squall("simulate", "wrong.toml") == (
        2,
        "",
        "squall: error: wrong.toml: [fleet] has no key 'replica'; did you mean 'replicas'?\n",
    )


def test_a_missing_file_is_one_line_and_exit_code_2(squall: Squall) -> None:
    assert squall("simulate", "nowhere.toml") == (2, "", "squall: error: nowhere.toml: no such configuration file\n")
    assert squall("simulate", ".") == (2, "", "squall: error: .: is a folder; give a TOML file\n")
    assert squall("report", "nowhere") == (2, "", "squall: error: nowhere is no run directory: it has no summary.json\n")


def test_one_run_cannot_be_compared(squall: Squall) -> None:
    assert squall("compare", "a") == (2, "", "squall: error: compare needs two run directories or more; only a was given\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sumulate",), "No such command 'sumulate'."),
        (("simulate",), "Missing argument 'CONFIG'. (`squall simulate --help` says more)"),
        (("model", "pull", "--to=x"), "No such option: --to (`squall model pull --help` says more)"),
        (("profile", "--seconds=nan"), "nan is not a number of seconds above 0. (`squall profile measure --help` says more)"),
        (("replay", "x.toml", "--timeout=0"), "0.0 is not a number of seconds above 0. (`squall replay --help` says more)"),
        (("simulate", "x" * 300), "File name too long"),
        (("simulate", EXAMPLES / "azure-conv.toml", "--out", "x" * 300), "File name too long"),
        (("profile", "--out", "no/such/folder/profile.json"), "nothing can be written into no/such/folder"),
    ],
)
def test_a_command_line_that_cannot_be_is_one_line_and_exit_code_2(squall: Squall, arguments: Any, message: str) -> None:
    said = squall(*arguments)
    assert (said.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert line.startswith("squall: error: ")
    assert message in line


def test_a_command_without_its_word_shows_the_help(squall: Squall) -> None:
    said = squall("model")
    assert said.code == 2
    assert "\n  pull  " in said.out


@pytest.mark.parametrize("host", ["x" * 70, "a..b"])
def test_a_host_that_cannot_be_is_one_line(squall: Squall, host: str) -> None:
    said = squall("serve", "--engine", "emulated", "--model", "llama-3-8b", "--gpu", "h100-sxm", "--host", host, "--out", "run")
    assert said == (2, "", f"squall: error: serve.host = '{host}' is no address of this machine: no host can have this name\n")
    said = squall("replay", EXAMPLES / "azure-conv.toml", "--url", f"http://{host}:80")
    assert (said.code, said.out) == (2, "")
    assert said.err.endswith("no host can have this name; is the server running?\n")
    assert not Path("run").exists()


def test_ctrl_c_while_libraries_are_imported_is_quiet() -> None:
    code = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from squall.__main__ import main
main()
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (130, "", "")


def test_sigterm_lets_a_command_remove_what_is_half_done(tmp_path: Path) -> None:
    code = """
import os, signal, sys, tempfile
from squall import cli
from squall.report import run
def killed(path):
    with tempfile.TemporaryDirectory(dir="."):
        os.kill(os.getpid(), signal.SIGTERM)
        print("too late")
run.read_run = killed
sys.argv = ["squall", "report", "run"]
cli.main()
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (said.returncode, said.stdout, said.stderr) == (143, "", "")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_exit_code_130(squall: Squall, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("squall.report.run.read_run", interrupted)
    assert squall("report", "run") == (130, "", "")


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    arguments = ["squall", "serve", "--port", "0", "--out", str(tmp_path / "run")]
    code = f"import sys; sys.modules['grpc'] = None; sys.argv = {arguments}; from squall.cli import main; main()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        "squall: error: this command needs grpc, which is not installed: "
        "pip install 'squall[serve]', or in a clone pip install -c constraints.txt '.[serve]'\n"
    )


def test_every_extra_is_named_by_whatever_needs_it() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = "".join(path.read_text(encoding="utf-8") for path in (root / "squall").rglob("*.py"))
    assert [name for name in extras if name != "dev" and not re.search(rf"""install\(["']{name}["']\)""", text)] == []


# -- simulate, compare, report


DEPLOYMENTS = [path for path in sorted(EXAMPLES.glob("*.toml")) if "\n[search]" not in path.read_text(encoding="utf-8")]
"""The other examples ask which deployment it should be."""


@pytest.mark.parametrize("example", DEPLOYMENTS, ids=lambda path: path.stem)
def test_every_example_can_be_simulated(squall: Squall, example: Path) -> None:
    said = squall("simulate", example, "--out", "run")
    assert (said.code, said.err) == (0, "")
    assert "\nwrote run\nnext: squall report run\n      squall compare run OTHER_RUN\n" in said.out
    summary = read_run(Path("run")).summary
    assert summary.completed == summary.requests > 0
    assert summary.slo_attainment is not None


def test_a_simulation_prints_what_its_summary_says(squall: Squall) -> None:
    said = squall("simulate", EXAMPLES / "azure-conv.toml", "--set", "workload.num_requests=8", "--out", "run")
    summary = read_run(Path("run")).summary
    assert summary.ttft_s is not None
    assert summary.cost_usd is not None
    assert summary.cost_usd > 0
    assert said.out.startswith(f"simulated: 8 requests (8 completed) in {written(summary.makespan_s)} s, which took ")
    assert "; times: roofline (" in said.out
    assert f"TTFT        p50 {written(summary.ttft_s.p50)} s" in said.out


def test_several_models_leave_a_run_directory_each_and_one_page_for_all(squall: Squall) -> None:
    files = EXAMPLES / "two-models-chat.toml", EXAMPLES / "two-models-code.toml"
    said = squall("simulate", *files, "--set", "workload.duration_s=5", "--out", "run")
    assert said.code == 0, said.err
    assert [line for line in said.out.splitlines() if line in ("chat", "code")] == ["chat", "code"]
    assert "cluster: 8 x h100-sxm" in said.out
    assert squall("report", "run").out.splitlines() == [
        "wrote run/report.html", "next: squall report run/chat", "      squall report run/code"
    ]  # fmt: skip
    assert squall("report", "run/chat").code == 0
    Path("run/code").rename("kept")
    assert squall("report", "run").out.splitlines()[1:] == ["next: squall report run/chat"]
    Path("kept").rename("run/code")
    assert squall("compare", "run", "run/chat").err == ("squall: error: run holds several runs; name one: run/chat, run/code\n")
    said = squall("simulate", *files, "--set", "workload.duration_s=5", "--set", "run.out=there")
    assert said.out.splitlines()[-3] == "wrote there"
    said = squall("simulate", *files, "--set", "cluster.gpus_per_node=2")
    assert said.err.startswith(f"squall: error: {files[0]}: --set: [fleet] may grow to 7 replicas of 1 GPU, and 1 x 2 GPUs")
    said = squall("simulate", files[0], files[0], "--out", "other")
    assert said.err == (
        f"squall: error: {files[0]} and {files[0]} both serve 'chat'; give one of them another name with model.served_as\n"
    )
    assert not Path("other").exists()


def test_a_run_can_be_repeated_from_its_directory(squall: Squall) -> None:
    squall("simulate", EXAMPLES / "azure-conv.toml", "--set", "workload.num_requests=20", "--set", "run.seed=3", "--out", "one")
    again = squall("simulate", "one/config.toml", "--out", "two")
    assert again.code == 0
    one, two = (pl.read_parquet(Path(name) / "requests.parquet") for name in ("one", "two"))
    assert one.equals(two)
    assert squall("simulate", "one/config.toml").code == 0  # it does not insist on being written where it is


def test_the_policies_of_the_documentation_work_from_the_current_directory(
    squall: Squall, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    pages = [(EXAMPLES.parent / "docs" / f"{name}.md").read_text() for name in ("policies", "scaling")]
    kinds = {"route": "my_routes", "batching": "my_batching", "scale": "my_scaling"}
    example = (EXAMPLES / "azure-conv.toml").read_text().split("[workload]")[1]
    tables = ""
    for kind, module in kinds.items():
        [section] = [page.split(f" {kind} policy of your own\n")[1] for page in pages if f" {kind} policy of your own\n" in page]
        python, toml = (re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[0] for language in ("python", "toml"))
        assert len(python.splitlines()) < 40
        (tmp_path / f"{module}.py").write_text(python)
        tables += toml
    Path("own.toml").write_text(f"{tables}\n[model]\nname = 'llama-3-8b'\n[cluster]\ngpu = 'h100-sxm'\n[workload]{example}")
    said = squall("simulate", "own.toml", "--set", "workload.num_requests=100", "--out", "run")
    for module in kinds.values():
        sys.modules.pop(module)
    assert said.code == 0, said.err
    summary = read_run(Path("run")).summary
    assert (summary.completed, summary.scale_ups > 0) == (100, True)


def test_an_existing_run_directory_is_refused_before_any_work(squall: Squall, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    said = squall("simulate", EXAMPLES / "azure-conv.toml", "--out", "run")
    assert said == (2, "", "squall: error: run exists already; choose another run directory (--out) or remove it\n")


def test_without_a_workload_there_is_nothing_to_simulate(squall: Squall, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    said = squall("simulate", "empty.toml")
    assert (said.code, said.out) == (2, "")
    assert said.err == "squall: error: there is no [workload]: say what arrives, as examples/azure-conv.toml does\n"
    assert not (tmp_path / "runs").exists()


def test_runs_are_compared_and_reported(squall: Squall) -> None:
    for name, gpu in (("a100", "a100-80g"), ("h100", "h100-sxm")):
        squall(
            "simulate",
            EXAMPLES / "azure-conv.toml",
            "--set",
            "workload.num_requests=40",
            "--set",
            f"cluster.gpu={gpu}",
            "--out",
            name,
        )
    compared = squall("compare", "a100", "h100")
    assert compared.code == 0
    (throughput,) = [line for line in compared.out.splitlines() if line.startswith("TTFT p50")]
    assert throughput.endswith("%") or " x " in throughput
    assert "different workloads" not in compared.out
    reported = squall("report", "h100")
    assert reported == (0, "wrote h100/report.html\nnext: squall compare h100 OTHER_RUN\n", "")
    assert Path("h100/report.html").stat().st_size > 1_000_000


def test_different_workloads_are_said_to_be_different(squall: Squall) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        squall(
            "simulate",
            EXAMPLES / "azure-conv.toml",
            "--set",
            "workload.num_requests=40",
            "--set",
            f"run.seed={seed}",
            "--out",
            name,
        )
    assert "different workloads: one and two: " in squall("compare", "one", "two").out


def test_what_cannot_be_compared_is_told_instead_of_a_table(squall: Squall) -> None:
    for name in ("one", "two"):
        squall("simulate", EXAMPLES / "azure-conv.toml", "--set", "workload.num_requests=5", "--out", name)
    requests = Path("two/requests.parquet")
    pl.read_parquet(requests).drop("finished_at").write_parquet(requests)
    other = squall("compare", "one", "two")
    requests.write_bytes(b"PAR")
    broken = squall("compare", "one", "two")
    requests.unlink()
    absent = squall("compare", "one", "two")
    for said in (other, broken, absent):
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("squall: error: two/requests.parquet cannot be read: ")
        assert said.err.count("\n") == 1
    assert "finished_at" in other.err


def test_a_simulation_imports_no_web_server_and_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from squall.cli import main
from squall.config import dumps, load
from squall.errors import ModelError
from squall.live.models import find
try:
    main()
finally:
    print(sorted({"torch", "grpc", "uvicorn", "starlette", "rich", "plotly", "httpx", "scipy"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, "simulate", str(EXAMPLES / "azure-conv.toml"), "--out", str(tmp_path / "run")]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "[]"


def test_a_replay_needs_nothing_that_only_a_server_needs() -> None:
    code = (
        "import sys, squall.twin.drive; print(sorted({'torch', 'grpc', 'uvicorn', 'starlette', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- serve and replay


def served(example: str, folder: Path, *settings: str) -> AbstractContextManager[tuple[str, int]]:
    """`squall serve` of an example on a free port, in a process of its own."""
    config = load(EXAMPLES / example, ["serve.port=0", *settings])
    (folder / "served.toml").write_text(dumps(config))
    return serving(folder / "served.toml", folder / "serve")


def test_the_emulated_fleet_of_the_examples_answers_a_replay(squall: Squall, tmp_path: Path) -> None:
    with served("emulated-fleet.toml", tmp_path) as (_, port):
        short = ("--set", "workload.duration_s=1", "--set", 'workload.output={kind="fixed", tokens=20}')
        settings = ("--set", f"serve.port={port}", *short)
        said = squall("replay", EXAMPLES / "emulated-fleet.toml", *settings, "--out", "live")
    assert said.code == 0
    assert said.out.startswith("emulated: ")
    assert "\nwrote live\nnext: squall report live\n      squall simulate live/config.toml\n" in said.out
    live = read_run(Path("live")).summary
    assert live.completed == live.requests > 0
    assert live.gpu_seconds == pytest.approx(64 * live.makespan_s)
    squall("simulate", "live/config.toml", "--out", "simulated")
    assert "different workloads" not in squall("compare", "live", "simulated").out
    told = squall("report", tmp_path / "serve")
    assert told.out.splitlines()[0].startswith("counted from the event log, where requests enter the router; left out, ")
    inside = read_run(tmp_path / "serve").summary
    asked_before = 3  # of a token each: what the endpoint is
    assert (inside.world, inside.completed - asked_before) == ("emulated", live.completed)
    assert inside.num_output_tokens - asked_before == live.num_output_tokens
    assert inside.ttft_s is not None
    assert live.ttft_s is not None
    assert inside.ttft_s.p50 < live.ttft_s.p50  # of a client, which is farther away


TWO_MODELS = """
model = {{ name = "llama-3.1-8b", served_as = ["{name}"] }}
cluster = {{ gpu = "h100-sxm", gpus_per_node = 4 }}
serve = {{ engine = "emulated", port = 0, time_dilation = 0.2 }}
workload.kind = "synthetic"
workload.num_requests = {num_requests}
workload.arrivals = {{ kind = "fixed", rate_rps = 4 }}
workload.prompt = {{ kind = "fixed", tokens = 100 }}
workload.output = {{ kind = "fixed", tokens = 20 }}
"""


def test_models_that_are_served_together_are_replayed_simulated_and_compared_together(squall: Squall, tmp_path: Path) -> None:
    chat, code = (TWO_MODELS.format(name=name, num_requests=count) for name, count in (("chat", 3), ("code", 5)))
    files = ("chat.toml", "code.toml")
    with together(tmp_path, chat, code) as service:
        port = ("--set", f"serve.port={service.url.rpartition(':')[2]}")
        said = squall("replay", *files, *port, "--out", "live")
        assert squall("replay", *files, *port, "--model", "chat").err == (
            "squall: error: --model chat is one of 2 models; leave it out, or give one file\n"
        )
        assert squall("replay", files[0], files[0], *port).err.startswith(
            "squall: error: chat.toml and chat.toml both serve 'chat'; give one of them another name"
        )
        one = squall("replay", files[1], *port, "--out", "code-alone")
    assert said.code == one.code == 0
    assert [line for line in said.out.splitlines() if line in ("chat", "code")] == ["chat", "code"]
    assert said.out.splitlines()[-4:] == [
        "wrote live", "next: squall report live/chat", "      squall simulate live/chat/config.toml live/code/config.toml",
        "      squall compare live SIMULATED_RUN",
    ]  # fmt: skip
    assert [read_run(Path("live") / name).summary.completed for name in ("chat", "code")] == [3, 5]
    assert squall("report", "run").out.count("\nwrote ") == 2
    assert [read_run(Path("run") / name).summary.completed for name in ("chat", "code")] == [3 + 3, 10 + 6]  # code twice
    assert squall("simulate", "live/chat/config.toml", "live/code/config.toml", "--out", "simulated").code == 0
    lines = squall("compare", "live", "simulated").out.splitlines()
    assert [line for line in lines if line in ("chat", "code")] == ["chat", "code"]
    assert sum(line.split()[:3] == ["requests", "3", "3"] for line in lines) == 1
    assert "different workloads" not in "".join(lines)
    assert squall("compare", "simulated/code", "code-alone").code == 0
    Path("live/code").rename("code")
    assert squall("compare", "live", "simulated").err == (
        "squall: error: simulated holds runs of chat, code, and live of chat; name the runs of one model in each\n"
    )


@pytest.mark.model
def test_the_served_model_of_the_examples_answers_a_replay(squall: Squall, tmp_path: Path) -> None:
    try:
        find("smollm2")
    except ModelError:
        pytest.skip("the embedded model is not on disk: squall model pull smollm2")
    with served("serve-smollm2.toml", tmp_path, "fleet.replicas=1") as (host, port):
        few = [
            option
            for key in ("num_requests=3", 'output={kind="fixed", tokens=4}', 'arrivals={kind="fixed", rate_rps=4}')
            for option in ("--set", f"workload.{key}")
        ]
        url = f"http://{host}:{port}"
        said = squall("replay", EXAMPLES / "serve-smollm2.toml", *few, "--url", url, "--out", "live")
    assert said.code == 0
    live = read_run(Path("live")).summary
    assert (live.world, live.completed, live.num_output_tokens) == ("real", 3, 12)
    assert (live.gpu_seconds, live.cost_usd) == (0, None)


def test_a_replay_without_a_server_is_one_line(squall: Squall) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        said = squall("replay", EXAMPLES / "serve-smollm2.toml", "--url", url, "--out", "live")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"squall: error: {url}: cannot connect")
    assert said.err.endswith("is the server running?\n")
    assert not Path("live").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--engine", "torhc"), "serve.engine = 'torhc': "),
        (("--replicas", "0"), "fleet.replicas = 0: "),
        (("--gpu", "h1000", "--engine", "emulated", "--model", "llama-3-8b"), "cluster.gpu 'h1000' is unknown: did you mean "),
        (("--model", "no-such-model"), "model 'no-such-model' "),
    ],
)
def test_a_wrong_option_of_serve_is_one_line(squall: Squall, option: tuple[str, ...], message: str) -> None:
    said = squall("serve", "--port", "0", *option)
    assert said.code == 2
    assert said.err.startswith("squall: error: ")
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_profile_is_measured_and_read_by_a_simulation(squall: Squall) -> None:
    machine = ("--set", "serve.engine=emulated", "--set", "cluster.gpu=h100-sxm")
    said = squall("profile", "--model", "llama-3-8b", *machine, "--seconds", "0.3", "--out", "p.json")
    assert said.code == 0
    assert "\nwrote p.json\nnext: squall simulate CONFIG --set latency.kind=profile --set latency.path=p.json\n" in said.out
    said = squall("simulate", EXAMPLES / "azure-conv.toml", "--set", "latency.kind=profile", "--set", "latency.path=p.json")
    assert "; times: profile (" in said.out
    again = squall("profile", "--model", "llama-3-8b", *machine, "--out", "p.json")
    assert again == (2, "", "squall: error: p.json exists already; choose another file (--out) or remove it\n")


def test_a_step_is_told_operator_by_operator(squall: Squall) -> None:
    said = squall("latency", "llama-3-8b", "--gpu", "h100-sxm", "--tp", "2", "--pp", "2", "--set", "latency.kind=roofline")
    assert said.code == 0
    assert said.out.startswith("roofline (meta-llama/Meta-Llama-3-8B on 4 x h100-sxm, bf16)")
    assert "stage 1: " in said.out
    assert "all-reduce of attention" in said.out
    assert "operators: 100% roofline" in said.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "3"), "--tp is 3, but meta-llama/Meta-Llama-3-8B has 32 heads"),
        (("--pp", "40"), "--pp is 40, but meta-llama/Meta-Llama-3-8B has 32 layers; use 1 to 32"),
        (("--batch", "0"), "a step of nothing takes no time; give --batch or --chunk"),
        (("--set", "cluster.node=hgx-a100"), "cluster.node 'hgx-a100' has a100-80g GPUs, not h100-sxm"),
    ],
)
def test_a_step_that_cannot_be_is_one_line(squall: Squall, options: tuple[str, ...], message: str) -> None:
    said = squall("latency", "llama-3-8b", "--gpu", "h100-sxm", *options)
    assert said.code == 2
    assert message in said.err
